"""When following ends, and which lines it lets through."""

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
from tests.services.log_reading import Run


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


def answer(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> None:
    """Have the scheduler answer so."""

    def views(context: Context, records: Sequence[JobRecord], **need: object) -> list[RunView]:
        del context, need
        state, trouble = answers()
        return [RunView(records[0], (JobStatus(job_id="1", state=state),), trouble, time.time())]

    monkeypatch.setattr(status, "views", views)


def texts(items: Sequence[Item]) -> list[str]:
    return [text for item in items if isinstance(item, LogBlock) for text in item.texts()]


def followed(record: JobRecord) -> list[Item]:
    return [item for items in logs.follow(Context(), record, LogFilter()) for item in items]


def test_it_ends_when_the_job_is_over_and_everything_is_shown(
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

    answer(monkeypatch, answers)
    assert texts(followed(record)) == ["the very last", "without an end"]


def test_a_job_that_nobody_knows_is_not_waited_for(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_UNKNOWN_S", 0.0)
    run.write(0, b"all there is\n")
    answer(monkeypatch, lambda: (JobState.UNKNOWN, ""))
    items = followed(record)
    assert texts(items) == ["all there is"]
    assert any(
        isinstance(item, Notice) and "the scheduler no longer knows this job" in item.text for item in items
    )


def test_a_scheduler_that_does_not_answer_is_waited_for(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_UNKNOWN_S", 0.0)
    looks = [(JobState.UNKNOWN, "no answer")] * 5
    answer(monkeypatch, lambda: looks.pop() if looks else (JobState.FAILED, ""))
    run.write(0, b"x\n")
    items = followed(record)
    assert not any(isinstance(item, Notice) for item in items)
    assert texts(items) == ["x"]


def test_a_run_folder_that_is_gone_is_an_error(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "logs").rmdir()
    run.path.rmdir()
    answer(monkeypatch, lambda: (JobState.RUNNING, ""))
    with pytest.raises(StoreError, match="there is no folder"):
        followed(record)


def test_waiting_needs_nothing_of_the_run_folder(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "logs").rmdir()
    run.path.rmdir()
    states = [JobState.RUNNING, JobState.RUNNING, JobState.COMPLETED]
    answer(monkeypatch, lambda: (states.pop(0), ""))
    assert logs.wait(Context(), record).terminal


def test_a_failing_look_is_no_end(run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [SlurmUnavailable("no"), SlurmUnavailable("no")]

    def answers() -> tuple[JobState, str]:
        if looks:
            raise looks.pop()
        return JobState.COMPLETED, ""

    answer(monkeypatch, answers)
    assert logs.wait(Context(), record).terminal


def test_a_fault_of_the_watching_thread_is_not_waited_for(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers() -> tuple[JobState, str]:
        raise ZeroDivisionError

    answer(monkeypatch, answers)
    with pytest.raises(ZeroDivisionError):
        logs.wait(Context(), record)


def test_a_scheduler_that_takes_long_holds_no_line_back(
    run: Run, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def answers() -> tuple[JobState, str]:
        assert answered.wait(60)
        return JobState.COMPLETED, ""

    answer(monkeypatch, answers)
    run.write(0, b"first\n")
    seen: list[str] = []
    for items in logs.follow(Context(), record, LogFilter()):
        seen += texts(items)
        if "first" in texts(items):
            run.write(0, b"second\n")
        if "second" in seen:
            answered.set()
    assert seen == ["first", "second"]


def chosen(run: Run, record: JobRecord, wanted: LogFilter) -> list[str]:
    return texts([item for items in logs.read(Context(), record, wanted) for item in items])


def test_the_last_lines_that_match(run: Run, record: JobRecord) -> None:
    for rank in range(2):
        run.write(rank, b"".join(b"rank %d line %d\r\n" % (rank, number) for number in range(100)))
    wanted = LogFilter(grep=re.compile("line .*7$"), tail=2)
    assert chosen(run, record, wanted) == [
        "rank 0 line 87", "rank 0 line 97", "rank 1 line 87", "rank 1 line 97",
    ]  # fmt: skip


def test_a_line_without_a_time_belongs_to_the_one_before(run: Run, record: JobRecord) -> None:
    now = time.time()
    stamps = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now - ago)) for ago in (300, 100, 10)]
    text = "first of all\n" + "".join(f"{stamp} line\nmore of it\n" for stamp in stamps)
    run.write(0, text.encode())
    wanted = LogFilter(since=now - 200, until=now - 50)
    assert chosen(run, record, wanted) == ["first of all", f"{stamps[1]} line", "more of it"]
