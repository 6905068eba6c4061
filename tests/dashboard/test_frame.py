"""One frame of the dashboard as text for a pipe."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dtslurm.dashboard import frame
from dtslurm.errors import JobNotFound
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.observe.run_list import Board
from dtslurm.views.role_states import parse_roles
from tests.dashboard.desk import Desk
from tests.dashboard.samples import NOW, board, page_of, row


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


def board_lines(sample_board: Board, width: int = 200) -> list[str]:
    return frame.render_frame(sample_board, None, None, width=width, now=NOW)


def test_one_frame_has_a_line_per_job_and_per_failed_cluster() -> None:
    lines = board_lines(board())
    assert lines[0].startswith("3 running · 2 pending")
    assert lines[1].split() == ["STATE", "NAME", "JOB", "CLUSTER", "SIZE", "TIME/LIMIT", "DONE", "ABOUT"]
    assert lines[2].startswith("● RUNNING    llama-8b")
    assert lines[2].endswith("40%   will stop at step 41,200 of 50,000")
    assert sum("sweep" in line for line in lines) == 1  # an array is folded
    assert lines[-1].startswith("slow: no answer for 1m35s (there is no link to login.slow)")
    assert not any("hpc ok" in line for line in lines)


def test_one_frame_without_runs_shows_a_message() -> None:
    assert board_lines(Board()) == ["no runs yet"]


def test_lines_are_cut_to_the_display_width() -> None:
    lines = board_lines(board(), width=40)
    assert all(len(line) <= 40 for line in lines)
    assert lines[2].endswith("…")
    wide = board_lines(Board(rows=(row(1, name="数" * 40),)), width=40)
    assert wide[2].startswith("● RUNNING  数数")
    assert len(wide[2]) < 30


def page_text(size: int, **values: object) -> str:
    job = row(1, ranks=size)
    shown = replace(page_of(size, job.key), **values)  # type: ignore[arg-type]
    return "\n".join(frame.render_frame(Board(rows=(job,)), shown, job.key, width=100, now=NOW))


def test_the_page_of_a_stalled_job_names_diagnose_live() -> None:
    activity = Activity(
        stalled=True, since=NOW - 220, quiet_s=220, summary="no work for 3m40s; rank 3 is stopped"
    )
    lines = page_text(4, activity=activity).splitlines()
    assert lines[0].startswith("■ STALLED 3m40s  train-1")
    assert lines[2:4] == [
        "no work for 3m40s", "dtslurm diagnose --live 4701 examines every rank; rank 3 is stopped",
    ]  # fmt: skip


def test_the_page_shows_progress_curves_ranks_nodes_and_events() -> None:
    result = page_text(16)
    for part in (
        "train-1  4701 on hpc · 16 ranks on gpu[01-02]",
        "step 2,000 of 50,000 (4%)",
        "██",
        "\nloss ",
        "15 running · 1 failed",
        "outliers: 5 no output while other ranks write",
        "rank 9: failed",
        "rank 15: ",
        "node gpu01  gpu ",
        "checkpoint",
    ):
        assert part in result
    assert "more ranks" not in result


def test_the_page_shows_roles_and_faults_as_the_dashboard_does() -> None:
    instance = {"instance": 0, "state": "ready", "node": "n0", "restarts": 1}
    roles = parse_roles([{"name": "rollout", "instances": [instance]}])
    apart = {"event": "not_distributed", "attempt": 0, "world_size": 4, "evidence": "no connection"}
    point = replace(page_of(4).points[-1], step=2010, loss=float("nan"))
    result = page_text(4, roles=roles, attempt=0, events=(apart,), points=(point,))
    assert "\nrollout: 1 of 1 ready on n0, 1 restart\n" in result
    assert "\nNOT DISTRIBUTED: the 4 ranks do not train together: no connection" in result
    assert "\nthe loss is no number since step 2010\n" in result


def test_many_ranks_are_shortened_to_the_first_with_a_count() -> None:
    result = page_text(1000)
    assert "rank 15: " in result
    assert "rank 16: " not in result
    assert "and 984 more ranks" in result


def test_an_unavailable_page_shows_the_reason() -> None:
    result = page_text(
        1, ranks=(), nodes=(), points=(), events=(), forecast=None, trouble="no link to login.hpc"
    )
    assert "\nno link to login.hpc\n" in result
    assert "no ranks yet" in result
    assert "no events yet" in result


def test_progress_without_a_total_has_no_bar() -> None:
    forecast = replace(page_of(4).forecast, total=None, done_at=None, cut_at=None)  # type: ignore[type-var]
    result = page_text(4, forecast=forecast)
    assert "\nstep 2,000 · " in result
    assert "██" not in result


def test_query_board_asks_every_cluster_and_reads_the_progress_of_running_jobs(desk: Desk) -> None:
    _, files = desk.run(1)
    desk.run(2, cluster="gone", job="8")
    desk.say("7", JobState.RUNNING, start_time=int(NOW) - 60)
    files.start(1)
    files.lines("train.jsonl", {"step": 5, "time": NOW, "total_steps": 10})
    result = frame.query_board(desk.context, None)
    assert [(item.job_id, item.state) for item in result.rows] == [("8", "UNKNOWN"), ("7", "RUNNING")]
    forecast = result.rows[1].forecast
    assert forecast is not None
    assert (forecast.step, forecast.total) == (5, 10)
    troubled = [line.name for line in result.clusters if line.trouble]
    assert troubled == ["gone"]
    assert [item.job_id for item in frame.query_board(desk.context, "local").rows] == ["7"]


def test_query_board_does_not_wait_for_a_slow_cluster(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def late(_: object) -> dict[str, list[JobStatus]]:
        answer.wait(60)
        return {}

    monkeypatch.setattr(desk, "_query", late)
    monkeypatch.setattr(frame, "_PATIENCE_S", 0.0)
    desk.run(1)
    result = frame.query_board(desk.context, None)
    answer.set()
    for thread in threading.enumerate():
        if thread.name.endswith("(ask)"):
            thread.join(60)  # before what it works with is gone
    assert [(item.job_id, item.state, item.about) for item in result.rows] == [("7", "UNKNOWN", "asking")]
    assert [line.trouble for line in result.clusters] == ["no answer within 0 s"]


def test_page_of_returns_the_page_of_a_job_on_the_board(desk: Desk) -> None:
    record, files = desk.run(1)
    desk.say("7", JobState.RUNNING, start_time=int(NOW) - 60)
    files.start(2)
    files.rank(0)
    result = frame.query_board(desk.context, None)
    shown = frame.page_of(desk.context(), result, record.token)
    assert [cell.state for cell in shown.ranks] == ["running", "waiting"]
    with pytest.raises(JobNotFound, match="no job 'other' on the board"):
        frame.page_of(desk.context(), result, "other")
    gone = replace(result.rows[0], token="gone")
    assert "no run 'gone' is known on this machine" in frame.page_of_row(desk.context(), gone, None).trouble
