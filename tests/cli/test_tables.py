"""Tables of runs, and a single run in full, at several terminal widths."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from dtslurm.cli.commands import status
from dtslurm.cli.printing import output, progress
from dtslurm.cli.printing.status_rows import format_run, make_rows
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.runs.history import History
from dtslurm.services.runs.run_times import Attempt
from dtslurm.services.runs.status import RunView
from tests.cli.conftest import Run
from tests.cli.sample_runs import Runs, ended_job

NOW = 1_800_000_000.0
NOTHING = History((), ())


def run_view(
    *statuses: JobStatus, trouble: str = "", observed_at: float | None = NOW - 2, **values: Any
) -> RunView:
    known: dict[str, Any] = {
        "token": "t", "cluster": "hpc", "name": "llama", "run_dir": "/nowhere/run", "job_id": "17",
        "phase": "submitted", "created_at": 0, "world_size": 64, "launcher": "torchrun", **values,
    }  # fmt: skip
    return RunView(JobRecord(**known), statuses, trouble, observed_at)


def job_status(job: str = "17", word: JobState = JobState.RUNNING, **values: Any) -> JobStatus:
    return JobStatus(**{"job_id": job, "state": word, "observed_at": NOW, "source": "squeue", **values})


def full_lines(view: RunView, history: History = NOTHING, **values: Any) -> list[str]:
    return list(format_run(view, history, NOW, None, **values))


def field_text(lines: list[str], label: str) -> str:
    [result] = [line[13:] for line in lines if line[:13].strip() == label]
    return result


def test_a_row_shows_stage_attempt_and_time_left() -> None:
    stages = {"prepare": "p", "train": "t"}
    staged = run_view(job_status(time_left=600, restarts=2), stage="train", stages=stages)
    assert make_rows(staged, NOW)[0][-1] == "stage train, 2 of 2; attempt 2; 10m00s left"
    assert (
        make_rows(run_view(job_status(), stage="train", stages=stages), NOW)[0][-1] == "stage train, 2 of 2"
    )
    recorded = run_view(job_status(source="record", reason="the batch script has ended"))
    assert make_rows(recorded, NOW)[0][-1] == "the batch script has ended"
    assert make_rows(run_view(job_status(word=JobState.UNKNOWN)), NOW)[0][-1] == "no evidence"


def test_a_long_list_of_tasks_in_one_state_is_shortened() -> None:
    tasks = [job_status(f"17_{task}", start_time=int(NOW) - 5) for task in range(14)]
    lines = full_lines(
        run_view(*tasks, job_status("17_[14-15]", JobState.PENDING, submit_time=int(NOW) - 60), array="0-15")
    )
    assert field_text(lines, "running") == "17 (14 tasks): 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 4 more"
    assert field_text(lines, "pending") == "17_[14-15]: for 1m00s"


def test_attempts_and_the_newest_events_are_listed() -> None:
    attempts = (
        Attempt(0, "n1", NOW - 900, NOW - 600, 85, "exit code 85"),
        Attempt(1, "n2", NOW - 500, None, None, "goes on"),
        Attempt(2),
    )
    events = [{"time": NOW - 100 + number, "event": f"event {number}"} for number in range(14)]
    lines = full_lines(run_view(job_status()), History(attempts, (*events, {"event": "no time"})))
    clock = [time.strftime("%H:%M:%S", time.localtime(NOW - ago)) for ago in (900, 600, 500)]
    begin = next(number for number, line in enumerate(lines) if line.startswith("  attempts"))
    assert [line[13:] for line in lines[begin : begin + 3]] == [
        f"0  {clock[0]} - {clock[1]}  n1  exit code 85", f"1  from {clock[2]}  n2  goes on", "2  from ?",
    ]  # fmt: skip
    assert field_text(lines, "events") == "(3 before these)"
    assert any(line.endswith("event 13") for line in lines)
    assert not any(line.endswith("event 2") for line in lines)
    assert any(line.endswith("?  no time") for line in lines)


def test_a_remote_run_directory_is_shown_with_its_cluster() -> None:
    lines = full_lines(
        run_view(job_status(), mirror="/here/copy", parent="/runs/before", command="train.py --lr 1")
    )
    assert field_text(lines, "run") == "hpc:/nowhere/run"
    assert field_text(lines, "parent run") == "/runs/before"
    assert field_text(lines, "command") == "train.py --lr 1"


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (run_view(job_status()), "2s ago"),
        (run_view(job_status(), trouble="no route"), "2s ago; no route"),
        (run_view(job_status(), observed_at=None), "the scheduler was not queried: the record is final"),
    ],
)
def test_the_age_of_the_scheduler_answer_is_shown(view: RunView, text: str) -> None:
    assert field_text(full_lines(view), "queried") == text


@pytest.mark.parametrize(
    ("word", "offered"),
    [
        (JobState.RUNNING, "dtslurm logs -f 17   dtslurm cancel 17"),
        (JobState.COMPLETED, "dtslurm logs 17"),
        (JobState.FAILED, "dtslurm diagnose 17   dtslurm logs 17"),
    ],
)
def test_the_next_commands_depend_on_the_state(word: JobState, offered: str) -> None:
    assert field_text(full_lines(run_view(job_status(word=word))), "next") == offered


def test_all_stages_are_shown_with_their_states() -> None:
    stages = {"prepare": "p", "train": "t", "test": "x"}
    this = run_view(job_status(), stage="train", stages=stages)
    before = run_view(job_status("16", JobState.COMPLETED), token="p", job_id="16")
    lines = full_lines(this, stages=[("prepare", before), ("train", this), ("test", None)])
    assert field_text(lines, "stages") == "prepare 16 COMPLETED → train 17 RUNNING (this) → test (gone)"


def test_a_run_without_a_known_job_is_shown_without_a_job_id() -> None:
    unknown = run_view(job_status("", JobState.UNKNOWN, reason="the answer of sbatch was lost"), job_id=None)
    assert full_lines(unknown)[0] == "job ?  llama  on hpc: UNKNOWN"
    assert "the answer of sbatch was lost" in "\n".join(full_lines(unknown))
    assert field_text(full_lines(unknown), "next") == "dtslurm status t"
    assert "the record is final" not in "\n".join(full_lines(unknown))
    never = run_view(
        job_status("", JobState.CANCELLED, source="record"), job_id=None, phase="withdrawn", observed_at=None
    )
    assert field_text(full_lines(never), "next") == "dtslurm resubmit t"
    assert field_text(full_lines(never), "queried") == "the scheduler was not queried: the run has no job"


def show_table(
    run_views: list[RunView], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> tuple[str, str]:
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    status._show_table(run_views, NOW)
    said = capsys.readouterr()
    return said.out, said.err


@pytest.mark.parametrize(
    ("width", "clusters", "heads"),
    [
        (80, ["a", "a"], ["JOB", "NAME", "STATE", "AGE", "TIME", "ABOUT"]),
        (80, ["a", "b"], ["JOB", "NAME", "CLUSTER", "STATE", "AGE", "TIME", "ABOUT"]),
        (160, ["a", "a"], ["JOB", "NAME", "CLUSTER", "STATE", "RANKS", "AGE", "TIME", "NODES", "ABOUT"]),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns(
    width: int, clusters: list[str], heads: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out, _ = show_table(
        [run_view(job_status(), cluster=name) for name in clusters], monkeypatch, capsys, width
    )
    assert out.splitlines()[0].split() == heads


def test_a_cluster_that_did_not_answer_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = run_view(job_status(), trouble="no route", observed_at=NOW - 60)
    never = run_view(job_status(), trouble="no key", observed_at=None, cluster="far")
    _, err = show_table([old, old, never], monkeypatch, capsys, 80)
    assert err == "hpc: no route; last update 1m00s ago\nfar: no key\n"


def test_status_exits_with_3_if_a_profile_was_deleted(invoke: Run, runs: Runs) -> None:
    runs.add("lost", "7", ended_job("7", JobState.RUNNING, end_time=None), cluster="gone")
    done = invoke("status", code=3)
    assert "RUNNING" in done.stdout
    assert re.search(r"^gone: .*no cluster profile", done.stderr, re.MULTILINE)
    [run] = json.loads(invoke("status", "--json", code=3).stdout)["runs"]
    assert "no cluster profile" in run["trouble"]


def test_the_full_status_of_several_runs_is_separated_by_empty_lines(invoke: Run, runs: Runs) -> None:
    stages = {"a": f"{7:012x}", "b": f"{8:012x}", "c": "f" * 12}
    runs.add("one", "7", stage="a", stages=stages)
    runs.add("two", "8", ended_job("8", JobState.FAILED), stage="b", stages=stages, time_limit=60)
    done = invoke("status", "7", "8", code=0)
    first, second = done.stdout.split("\n\n")
    assert first.startswith(
        "job 7  one  on local: COMPLETED\n  stages     a 7 COMPLETED (this) → b 8 FAILED → c (gone)"
    )
    assert second.startswith("job 8  two  on local: FAILED\n")
    assert "no runs on perlmutter yet" in invoke("status", "--cluster", "perlmutter", code=0).stderr


# ---- Progress of transfers ----


class Screen:
    """A stderr that says it is a terminal, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
        monkeypatch.setattr("dtslurm.cli.printing.progress.time.monotonic", lambda: self.now)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("FORCE_COLOR", "1")


def test_a_fast_transfer_shows_no_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Screen(monkeypatch)
    with progress.transfer() as show:
        show("weights.bin", 5, 10)
    assert capsys.readouterr().err == ""


def test_a_slow_transfer_shows_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(monkeypatch)
    with progress.transfer() as show:
        screen.now = 1.0
        show("weights\x1b[2J.bin", 5000, 10000)
        show("weights\x1b[2J.bin", 9000, 10000)
    drawn = capsys.readouterr().err
    assert "weights.bin" in drawn
    assert "9.0/10.0 kB" in drawn
    assert "\x1b[2J" not in drawn


def test_a_pipe_gets_no_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.transfer() as show:
        show("weights.bin", 5, 10)
    assert capsys.readouterr().err == ""
