"""The results of probe jobs, and the reasons for missing results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import CommandTimeout, SlurmUnavailable
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.clusters import probing
from dtslurm.services.clusters.probing import Probe, Target
from dtslurm.services.wiring.context import Context
from dtslurm.transport.base import Completed

SEEN = f"{probing._MARK}{json.dumps({'schema': 1, 'cpus': 8})}\n{probing._END}0\n"
TARGETS = [Target(name="gpu", options=("--gres=gpu:1",)), Target(name="cpu", options=())]


class Site:
    """A login node where jobs are queued, and whose files tell so the next time that somebody looks."""

    def __init__(self, submitted: str, *looks: dict[str, str] | Exception, states: Any = None) -> None:
        self.submitted, self.looks, self.states = submitted, list(looks), states
        self.ran: list[Sequence[str]] = []
        self.cancelled: list[str] = []
        self.now = 0.0

    def run(self, argv: Sequence[str], timeout: float = 0.0) -> Completed:
        self.ran.append(argv)
        if argv[0] == "rm":
            return Completed(tuple(argv), 0, "", "")
        if len(self.ran) == 1:
            return Completed(tuple(argv), 0, self.submitted, "")
        self.now += 10
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, Exception):
            raise look
        folder = argv[4]
        return Completed(
            tuple(argv), 0, "".join(f"\x1e{folder}/{name}\n{text}" for name, text in look.items()), ""
        )

    def query(self, ids: Sequence[str]) -> dict[str, list[JobStatus]]:
        if isinstance(self.states, Exception):
            raise self.states
        return {job: [self.states] if self.states else [] for job in ids}

    def cancel(self, ids: Sequence[str]) -> None:
        self.cancelled += ids


def run_probes(monkeypatch: pytest.MonkeyPatch, site: Site, said: list[str] | None = None) -> list[Probe]:
    monkeypatch.setattr(probing, "run_root", lambda *_: "/runs")
    cluster: Any = SimpleNamespace(transport=site, scheduler=site)
    context = Context(clock=lambda: site.now)
    words: list[str] = [] if said is None else said
    return probing.probe(context, cluster, TARGETS, wait_s=30.0, report_progress=words.append)


QUEUED = "\x1egpu\n11\n\x1ecpu\n12\n"


def test_probe_results_are_returned_and_the_probe_folder_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    site = Site(QUEUED, {"0.out": ""}, {"0.out": "motd\n" + SEEN, "1.out": SEEN}, states=None)
    result = run_probes(monkeypatch, site, said)
    assert [(item.name, item.job_id, item.seen["cpus"], item.problem) for item in result] == [
        ("gpu", "11", 8, ""), ("cpu", "12", 8, ""),
    ]  # fmt: skip
    assert said == ["probe job 11, 12 queued; waiting for 30 s at most"]
    assert site.cancelled == []
    assert site.ran[-1][:2] == ["rm", "-rf"]


def test_a_refused_probe_does_not_stop_other_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site("\x1egpu\nsbatch: error: Invalid account\n\x1ecpu\n12\n", {"1.out": SEEN})
    refused, seen = run_probes(monkeypatch, site)
    assert (refused.job_id, "Invalid account" in refused.problem, refused.seen) == (None, True, {})
    assert (seen.job_id, seen.problem) == ("12", "")


def test_probe_jobs_that_do_not_start_in_time_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = JobStatus(job_id="11", state=JobState.PENDING, reason="Priority")
    site = Site(QUEUED, {"1.out": SEEN}, states=waiting)
    late, seen = run_probes(monkeypatch, site)
    assert late.problem == "job 11 is PENDING (Priority)"
    assert seen.problem == ""
    assert site.cancelled == ["11"]


def test_a_probe_without_an_answer_of_the_scheduler_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(QUEUED, {}, states=SlurmUnavailable("no controller"))
    assert [item.problem for item in run_probes(monkeypatch, site)] == [
        "the probe did not answer in time"
    ] * 2


def test_probe_jobs_that_failed_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(QUEUED, {}, states=JobStatus(job_id="x", state=JobState.FAILED))
    assert [item.problem for item in run_probes(monkeypatch, site)] == [
        "job 11 is FAILED",
        "job 12 is FAILED",
    ]
    assert site.now < 30


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"no Python\nat all\n{probing._END}1\n", "no Python; at all"),
        (f"{probing._END}1\n", "the probe ended without output"),
        (f"{probing._MARK}[1]\n{probing._END}0\n", "the probe ended without output"),
        (f"{probing._MARK}{{cut\n{probing._END}0\n", "the probe ended without output"),
        ("slurmstepd: error: killed\n", "slurmstepd: error: killed"),
    ],
)
def test_a_probe_without_a_result_reports_its_last_output(
    monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    first, _ = run_probes(monkeypatch, Site(QUEUED, {"0.out": text, "1.out": SEEN}))
    assert (first.problem, first.seen) == (problem, {})


def test_an_interrupted_wait_cancels_the_probe_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(QUEUED, CommandTimeout("too long"))
    with pytest.raises(CommandTimeout):
        run_probes(monkeypatch, site)
    assert site.cancelled == ["11", "12"]
    assert site.ran[-1][0] == "rm"


def test_without_targets_no_probe_is_queued() -> None:
    assert probing.probe(Context(), None, [], wait_s=1.0) == []  # type: ignore[arg-type]
