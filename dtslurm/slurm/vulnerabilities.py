"""The known vulnerabilities of a Slurm version, from SchedMD's release announcements."""

from __future__ import annotations

import re

# (vulnerability, {series: first release with the fix}). A series older than all listed ones was never fixed;
# a newer series that is not listed never had the vulnerability.
_VULNERABILITIES: tuple[tuple[str, dict[tuple[int, int], int]], ...] = (
    ("CVE-2023-41914 (files of others, by races)", {(22, 5): 10, (23, 2): 6}),
    ("CVE-2023-49933 to 49938 (messages changed, code run)", {(22, 5): 11, (23, 2): 7, (23, 11): 1}),
    ("CVE-2024-48936 (stepmgr runs others' steps)", {(24, 5): 4}),
    ("CVE-2025-43904 (coordinators make administrators)", {(23, 11): 11, (24, 5): 8, (24, 11): 5}),
)
_FIRST_SERIES = {"CVE-2024-48936 (stepmgr runs others' steps)": (24, 5)}


def find_vulnerabilities(version: str) -> list[str]:
    """Return the known vulnerabilities of a version as ``sbatch --version`` prints it.

    The result is empty if the version cannot be parsed.
    """
    match = re.search(r"\b(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        return []
    major, minor, patch = map(int, match.groups())
    series = (major, minor)
    vulnerabilities = []
    for name, fixed_versions in _VULNERABILITIES:
        first_series = _FIRST_SERIES.get(name, (0, 0))
        if first_series <= series <= max(fixed_versions) and patch < fixed_versions.get(series, 1 << 30):
            vulnerabilities.append(name)
    return vulnerabilities
