"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(text: str | os.PathLike[str]) -> Path:
    """Return a path with ``~`` and ``~USER`` at its beginning filled in, if there is such a user."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 (that of Path raises for users that there are not)
