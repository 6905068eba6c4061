"""What the threads behind the dashboard post of all runs, and what they do to one."""

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
from tests.dashboard.desk import Desk, over, row_of
from tests.dashboard.made import NOW, pulse_of


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


@pytest.fixture
def started(desk: Desk) -> Iterator[Feed]:
    feed = desk.feed()
    yield feed
    feed.stop()
    over()


def states(board: Board) -> dict[str, str]:
    return {row.job_id: row.state for row in board.rows}


def test_a_run_is_shown_at_once_then_as_the_queue_tells_then_with_how_far_it_is(
    desk: Desk, started: Feed
) -> None:
    _, files = desk.run(1)
    desk.say("7", JobState.RUNNING, start_time=int(NOW) - 60)
    files.start(1)
    files.rank(0)
    files.lines(
        "train.jsonl", *({"step": step, "time": NOW - 60 + step, "total_steps": 100} for step in range(1, 31))
    )
    started.start(desk.posts.put)
    first = desk.next(Board)
    assert states(first) in ({"7": "UNKNOWN"}, {"7": "RUNNING"})
    told = desk.next(Board, lambda board: board.rows[0].forecast is not None)
    assert states(told) == {"7": "RUNNING"}
    assert told.rows[0].forecast is not None
    assert (told.rows[0].forecast.step, told.rows[0].forecast.total) == (30, 100)
    assert [(line.name, line.trouble) for line in told.clusters] == [("local", "")]


def test_what_comes_to_a_cluster_and_what_ends_there_is_seen_when_asked_anew(
    desk: Desk, started: Feed
) -> None:
    desk.run(1)
    desk.say("7", JobState.PENDING)
    started.start(desk.posts.put)
    desk.next(Board, lambda board: states(board) == {"7": "PENDING"})
    desk.run(2, job="8")
    desk.say("7", JobState.COMPLETED, end_time=int(NOW), exit_code=0)
    desk.say("8", JobState.RUNNING, start_time=int(NOW))
    started.refresh()
    told = desk.next(Board, lambda board: states(board) == {"8": "RUNNING", "7": "COMPLETED"})
    assert [row.job_id for row in told.rows] == ["8", "7"]  # the newest first
    started.refresh()
    assert states(desk.next(Board)) == {"8": "RUNNING", "7": "COMPLETED"}


def test_a_cluster_that_has_no_profile_any_more_is_said_to_and_the_others_are_shown(
    desk: Desk, started: Feed
) -> None:
    desk.run(1)
    desk.run(2, cluster="gone", job="8")
    desk.say("7", JobState.RUNNING, start_time=int(NOW))
    started.start(desk.posts.put)
    told = desk.next(
        Board,
        lambda board: "RUNNING" in states(board).values() and any(one.trouble for one in board.clusters),
    )
    assert states(told) == {"8": "UNKNOWN", "7": "RUNNING"}
    assert [line.name for line in told.clusters if "gone" in line.trouble] == ["gone"]


def test_a_job_whose_progress_cannot_be_had_is_shown_without(
    desk: Desk, started: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_: Context, record: JobRecord, **values: object) -> RunTelemetry:
        if record.job_id == "7":
            raise TransportError("the folder cannot be read")
        return pulse_of(1)

    monkeypatch.setattr(feed_module, "read_telemetry", unreadable)
    desk.run(1)
    desk.run(2, job="8")
    desk.say("7", JobState.RUNNING, start_time=int(NOW))
    desk.say("8", JobState.RUNNING, start_time=int(NOW))
    started.start(desk.posts.put)
    told = desk.next(Board, lambda board: any(row.forecast for row in board.rows))
    assert {row.job_id: row.forecast is not None for row in told.rows} == {"7": False, "8": True}
    assert not told.clusters[0].trouble


def test_of_the_clusters_only_the_one_that_was_named_is_asked(desk: Desk) -> None:
    desk.run(1)
    desk.run(2, cluster="gone", job="8")
    desk.say("7", JobState.RUNNING, start_time=int(NOW))
    feed = desk.feed(cluster="local")
    feed.start(desk.posts.put)
    told = desk.next(Board, lambda board: "RUNNING" in states(board).values())
    feed.stop()
    assert (set(states(told)), [line.name for line in told.clusters]) == ({"7"}, ["local"])
    over()


def test_an_index_that_cannot_be_read_is_told_and_there_are_no_runs(desk: Desk, started: Feed) -> None:
    path = default_path()
    path.parent.mkdir(parents=True)
    path.write_text("no database, but long enough that it might be one" * 99)
    started.start(desk.posts.put)
    told = desk.next(Notification)
    assert told.bad
    assert f"the index of runs {path} failed" in told.text
    assert desk.next(Board).rows == ()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (RequestInvalid(["it is wrong"], hint="so do that"), "so do that"),
    ],
)
def test_a_thread_that_cannot_go_on_tells_why(desk: Desk, error: Exception, words: str) -> None:
    def broken() -> Context:
        raise error

    Feed(broken, lambda _: ()).start(desk.posts.put)
    told = desk.next(Notification)
    assert told.bad
    assert words in told.text


def test_after_the_stop_nothing_is_posted(desk: Desk) -> None:
    desk.run(1)
    feed = desk.feed()
    feed.stop()
    feed.start(desk.posts.put)
    over()
    assert desk.posts.empty()


@pytest.mark.parametrize(
    ("verb", "words"),
    [("cancel", "cancelled: 7"), ("requeue", "requeued: 7"), ("hold", "held: 7"), ("release", "released: 7")],
)
def test_what_was_done_to_a_job_is_told(desk: Desk, verb: str, words: str) -> None:
    record, _ = desk.run(1)
    desk.feed().act(verb, row_of(record))
    assert desk.next(Notification) == Notification(words)
    assert desk.asked == [(verb, ("7",))]
    over()


def test_of_an_array_only_the_task_under_the_cursor_is_cancelled(desk: Desk) -> None:
    record, _ = desk.run(1)
    desk.feed().act("cancel", row_of(record, task="3", job_id="7_3"))
    assert desk.next(Notification).text == "cancelled: 7_3"
    assert desk.asked == [("cancel", ("7_3",))]
    over()


def test_an_act_on_a_run_that_is_gone_is_told_to_be_in_vain(desk: Desk) -> None:
    record, _ = desk.run(1)
    desk.feed().act("cancel", row_of(record, token="another"))
    told = desk.next(Notification)
    assert told.bad
    assert "no run 'another' is known on this machine" in told.text
    assert desk.asked == []
    over()


@pytest.mark.parametrize(("program", "code"), [("/bin/true", 0), ("/bin/false", 1)])
def test_a_shell_is_this_machines_for_a_job_of_this_machine(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, code: int
) -> None:
    monkeypatch.setenv("SHELL", program)
    record, _ = desk.run(1)
    assert desk.feed().shell(row_of(record), "n1") == code
    assert capsys.readouterr().out == f"{program}   (leave with exit or Ctrl-D)\n"
