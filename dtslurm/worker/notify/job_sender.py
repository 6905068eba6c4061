"""Start the program that sends the messages of a run, and wait for it for a limited time at the end."""

import contextlib
import os
import subprocess
import sys
import time
from typing import Any, List, Optional

from ..lib.json_records import finite_number, read_lines, read_object
from .messages import PAUSE_S
from .outbox import SETTINGS
from .sender import NO_LIBRARY, UNSENT

END_S = 15.0  # how long the end of the job waits for a receiver that does not answer
LIMIT_CHECK_S = 10.0
_SHARE, _LEAST_S = 0.1, 30.0  # of the time limit, in which its end is near
_FEWEST_STEPS = 3
_METRICS_TAIL = 1 << 16  # bytes


class JobMessages:
    """Sends the messages of one run in a separate process, whose failure changes nothing in the run.

    Attributes:
        top: the path of the worker program's files.
        ledger: the events of the run.
        reports: whether the user has requested messages.
        enabled: whether the job sends them.
        python: an interpreter that has Apprise.
        limit_reported: whether it was recorded in this start that training will reach the time limit.
    """

    def __init__(self, run_dir: str, top: str, ledger: Any) -> None:
        settings = read_object(os.path.join(run_dir, SETTINGS))
        self.run_dir, self.top, self.ledger = run_dir, top, ledger
        self.reports = bool(settings)
        self.enabled = settings.get("from_job") is True
        python = settings.get("python")
        self.python = python if isinstance(python, str) and os.access(python, os.X_OK) else sys.executable
        self._process: Any = None
        self._requested = False
        self._retry_at: Optional[float] = None  # monotonic clock
        self.limit_reported = False
        self._limit_checked_at = -LIMIT_CHECK_S
        self._first_look_at = 0.0

    def request(self) -> None:
        """Send the messages of events that were recorded just now."""
        self._requested = True
        self.look()

    def look(self) -> None:
        """Start the program if messages are left to send, unless it runs already."""
        if not self.enabled or self._is_running():
            return
        if self._requested or (self._retry_at is not None and time.monotonic() >= self._retry_at):
            self._requested, self._retry_at = False, None
            words: List[str] = [self.python, self.top, "notify", self.run_dir, "--job"]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    words,
                    # As where the addresses were checked: variables of training may lead to other modules.
                    env={name: value for name, value in os.environ.items() if name[:6] != "PYTHON"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # signals for the job's script do not reach it
                )

    def _is_running(self) -> bool:
        if self._process is None:
            return False
        code = self._process.poll()
        if code is None:
            return True
        self._process = None
        if code == UNSENT:
            self._retry_at = time.monotonic() + PAUSE_S
        elif code:
            self.enabled = False
            problem = "ended with exit code {}".format(code)
            if code == NO_LIBRARY:
                problem = "cannot import the module apprise in the job"
            self.ledger.event("messages_left", problem="{} {}".format(self.python, problem))
        return False

    def finish(self, patience_s: float) -> None:
        """Wait until the messages are sent, at most this long; the program does not outlive the job."""
        end = time.monotonic() + patience_s
        while self.enabled and time.monotonic() < end:
            self.look()
            if self._process is None:
                return
            time.sleep(0.1)

    def expect_limit(self, attempt: int, now: float, limit_at: Optional[float], time_limit: float) -> str:
        """Return why training is expected to reach the job's time limit; empty if it is not.

        Args:
            now, limit_at: the time and the end of the time limit, by the controller's clock.
            time_limit: the requested time limit in seconds; 0 if the job has the default of its partition.
        """
        if limit_at is None:
            return ""
        self._first_look_at = self._first_look_at or now
        path = os.path.join(self.run_dir, "metrics", str(attempt), "train.jsonl")
        points = [
            (record.get("time"), record.get("step"), record.get("total_steps"))
            for record in read_lines(path, _METRICS_TAIL)
        ]
        return expect_limit(points, limit_at - now, time_limit or limit_at - self._first_look_at)

    def is_limit_check_due(self) -> bool:
        """Return whether the time limit should be checked now."""
        now = time.monotonic()
        if not self.reports or self.limit_reported or now < self._limit_checked_at + LIMIT_CHECK_S:
            return False
        self._limit_checked_at = now
        return True

    def report_limit(self, attempt: int, summary: str) -> None:
        """Record and send that training is expected to reach the job's time limit."""
        self.limit_reported = True
        self.ledger.event("limit_expected", attempt, summary=summary)
        self.request()


def expect_limit(points: List[Any], left_s: float, time_limit: float) -> str:
    """Return why training is expected to reach the time limit; empty if it is not, or not yet known.

    Args:
        points: the time, the step and the number of steps of reports of training; values may be invalid.
        left_s: seconds until the time limit.
    """
    minutes = "{:.0f} min".format(left_s / 60) if left_s >= 120 else "{:.0f} s".format(max(0.0, left_s))
    is_near = left_s <= max(_SHARE * time_limit, _LEAST_S)
    if not is_near and left_s > time_limit / 2:
        return ""
    needed_s = _predict_rest(points)
    if needed_s is None:
        return (
            "the job reaches its time limit in {}, and training continues".format(minutes) if is_near else ""
        )
    if needed_s <= left_s:
        return ""
    return "the job reaches its time limit in {}, and training needs about {:.0f} min more".format(
        minutes, needed_s / 60
    )


def _predict_rest(points: List[Any]) -> Optional[float]:
    """Return the seconds that training still needs at its pace so far; None if it is unknown."""
    valid: List[Any] = []
    for point in points:
        moment, step, total = map(finite_number, point)
        if moment is not None and step is not None:
            if valid and (step < valid[-1][1] or moment < valid[-1][0]):
                valid = []
            valid.append((moment, step, total))
    if len(valid) < _FEWEST_STEPS:
        return None
    (first_time, first_step, _), (last_time, last_step, total) = valid[0], valid[-1]
    if total is None or last_time <= first_time or last_step <= first_step:
        return None
    needed_s: float = (total - last_step) * (last_time - first_time) / (last_step - first_step)
    return max(0.0, needed_s)
