"""The end of log following, and the filters of log lines."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from dtslurm.errors import SlurmUnavailable, StoreError
from dtslurm.logs.lines import LogBlock
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.logs import logs
from dtslurm.services.logs.log_stream import Item, Notice
from dtslurm.services.logs.logs import LogFilter
from dtslurm.services.runs import status
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import Context
from tests.services.log_reading import DEADLINE_S, Run
from tests.waiting import busyness


@pytest.fixture
def record(run: Run) -> JobRecord:
    return JobRecord(
        token="t",
        cluster="local",
        name="n",
        run_dir=str(run.path),
        phase="submitted",
        created_at=0,
        job_id="1",
    )


Answers = Callable[[], tuple[JobState, str]]


def replace_views(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> None:
    """Let the scheduler give these answers."""

    def views(context: Context, records: Sequence[JobRecord], **need: object) -> list[RunView]:
        del context, need
        state, trouble = answers()
        return [RunView(records[0], (JobStatus(job_id="1", state=state),), trouble, time.time())]

    monkeypatch.setattr(status, "views", views)


def texts(items: Sequence[Item]) -> list[str]:
    return [text for item in items if isinstance(item, LogBlock) for text in item.texts()]


def follow_items(record: JobRecord) -> list[Item]:
    return [item for items in logs.follow(Context(), record, LogFilter()) for item in items]


def test_follow_ends_after_the_job_has_ended_and_all_lines_are_shown(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [(JobState.PENDING, ""), (JobState.UNKNOWN, "no answer"), (JobState.RUNNING, "")]

    def answers() -> tuple[JobState, str]:
        if states:
            with (run.path / "events.jsonl").open("a") as file:
                file.write('{"event": "ended"}\n')  # have it asked again soon
            return states.pop(0)
        run.write(0, b"the very last\nwithout an end")
        return JobState.COMPLETED, ""

    replace_views(monkeypatch, answers)
    assert texts(follow_items(record)) == ["the very last", "without an end"]


def test_follow_ends_for_a_job_that_the_scheduler_no_longer_knows(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_UNKNOWN_S", 0.0)
    run.write(0, b"all there is\n")
    replace_views(monkeypatch, lambda: (JobState.UNKNOWN, ""))
    items = follow_items(record)
    assert texts(items) == ["all there is"]
    assert any(
        isinstance(item, Notice) and "the scheduler no longer knows this job" in item.text for item in items
    )


@pytest.mark.slow
def test_follow_continues_while_the_scheduler_does_not_answer(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_UNKNOWN_S", 0.0)
    looks = [(JobState.UNKNOWN, "no answer")] * 5
    replace_views(monkeypatch, lambda: looks.pop() if looks else (JobState.FAILED, ""))
    run.write(0, b"x\n")
    items = follow_items(record)
    assert not any(isinstance(item, Notice) for item in items)
    assert texts(items) == ["x"]


def test_follow_of_a_deleted_run_directory_is_an_error(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "logs").rmdir()
    run.path.rmdir()
    replace_views(monkeypatch, lambda: (JobState.RUNNING, ""))
    with pytest.raises(StoreError, match="there is no folder"):
        follow_items(record)


def test_wait_does_not_need_the_run_directory(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "logs").rmdir()
    run.path.rmdir()
    states = [JobState.RUNNING, JobState.RUNNING, JobState.COMPLETED]
    replace_views(monkeypatch, lambda: (states.pop(0), ""))
    assert logs.wait(Context(), record).terminal


def test_wait_continues_after_failed_queries(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [SlurmUnavailable("no"), SlurmUnavailable("no")]

    def answers() -> tuple[JobState, str]:
        if looks:
            raise looks.pop()
        return JobState.COMPLETED, ""

    replace_views(monkeypatch, answers)
    assert logs.wait(Context(), record).terminal


def test_an_exception_in_the_polling_thread_ends_the_wait(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers() -> tuple[JobState, str]:
        raise ZeroDivisionError

    replace_views(monkeypatch, answers)
    with pytest.raises(ZeroDivisionError):
        logs.wait(Context(), record)


def test_a_slow_scheduler_does_not_delay_log_lines(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def answers() -> tuple[JobState, str]:
        assert answered.wait(DEADLINE_S * busyness())
        return JobState.COMPLETED, ""

    replace_views(monkeypatch, answers)
    run.write(0, b"first\n")
    seen: list[str] = []
    for items in logs.follow(Context(), record, LogFilter()):
        seen += texts(items)
        if "first" in texts(items):
            run.write(0, b"second\n")
        if "second" in seen:
            answered.set()
    assert seen == ["first", "second"]


def read_lines(run: Run, record: JobRecord, log_filter: LogFilter) -> list[str]:
    return texts([item for items in logs.read(Context(), record, log_filter) for item in items])


def test_tail_applies_to_the_lines_that_match_grep(run: Run, record: JobRecord) -> None:
    for rank in range(2):
        run.write(rank, b"".join(b"rank %d line %d\r\n" % (rank, number) for number in range(100)))
    log_filter = LogFilter(grep=re.compile("line .*7$"), tail=2)
    assert read_lines(run, record, log_filter) == [
        "rank 0 line 87", "rank 0 line 97", "rank 1 line 87", "rank 1 line 97",
    ]  # fmt: skip


def test_a_line_without_a_timestamp_is_filtered_like_the_line_before(run: Run, record: JobRecord) -> None:
    now = time.time()
    stamps = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now - ago)) for ago in (300, 100, 10)]
    text = "first of all\n" + "".join(f"{stamp} line\nmore of it\n" for stamp in stamps)
    run.write(0, text.encode())
    log_filter = LogFilter(since=now - 200, until=now - 50)
    assert read_lines(run, record, log_filter) == ["first of all", f"{stamps[1]} line", "more of it"]
