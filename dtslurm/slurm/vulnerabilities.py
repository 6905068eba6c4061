"""Which known holes a version of Slurm has, by SchedMD's announcements of its releases."""

from __future__ import annotations

import re

# (what, {series: first release of it without}); a series older than all of these was never mended,
# and one that is not named but newer never had it.
_HOLES: tuple[tuple[str, dict[tuple[int, int], int]], ...] = (
    ("CVE-2023-41914 (files of others, by races)", {(22, 5): 10, (23, 2): 6}),
    ("CVE-2023-49933 to 49938 (messages changed, code run)", {(22, 5): 11, (23, 2): 7, (23, 11): 1}),
    ("CVE-2024-48936 (stepmgr runs others' steps)", {(24, 5): 4}),
    ("CVE-2025-43904 (coordinators make administrators)", {(23, 11): 11, (24, 5): 8, (24, 11): 5}),
)
_NEVER_BEFORE = {"CVE-2024-48936 (stepmgr runs others' steps)": (24, 5)}


def holes(version: str) -> list[str]:
    """Return the known holes of a version as ``sbatch --version`` prints it; none of one that is not read."""
    found = re.search(r"\b(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        return []
    major, minor, patch = map(int, found.groups())
    series = (major, minor)
    told = []
    for name, mended in _HOLES:
        first = _NEVER_BEFORE.get(name, (0, 0))
        if first <= series <= max(mended) and patch < mended.get(series, 1 << 30):
            told.append(name)
    return told
