"""The one place where dtslurm deletes files of this machine: only below a folder of its own."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

from dtslurm.errors import StoreError


def remove(path: Path, *, within: Path) -> bool:
    """Remove a file, a link, or a folder with all that is in it; return whether there was one.

    Args:
        within: the folder of dtslurm's own in which the path must lie once links on the way are resolved.

    Raises:
        StoreError: the path lies elsewhere; nothing was removed.
        OSError: the disk refused.
    """
    place = path.parent.resolve() / path.name
    if path.name in {"", ".", ".."} or within.resolve() not in place.parents:
        raise StoreError(
            f"{path} is not below {within}: it is not removed",
            evidence=[f"links resolved, it is {place}"],
            hint="the record of the run was changed by somebody else than dtslurm; please report this",
        )
    try:
        mode = place.lstat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    return True
