"""Expansion of paths that users write."""

from __future__ import annotations

import os
from pathlib import Path

from dtslurm.errors import RequestInvalid

RUN_ROOT = "~/dtslurm-runs"  # unless the environment or the cluster profile names another run root


def expand_home(text: str | os.PathLike[str], home: str = "") -> Path:
    """Return a path with a leading ``~`` or ``~USER`` expanded, if there is such a user.

    Args:
        home: the expansion of ``~`` alone; by default the home folder of the user who runs this process.
    """
    path_text = os.fspath(text)
    if home and (path_text == "~" or path_text.startswith("~/")):
        return Path(home + path_text[1:])
    return Path(os.path.expanduser(path_text))  # noqa: PTH111 (Path.expanduser raises for unknown users)


def working_directory() -> Path:
    """Return the user's working directory.

    Raises:
        RequestInvalid: the directory was removed, or its file system no longer responds.
    """
    try:
        return Path.cwd()
    except OSError as error:
        problem = f"the current directory cannot be used: {error.strerror}"
        hint = "change to another directory with cd; if it was deleted and created again, run cd ."
        raise RequestInvalid([problem], hint=hint) from error
