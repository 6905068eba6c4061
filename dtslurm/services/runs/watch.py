"""Watches runs' states in a thread of its own, so that who reads logs never waits for a scheduler."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dtslurm.errors import DtslurmError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState
from dtslurm.services.runs import status
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import Context

_LOOK_S = 1.0  # how often what is known is looked at; whether the scheduler is asked is the monitor's affair
_SOON_S = 0.5  # the scheduler notices what a script tells of itself a little later
_LONGEST_WAIT_S = 30.0
_NEWS = {"started", "ended", "attempt", "attempt_ended"}


class Watcher:
    """Looks at runs until all are over. Use it as a context manager; `news` and `heard` never wait.

    It begins with the first call of `news`: a login that asks its user something must be made before, for a
    thread cannot be asked.
    """

    def __init__(self, context: Context, records: Sequence[JobRecord]) -> None:
        self._context = context
        self._records = list(records)
        self._lock = threading.Lock()
        self._news: list[RunView] = []
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="dtslurm-watch")
        self._confirm = _Confirm()
        self._error: Exception | None = None

    def __enter__(self) -> Watcher:  # noqa: PYI034 (typing.Self is of Python 3.11)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._wake.set()  # a question under way is not waited for: its thread ends with the process

    def news(self) -> list[RunView]:
        """Return the newest observation of every run, nothing if there is none since the last call."""
        if self._thread.ident is None:
            self._thread.start()
        if self._error is not None:
            raise self._error
        with self._lock:
            found, self._news = self._news, []
        return found

    def heard(self, event: str) -> None:
        """Take notice of what a run itself recorded: the scheduler is asked about it soon."""
        if event in _NEWS:
            with self._lock:
                self._confirm.begin(event, self._context.clock())
            self._wake.set()

    def _run(self) -> None:
        try:
            self._look_on()
        except Exception as error:  # noqa: BLE001 (raised where the news are read)
            self._error = error

    def _look_on(self) -> None:
        while not self._stop.is_set():
            found = self._look()
            if found and all(view.terminal for view in found):
                return
            with self._lock:
                pause = min(_LOOK_S, self._confirm.pause(self._context.clock()))
            self._wake.wait(pause)
            self._wake.clear()

    def _look(self) -> list[RunView]:
        now = self._context.clock()
        with self._lock:
            after = self._confirm.after(now)
        try:
            found = status.views(self._context, self._records, background=True, after=after)
        except DtslurmError:
            return []
        self._records = [view.record for view in found]
        with self._lock:
            self._confirm.answered(found, now)
            self._news = found
        return found


class _Confirm:
    """When to ask about what a run told of itself: soon, then less and less often until it shows."""

    def __init__(self) -> None:
        self._event = ""
        self._next = float("inf")
        self._pause = _SOON_S

    def begin(self, event: str, now: float) -> None:
        self._event, self._pause, self._next = event, _SOON_S, now + _SOON_S

    def pause(self, now: float) -> float:
        """Return the seconds until it is time."""
        return max(0.0, self._next - now) if self._next > now else _SOON_S

    def after(self, now: float) -> float:
        """Return the moment of which an answer must be, 0 if nothing is to be confirmed now."""
        return self._next if self._next <= now else 0.0

    def answered(self, found: Sequence[RunView], now: float) -> None:
        if self._next > now or any((view.observed_at or 0.0) < self._next for view in found):
            return
        self._pause *= 2
        shown = self._event in {"started", "attempt"} and all(
            item.state is JobState.RUNNING for view in found for item in view.statuses
        )
        self._next = float("inf") if shown or self._pause > _LONGEST_WAIT_S else now + self._pause
