"""Run a trial and stop it early: after a number of steps, or by asynchronous successive halving.

Halving uses files in the sweep's folder:
``asha/<rung>/<number>=<value>`` in that folder is a trial's metric when the trial reached a rung. A trial
that reaches a rung continues if it is among the best 1/eta of all trials that have reached the rung (Li et
al., 2020).
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any, Callable, Dict, Iterator, List, Optional

try:
    from .lib.json_records import finite_number, number, parse_lines
except ImportError:  # beside this file, in a run directory
    from json_records import (  # type: ignore[import-not-found,no-redef]
        finite_number,
        number,
        parse_lines,
    )

_POLL_S = 0.5
_GRACE_S = 30.0
_MAX_LISTED_KEYS = 20  # number of metric keys listed in the warning about a missing metric
STOPPED = "stopped.json"


class Rungs:
    """The rungs of a sweep: the step of each rung, and the trials that have reached it."""

    def __init__(self, folder: str, number: int, settings: Dict[str, Any]) -> None:
        self._folder = os.path.join(folder, "asha")
        self._number = number
        self._asha = settings["asha"]
        self._metric = settings["metric"]
        self._sign = -1.0 if settings["mode"] == "max" else 1.0
        self._next = 0

    def stops(self, record: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        """Process a line of the metrics file; return why the trial must stop, None if it continues."""
        step, value = finite_number(record.get(self._asha["step"])), number(record.get(self._metric))
        if step is None or value is None:
            return None
        while step >= self._asha["min_steps"] * self._asha["eta"] ** self._next:
            rung, self._next = self._next, self._next + 1
            better_trials, count = self._record_rank(rung, value)
            if better_trials >= max(1, count // self._asha["eta"]):
                return {
                    "rung": rung,
                    "step": step,
                    "place": better_trials + 1,
                    "of": count,
                    self._metric: value,
                }
        return None

    def _record_rank(self, rung: int, value: float) -> Any:
        """Record this trial's value at a rung; return how many trials are better and how many reached it."""
        folder = os.path.join(self._folder, str(rung))
        os.makedirs(folder, mode=0o700, exist_ok=True)
        own_score = self._sign * value
        # A value that is not finite ranks last.
        own_score = own_score if math.isfinite(own_score) else math.inf
        earlier_marks = [
            file_name for file_name in os.listdir(folder) if file_name.startswith("{}=".format(self._number))
        ]
        if earlier_marks:  # an earlier attempt of this trial has reached the rung
            own_score = float(earlier_marks[0].split("=", 1)[1])
        else:
            with open(os.path.join(folder, "{}={!r}".format(self._number, own_score)), "w"):
                pass
        scores = [float(file_name.split("=", 1)[1]) for file_name in os.listdir(folder)]
        return sum(score < own_score for score in scores), len(scores)


def _new_records(path: str, state: Dict[str, int]) -> Iterator[Dict[str, Any]]:
    """Yield the records of rank 0 appended to a metrics file since the previous call; complete lines only."""
    try:
        with open(path, "rb") as file:
            file.seek(state["offset"])
            chunk = file.read()
    except OSError:
        return
    complete_lines = chunk[: chunk.rfind(b"\n") + 1]
    state["offset"] += len(complete_lines)
    for record in parse_lines(complete_lines.splitlines()):
        if record.get("rank") in (None, 0):
            yield record


class _Watch:
    """A monitor of a trial's metrics, which marks the trial as stopped when it must stop."""

    def __init__(self, trial: Any) -> None:
        self._trial = trial
        self._metric = trial.settings["metric"]
        asha = trial.settings["asha"]
        self._rungs = Rungs(trial.settings["sweep"], trial.line["number"], trial.settings) if asha else None
        self._steps_left: Optional[int] = trial.settings.get("steps")
        self._state = {"offset": 0}
        self.mark = os.path.join(trial.folder, STOPPED)
        self.last: Optional[float] = None
        self.keys: Dict[str, None] = {}  # keys of all records, in the order of their first appearance

    @property
    def stopped(self) -> bool:
        """Whether the trial must stop or was stopped; any of its ranks may read this."""
        return os.path.exists(self.mark)

    def look(self, has_ended: bool) -> None:
        """Read new records; once training has ended, they only serve comparisons by other trials."""
        if not self._trial.first:
            return
        for record in _new_records(self._trial.metrics, self._state):
            self.keys.update(dict.fromkeys(record))
            value = number(record.get(self._metric))
            self.last = self.last if value is None else value
            stop_reason = self._rungs.stops(record) if self._rungs else None
            if self._steps_left is not None and value is not None:
                self._steps_left -= 1
                stop_reason = (
                    None if self._steps_left > 0 else {"step": record.get("step"), self._metric: value}
                )
            if stop_reason and not has_ended:
                self._trial.keep(STOPPED, dict(stop_reason, time=time.time()))
                return

    def warn(self) -> None:
        """Warn that trials cannot be compared if this one never wrote the metric."""
        if self._trial.first and self.last is None:
            text = (
                "this trial wrote no number as {!r}, which this sweep uses to compare trials; keys found: {}"
            )
            print(text.format(self._metric, ", ".join(list(self.keys)[:_MAX_LISTED_KEYS]) or "none"))
            sys.stdout.flush()


def watch(words: List[str], trial: Any, finish: Optional[Callable[[Optional[float], bool], None]]) -> int:
    """Run the training code, end it when the trial must stop, and return its exit code; 0 if stopped.

    Args:
        finish: called at the end with the last value of the metric, and whether training succeeded.
    """
    monitor = _Watch(trial)
    child: Optional["subprocess.Popen[bytes]"] = None
    early_signals: List[int] = []  # signals received before the child exists, forwarded later

    def forward_signal(number: int, _: Optional[FrameType]) -> None:
        early_signals.append(number) if child is None else child.send_signal(number)

    signal.signal(signal.SIGTERM, forward_signal)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # the training code receives them, too
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    child = subprocess.Popen(words)
    for early_signal in early_signals:
        child.send_signal(early_signal)
    ended = False
    while not ended and not monitor.stopped:
        ended = child.poll() is not None
        monitor.look(ended)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0 if monitor.stopped else _POLL_S)
    steps = trial.settings.get("steps")
    exit_code = _terminate(child, now=bool(steps)) if monitor.stopped else child.wait()
    if monitor.stopped:
        print(
            "stopped after {} values of {}".format(steps, trial.settings["metric"])
            if steps
            else "stopped early: other trials are better at this step; {} has the comparison".format(
                monitor.mark
            )
        )
        sys.stdout.flush()
    elif exit_code == 0:
        monitor.warn()
    if finish is not None and trial.first:
        finish(monitor.last, monitor.stopped or exit_code == 0)
    if monitor.stopped:
        return 0
    return exit_code if exit_code >= 0 else 128 - exit_code


def _terminate(child: "subprocess.Popen[bytes]", now: bool) -> int:
    """End the training code; ``now`` gives it no time to write a checkpoint that is not needed."""
    if child.poll() is None:
        child.kill() if now else child.terminate()
    try:
        return child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
