"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from dtslurm.errors import RequestInvalid


def expanded(text: str | os.PathLike[str], home: str = "") -> Path:
    """Return a path with ``~`` and ``~USER`` at its beginning filled in, if there is such a user.

    Args:
        home: what ``~`` alone means; by default the home of who runs this process.
    """
    written = os.fspath(text)
    if home and (written == "~" or written.startswith("~/")):
        return Path(home + written[1:])
    return Path(os.path.expanduser(written))  # noqa: PTH111 (that of Path raises for users that there are not)


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
