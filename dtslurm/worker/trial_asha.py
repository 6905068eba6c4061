"""Runs a trial and stops it early, by asynchronous successive halving over files of the sweep's folder.

``asha/<rung>/<number>=<value>`` in that folder is what a trial's metric was when it came to a rung; a trial
that comes to one goes on if it is among the best 1/eta of all that have come there (Li et al., 2020).
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any, Callable, Dict, Iterator, List, Optional

_LOOK_S = 0.5
_GRACE_S = 30.0
_KEYS = 20  # of metrics, that are named where the right one is not among them
STOPPED = "stopped.json"


class Rungs:
    """The rungs of a sweep: which steps they are at, and who has come to them."""

    def __init__(self, folder: str, number: int, settings: Dict[str, Any]) -> None:
        self._folder = os.path.join(folder, "asha")
        self._number = number
        self._asha = settings["asha"]
        self._metric = settings["metric"]
        self._sign = -1.0 if settings["mode"] == "max" else 1.0
        self._next = 0

    def stops(self, record: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        """Take a line of the metrics file; return why the trial is to stop, None where it goes on."""
        step, value = record.get(self._asha["step"]), record.get(self._metric)
        if (
            not isinstance(step, (int, float))
            or not isinstance(value, (int, float))
            or not math.isfinite(step)
        ):
            return None
        while step >= self._asha["min_steps"] * self._asha["eta"] ** self._next:
            rung, self._next = self._next, self._next + 1
            place, count = self._placed(rung, float(value))
            if place >= max(1, count // self._asha["eta"]):
                return {"rung": rung, "step": step, "place": place + 1, "of": count, self._metric: value}
        return None

    def _placed(self, rung: int, value: float) -> Any:
        """Note our value at a rung; return how many are better, and how many have come there."""
        folder = os.path.join(self._folder, str(rung))
        os.makedirs(folder, mode=0o700, exist_ok=True)
        mine = self._sign * value
        mine = mine if math.isfinite(mine) else math.inf  # what is no result is the worst
        earlier = [text for text in os.listdir(folder) if text.startswith("{}=".format(self._number))]
        if earlier:  # an earlier try of this trial was here
            mine = float(earlier[0].split("=", 1)[1])
        else:
            with open(os.path.join(folder, "{}={!r}".format(self._number, mine)), "w"):
                pass
        values = [float(text.split("=", 1)[1]) for text in os.listdir(folder)]
        return sum(other < mine for other in values), len(values)


def _new_records(path: str, state: Dict[str, int]) -> Iterator[Dict[str, Any]]:
    """Yield what rank 0 has added to a metrics file since the last call, whole lines only."""
    try:
        with open(path, "rb") as file:
            file.seek(state["offset"])
            data = file.read()
    except OSError:
        return
    whole = data[: data.rfind(b"\n") + 1]
    state["offset"] += len(whole)
    for line in whole.splitlines():
        try:
            value = json.loads(line.decode("utf-8", "replace"))
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("rank") in (None, 0):
            yield value


class _Watch:
    """Looks at what a trial tells of itself, and marks it as stopped where it is to stop."""

    def __init__(self, trial: Any) -> None:
        self._trial = trial
        self._metric = trial.settings["metric"]
        asha = trial.settings["asha"]
        self._rungs = Rungs(trial.settings["sweep"], trial.line["number"], trial.settings) if asha else None
        self._state = {"offset": 0}
        self.mark = os.path.join(trial.folder, STOPPED)
        self.last: Optional[float] = None
        self.keys: Dict[str, None] = {}  # of all lines, in the order in which they were first written

    @property
    def stopped(self) -> bool:
        """Whether the trial is to stop, or was stopped before: any of its ranks may ask."""
        return os.path.exists(self.mark)

    def look(self, ended: bool) -> None:
        """Read what is new; once training has ended it is only noted for other trials to compare with."""
        if not self._trial.first:
            return
        for record in _new_records(self._trial.metrics, self._state):
            self.keys.update(dict.fromkeys(record))
            value = record.get(self._metric)
            self.last = float(value) if isinstance(value, (int, float)) else self.last
            told = self._rungs.stops(record) if self._rungs else None
            if told and not ended:
                self._trial.keep(STOPPED, dict(told, time=time.time()))
                return

    def warn(self) -> None:
        """Say so where trials cannot be compared, since this one never wrote the metric."""
        if self._trial.first and self.last is None:
            text = (
                "this trial has written no number as {!r}, by which this sweep compares trials; keys seen: {}"
            )
            print(text.format(self._metric, ", ".join(list(self.keys)[:_KEYS]) or "none"))
            sys.stdout.flush()


def watch(words: List[str], trial: Any, finish: Optional[Callable[[Optional[float], bool], None]]) -> int:
    """Run the training code, end it where the trial is to stop, and return its exit code; 0 if stopped.

    Args:
        finish: told the last value of the metric at the end, and whether training went well.
    """
    seen = _Watch(trial)
    child: Optional["subprocess.Popen[bytes]"] = None
    early: List[int] = []  # signals that come before there is a child to pass them on to

    def passed_on(number: int, _: Optional[FrameType]) -> None:
        early.append(number) if child is None else child.send_signal(number)

    signal.signal(signal.SIGTERM, passed_on)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # they come to the training code as well
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    child = subprocess.Popen(words)
    for each in early:
        child.send_signal(each)
    ended = False
    while not ended and not seen.stopped:
        ended = child.poll() is not None
        seen.look(ended)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0 if seen.stopped else _LOOK_S)
    code = _end(child) if seen.stopped else child.wait()
    if seen.stopped:
        print("stopped early: others do better at this step; {} tells how they compare".format(seen.mark))
        sys.stdout.flush()
    elif code == 0:
        seen.warn()
    if finish is not None and trial.first:
        finish(seen.last, seen.stopped or code == 0)
    if seen.stopped:
        return 0
    return code if code >= 0 else 128 - code


def _end(child: "subprocess.Popen[bytes]") -> int:
    if child.poll() is None:
        child.terminate()
    try:
        return child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
