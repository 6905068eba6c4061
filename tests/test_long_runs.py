"""The page of the long runs shows the recorded results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import long_runs, robustness
from tests.nemesis.schedule import FAULTS
from tests.soak.leaks import Sample


def test_format_ranges_joins_consecutive_numbers() -> None:
    assert long_runs.format_ranges([5, 1, 2, 3, 9, 8]) == "1-3, 5, 8-9"


def test_every_fault_and_every_resource_has_a_description() -> None:
    assert set(long_runs.NEMESES) == set(FAULTS)
    assert set(long_runs.RESOURCES) == set(Sample.__dataclass_fields__)


def test_recorded_results_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robustness, "RESULTS", tmp_path / "results.json")
    assert "schedules, seeds" not in long_runs.page()
    result = {
        "seeds": [1, 2], "runs": 3, "attempts": 4, "looks": 50, "ends": {"COMPLETED": 2, "UNKNOWN": 1},
        "faults": {"N2": 2}, "by_hand": 1, "violations": [[2, "lost", "s2-r0", "it is gone"]], "errors": [],
    }  # fmt: skip
    robustness.write("nemesis", result, 61.4)
    robustness.write("nemesis-roles", {**result, "seeds": [3000], "faults": {"N27": 9}}, 61.4)
    robustness.write(
        "soak", {"rounds": 7, "done": {"submit": 21}, "held": {"files": [8, 9]}, "found": []}, 60
    )
    page = long_runs.page()
    assert "2 schedules, seeds 1-2: 3 runs (2 COMPLETED, 1 UNKNOWN)" in page
    assert "**1 violations**" in page
    assert "- seed 2: lost: s2-r0: `it is gone`" in page
    assert "| N2 | controller killed and restarted | 2 |" in page
    _, _, with_roles = page.partition("### Runs with roles")
    assert "1 schedules, seeds 3000:" in with_roles
    assert "up to 20 s | 9 |" in with_roles
    assert "7 rounds: 21 × submit. Problems: none." in page
    assert "| open files of the client | 8 | 9 |" in page
