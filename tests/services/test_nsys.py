"""Profiles with nsys: what prevents them, the restart of the attempt, and the reports that ranks send."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import DtslurmError, RequestInvalid, TransportError
from dtslurm.model.runs.telemetry import RankTelemetry, RunTelemetry, TrainPoint
from dtslurm.remote.answers import InvalidAnswer
from dtslurm.services.observe.inside import nsys
from dtslurm.services.observe.inside.nsys import (
    NsysTarget,
    ranks_are_below_nsys,
    record_ranks,
    restart_below_nsys,
)
from dtslurm.services.observe.inside.profile import RankAnswers

POINT = TrainPoint(step=7)


class Site:
    """A run whose state changes from look to look, and its time."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, 1000.0
        self.states: list[RunTelemetry] = []
        self.looks: list[RunTelemetry | None] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def put(self, content: bytes, path: str) -> None:
        assert len(self.looks) == 1  # the attempt that ends is known before
        Path(path).write_bytes(content)

    def read(self, *_: Any, previous_telemetry: RunTelemetry | None, **__: Any) -> RunTelemetry:
        self.looks.append(previous_telemetry)
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def target(self, ranks: Sequence[tuple[int, int]] | None = None) -> NsysTarget:
        context: Any = SimpleNamespace(
            clock=lambda: self.now, sleep=self.sleep, cluster_of=lambda _: SimpleNamespace(transport=self)
        )
        record: Any = SimpleNamespace(job_id="17", name="train", run_dir=str(self.path))
        return NsysTarget(context=context, record=record, ranks=tuple(ranks) if ranks else None)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    result = Site(tmp_path)
    monkeypatch.setattr(nsys, "read_telemetry", result.read)
    return result


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What the ranks answer."""

    def set_answer(code: int, *lines: tuple[str, str], problems: Sequence[str] = ()) -> None:
        data = [(label, line.encode()) for label, line in lines]
        reply = RankAnswers(code=code, lines=data, problems=problems)
        monkeypatch.setattr(nsys, "ask_ranks", lambda *_, **__: reply)

    return set_answer


def state(attempt: int | None, running: int = 2, **values: Any) -> RunTelemetry:
    ranks = {rank: RankTelemetry(rank=rank, started=1000 + rank) for rank in range(running)}
    return RunTelemetry(now=1010.0, attempt=attempt, world_size=2, ranks=ranks, **values)


def packed(text: bytes) -> str:
    return base64.b64encode(text).decode()


@pytest.mark.parametrize(("code", "runs_below"), [(0, True), (64, False)])
def test_ranks_below_nsys_need_no_restart(
    site: Site, answer: Callable[..., None], code: int, runs_below: bool
) -> None:
    answer(code)
    assert ranks_are_below_nsys(site.target()) is runs_below


@pytest.mark.parametrize(
    ("code", "error", "text", "hint"),
    [
        (65, RequestInvalid, "job 17 has no supervisor that restarts it", "--max-restarts 3"),
        (127, RequestInvalid, "nsys is not on PATH where the ranks run", "--module NAME"),
        (66, TransportError, "nsys does not start where the ranks run", ""),
    ],
)
def test_reason_against_a_restart_is_named_before_it(
    site: Site, answer: Callable[..., None], code: int, error: type[DtslurmError], text: str, hint: str
) -> None:
    answer(code, problems=["license expired"])
    with pytest.raises(error, match=text) as caught:
        ranks_are_below_nsys(site.target())
    assert hint in (caught.value.hint or "")
    assert list(site.path.iterdir()) == []


def test_restart_names_the_ranks_and_waits_for_a_step(site: Site) -> None:
    site.states = [
        state(3, train=(POINT,)),
        state(3),
        state(4, running=1),
        state(4),
        state(4),
        state(4, train=(POINT,)),
    ]
    states = list(site.states)
    assert restart_below_nsys(site.target([(1, 2), (8, 8)])) is True
    assert (site.path / "nsys-4").read_text() == "1\n2\n8\n"
    assert (site.path / "restart").read_text() == "3\n"
    assert site.looks == [None, *states[:5]]  # each look asks only for what is new
    assert site.now == 1025.0


def test_step_that_came_with_the_start_is_not_waited_for_again(site: Site) -> None:
    site.states = [state(0, train=(POINT,)), state(1, train=(POINT,))]
    assert restart_below_nsys(site.target()) is True
    assert (site.path / "nsys-1").read_text() == "all\n"
    assert site.now == 1005.0


def test_run_without_known_steps_warms_up_for_a_minute(site: Site) -> None:
    site.states = [state(0), state(1)]
    assert restart_below_nsys(site.target()) is False
    assert site.now == 1005.0 + 60 - 10  # its ranks have run for 10 s


@pytest.mark.parametrize(
    ("states", "error", "text"),
    [
        ([state(None, 0)], RequestInvalid, "the run has not started an attempt"),
        ([state(0), state(0, events=({"event": "ended"},))], RequestInvalid, "the job has ended"),
        ([state(0, events=({"event": "ended"},)), state(0)], TransportError, "not started its ranks"),
        ([state(0, train=(POINT,)), state(1)], TransportError, "has not reported a step within 15 min"),
    ],
)
def test_attempt_that_does_not_begin_is_not_waited_for_forever(
    site: Site, states: list[RunTelemetry], error: type[DtslurmError], text: str
) -> None:
    site.states = states
    with pytest.raises(error, match=text):
        restart_below_nsys(site.target())
    assert site.now < 2000


def test_reports_of_ranks_are_read(site: Site, answer: Callable[..., None]) -> None:
    kernel = {"ph": "X", "name": "gemm", "cat": "kernel", "ts": 0, "dur": 5.0, "pid": 0, "tid": "stream 7"}
    marks = {**kernel, "cat": "user_annotation"}
    traces = [gzip.compress(json.dumps({"traceEvents": [event]}).encode()) for event in (kernel, marks)]
    answer(
        0,
        ("0", f"trace {packed(traces[0])[:30]}"),
        ("0", f"trace {packed(traces[0])[30:]}"),
        ("0", f"nsys-rep {packed(b'report')}"),
        ("1", f"trace {packed(traces[1])}"),
        ("1", f"kept {packed(b'/runs/a/nsys-1.nsys-rep')}"),
        ("2", "trace "),
        ("2", f"qdstrm {packed(b'raw')}"),
        ("3", f"kept {packed(chr(27).encode() + b'[31m/runs')}"),
    )
    reports = record_ranks(site.target(), 5)
    assert [(one.label, one.report, one.suffix, one.kept) for one in reports] == [
        ("0", b"report", "nsys-rep", ""),
        ("1", b"", "", "/runs/a/nsys-1.nsys-rep"),
        ("2", b"raw", "qdstrm", ""),
        ("3", b"", "", "[31m/runs"),
    ]
    assert [one.profile is not None for one in reports] == [True, True, False, False]
    assert [one.has_gpu_work for one in reports] == [True, False, False, False]


@pytest.mark.parametrize(
    "line", ["trace !", f"trace {packed(b'no gzip')}", f"exe {packed(b'x')}", "", "nsys-rep", "trace "]
)
def test_damaged_report_is_refused(site: Site, answer: Callable[..., None], line: str) -> None:
    answer(0, ("0", line))
    with pytest.raises(InvalidAnswer):
        record_ranks(site.target(), 5)


def test_rank_that_trains_without_nsys_is_explained(site: Site, answer: Callable[..., None]) -> None:
    answer(4, problems=["rank 1 does not run below nsys"])
    with pytest.raises(TransportError) as caught:
        record_ranks(site.target(), 5)
    assert list(caught.value.evidence) == ["rank 1 does not run below nsys"]
    assert "repeat the command" in (caught.value.hint or "")


def test_exit_code_is_the_evidence_if_nothing_was_printed(site: Site, answer: Callable[..., None]) -> None:
    answer(137)
    with pytest.raises(TransportError) as caught:
        record_ranks(site.target(), 5)
    assert list(caught.value.evidence) == ["the command in the place of the ranks ended with 137"]


def test_failure_of_nsys_is_the_evidence(site: Site, answer: Callable[..., None]) -> None:
    answer(1, problems=["the rank has ended"])
    with pytest.raises(TransportError) as caught:
        record_ranks(site.target(), 5)
    assert list(caught.value.evidence) == ["the rank has ended"]
