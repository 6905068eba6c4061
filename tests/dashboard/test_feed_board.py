"""The boards that the dashboard's threads post, and the actions on a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.dashboard import feed as feed_module
from dtslurm.dashboard.feed import Feed, Notification
from dtslurm.errors import RequestInvalid, TransportError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState
from dtslurm.model.runs.telemetry import RunTelemetry
from dtslurm.services.observe.run_list import Board
from dtslurm.services.wiring.context import Context
from dtslurm.store.index import default_path
from tests.dashboard.desk import Desk, join_feed_threads, row_of
from tests.dashboard.samples import NOW, telemetry_of


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


@pytest.fixture
def unstarted_feed(desk: Desk) -> Iterator[Feed]:
    feed = desk.feed()
    yield feed
    feed.stop()
    join_feed_threads()


def states_by_job(board: Board) -> dict[str, str]:
    return {row.job_id: row.state for row in board.rows}


def test_a_board_shows_the_run_then_the_queue_state_then_the_forecast(
    desk: Desk, unstarted_feed: Feed
) -> None:
    _, files = desk.run(1)
    desk.say("7", JobState.RUNNING, start_time=int(NOW) - 60)
    files.start(1)
    files.rank(0)
    files.lines(
        "train.jsonl", *({"step": step, "time": NOW - 60 + step, "total_steps": 100} for step in range(1, 31))
    )
    unstarted_feed.start(desk.posts.put)
    first = desk.next(Board)
    assert states_by_job(first) in ({"7": "UNKNOWN"}, {"7": "RUNNING"})
    result = desk.next(Board, lambda board: board.rows[0].forecast is not None)
    assert states_by_job(result) == {"7": "RUNNING"}
    assert result.rows[0].forecast is not None
    assert (result.rows[0].forecast.step, result.rows[0].forecast.total) == (30, 100)
    assert [(line.name, line.trouble) for line in result.clusters] == [("local", "")]


def test_a_refresh_shows_new_runs_and_new_states(desk: Desk, unstarted_feed: Feed) -> None:
    desk.run(1)
    desk.say("7", JobState.PENDING)
    unstarted_feed.start(desk.posts.put)
    desk.next(Board, lambda board: states_by_job(board) == {"7": "PENDING"})
    desk.run(2, job="8")
    desk.say("7", JobState.COMPLETED, end_time=int(NOW), exit_code=0)
    desk.say("8", JobState.RUNNING, start_time=int(NOW))
    unstarted_feed.refresh()
    result = desk.next(Board, lambda board: states_by_job(board) == {"8": "RUNNING", "7": "COMPLETED"})
    assert [row.job_id for row in result.rows] == ["8", "7"]  # the newest first
    unstarted_feed.refresh()
    assert states_by_job(desk.next(Board)) == {"8": "RUNNING", "7": "COMPLETED"}


def test_a_cluster_without_a_profile_is_reported_and_others_are_shown(
    desk: Desk, unstarted_feed: Feed
) -> None:
    desk.run(1)
    desk.run(2, cluster="gone", job="8")
    desk.say("7", JobState.RUNNING, start_time=int(NOW))
    unstarted_feed.start(desk.posts.put)
    result = desk.next(
        Board,
        lambda board: (
            "RUNNING" in states_by_job(board).values() and any(cluster.trouble for cluster in board.clusters)
        ),
    )
    assert states_by_job(result) == {"8": "UNKNOWN", "7": "RUNNING"}
    assert [line.name for line in result.clusters if "gone" in line.trouble] == ["gone"]


def test_a_job_with_unreadable_telemetry_is_shown_without_a_forecast(
    desk: Desk, unstarted_feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_: Context, record: JobRecord, *_part: object, **_values: object) -> RunTelemetry:
        if record.job_id == "7":
            raise TransportError("the folder cannot be read")
        return telemetry_of(1)

    monkeypatch.setattr(feed_module, "read_telemetry", unreadable)
    desk.run(1)
    desk.run(2, job="8")
    desk.say("7", JobState.RUNNING, start_time=int(NOW))
    desk.say("8", JobState.RUNNING, start_time=int(NOW))
    unstarted_feed.start(desk.posts.put)
    result = desk.next(Board, lambda board: any(row.forecast for row in board.rows))
    assert {row.job_id: row.forecast is not None for row in result.rows} == {"7": False, "8": True}
    assert not result.clusters[0].trouble


def test_only_the_named_cluster_is_queried(desk: Desk) -> None:
    desk.run(1)
    desk.run(2, cluster="gone", job="8")
    desk.say("7", JobState.RUNNING, start_time=int(NOW))
    feed = desk.feed(cluster="local")
    feed.start(desk.posts.put)
    result = desk.next(Board, lambda board: "RUNNING" in states_by_job(board).values())
    feed.stop()
    assert (set(states_by_job(result)), [line.name for line in result.clusters]) == ({"7"}, ["local"])
    join_feed_threads()


def test_an_unreadable_index_is_reported_and_the_board_is_empty(desk: Desk, unstarted_feed: Feed) -> None:
    path = default_path()
    path.parent.mkdir(parents=True)
    path.write_text("no database, but long enough that it might be one" * 99)
    unstarted_feed.start(desk.posts.put)
    result = desk.next(Notification)
    assert result.bad
    assert f"the index of runs {path} failed" in result.text
    assert desk.next(Board).rows == ()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (RequestInvalid(["it is wrong"], hint="so do that"), "so do that"),
    ],
)
def test_an_error_that_ends_a_feed_thread_is_reported(desk: Desk, error: Exception, words: str) -> None:
    def broken() -> Context:
        raise error

    Feed(broken, lambda _: ()).start(desk.posts.put)
    result = desk.next(Notification)
    assert result.bad
    assert words in result.text


def test_a_stopped_feed_posts_nothing(desk: Desk) -> None:
    desk.run(1)
    feed = desk.feed()
    feed.stop()
    feed.start(desk.posts.put)
    join_feed_threads()
    assert desk.posts.empty()


@pytest.mark.parametrize(
    ("verb", "words"),
    [("cancel", "cancelled: 7"), ("requeue", "requeued: 7"), ("hold", "held: 7"), ("release", "released: 7")],
)
def test_the_result_of_an_action_is_reported(desk: Desk, verb: str, words: str) -> None:
    record, _ = desk.run(1)
    desk.feed().change_job(verb, row_of(record))
    assert desk.next(Notification) == Notification(words)
    assert desk.asked == [(verb, ("7",))]
    join_feed_threads()


def test_only_the_selected_array_task_is_cancelled(desk: Desk) -> None:
    record, _ = desk.run(1)
    desk.feed().change_job("cancel", row_of(record, task="3", job_id="7_3"))
    assert desk.next(Notification).text == "cancelled: 7_3"
    assert desk.asked == [("cancel", ("7_3",))]
    join_feed_threads()


def test_an_action_on_a_deleted_run_is_reported_as_failed(desk: Desk) -> None:
    record, _ = desk.run(1)
    desk.feed().change_job("cancel", row_of(record, token="another"))
    result = desk.next(Notification)
    assert result.bad
    assert "no run 'another' is known on this machine" in result.text
    assert desk.asked == []
    join_feed_threads()


@pytest.mark.parametrize(("program", "code"), [("/bin/true", 0), ("/bin/false", 1)])
def test_a_shell_for_a_local_job_is_the_shell_of_the_user(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, code: int
) -> None:
    monkeypatch.setenv("SHELL", program)
    record, _ = desk.run(1)
    assert desk.feed().shell(row_of(record), "n1") == code
    assert capsys.readouterr().out == f"{program}   (leave with exit or Ctrl-D)\n"
