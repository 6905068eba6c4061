"""One running command as two outputs and an input, and the talk with it that every transport has."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

_SLICE = 1 << 18
_POLL_S = 0.25


class Channel(Protocol):
    """A command that runs: what `PopenChannel` is for a process, and a session is for an SSH library."""

    @property
    def ended(self) -> bool:
        """Whether both outputs are at their end."""
        ...

    def read(self, timeout: float) -> tuple[bytes, bytes]:
        """Return what came on stdout and stderr, waiting up to ``timeout`` seconds for the first byte."""
        ...

    def write(self, data: bytes) -> None:
        """Write to stdin, waiting until all is taken.

        Raises:
            BrokenPipeError: nobody reads any more.
        """
        ...

    def close_stdin(self) -> None:
        """End the input."""
        ...

    def code(self, timeout: float) -> int | None:
        """Return the exit code, None if there is none within ``timeout`` seconds."""
        ...

    def end(self) -> None:
        """End it and release what it holds."""
        ...


class Feeder:
    """Writes an input in a thread of its own, so that outputs are read meanwhile."""

    def __init__(self, channel: Channel, stdin: bytes | Iterable[bytes], *, close: bool) -> None:
        self._channel = channel
        self._stdin = stdin
        self._close = close
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.refused = False  # nobody reads any more

    def start(self) -> None:
        """Begin; once only."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._feed, daemon=True, name="dtslurm-stdin")
            self._thread.start()

    def _feed(self) -> None:
        try:
            for chunk in _slices(self._stdin):
                if self._stop.is_set():
                    return
                self._channel.write(chunk)
        except (BrokenPipeError, ConnectionError):
            self.refused = True  # its exit code tells whether that is a fault
        except BaseException as error:  # noqa: BLE001 (the caller's own source failed: raised in its thread)
            self.error = error
            return  # stdin stays open: the command must not take the part for the whole
        if self._close:
            self._channel.close_stdin()

    def stop(self) -> None:
        """Write no more."""
        self._stop.set()


def _slices(stdin: bytes | Iterable[bytes]) -> Iterator[bytes]:
    for chunk in [stdin] if isinstance(stdin, bytes) else stdin:
        for start in range(0, len(chunk), _SLICE):
            yield chunk[start : start + _SLICE]


class TimeIsUp(Exception):
    """The command did not end in time."""


def exit_code(channel: Channel, deadline: float) -> int:
    """Return the exit code of a command whose outputs have ended.

    Raises:
        TimeIsUp: it went on without them until ``deadline`` (of ``time.monotonic``).
    """
    code = channel.code(max(0.0, deadline - time.monotonic()))
    if code is None:
        raise TimeIsUp
    return code


def outputs(channel: Channel, deadline: float, feeder: Feeder | None) -> Iterator[tuple[bytes, bytes]]:
    """Yield (stdout, stderr) as they come until both end.

    Raises:
        TimeIsUp: ``deadline`` (of ``time.monotonic``) came first.
        BaseException: the source of stdin failed; its own error.
    """
    while not channel.ended:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeIsUp
        yield channel.read(min(left, _POLL_S) if feeder else left)
        if feeder is not None and feeder.error is not None:
            raise feeder.error
