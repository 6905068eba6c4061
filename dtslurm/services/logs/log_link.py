"""A connection to the remote part of the log follower: a worker program, or a shell if there is no Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

from dtslurm import assets
from dtslurm.errors import StoreError, TransportError
from dtslurm.logs import frames
from dtslurm.logs.frames import Decoder, Frame
from dtslurm.logs.lines import Assembler
from dtslurm.logs.shell_tail import GREETING, ShellTail
from dtslurm.remote.worker_program import BOOT, NO_PYTHON, run_with_any_python, worker_source
from dtslurm.transport.base import Stream, Transport
from dtslurm.worker.logtail import frames as wire

WINDOW = 4 << 20  # bytes that may be in transit unacknowledged
_SILENCE_S = 45.0  # the worker program sends a ping every ten seconds
_GREETING_S = 60.0
_SHELL_POLL_S = 1.0

_MODULES = ("lib.json_records", "logtail.frames", "logtail.files", "logtail.summary", "logtail.tailer")


class NoPython(TransportError):
    """The host has no Python that can run the worker program."""

    transient = False


class Link:
    """The common part of both kinds of link: an open stream and its state.

    Attributes:
        since: when the link was opened, on ``clock``.
        fruitful: whether the link has delivered log data.
        streams: the log files that the link delivers, by stream number.
        grown: the files whose unfinished line grew since the last read, by stream number.
    """

    def __init__(
        self, transport: Transport, argv: Sequence[str], stdin: bytes, clock: Callable[[], float]
    ) -> None:
        self.since = self._last_received_at = clock()
        self.fruitful = False
        self.streams: dict[int, Assembler] = {}
        self.grown: dict[int, Assembler] = {}
        self._clock = clock
        self._stack = ExitStack()
        stream_context: AbstractContextManager[Stream] = transport.stream(argv, stdin=stdin)
        self._stream = self._stack.enter_context(stream_context)

    @property
    def greeted(self) -> bool:
        """Whether the remote program has sent its greeting."""
        raise NotImplementedError

    def read(self, timeout: float) -> Iterator[Frame]:
        """Yield the received frames, after waiting up to ``timeout`` seconds for data.

        Raises:
            TransportError: the connection is lost.
        """
        raise NotImplementedError

    def owe(self, amount: int) -> None:
        """Count processed bytes, for which credit is granted."""

    def send(self, data: bytes) -> None:
        """Send frames."""
        self._stream.send(data)

    def close(self) -> None:
        """Close the connection."""
        with suppress(TransportError):
            self._stack.close()

    def _receive(self, timeout: float) -> bytes:
        data = self._stream.read(timeout)
        now = self._clock()
        if data:
            self._last_received_at = now
        elif not self._stream.ended and now - self._last_received_at > (
            _SILENCE_S if self.greeted else _GREETING_S
        ):
            raise TransportError(f"no sign of life for {now - self._last_received_at:.0f} s")
        return data


class PythonLink(Link):
    """A link to the worker program, which is sent to the host over the connection."""

    def __init__(
        self,
        transport: Transport,
        request: Mapping[str, Any],
        clock: Callable[[], float],
        python: str = "",
    ) -> None:
        """Start the worker program with ``python`` if given, else with any Python 3 on the host."""
        self._unacknowledged = 0
        self._decoder = Decoder()
        source = far_source()
        preferred = sys.executable if transport.local else python
        pythons = [preferred] if preferred else []
        argv = run_with_any_python("dtslurm-tailer", BOOT, str(len(source)), pythons)
        super().__init__(transport, argv, source + frames.request(request), clock)

    @property
    def greeted(self) -> bool:
        """Whether the worker program runs."""
        return self._decoder.begun

    def read(self, timeout: float) -> Iterator[Frame]:
        """Yield the received frames; answer pings, and grant credit for processed bytes."""
        if self._unacknowledged >= WINDOW // 4:
            self.send(frames.credit(self._unacknowledged))
            self._unacknowledged = 0
        data = self._receive(timeout)
        if not data and self._stream.ended:
            banner = self._decoder.banner()
            if not self.greeted and NO_PYTHON in banner:
                raise NoPython("there is no Python 3.6 or later")
            raise TransportError("the far side of log following ended", evidence=banner)
        for frame in self._decoder.feed(data):
            if frame.kind == wire.PING:
                self.send(wire.frame(wire.PONG, 0, frame.payload))
            else:
                self.fruitful = self.fruitful or frame.kind in {wire.DATA, wire.CAUGHT_UP}
                yield frame

    def owe(self, amount: int) -> None:
        """Count processed bytes, for which credit is granted."""
        self._unacknowledged += amount


class ShellLink(Link):
    """A link to a shell program, which is polled every second."""

    def __init__(self, transport: Transport, request: Mapping[str, Any], clock: Callable[[], float]) -> None:
        if request.get("nodes") is not None:
            raise NoPython("without Python 3.6 or later on that host, ranks cannot be chosen by node")
        self._tail = ShellTail(request)
        self._banner: bytes | None = b""
        self._next_poll_at = 0.0
        program = assets.worker("logtail/tailer.sh").read_text("utf-8")
        super().__init__(transport, ["sh", "-c", program, "dtslurm-tailer", str(request["run"])], b"", clock)

    @property
    def greeted(self) -> bool:
        """Whether the shell program is ready for requests."""
        return self._banner is None

    def read(self, timeout: float) -> Iterator[Frame]:
        """Yield frames built from the shell program's answers."""
        now = self._clock()
        if self.greeted and self._tail.idle and now >= self._next_poll_at:
            self._next_poll_at = now + _SHELL_POLL_S
            self._stream.send(self._tail.look())
        elif self.greeted and self._tail.idle:
            timeout = min(timeout, self._next_poll_at - now)
        data = self._receive(timeout)
        if not data and self._stream.ended:
            last_lines = self._last_banner_lines()
            if any("there is no folder" in line for line in last_lines):
                raise StoreError(last_lines[-1])
            raise TransportError("the far side of log following ended", evidence=last_lines)
        if self._banner is not None:
            before, greeting, data = (self._banner + data).partition(GREETING)
            self._banner = None if greeting else before[-10_000:]
        if self.greeted:
            for output in self._tail.feed(data):
                if isinstance(output, bytes):
                    self._stream.send(output)
                else:
                    self.fruitful = True
                    yield output

    def _last_banner_lines(self) -> list[str]:
        return (self._banner or b"").decode("utf-8", "replace").splitlines()[-10:]

    def send(self, data: bytes) -> None:
        """Execute a DRAIN frame; a shell supports no other frame."""
        if wire.HEAD.unpack_from(data)[1] == wire.DRAIN:
            self._tail.draining = True
            self._next_poll_at = 0.0


def far_source() -> bytes:
    """Return the source of the worker program, in the format that its bootstrap reads."""
    return worker_source(*_MODULES)
