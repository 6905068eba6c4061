"""Deletion of local files. dtslurm deletes files only here, and only below one of its own folders."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

from dtslurm.errors import StoreError


def remove(path: Path, *, within: Path) -> bool:
    """Remove a file, a symbolic link, or a folder with its content; return whether the path existed.

    Args:
        within: the folder of dtslurm that must contain the path once symbolic links in its parents are
            resolved.

    Raises:
        StoreError: the path is outside ``within``; nothing was removed.
        OSError: the file system did not delete the files.
    """
    resolved_path = path.parent.resolve() / path.name
    if path.name in {"", ".", ".."} or within.resolve() not in resolved_path.parents:
        raise StoreError(
            f"{path} is not below {within}, so dtslurm does not delete it",
            evidence=[f"without symbolic links, the path is {resolved_path}"],
            hint="the record of the run was changed by another program; report this",
        )
    try:
        mode = resolved_path.lstat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        shutil.rmtree(resolved_path)
    else:
        resolved_path.unlink(missing_ok=True)
    return True
