"""What the user may still write where the runs lie: the file system's own quota, where it keeps one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dtslurm.model.values import dataclass
from dtslurm.transport.disk import size

LEAST_KIB, LEAST_FILES = 10 * 1024, 100
_MARK = "quota="

# For a shell with ``$root``, a folder that is there. Where no quota is kept, or nobody answers, nothing is
# known. -w keeps a line whole, -p fills the columns of grace; Lustre's own command always fills them.
LOOK = f"""
{{
  dt_mount=$(df -Pk "$root" | awk 'NR == 2 {{ print $6 }}')
  case $(stat -f -c %T "$root") in
    lustre) timeout 10 lfs quota -q -u "$(id -un)" "$dt_mount" ;;
    *) timeout 10 quota -wp -f "$dt_mount" ;;
  esac
}} 2>/dev/null </dev/null | sed 's/^/{_MARK}/'
"""

# used (with a star when there is too much), soft limit, hard limit, grace: of KiB, then of files
_ROW = re.compile(r"(\S+)\s+(\d+)\*?\s+(\d+)k?\s+(\d+)k?\s+\S+\s+(\d+)\*?\s+(\d+)\s+(\d+)\s+\S+")


@dataclass(frozen=True)
class Quota:
    """A user's share of a file system: KiB and files used, and their limits; 0 for no limit."""

    place: str
    used: int
    soft: int
    hard: int
    files: int
    files_soft: int
    files_hard: int


def quotas(output: str) -> list[Quota]:
    """Return the quotas in the output of `LOOK`, and maybe of more."""
    lines = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    # A long name stands on a line of its own.
    found = _ROW.findall("\n".join(line for line in lines if "Filesystem" not in line))
    return [Quota(place, *map(int, numbers)) for place, *numbers in found]


def problems(output: str) -> Iterator[str]:
    """Yield why a run's files would be refused."""
    for one in quotas(output):
        full = f"your quota on {one.place} is used up (see quota -s)"
        if one.hard and one.hard - one.used < LEAST_KIB:
            yield f"{full}: {_kib(one.used)} of {_kib(one.hard)}"
        if one.files_hard and one.files_hard - one.files < LEAST_FILES:
            yield f"{full}: {one.files} of {one.files_hard} files"


def notices(output: str) -> Iterator[str]:
    """Yield what will be refused later."""
    later = "after the time of grace nothing can be written there"
    for one in quotas(output):
        if one.soft and one.used > one.soft:
            yield f"more than your quota of {_kib(one.soft)} is used on {one.place}: {later}"
        if one.files_soft and one.files > one.files_soft:
            yield f"more than your quota of {one.files_soft} files is used on {one.place}: {later}"


def _kib(amount: int) -> str:
    return size(amount * 1024)
