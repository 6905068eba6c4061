"""The pages, logs and diagnoses of a job that the dashboard's threads post."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtslurm.dashboard import feed as feed_module
from dtslurm.dashboard.feed import Diagnosed, LogState, build_log_request, parse_rank_ranges
from dtslurm.dashboard.store import LineStore
from dtslurm.errors import SlurmUnavailable
from dtslurm.logs.lines import LogBlock, LogFile
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState
from dtslurm.services.logs.log_stream import Item, Mark, Notice, OutputSummary, Rewritten
from dtslurm.views.run_page import Page
from tests.dashboard.desk import Desk, join_feed_threads, row_of
from tests.dashboard.samples import NOW


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    for name in ("_PAGE_S", "_FAR_PAGE_S", "_IDLE_PAGE_S", "_REST_S"):
        monkeypatch.setattr(feed_module, name, 0.01)
    yield Desk(tmp_path, monkeypatch)
    join_feed_threads()


def lines(store: LineStore) -> list[tuple[str, str]]:
    return store.lines(range(store.first, store.total))


def test_a_watched_job_gets_pages_until_watching_ends(desk: Desk) -> None:
    record, files = desk.run(1)
    files.start(2)
    files.rank(0)
    feed = desk.feed()
    feed.watch(row_of(record, state="RUNNING"))
    first = desk.next(Page)
    assert (first.key, first.trouble, first.taken_at) == (record.token, "", NOW)
    assert [cell.state for cell in first.ranks] == ["running", "waiting"]
    files.rank(1, ended=2000, exit_code=1)
    result = desk.next(Page, lambda page: page.ranks[1].state == "failed")
    assert result.ranks[0].state == "running"
    feed.watch(None)
    join_feed_threads()  # its thread ends
    while not desk.posts.empty():
        assert isinstance(desk.posts.get(), Page)


def test_ranks_of_an_ended_job_without_a_recorded_end_are_lost(desk: Desk) -> None:
    record, files = desk.run(1)
    files.start(1)
    files.rank(0)
    feed = desk.feed()
    feed.watch(row_of(record, state="NODE_FAIL", over=True))
    assert [cell.state for cell in desk.next(Page).ranks] == ["lost"]
    feed.stop()


def test_a_read_error_is_shown_below_the_last_page(desk: Desk) -> None:
    record, files = desk.run(1)
    files.start(1)
    files.rank(0)
    feed = desk.feed()
    feed.watch(row_of(record), attempt=0)
    pages = [desk.next(Page)]
    assert (pages[0].attempt, pages[0].trouble) == (0, "")
    for kind in ("logs", "ranks"):
        shutil.rmtree(files.folder / kind)
    while not pages[-1].trouble:  # pages may also be read while the files are removed
        pages.append(desk.next(Page))
    good, result = pages[-2:]
    assert result.trouble == "job 7 has no attempt 0: the run has not started"
    assert (result.ranks, result.taken_at) == (good.ranks, good.taken_at)
    feed.stop()


def test_a_job_without_readable_data_gets_a_page_with_the_reason(desk: Desk) -> None:
    record, files = desk.run(1)
    files.start(1)
    feed = desk.feed()
    feed.watch(row_of(record), attempt=5)
    result = desk.next(Page)
    assert (result.key, result.trouble, result.taken_at) == (
        record.token,
        "job 7 has no attempt 5, only 0",
        0.0,
    )
    feed.stop()


def write_run(desk: Desk) -> JobRecord:
    record, files = desk.run(1)
    files.start(2)
    files.rank(0, log=b"hello\nworld\n")
    files.rank(1, log=b"other\n")
    return record


@pytest.mark.parametrize(
    ("ranks", "words", "expected_lines"),
    [
        ("", "all ranks", [("0", "hello"), ("0", "world"), ("1", "other")]),
        ("1", "rank 1", [("1", "other")]),
    ],
)
def test_log_lines_are_stored_with_their_rank(
    desk: Desk, ranks: str, words: str, expected_lines: list[tuple[str, str]]
) -> None:
    store, record = LineStore(), write_run(desk)
    desk.feed().follow(row_of(record, over=True), store, ranks)
    join_feed_threads()
    assert sorted(lines(store)) == expected_lines
    while not desk.posts.empty():
        assert desk.posts.get() == LogState(record.token, words)


def test_the_log_of_a_running_job_is_followed_until_the_page_is_left(desk: Desk) -> None:
    store, record = LineStore(), write_run(desk)
    feed = desk.feed()
    feed.follow(row_of(record), store)
    desk.next(LogState)
    desk.next(LogState)  # everything that was there has come
    assert ("0", "hello") in lines(store)
    feed.follow(None, store)
    join_feed_threads()


def test_a_log_that_cannot_be_followed_shows_the_reason_and_the_retry_key(desk: Desk) -> None:
    record, _ = desk.run(1, cluster="gone")
    desk.feed().follow(row_of(record), LineStore())
    desk.next(LogState)
    text = desk.next(LogState).text
    assert "gone" in text
    assert text.endswith("; press r to try again")


class Stream:
    """A stream of which everything comes at once, and then an error."""

    ended = skipped = False
    items: tuple[Item, ...] = ()

    def __init__(self, *_: Any) -> None:
        self.rounds = [self.items]

    def __enter__(self) -> Stream:  # noqa: PYI034 (typing.Self is of Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, _: float) -> tuple[Item, ...]:
        if not self.rounds:
            raise OSError("the disk is gone")
        return self.rounds.pop()


def test_alarms_and_notices_are_stored_among_the_log_lines(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, events = LogFile("rank", 3), LogFile("events")
    items = (
        Notice("connection lost\n(reset); reconnecting in 1 s"),
        LogBlock(LogFile("node", 1), b"srun: hello\n"),
        LogBlock(events, b'{"event": "started"}\n'),
        OutputSummary(rank, 100, 7, "step 7", "RuntimeError:\nno"),
        OutputSummary(rank, 100, 7, "step 8", ""),
        Rewritten(rank, " 7%|=   |"),
        Mark.CAUGHT_UP,
    )
    monkeypatch.setattr(Stream, "items", items)
    monkeypatch.setattr(feed_module, "LogStream", Stream)
    store, (record, _) = LineStore(), desk.run(1)
    desk.feed().follow(row_of(record), store)
    join_feed_threads()
    assert lines(store) == [
        ("*", "connection lost (reset); reconnecting in 1 s"),
        ("node1", "srun: hello"),
        ("3", "RuntimeError: no"),
    ]
    texts = [desk.next(LogState).text for _ in range(4)]
    assert texts == [
        "all ranks",
        "connection lost\n(reset); reconnecting in 1 s",
        "all ranks",
        "the disk is gone; press r to try again",
    ]


@pytest.mark.parametrize(
    ("ranks", "summary", "words", "most"),
    [
        ("", True, "of 300 ranks only lines that look like errors; r chooses ranks, r * all", 100),
        ("*", False, "all ranks", 100),
        ("0,3-7", False, "rank 0,3-7", 20_000),
    ],
)
def test_many_ranks_are_followed_as_summaries_unless_ranks_are_selected(
    ranks: str, summary: bool, words: str, most: int
) -> None:
    record = JobRecord(
        token="t", cluster="local", name="n", run_dir="/r", phase="submitted", created_at=0, world_size=300
    )
    wanted, result = build_log_request(record, row_of(record), ranks)
    assert (wanted.summary, result, wanted.lines) == (summary, words, most)
    assert wanted.ranks == (((0, 0), (3, 7)) if ranks == "0,3-7" else None)
    assert wanted.kinds == ({"rank"} if wanted.ranks else {"batch", "node", "rank"})


@pytest.mark.parametrize("text", ["x", "0,", "3-", "-3", "3-x", "7-3", "0,7-3", "1.5", "²", "12345678901"])
def test_invalid_rank_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' names no ranks: write 0,3-7, or "):
        parse_rank_ranges(text)


def test_rank_ranges_are_parsed() -> None:
    assert parse_rank_ranges("0, 3-7 ,9-9") == ((0, 0), (3, 7), (9, 9))
    assert parse_rank_ranges(" ") is parse_rank_ranges("*") is None


def test_a_diagnosis_is_formatted_by_the_given_function(desk: Desk) -> None:
    record, files = desk.run(1)
    desk.say("7", JobState.FAILED, exit_code=3, start_time=int(NOW) - 60, end_time=int(NOW))
    files.start(1)
    files.rank(0, log=b"ValueError: no\n", ended=int(NOW), exit_code=3)
    feed = desk.feed(lambda result: [f"{result.status.state.value} at attempt {result.attempt}"])
    feed.verdict(row_of(record))
    assert desk.next(Diagnosed) == Diagnosed(record.token, ("FAILED at attempt 0",))


def test_a_live_diagnosis_is_formatted_by_the_given_function(desk: Desk) -> None:
    record, files = desk.run(1)
    desk.say("7", JobState.RUNNING, start_time=int(NOW) - 60)
    files.start(1)
    files.rank(0, pid=2**22 + 1)
    feed = desk.feed(lambda result: [f"{type(result).__name__}: {result.status.state.value}"])
    feed.live(row_of(record))
    assert desk.next(Diagnosed) == Diagnosed(record.token, ("Live: RUNNING",), live=True)


def test_a_live_diagnosis_of_a_pending_job_shows_the_state(desk: Desk) -> None:
    record, _ = desk.run(1)
    desk.say("7", JobState.PENDING)
    desk.feed().live(row_of(record))
    result = desk.next(Diagnosed)
    assert result.live
    assert "7 is not running: its state is PENDING" in "\n".join(result.lines)


def test_a_failed_diagnosis_shows_the_reason(desk: Desk) -> None:
    record, files = desk.run(1)
    files.start(1)
    desk.feed().verdict(row_of(record), attempt=4)
    result = desk.next(Diagnosed)
    assert result.key == record.token
    assert "job 7 has no attempt 4, only 0" in "\n".join(result.lines)


def test_a_diagnosis_uses_the_run_directory_if_the_queue_does_not_answer(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(_: object) -> None:
        raise SlurmUnavailable("no answer")

    monkeypatch.setattr(desk, "_query", silent)
    record, files = desk.run(1)
    files.start(1)
    files.events({"time": 1000, "event": "started"}, {"time": 2000, "event": "ended", "exit_code": 3})
    feed = desk.feed(lambda result: [result.status.state.value])
    feed.verdict(row_of(record))
    assert desk.next(Diagnosed).lines == ("FAILED",)
