"""Runs whose ranks train separately."""

from __future__ import annotations

from typing import Any

import pytest

from dtslurm.diagnose.findings import Findings, read
from dtslurm.diagnose.ranks_apart import find_ranks_apart
from dtslurm.diagnose.verdict import judge
from dtslurm.model.runs.diagnosis import JobFacts

STARTED = {"event": "started", "attempt": 0}
APART = {"event": "not_distributed", "attempt": 0, "world_size": 2, "evidence": "no connection"}
NOTE = {**APART, "event": "ranks_apart"}
TOGETHER = {**APART, "event": "distributed"}
AGAIN = {"event": "attempt", "attempt": 1}


def findings(*events: dict[str, Any]) -> Findings:
    records = [{"rank": rank, "host": "n1", "ended": 5, "exit_code": 0, "written": 5.0} for rank in range(2)]
    return read({"events": list(events), "records": records}, [], 2)


@pytest.mark.parametrize(("state", "over"), [("COMPLETED", True), ("RUNNING", False)])
def test_a_successful_or_running_job_with_separate_ranks_is_reported(state: str, over: bool) -> None:
    verdict = judge(JobFacts(state=state, over=over, world_size=2), findings(STARTED, APART), ())
    assert (verdict.cause, verdict.rank, verdict.blame) == ("not-distributed", None, "code")
    assert verdict.summary == "NOT DISTRIBUTED: the 2 ranks do not train together: no connection"
    assert "init_process_group" in verdict.advice


@pytest.mark.parametrize("events", [(), (NOTE,), (APART, TOGETHER)], ids=["nothing", "note", "together"])
def test_ranks_apart_are_not_reported_without_evidence(events: tuple[dict[str, Any], ...]) -> None:
    verdict = judge(JobFacts(state="COMPLETED", over=True, world_size=2), findings(STARTED, *events), ())
    assert verdict.cause == "none"


def test_ranks_apart_are_searched_only_in_the_given_attempt() -> None:
    assert find_ranks_apart([STARTED, APART]) is not None
    assert find_ranks_apart([STARTED, APART, AGAIN]) is None
    assert find_ranks_apart([STARTED, APART, AGAIN], 0) is not None
    assert find_ranks_apart([STARTED, APART, AGAIN], 1) is None
