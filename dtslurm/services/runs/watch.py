"""Watch the states of runs in a separate thread, so that log output never waits for the scheduler."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dtslurm.errors import DtslurmError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState
from dtslurm.services.runs import status
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import Context

_POLL_S = 1.0  # interval between cache reads; the monitor decides whether the scheduler is queried
_FIRST_CONFIRM_S = 0.5  # the scheduler reports a start or an end a little later than the script's events
_LONGEST_CONFIRM_S = 30.0
_CONFIRMED_EVENTS = {"started", "ended", "attempt", "attempt_ended"}


class Watcher:
    """A thread that observes runs until all have ended, as a context manager; `news` and `heard` never block.

    The first call of `news` starts the thread. A login that prompts the user must be made before that call,
    because the thread cannot prompt.
    """

    def __init__(self, context: Context, records: Sequence[JobRecord]) -> None:
        self._context = context
        self._records = list(records)
        self._lock = threading.Lock()
        self._news: list[RunView] = []
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="dtslurm-watch")
        self._confirmation = _ConfirmationSchedule()
        self._error: Exception | None = None

    def __enter__(self) -> Watcher:  # noqa: PYI034 (typing.Self is of Python 3.11)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._wake.set()  # a query in progress is not awaited: the daemon thread ends with the process

    def news(self) -> list[RunView]:
        """Return the newest view of every run; empty if there is none since the last call."""
        if self._thread.ident is None:
            self._thread.start()
        if self._error is not None:
            raise self._error
        with self._lock:
            views, self._news = self._news, []
        return views

    def confirm_event(self, event: str) -> None:
        """Schedule a query of the scheduler that confirms an event from the run directory."""
        if event in _CONFIRMED_EVENTS:
            with self._lock:
                self._confirmation.begin(event, self._context.clock())
            self._wake.set()

    def _run(self) -> None:
        try:
            self._observe_until_end()
        except Exception as error:  # noqa: BLE001 (`news` raises it)
            self._error = error

    def _observe_until_end(self) -> None:
        while not self._stop.is_set():
            views = self._observe()
            if views and all(view.terminal for view in views):
                return
            with self._lock:
                pause = min(_POLL_S, self._confirmation.pause(self._context.clock()))
            self._wake.wait(pause)
            self._wake.clear()

    def _observe(self) -> list[RunView]:
        now = self._context.clock()
        with self._lock:
            after = self._confirmation.after(now)
        try:
            views = status.views(self._context, self._records, background=True, newer_than=after)
        except DtslurmError:
            return []
        self._records = [view.record for view in views]
        with self._lock:
            self._confirmation.answered(views, now)
            self._news = views
        return views


class _ConfirmationSchedule:
    """The times of the queries that confirm an event: soon, then at doubled pauses until Slurm shows it."""

    def __init__(self) -> None:
        self._event = ""
        self._next = float("inf")
        self._pause = _FIRST_CONFIRM_S

    def begin(self, event: str, now: float) -> None:
        self._event, self._pause, self._next = event, _FIRST_CONFIRM_S, now + _FIRST_CONFIRM_S

    def pause(self, now: float) -> float:
        """Return the seconds until the next query is due."""
        return max(0.0, self._next - now) if self._next > now else _FIRST_CONFIRM_S

    def after(self, now: float) -> float:
        """Return the time after which the scheduler must have been queried; 0 if no query is due now."""
        return self._next if self._next <= now else 0.0

    def answered(self, views: Sequence[RunView], now: float) -> None:
        if self._next > now or any((view.observed_at or 0.0) < self._next for view in views):
            return
        self._pause *= 2
        is_confirmed = self._event in {"started", "attempt"} and all(
            status.state is JobState.RUNNING for view in views for status in view.statuses
        )
        self._next = float("inf") if is_confirmed or self._pause > _LONGEST_CONFIRM_S else now + self._pause
