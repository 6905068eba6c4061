"""The channel of a running command (two outputs and an input), and the I/O that all transports share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

_SLICE_BYTES = 1 << 18
_POLL_S = 0.25


class Channel(Protocol):
    """A running command: a local process (`PopenChannel`) or an SSH session."""

    @property
    def ended(self) -> bool:
        """Whether both outputs have reached their end."""
        ...

    def read(self, timeout: float) -> tuple[bytes, bytes]:
        """Return new bytes of stdout and stderr, waiting up to ``timeout`` seconds for the first byte."""
        ...

    def write(self, data: bytes) -> None:
        """Write to stdin, and block until all bytes are written.

        Raises:
            BrokenPipeError: the command no longer reads its stdin.
        """
        ...

    def close_stdin(self) -> None:
        """Close stdin."""
        ...

    def code(self, timeout: float) -> int | None:
        """Return the exit code, None if the command has not ended within ``timeout`` seconds."""
        ...

    def end(self) -> None:
        """End the command and release the channel's resources."""
        ...


class Feeder:
    """Writes a command's stdin in a separate thread, so that the outputs can be read at the same time."""

    def __init__(self, channel: Channel, stdin: bytes | Iterable[bytes], *, close: bool) -> None:
        self._channel = channel
        self._stdin = stdin
        self._close = close
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.refused = False  # the command no longer reads its stdin

    def start(self) -> None:
        """Start the thread, unless it was started before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._feed, daemon=True, name="dtslurm-stdin")
            self._thread.start()

    def _feed(self) -> None:
        try:
            for chunk in _iterate_slices(self._stdin):
                if self._stop.is_set():
                    return
                self._channel.write(chunk)
        except (BrokenPipeError, ConnectionError):
            self.refused = True  # the command's exit code decides whether this is an error
        except BaseException as error:  # noqa: BLE001 (`outputs` raises it in the caller's thread)
            self.error = error
            return  # stdin stays open: the command must not take a part of its input for all of it
        if self._close and not self._stop.is_set():
            self._channel.close_stdin()

    def stop(self) -> None:
        """Stop writing."""
        self._stop.set()


def _iterate_slices(stdin: bytes | Iterable[bytes]) -> Iterator[bytes]:
    for chunk in [stdin] if isinstance(stdin, bytes) else stdin:
        for start in range(0, len(chunk), _SLICE_BYTES):
            yield chunk[start : start + _SLICE_BYTES]


class TimeIsUp(Exception):
    """The command did not end before its deadline."""


def exit_code(channel: Channel, deadline: float) -> int:
    """Return the exit code of a command whose outputs have ended.

    Raises:
        TimeIsUp: the command still ran at ``deadline`` (of ``time.monotonic``).
    """
    code = channel.code(max(0.0, deadline - time.monotonic()))
    if code is None:
        raise TimeIsUp
    return code


def outputs(channel: Channel, deadline: float, feeder: Feeder | None) -> Iterator[tuple[bytes, bytes]]:
    """Yield (stdout, stderr) chunks until both outputs end.

    Raises:
        TimeIsUp: ``deadline`` (of ``time.monotonic``) passed first.
        BaseException: the error of the iterable that supplies stdin, if it failed.
    """
    while not channel.ended:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeIsUp
        yield channel.read(min(remaining_s, _POLL_S) if feeder else remaining_s)
        if feeder is not None and feeder.error is not None:
            raise feeder.error
