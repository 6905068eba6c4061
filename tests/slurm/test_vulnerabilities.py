"""Known vulnerabilities of Slurm versions."""

from __future__ import annotations

import pytest

from dtslurm.slurm.vulnerabilities import find_vulnerabilities

STEPMGR = "CVE-2024-48936 (stepmgr runs others' steps)"


@pytest.mark.parametrize(
    ("version", "open_"),
    [
        ("slurm 24.05.3", True),
        ("slurm 24.05.4", False),
        ("slurm 24.05.9", False),  # newer than the one that mended it
        ("slurm 24.11.0", False),
        ("slurm 23.11.10", False),  # never had it
        ("slurm-wlm 24.05.0-2", True),
        ("slurm", False),
    ],
)
def test_a_vulnerability_is_reported_until_the_fixed_version_of_its_series(version: str, open_: bool) -> None:
    assert (STEPMGR in find_vulnerabilities(version)) is open_


def test_an_unmaintained_series_keeps_its_vulnerabilities() -> None:
    result = [hole.partition(" ")[0] for hole in find_vulnerabilities("slurm 20.11.4")]
    assert result == ["CVE-2023-41914", "CVE-2023-49933", "CVE-2025-43904"]
    assert find_vulnerabilities("slurm 26.05.5") == []
