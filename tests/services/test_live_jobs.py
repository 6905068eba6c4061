"""A look at a running job: its ranks' stacks, what could not be seen, and what cannot be looked at at all."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import CommandNotFound, CommandTimeout, RequestInvalid
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.runs.telemetry import GpuSample, NodeSample, RankTelemetry, RunTelemetry, TrainPoint
from dtslurm.remote.worker_program import NO_PYTHON
from dtslurm.services.observe import live
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import Context
from dtslurm.transport.base import Completed
from dtslurm.worker.stacks import live as node_side

RECORD = JobRecord(
    token="t", cluster="hpc", name="llama", run_dir="/r", phase="submitted", created_at=0.0, job_id="17"
)
RUNNING = JobStatus(job_id="17", state=JobState.RUNNING)


def a_rank(rank: int = 0, **values: Any) -> RankTelemetry:
    return RankTelemetry(
        **{
            "rank": rank,
            "host": "n1",
            "pid": 70 + rank,
            "started": 1,
            "local_rank": rank,
            "spoke": 90.0,
            **values,
        }
    )


def now(*ranks: RankTelemetry, **values: Any) -> RunTelemetry:
    known = {"attempt": 0, "attempts": (0,), "now": 100.0, "world_size": len(ranks), **values}
    return RunTelemetry(ranks={rank.rank: rank for rank in ranks}, **known)


def looked(
    monkeypatch: pytest.MonkeyPatch, seen: RunTelemetry, *statuses: JobStatus, answer: Any = None
) -> list[list[str]]:
    """Let a job be so; return the steps that look at its nodes."""
    steps: list[list[str]] = []

    def run(argv: list[str], timeout: float) -> Completed:
        del timeout
        steps.append(argv)
        if isinstance(answer, Exception):
            raise answer
        return Completed(tuple(argv), 0, answer or "", "srun: error: n1: Killed\n")

    cluster = SimpleNamespace(profile=SimpleNamespace(scheduler="slurm"), transport=SimpleNamespace(run=run))
    monkeypatch.setattr(Context, "cluster_of", lambda *_: cluster)
    monkeypatch.setattr(live, "views", lambda _, records: [RunView(records[0], statuses or (RUNNING,))])
    monkeypatch.setattr(live, "read_telemetry", lambda *_, **__: seen)
    return steps


def told(capsys: pytest.CaptureFixture[str], node: str, ranks: dict[int, dict[str, Any]]) -> str:
    """What a node prints."""
    node_side.answer(node, {"node": node, "ranks": {str(rank): look for rank, look in ranks.items()}})
    return capsys.readouterr().out


def test_what_a_node_tells_of_a_rank_is_put_to_its_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = [
        {"function": "step", "file": "/p/train.py", "line": 9},
        {"function": None, "file": "x", "line": None},
    ]
    thread = {"state": "S", "waits": "futex", "frames": frames}
    worker = {"pid": 99, "cpu": None, "threads": [{"state": "D", "waits": "nfs", "frames": []}]}
    looks: dict[int, dict[str, Any]] = {
        0: {
            "pid": 170,
            "by": "py-spy",
            "why": [],
            "threads": [thread],
            "cpu": 0.5,
            "moved": True,
            "workers": [worker],
        },
        1: {"pid": None, "by": "proc", "why": ["no py-spy"], "state": "R", "threads": []},
    }
    steps = looked(monkeypatch, now(a_rank(0), a_rank(1)), answer=told(capsys, "n1", looks))
    found = live.diagnose_live(Context(), RECORD)
    first, second = found.looks
    assert (first.pid, first.state, first.cpu, first.moved, first.waits) == (170, "S", 0.5, True, "futex")
    assert [(frame.function, frame.line) for frame in first.frames] == [("step", 9), ("None", 0)]
    assert first.workers == ("process 99: waiting for a device or file system: nfs",)
    assert (second.pid, second.state, second.cpu, second.by) == (71, "R", 0.0, "proc")
    assert found.by == {"py-spy": 1, "proc": 1}
    assert found.missing == ("no stacks of 1 rank: no py-spy",)
    assert steps[0][:2] == ["srun", "--jobid=17"]


def test_a_rank_that_was_not_looked_at_is_what_its_record_says(monkeypatch: pytest.MonkeyPatch) -> None:
    looked(monkeypatch, now(a_rank(0), a_rank(1, ended=95, exit_code=3), a_rank(2, pid=None)))
    found = live.diagnose_live(Context(), RECORD)
    assert [(look.by, look.ended, look.exit_code) for look in found.looks] == [
        ("", False, None), ("", True, 3), ("", False, None),
    ]  # fmt: skip
    assert found.missing == ("could not examine the ranks of n1: srun: error: n1: Killed",)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (CommandTimeout("timed out"), "the srun step that examines the ranks did not end within 60 s"),
        (CommandNotFound("there is no srun here"), "no stacks: there is no srun here"),
        (f"{NO_PYTHON}\n", "the node has no Python 3.6 or later"),
        ("dtslurm-live:n1:0:1:AAAA\n", "could not examine the ranks of n1"),
    ],
)
def test_why_nothing_was_seen(monkeypatch: pytest.MonkeyPatch, answer: Any, said: str) -> None:
    looked(monkeypatch, now(a_rank()), answer=answer)
    [why] = live.diagnose_live(Context(), RECORD).missing
    assert said in why


def test_the_nodes_are_looked_at_whose_ranks_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    done = a_rank(0, ended=95, exit_code=0, spoke=20.0)
    steps = looked(monkeypatch, now(done, a_rank(1, host="n2", spoke=95.0)))
    found = live.diagnose_live(Context(), RECORD)
    assert "--nodelist=n2" in steps[0]
    # Nor is it said to hang, though the one that speaks could not be looked at.
    assert (found.verdict.cause, found.verdict.confidence) == ("unknown", 0.4)
    assert found.verdict.summary.endswith("; but rank 1, which could not be examined, wrote output 5 s ago")


def test_many_silent_nodes_are_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    looked(monkeypatch, now(*(a_rank(number, host=f"n{number}") for number in range(7))))
    [why] = live.diagnose_live(Context(), RECORD).missing
    assert why.startswith("could not examine the ranks of n0, n1, n2, n3, n4 and 2 more")


def test_where_no_process_is_known_no_step_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = looked(monkeypatch, now(a_rank(pid=None)))
    assert live.diagnose_live(Context(), RECORD).missing == ("no rank has recorded its process id",)
    assert steps == []


def test_very_many_ranks_do_not_fit_into_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LONGEST", 10)
    steps = looked(monkeypatch, now(a_rank(0), a_rank(1)))
    assert live.diagnose_live(Context(), RECORD).missing == ("2 ranks are too many for one srun step",)
    assert steps == []


@pytest.mark.parametrize(
    ("seen", "status", "told"),
    [
        (
            now(a_rank()),
            JobStatus(job_id="17", state=JobState.PENDING),
            "17 is not running: its state is PENDING",
        ),
        (
            now(a_rank()),
            JobStatus(job_id="", state=JobState.UNKNOWN),
            "llama is not running: its state is UNKNOWN",
        ),
        (RunTelemetry(now=100.0), RUNNING, "17 has not started any rank"),
    ],
)
def test_what_cannot_be_looked_at(
    monkeypatch: pytest.MonkeyPatch, seen: RunTelemetry, status: JobStatus, told: str
) -> None:
    looked(monkeypatch, seen, status)
    with pytest.raises(RequestInvalid, match=told):
        live.diagnose_live(Context(), RECORD)


@pytest.mark.parametrize(("task", "job"), [(None, "17_3"), ("4", "17_4"), ("9", "17_3")])
def test_of_an_array_it_is_the_task_named_or_the_first_that_runs(
    monkeypatch: pytest.MonkeyPatch, task: str | None, job: str
) -> None:
    tasks = [
        JobStatus(job_id=f"17_{number}", state=JobState.COMPLETED if number == 2 else JobState.RUNNING)
        for number in (2, 3, 4)
    ]
    looked(monkeypatch, now(a_rank(pid=None)), *tasks)
    found = live.diagnose_live(Context(), JobRecord(**{**vars(RECORD), "array": "2-4"}), task=task)
    assert found.status.job_id == job
    assert found.task == (task or "3")


def test_a_job_that_ended_meanwhile_is_read_once_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked(monkeypatch, now(a_rank()), answer=told(capsys, "n1", {0: {"by": "none", "threads": []}}))
    answers = iter([now(a_rank()), now(a_rank(ended=99, exit_code=0))])
    monkeypatch.setattr(live, "read_telemetry", lambda *_, **__: next(answers))
    [look] = live.diagnose_live(Context(), RECORD).looks
    assert (look.by, look.ended) == ("none", False)
    assert next(answers, None) is None


def test_silence_ends_with_a_line_or_with_a_step_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    points = (
        TrainPoint(step=1, time=97.0),
        TrainPoint(step=2, time=None),
        TrainPoint(step=1, time=99.0, rank=1),
    )
    ranks = (a_rank(0, pid=None), a_rank(1, pid=None, spoke=None), a_rank(2, pid=None, spoke=None))
    looked(monkeypatch, now(*ranks, train=points))
    assert [look.silent_s for look in live.diagnose_live(Context(), RECORD).looks] == [3.0, 1.0, None]


def test_gpus_are_of_the_newest_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (GpuSample(index=0, util=2.0), GpuSample(index=1, util=99.0), GpuSample(index=2))
    node = NodeSample(node="n1", node_rank=0, time=96.0, gpus=gpus)
    looked(monkeypatch, now(a_rank(pid=None), nodes=(node,)))
    found = live.diagnose_live(Context(), RECORD).gpus
    assert found == live.GpuUse(count=2, idle=1, util=50.5, age_s=4.0)


def test_on_this_machine_it_looks_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = looked(monkeypatch, now(a_rank(pid=os.getpid(), host="here")))
    local = SimpleNamespace(
        profile=SimpleNamespace(scheduler="local"), transport=Context().cluster_of(RECORD).transport
    )
    monkeypatch.setattr(Context, "cluster_of", lambda *_: local)
    live.diagnose_live(Context(cwd=tmp_path), RECORD)
    assert steps[0][0] != "srun"
