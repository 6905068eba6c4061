"""The rows of the list of runs: runs, arrays, and clusters that do not answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtslurm.errors import SlurmUnavailable
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.observe import run_list
from dtslurm.services.observe.run_list import ClusterReader, Runs, rows_of
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import Context
from dtslurm.store import codec

NOW = 10_000.0


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(cwd=tmp_path, clock=lambda: NOW)


def run_record(folder: Path, number: int = 17, **values: Any) -> JobRecord:
    return JobRecord(
        **{
            "token": f"{number:012x}",
            "cluster": "hpc",
            "name": "llama",
            "run_dir": str(folder / f"run-{number}"),
            "phase": "submitted",
            "created_at": float(number),
            "job_id": str(number),
            "world_size": 16,
            **values,
        }
    )


def job_status(job: str = "17", state: JobState = JobState.RUNNING, **values: Any) -> JobStatus:
    return JobStatus(**{"job_id": job, "state": state, "observed_at": NOW - 1, **values})


def replace_views(monkeypatch: pytest.MonkeyPatch, *views: RunView | Exception) -> list[list[str]]:
    """Let the scheduler give these answers, one for each query; return the queries."""
    asked: list[list[str]] = []
    waiting = list(views)

    def said(_: Context, records: list[JobRecord]) -> list[RunView]:
        asked.append([record.token for record in records])
        if not records:
            return []
        answer = waiting.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    monkeypatch.setattr(run_list, "views", said)
    return asked


def test_a_row_has_the_requested_size_until_slurm_reports_the_size(tmp_path: Path) -> None:
    view = RunView(run_record(tmp_path), (job_status(),))
    [row] = rows_of(view, {"nodes": 2, "gpus_per_node": 8})
    assert (row.key, row.nodes, row.gpus, row.ranks, row.about) == (f"{17:012x}", 2, 16, 16, "")
    [row] = rows_of(RunView(run_record(tmp_path), (job_status(nodes=4, restarts=2),)), {"gpus_per_node": 8})
    assert (row.nodes, row.gpus, row.attempt) == (4, 32, 2)
    [row] = rows_of(view, {"nodes": "two"})
    assert (row.nodes, row.gpus) == (None, None)


@pytest.mark.parametrize(
    ("status", "about", "fix", "never"),
    [
        (
            job_status(state=JobState.PENDING, reason="Priority"),
            "jobs with a higher priority wait, too",
            "",
            False,
        ),
        (job_status(state=JobState.PENDING, reason="PartitionTimeLimit"), "time", "", True),
        (job_status(state=JobState.PENDING), "", "", False),
        (job_status(state=JobState.UNKNOWN, reason="asking"), "asking", "", False),
        (job_status(state=JobState.UNKNOWN), "state unknown: no evidence", "", False),
        (job_status(state=JobState.FAILED, exit_code=7), "exit code 7", "", False),
        (job_status(state=JobState.COMPLETED), "", "", False),
    ],
)
def test_a_row_explains_why_a_run_is_pending_or_how_the_run_ended(
    tmp_path: Path, status: JobStatus, about: str, fix: str, never: bool
) -> None:
    [row] = rows_of(RunView(run_record(tmp_path), (status,)), {})
    assert about in row.about
    assert fix in row.fix
    assert "JOB" not in row.fix
    assert (row.never, row.over, row.unknown) == (never, status.terminal, status.state is JobState.UNKNOWN)
    assert row.pending is (status.state is JobState.PENDING)


@pytest.mark.parametrize(
    ("state", "restarts", "there", "attempt"),
    [
        (JobState.RUNNING, 0, (0, 1, 2), 2),  # restarted within the job
        (JobState.RUNNING, 3, (0, 1), 3),  # what it writes has not come over yet
        (JobState.RUNNING, None, (), 0),
        (JobState.COMPLETED, 0, (0, 1), 1),
        (JobState.PENDING, 1, (0,), 1),
    ],
)
def test_a_row_uses_the_attempt_number_of_the_log_folders_if_the_run_is_running(
    tmp_path: Path, state: JobState, restarts: int | None, there: tuple[int, ...], attempt: int
) -> None:
    run = run_record(tmp_path)
    for number in there:
        (Path(run.run_dir) / "logs" / str(number)).mkdir(parents=True)
    (row,) = rows_of(RunView(run, (job_status(state=state, restarts=restarts),)), {})
    assert row.attempt == attempt
    if state is JobState.RUNNING:
        assert row.about == (f"attempt {attempt}" if attempt else "")


def test_each_array_task_has_its_own_attempt_number(tmp_path: Path) -> None:
    run = run_record(tmp_path, array="1-2")
    for task, number in (("1", 0), ("2", 1)):
        (Path(run.run_dir) / "tasks" / task / "logs" / str(number)).mkdir(parents=True)
    statuses = tuple(job_status(f"17_{task}") for task in (1, 2))
    _, *tasks = rows_of(RunView(run, statuses), {})
    assert [(row.task, row.attempt) for row in tasks] == [("1", 0), ("2", 1)]


def test_an_array_has_a_summary_row_and_a_row_per_task(tmp_path: Path) -> None:
    array = run_record(tmp_path, array="0-9", time_limit=60)
    folder = Path(array.run_dir)
    (folder / "tasks" / "1" / "logs" / "0").mkdir(parents=True)
    (folder / "tasks" / "1" / "ranks" / "0").mkdir(parents=True)
    (folder / "tasks" / "1" / "ranks" / "0" / "first-failure").write_text("3 7\n")
    seen = (
        job_status("17_0", JobState.COMPLETED, start_time=100, end_time=150),
        job_status("17_1", JobState.FAILED, exit_code=7, start_time=90, end_time=200),
        job_status("17_2", start_time=120),
        job_status("17_[3-9]", JobState.PENDING, reason="JobArrayTaskLimit"),
    )
    whole, *tasks = rows_of(RunView(array, seen), {})
    assert [task.key.rpartition("_")[2] for task in tasks] == ["0", "1", "2", "[3-9]"]
    assert (whole.job_id, whole.state, whole.start, whole.end) == ("17", "RUNNING", 90, None)
    assert whole.about == "1 completed, 1 failed, 1 running, 1 pending"
    assert whole.is_array
    assert tasks[1].about == "rank 3 failed first, exit code 7"
    over, *_ = rows_of(RunView(array, seen[:2]), {})
    assert (over.state, over.over, over.ok, over.end) == ("FAILED", True, False, 200)
    good, *_ = rows_of(RunView(array, seen[:1]), {})
    assert (good.state, good.ok, good.limit_at) == ("COMPLETED", True, None)
    assert tasks[2].limit_at == 180


def test_a_run_that_ended_long_ago_is_queried_only_after_a_change(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = (job_status(state=JobState.COMPLETED, end_time=int(NOW) - 1000),)
    ended = run_record(tmp_path, final=done)
    asked = replace_views(monkeypatch, RunView(ended, done, observed_at=NOW - 900), RunView(ended, done))
    reader = ClusterReader(context, "hpc")
    [first], line = reader.read([ended])
    assert (first.state, line.trouble, line.observed_at) == ("COMPLETED", "", NOW)  # no answer could be newer
    [again], _ = reader.read([ended])
    assert again is first
    reader.read([replace(ended, name="renamed")])
    assert asked == [[ended.token], [], [ended.token]]


def test_a_run_that_ended_recently_is_queried_again(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = (job_status(state=JobState.COMPLETED, end_time=int(NOW) - 10),)
    ended = run_record(tmp_path, final=done)
    asked = replace_views(monkeypatch, *([RunView(ended, done)] * 2))
    reader = ClusterReader(context, "hpc")
    reader.read([ended])
    reader.read([ended])
    assert asked == [[ended.token]] * 2


def test_an_unreachable_cluster_keeps_its_last_rows(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_record(tmp_path)
    unknown = (job_status(state=JobState.UNKNOWN, reason="the scheduler could not be queried"),)
    replace_views(
        monkeypatch, RunView(run, (job_status(),), observed_at=NOW - 9), RunView(run, unknown, "no route"),
        SlurmUnavailable("no controller"),
    )  # fmt: skip
    reader = ClusterReader(context, "hpc")
    [row], line = reader.read([run])
    assert (row.state, line.observed_at) == ("RUNNING", NOW - 9)
    for trouble in ("no route", "no controller"):
        [kept], line = reader.read([run])
        assert (kept, line.trouble, line.observed_at) == (row, trouble, NOW - 9)


def test_the_row_of_a_run_never_queried_shows_the_error_or_the_recorded_end(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_views(monkeypatch, SlurmUnavailable("no controller"))
    run = run_record(tmp_path, job_id=None)
    reader = ClusterReader(context, "hpc")
    [asking] = reader.first([run])
    assert (asking.about, asking.job_id, asking.unknown) == ("asking", "?", True)
    [row], line = reader.read([run])
    assert (row.about, line.trouble, line.observed_at) == ("no controller", "no controller", None)
    [known] = reader.first([replace(run, final=(job_status(state=JobState.FAILED, exit_code=3),))])
    assert (known.state, known.about) == ("FAILED", "exit code 3")


def write_job_file(run: JobRecord, **more: object) -> None:
    path = Path(run.run_dir) / "job.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(codec.encode({"schema": 1, **codec.plain(run), **more}))


def test_the_gpu_count_of_a_row_comes_from_the_run_directory(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, bare, odd = run_record(tmp_path, 1), run_record(tmp_path, 2), run_record(tmp_path, 3)
    write_job_file(run, layout={"nodes": 3, "gpus_per_node": 4})
    write_job_file(odd, layout="none")
    replace_views(
        monkeypatch, *(RunView(item, (job_status(item.job_id or ""),)) for item in (run, bare, odd))
    )
    sizes = [ClusterReader(context, "hpc").read([item])[0][0].gpus for item in (run, bare, odd)]
    assert sizes == [12, None, None]


def test_by_cluster_groups_runs_skips_unreadable_ones_and_reuses_unchanged_records(
    context: Context, tmp_path: Path
) -> None:
    alive, broken, other = (
        run_record(tmp_path, 1),
        run_record(tmp_path, 2),
        run_record(tmp_path, 3, cluster="far"),
    )
    for item in (alive, broken, other):
        write_job_file(item)
        context.index.put(item)
    (Path(broken.run_dir) / "job.json").write_text(json.dumps({"schema": 99}))
    runs = Runs(context)
    first = runs.by_cluster()
    assert {key[0]: [item.token for item in result] for key, result in first.items()} == {
        "far": [other.token], "hpc": [alive.token],
    }  # fmt: skip
    again = runs.by_cluster()
    assert again["hpc", "", ""][0] is first["hpc", "", ""][0]
