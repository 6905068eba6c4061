"""What happened in a schedule: what clients did and were told, what training code did, what was broken."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SERVING = {"serve", "alive"}


@dataclass(frozen=True)
class Event:
    """Something that began at `at` and was over at `until`, in seconds since the epoch, by one clock.

    Attributes:
        who: ``body`` is the training code itself, ``server`` an instance of a role beside it, ``nemesis``
            what breaks things; all others are clients.
        what: ``plan``, ``submit``, ``cancel``, ``requeue``, ``scale``, ``clean``, ``seen``, ``listed``,
            ``final``, ``undisturbed`` (the training of the comparison); ``begin``, ``restored``, ``saved``,
            ``commit``, ``trained``, ``end``; ``serve``, ``alive``, ``gave up``; ``fault``, ``created`` (a
            directory in the place of one that was moved).
        run: the run's name, empty where it is about none; of a task of a job array as `name_task` says.
        values: whether a planned run is ``supervised``, how many ``servers`` it has, and how many ``tasks``
            if it is a job array; ``result`` of what a
            client did (ok, refused, unknown, killed); ``state``, ``terminal``, ``code`` and ``source`` of
            what it saw; ``attempt``, ``job``, ``code`` of a body; ``instance``, ``start`` and ``job`` of a
            server.
    """

    at: float
    until: float
    who: str
    what: str
    run: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value."""
        return self.values.get(key, default)


def name_task(run: str, task: int) -> str:
    """Return the name of a task of a run that is a job array."""
    return f"{run}[{task}]"


def run_of(name: str) -> str:
    """Return the name of the run that a task belongs to, or of the run itself."""
    return name.partition("[")[0]


class History:
    """Collects events from many threads."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def add(self, who: str, what: str, run: str = "", *, since: float | None = None, **values: Any) -> None:
        """Note what has just ended, and began `since`."""
        now = time.time()
        with self._lock:
            self._events.append(Event(now if since is None else since, now, who, what, run, values))

    def events(self, *more: Event) -> list[Event]:
        """Return all events, in the order of their beginning."""
        with self._lock:
            return sorted([*self._events, *more], key=lambda event: event.at)


def of_bodies(path: Path) -> list[Event]:
    """Return what training code and servers wrote, one JSON object a line, in the order of writing."""
    events = []
    for line in path.read_text().splitlines() if path.exists() else []:
        values = json.loads(line)
        at, what, run = values.pop("at"), values.pop("what"), values.pop("run")
        events.append(Event(at, at, "server" if what in SERVING else "body", what, run, values))
    return events


def dump(events: Iterable[Event], path: Path) -> None:
    """Write events, one JSON object a line."""
    path.write_text("".join(json.dumps(asdict(event)) + "\n" for event in events))


def load(path: Path) -> list[Event]:
    """Read what `dump` wrote."""
    return [Event(**json.loads(line)) for line in path.read_text().splitlines()]
