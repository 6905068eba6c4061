"""A clock, connections and a selector for tests of the heartbeat tree without threads and networks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dtslurm.worker.supervisor.heartbeat_tree import relay

ADDRESS = ("10.0.0.1", 7)


class SetClock:
    """A clock that stands still until a test changes ``now``."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    monotonic = time = __call__

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 2000.0, "the node waits for ever"


class FakeConnection:
    """A connection that records its messages; ``error`` makes every action fail."""

    def __init__(self, *received: bytes, is_sending: bool = False) -> None:
        self.received, self.is_sending, self.is_overdue = list(received), is_sending, False
        self.sent: list[bytes] = []
        self.flushes = 0
        self.is_closed = False
        self.error: OSError | None = None
        self.link = SimpleNamespace(getpeername=lambda: ("10.0.0.9", 5))

    def send(self, payload: bytes) -> None:
        self._fail()
        self.sent.append(payload)

    def flush(self) -> None:
        self._fail()
        self.flushes += 1

    def receive(self) -> list[bytes]:
        self._fail()
        return self.received

    def close(self) -> None:
        self.is_closed = True

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


class FakeParent(FakeConnection):
    """The connection to the parent of a node, or to the supervisor that names the parent."""

    is_finished = False

    def finish(self, patience_s: float) -> None:
        assert patience_s == relay.FAREWELL_S
        self._fail()
        self.is_finished = True


class FakeSelector:
    """A selector without events; ``on_select`` runs whenever a node waits."""

    def __init__(self) -> None:
        self.registered: list[object] = []
        self.on_select: Callable[[], object] = lambda: None

    def register(self, connection: object, _events: int) -> None:
        self.registered.append(connection)

    def unregister(self, connection: object) -> None:
        if connection not in self.registered:
            raise KeyError(connection)
        self.registered.remove(connection)

    def select(self, _seconds: float) -> list[Any]:
        self.on_select()
        return []

    def close(self) -> None:
        pass


def line(node: str, code: str = "b", at: float = 10.0) -> bytes:
    return f"{node} {code} {at} - 0 0 {{}}".encode()
