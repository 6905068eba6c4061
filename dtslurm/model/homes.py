"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from dtslurm.errors import RequestInvalid


def expanded(text: str | os.PathLike[str]) -> Path:
    """Return a path with ``~`` and ``~USER`` at its beginning filled in, if there is such a user."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 (that of Path raises for users that there are not)


def here() -> Path:
    """Return the folder the user stands in.

    Raises:
        RequestInvalid: it is gone: removed, or on a file system that does not answer for it any more.
    """
    try:
        return Path.cwd()
    except OSError as error:
        why = f"the folder you are in cannot be used: {error.strerror}"
        hint = "go to another one by cd; cd . finds one that was made anew"
        raise RequestInvalid([why], hint=hint) from error
