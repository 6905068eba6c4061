"""The early stop of a trial, by its metrics and those of other trials; no training code runs."""

from __future__ import annotations

import json
import math
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker import trial_asha
from dtslurm.worker.trial import RunningTrial
from dtslurm.worker.trial_asha import Rungs

ASHA = {"min_steps": 2, "eta": 3, "step": "step"}
SETTINGS = {"metric": "loss", "mode": "min", "asha": ASHA, "optuna": None}


def rungs(folder: Path, number: int, **settings: Any) -> Rungs:
    return Rungs(str(folder), number, {**SETTINGS, **settings})


def marks(folder: Path) -> list[str]:
    """Return the values of trials at each rung, as ``RUNG/NUMBER=VALUE``."""
    return sorted(str(path.relative_to(folder / "asha")) for path in folder.glob("asha/*/*"))


# ---- Rungs ----


@pytest.mark.parametrize(
    ("step", "reached"), [(1, 0), (1.9, 0), (2, 1), (5, 1), (6, 2), (17, 2), (18, 3), (53, 3), (54, 4)]
)
def test_rungs_are_at_the_powers_of_eta_times_the_first_step(
    tmp_path: Path, step: float, reached: int
) -> None:
    trial = rungs(tmp_path, 1)
    for _ in range(2):  # each rung once
        assert trial.stops({"step": step, "loss": 0.5}) is None
        assert marks(tmp_path) == [f"{rung}/1=0.5" for rung in range(reached)]


@pytest.mark.parametrize(
    ("others", "place", "continues"),
    [
        ([], 1, True),
        ([1.0], 2, False),
        ([3.0], 1, True),
        ([2.0, 2.0, 2.0], 1, True),  # no trial is better
        ([1.0, 3.0, 3.0, 3.0], 2, False),  # the best third of five is one
        ([1.0, 3.0, 3.0, 3.0, 3.0], 2, True),  # of six, two
        ([1.0, 1.0, 3.0, 3.0, 3.0], 3, False),
        ([1.0, math.inf], 2, False),
    ],
)
@pytest.mark.parametrize("mode", ["min", "max"])
def test_trial_continues_if_it_is_among_the_best_third(
    tmp_path: Path, others: list[float], place: int, continues: bool, mode: str
) -> None:
    sign = 1 if mode == "min" else -1
    (tmp_path / "asha/0").mkdir(parents=True)
    for number, score in enumerate(others, 10):
        (tmp_path / f"asha/0/{number}={score!r}").touch()
    stop_reason = rungs(tmp_path, 1, mode=mode).stops({"step": 3, "loss": sign * 2.0})
    expected = {"rung": 0, "step": 3, "place": place, "of": len(others) + 1, "loss": sign * 2.0}
    assert stop_reason == (None if continues else expected)
    assert "0/1=2.0" in marks(tmp_path)


def test_trial_keeps_its_value_at_a_rung_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "asha/0").mkdir(parents=True)
    for name in ("1=5.0", "11=3.0", "2=4.0"):
        (tmp_path / "asha/0" / name).touch()
    stop_reason = rungs(tmp_path, 1).stops({"step": 2, "loss": 0.0})
    assert stop_reason == {"rung": 0, "step": 2, "place": 3, "of": 3, "loss": 0.0}
    assert marks(tmp_path) == ["0/11=3.0", "0/1=5.0", "0/2=4.0"]
    assert rungs(tmp_path, 11).stops({"step": 2, "loss": 9.0}) is None


@pytest.mark.parametrize(
    "record", [{"loss": 1.0}, {"step": 9}, {"step": "9", "loss": 1}, {"step": 9, "loss": ""}]
)
def test_record_without_a_step_or_a_value_reaches_no_rung(tmp_path: Path, record: dict[str, Any]) -> None:
    assert rungs(tmp_path, 1).stops(record) is None
    assert marks(tmp_path) == []


# ---- Watching the metrics ----


class Watched:
    """A trial whose metrics a test writes."""

    def __init__(self, folder: Path, *, first: bool = True, **settings: Any) -> None:
        self.folder, self.metrics = folder, folder / "train.jsonl"
        values = {**SETTINGS, "sweep": str(folder), **settings}
        self.trial = RunningTrial({"number": 1}, values, str(folder), str(self.metrics), first)
        self.watch = trial_asha._Watch(self.trial)

    def write(self, *records: Any, end: str = "\n") -> None:
        with self.metrics.open("a") as file:
            file.write("\n".join(map(json.dumps, records)) + end)

    @property
    def stop(self) -> dict[str, Any] | None:
        """Why the trial must stop."""
        path = self.folder / trial_asha.STOPPED
        return json.loads(path.read_text()) if path.exists() else None


def test_each_line_of_the_first_rank_is_read_once(tmp_path: Path) -> None:
    watched = Watched(tmp_path, asha=None, steps=None)
    lasts = []
    for records, end in (
        ([{"loss": 5.0}, {"loss": 4.0, "rank": 0}], "\n"),
        ([{"loss": 9.0, "rank": 1}, {"lr": 1}], "\n"),
        ([{"loss": 3.0}], ""),  # its line is not complete
        ([], "\n"),
        ([], ""),
    ):
        watched.write(*records, end=end)
        watched.watch.look(False)
        lasts.append(watched.watch.last)
    assert lasts == [4.0, 4.0, 4.0, 3.0, 3.0]
    assert list(watched.watch.keys) == ["loss", "rank", "lr"]
    assert watched.stop is None


@pytest.mark.parametrize(("first", "ended"), [(True, False), (False, False), (True, True)])
def test_trial_of_a_few_steps_stops_after_the_last(tmp_path: Path, first: bool, ended: bool) -> None:
    watched = Watched(tmp_path, asha=None, steps=2, first=first)
    watched.write({"step": 1, "loss": 5.0}, {"step": 2, "lr": 1})
    watched.watch.look(ended)
    assert (watched.stop, watched.watch.stopped) == (None, False)
    watched.write({"step": 3, "loss": 4.0}, {"step": 4, "loss": 3.0})
    watched.watch.look(ended)
    if ended or not first:
        assert watched.stop is None
        return
    stop_reason = watched.stop or {}
    assert (stop_reason["step"], stop_reason["loss"], watched.watch.stopped) == (3, 4.0, True)
    assert watched.watch.last == 4.0


def test_stop_by_other_trials_is_recorded_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_asha, "time", SimpleNamespace(time=lambda: 1000.0))
    watched = Watched(tmp_path)
    (tmp_path / "asha/0").mkdir(parents=True)
    (tmp_path / "asha/0/7=0.5").touch()
    watched.write({"step": 1, "loss": 9.0}, {"step": 2, "loss": 8.0}, {"step": 3, "loss": 7.0})
    watched.watch.look(False)
    assert watched.stop == {"rung": 0, "step": 2, "place": 2, "of": 2, "loss": 8.0, "time": 1000.0}
    assert watched.watch.last == 8.0


@pytest.mark.parametrize(
    ("first", "records", "message"),
    [
        (True, [{f"k{n}": n} for n in range(25)], ", ".join(f"k{n}" for n in range(20))),
        (True, [], "none"),
        (True, [{"loss": 1.0}], None),
        (False, [], None),
    ],
)
def test_missing_metric_is_reported_with_the_keys_that_were_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    first: bool,
    records: list[dict[str, float]],
    message: str | None,
) -> None:
    watched = Watched(tmp_path, first=first)
    watched.write(*records)
    watched.watch.look(True)
    watched.watch.warn()
    text = "this trial wrote no number as 'loss', which this sweep uses to compare trials; keys found: "
    assert capsys.readouterr().out == ("" if message is None else f"{text}{message}\n")


# ---- Ends ----


class Code:
    """Training code that ends by itself after some checks, or by signals."""

    def __init__(self, exit_code: int = 0, *, checks: int = 0, ignores_term: bool = False) -> None:
        self.exit_code, self.checks, self.ignores_term = exit_code, checks, ignores_term
        self.calls: list[Any] = []

    def poll(self) -> int | None:
        self.checks -= 1
        return None if self.checks >= 0 else self.exit_code

    def wait(self, timeout: float | None = None) -> int:
        self.calls.append(timeout)
        if self.checks > 0:
            raise subprocess.TimeoutExpired("train", timeout or 0.0)
        return self.exit_code

    def terminate(self) -> None:
        self.calls.append("TERM")
        self.checks = self.checks if self.ignores_term else 0

    def kill(self) -> None:
        self.calls.append("KILL")
        self.checks = 0


@pytest.mark.parametrize(
    ("code", "now", "calls"),
    [
        (Code(checks=99), False, ["TERM", 30.0]),
        (Code(checks=99), True, ["KILL", 30.0]),
        (Code(checks=99, ignores_term=True), False, ["TERM", 30.0, "KILL", None]),
        (Code(), False, [30.0]),
        (Code(), True, [30.0]),
    ],
)
def test_end_of_the_code_is_forced_after_a_moment(code: Code, now: bool, calls: list[Any]) -> None:
    assert trial_asha._terminate(code, now=now) == 0  # type: ignore[arg-type]
    assert code.calls == calls


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of signals are left as they were."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("code", "mark", "first", "exit_code", "finished"),
    [
        (Code(0), False, True, 0, [(4.0, True)]),
        (Code(3), False, True, 3, [(4.0, False)]),
        (Code(-9), False, True, 137, [(4.0, False)]),
        (Code(0), False, False, 0, []),
        (Code(-15, checks=99), True, True, 0, [(None, True)]),
    ],
)
def test_end_of_a_watched_trial(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: Code,
    mark: bool,
    first: bool,
    exit_code: int,
    finished: list[tuple[float | None, bool]],
) -> None:
    watched = Watched(tmp_path, asha=None, first=first)
    watched.write({"loss": 4.0})
    if mark:
        (tmp_path / trial_asha.STOPPED).write_text("{}")
    started: list[list[str]] = []

    def start(words: list[str]) -> Code:
        started.append(words)
        return code

    monkeypatch.setattr(subprocess, "Popen", start)
    ends: list[tuple[float | None, bool]] = []
    result = trial_asha.watch(["train"], watched.trial, lambda *words: ends.append(words))
    assert (result, ends, started) == (exit_code, finished, [["train"]])


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("exit_code", "is_reported"), [(0, True), (1, False), (-9, False)])
def test_missing_metric_is_reported_only_after_successful_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    exit_code: int,
    is_reported: bool,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda _words: Code(exit_code))
    trial_asha.watch(["train"], Watched(tmp_path, asha=None).trial, None)
    assert ("wrote no number" in capsys.readouterr().out) is is_reported


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("settings", "calls", "message"),
    [
        ({"steps": 1}, [0.5, 0, "KILL", 30.0], "stopped after 1 values of loss"),
        ({"steps": None}, [0.5, 0, "TERM", 30.0], "stopped early: other trials are better at this step; {}"),
    ],
)
def test_trial_that_must_stop_is_ended_and_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    calls: list[Any],
    message: str,
) -> None:
    watched = Watched(tmp_path, **settings)
    (tmp_path / "asha/0").mkdir(parents=True)
    (tmp_path / "asha/0/7=0.5").touch()
    code = Code(-15, checks=99)

    def wait(timeout: float | None = None) -> int:
        if not watched.metrics.exists():  # at the second look
            watched.write({"step": 2, "loss": 4.0})
        return Code.wait(code, timeout)

    monkeypatch.setattr(code, "wait", wait)
    monkeypatch.setattr(subprocess, "Popen", lambda _words: code)
    assert trial_asha.watch(["train"], watched.trial, None) == 0
    assert code.calls == calls
    assert capsys.readouterr().out.startswith(message.format(tmp_path / "stopped.json"))


@pytest.mark.usefixtures("handlers")
def test_signal_that_slurm_sends_to_all_processes_is_not_forwarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as the job chose
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    monkeypatch.setattr(subprocess, "Popen", lambda _words: Code())
    trial_asha.watch(["train"], Watched(tmp_path, asha=None).trial, None)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    handler = signal.getsignal(signal.SIGUSR2)
    assert callable(handler)
    assert handler(signal.SIGUSR2, None) is None
