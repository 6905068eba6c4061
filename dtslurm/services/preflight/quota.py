"""How much the user may still write in the run root: the file system's quota, where it has one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dtslurm.model.values import dataclass
from dtslurm.presentation.quantities import format_bytes

LEAST_KIB, LEAST_FILES = 10 * 1024, 100
_MARK = "quota="

# For a shell with ``$root``, an existing folder. A file system without quotas, or one that does not answer in
# time, prints nothing. -w prevents line breaks, -p fills the columns of the grace time; ``lfs`` always does.
QUERY = f"""
{{
  dt_mount=$(df -Pk "$root" | awk 'NR == 2 {{ print $6 }}')
  case $(stat -f -c %T "$root") in
    lustre) timeout 10 lfs quota -q -u "$(id -un)" "$dt_mount" ;;
    *) timeout 10 quota -wp -f "$dt_mount" ;;
  esac
}} 2>/dev/null </dev/null | sed 's/^/{_MARK}/'
"""

# used (with a star above the limit), soft limit, hard limit, grace time: first in KiB, then in files
_ROW = re.compile(r"(\S+)\s+(\d+)\*?\s+(\d+)k?\s+(\d+)k?\s+\S+\s+(\d+)\*?\s+(\d+)\s+(\d+)\s+\S+")


@dataclass(frozen=True)
class Quota:
    """A user's quota on a file system; a limit of 0 means no limit.

    Attributes:
        place: the file system.
        used, soft, hard: used space, soft and hard limit, in KiB.
        files, files_soft, files_hard: number of files, soft and hard limit.
    """

    place: str
    used: int
    soft: int
    hard: int
    files: int
    files_soft: int
    files_hard: int


def quotas(output: str) -> list[Quota]:
    """Parse the quotas in the output of `QUERY`; other lines are skipped."""
    lines = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    # quota prints a long file system name on a line of its own.
    rows = _ROW.findall("\n".join(line for line in lines if "Filesystem" not in line))
    return [Quota(file_system, *map(int, numbers)) for file_system, *numbers in rows]


def problems(output: str) -> Iterator[str]:
    """Yield why the run's files could not be written."""
    for entry in quotas(output):
        message = f"your quota on {entry.place} is used up (see quota -s)"
        if entry.hard and entry.hard - entry.used < LEAST_KIB:
            yield f"{message}: {_format_kib(entry.used)} of {_format_kib(entry.hard)}"
        if entry.files_hard and entry.files_hard - entry.files < LEAST_FILES:
            yield f"{message}: {entry.files} of {entry.files_hard} files"


def notices(output: str) -> Iterator[str]:
    """Yield which soft limits are exceeded: writes fail after the grace time."""
    consequence = "after the grace period you cannot write to it"
    for entry in quotas(output):
        if entry.soft and entry.used > entry.soft:
            yield f"you use more than your quota of {_format_kib(entry.soft)} on {entry.place}: {consequence}"
        if entry.files_soft and entry.files > entry.files_soft:
            yield f"you have more than your quota of {entry.files_soft} files on {entry.place}: {consequence}"


def _format_kib(kib: int) -> str:
    return format_bytes(kib * 1024)
