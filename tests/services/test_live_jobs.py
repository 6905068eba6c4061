"""The live diagnosis of a running job: stacks, unexamined ranks, and refused jobs."""

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


def rank_telemetry(rank: int = 0, **values: Any) -> RankTelemetry:
    return RankTelemetry(
        **{
            "rank": rank,
            "host": "n1",
            "pid": 70 + rank,
            "started": 1,
            "local_rank": rank,
            "last_output_at": 90.0,
            **values,
        }
    )


def run_telemetry(*ranks: RankTelemetry, **values: Any) -> RunTelemetry:
    known = {"attempt": 0, "attempts": (0,), "now": 100.0, "world_size": len(ranks), **values}
    return RunTelemetry(ranks={rank.rank: rank for rank in ranks}, **known)


def replace_job_and_record_steps(
    monkeypatch: pytest.MonkeyPatch, telemetry: RunTelemetry, *statuses: JobStatus, answer: Any = None
) -> list[list[str]]:
    """Replace the telemetry and the states of a job; return the started steps."""
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
    monkeypatch.setattr(live, "read_telemetry", lambda *_, **__: telemetry)
    return steps


def print_node_output(capsys: pytest.CaptureFixture[str], node: str, ranks: dict[int, dict[str, Any]]) -> str:
    """Return the output of a node."""
    node_side.answer(node, {"node": node, "ranks": {str(rank): look for rank, look in ranks.items()}})
    return capsys.readouterr().out


def test_the_answer_of_a_node_is_merged_with_the_rank_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = [
        {"function": "step", "file": "/p/train.py", "line": 9},
        {"function": None, "file": "x", "line": None},
    ]
    thread = {"state": "S", "waits": "futex", "frames": frames}
    worker = {"pid": 99, "cpu": None, "threads": [{"state": "D", "waits": "nfs_wait", "frames": []}]}
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
    steps = replace_job_and_record_steps(
        monkeypatch,
        run_telemetry(rank_telemetry(0), rank_telemetry(1)),
        answer=print_node_output(capsys, "n1", looks),
    )
    result = live.diagnose_live(Context(), RECORD)
    first, second = result.looks
    assert (first.pid, first.state, first.cpu, first.moved, first.waits) == (170, "S", 0.5, True, "futex")
    assert [(frame.function, frame.line) for frame in first.frames] == [("step", 9), ("None", 0)]
    assert first.workers == (
        "process 99: waiting for a device or file system: waiting for a network file system",
    )
    assert (second.pid, second.state, second.cpu, second.by) == (71, "R", 0.0, "proc")
    assert result.by == {"py-spy": 1, "proc": 1}
    assert result.missing == ("no stacks of 1 rank: no py-spy",)
    assert steps[0][:2] == ["srun", "--jobid=17"]


def test_a_rank_that_was_not_examined_is_described_by_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_job_and_record_steps(
        monkeypatch,
        run_telemetry(
            rank_telemetry(0), rank_telemetry(1, ended=95, exit_code=3), rank_telemetry(2, pid=None)
        ),
    )
    result = live.diagnose_live(Context(), RECORD)
    assert [(look.by, look.ended, look.exit_code) for look in result.looks] == [
        ("", False, None), ("", True, 3), ("", False, None),
    ]  # fmt: skip
    assert result.missing == ("could not examine the ranks of n1: srun: error: n1: Killed",)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (CommandTimeout("timed out"), "the srun step that examines the ranks did not end within 60 s"),
        (CommandNotFound("there is no srun here"), "no stacks: there is no srun here"),
        (f"{NO_PYTHON}\n", "the node has no Python 3.6 or later"),
        ("dtslurm-live:n1:0:1:AAAA\n", "could not examine the ranks of n1"),
    ],
)
def test_the_reason_for_a_failed_examination_is_reported(
    monkeypatch: pytest.MonkeyPatch, answer: Any, said: str
) -> None:
    replace_job_and_record_steps(monkeypatch, run_telemetry(rank_telemetry()), answer=answer)
    [why] = live.diagnose_live(Context(), RECORD).missing
    assert said in why


def test_only_nodes_with_running_ranks_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    done = rank_telemetry(0, ended=95, exit_code=0, last_output_at=20.0)
    steps = replace_job_and_record_steps(
        monkeypatch, run_telemetry(done, rank_telemetry(1, host="n2", last_output_at=95.0))
    )
    result = live.diagnose_live(Context(), RECORD)
    assert "--nodelist=n2" in steps[0]
    # Nor is it said to hang, though the one that speaks could not be looked at.
    assert (result.verdict.cause, result.verdict.confidence) == ("unknown", 0.4)
    assert result.verdict.summary.endswith("; but rank 1, which could not be examined, wrote output 5 s ago")


def test_a_long_list_of_unexamined_nodes_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_job_and_record_steps(
        monkeypatch, run_telemetry(*(rank_telemetry(number, host=f"n{number}") for number in range(7)))
    )
    [why] = live.diagnose_live(Context(), RECORD).missing
    assert why.startswith("could not examine the ranks of n0, n1, n2, n3, n4 and 2 more")


def test_no_step_is_started_if_no_rank_recorded_a_process_id(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = replace_job_and_record_steps(monkeypatch, run_telemetry(rank_telemetry(pid=None)))
    assert live.diagnose_live(Context(), RECORD).missing == ("no rank has recorded its process id",)
    assert steps == []


def test_no_step_is_started_if_the_ranks_exceed_the_argument_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LONGEST", 10)
    steps = replace_job_and_record_steps(monkeypatch, run_telemetry(rank_telemetry(0), rank_telemetry(1)))
    assert live.diagnose_live(Context(), RECORD).missing == ("2 ranks are too many for one srun step",)
    assert steps == []


@pytest.mark.parametrize(
    ("telemetry", "status", "message"),
    [
        (
            run_telemetry(rank_telemetry()),
            JobStatus(job_id="17", state=JobState.PENDING),
            "17 is not running: its state is PENDING",
        ),
        (
            run_telemetry(rank_telemetry()),
            JobStatus(job_id="", state=JobState.UNKNOWN),
            "llama is not running: its state is UNKNOWN",
        ),
        (RunTelemetry(now=100.0), RUNNING, "17 has not started any rank"),
    ],
)
def test_diagnose_live_refuses_a_job_that_is_not_running(
    monkeypatch: pytest.MonkeyPatch, telemetry: RunTelemetry, status: JobStatus, message: str
) -> None:
    replace_job_and_record_steps(monkeypatch, telemetry, status)
    with pytest.raises(RequestInvalid, match=message):
        live.diagnose_live(Context(), RECORD)


@pytest.mark.parametrize(("task", "job"), [(None, "17_3"), ("4", "17_4"), ("9", "17_3")])
def test_diagnose_live_of_an_array_examines_the_named_or_first_running_task(
    monkeypatch: pytest.MonkeyPatch, task: str | None, job: str
) -> None:
    tasks = [
        JobStatus(job_id=f"17_{number}", state=JobState.COMPLETED if number == 2 else JobState.RUNNING)
        for number in (2, 3, 4)
    ]
    replace_job_and_record_steps(monkeypatch, run_telemetry(rank_telemetry(pid=None)), *tasks)
    result = live.diagnose_live(Context(), JobRecord(**{**vars(RECORD), "array": "2-4"}), task=task)
    assert result.status.job_id == job
    assert result.task == (task or "3")


def test_telemetry_is_read_again_if_a_rank_has_ended_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_job_and_record_steps(
        monkeypatch,
        run_telemetry(rank_telemetry()),
        answer=print_node_output(capsys, "n1", {0: {"by": "none", "threads": []}}),
    )
    answers = iter([run_telemetry(rank_telemetry()), run_telemetry(rank_telemetry(ended=99, exit_code=0))])
    monkeypatch.setattr(live, "read_telemetry", lambda *_, **__: next(answers))
    [look] = live.diagnose_live(Context(), RECORD).looks
    assert (look.by, look.ended) == ("none", False)
    assert next(answers, None) is None


def test_silence_is_measured_from_the_last_log_line_or_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    points = (
        TrainPoint(step=1, time=97.0),
        TrainPoint(step=2, time=None),
        TrainPoint(step=1, time=99.0, rank=1),
    )
    ranks = (
        rank_telemetry(0, pid=None),
        rank_telemetry(1, pid=None, last_output_at=None),
        rank_telemetry(2, pid=None, last_output_at=None),
    )
    replace_job_and_record_steps(monkeypatch, run_telemetry(*ranks, train=points))
    assert [look.silent_s for look in live.diagnose_live(Context(), RECORD).looks] == [3.0, 1.0, None]


def test_gpu_use_comes_from_the_newest_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (GpuSample(index=0, util=2.0), GpuSample(index=1, util=99.0), GpuSample(index=2))
    node = NodeSample(node="n1", node_rank=0, time=96.0, gpus=gpus)
    replace_job_and_record_steps(monkeypatch, run_telemetry(rank_telemetry(pid=None), nodes=(node,)))
    result = live.diagnose_live(Context(), RECORD).gpus
    assert result == live.GpuUse(count=2, idle=1, util=50.5, age_s=4.0)


def test_diagnose_live_on_cluster_local_does_not_call_srun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = replace_job_and_record_steps(
        monkeypatch, run_telemetry(rank_telemetry(pid=os.getpid(), host="here"))
    )
    local = SimpleNamespace(
        profile=SimpleNamespace(scheduler="local"), transport=Context().cluster_of(RECORD).transport
    )
    monkeypatch.setattr(Context, "cluster_of", lambda *_: local)
    live.diagnose_live(Context(cwd=tmp_path), RECORD)
    assert steps[0][0] != "srun"
