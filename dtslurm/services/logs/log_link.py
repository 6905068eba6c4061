"""A connection to the worker program of the log follower."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

from dtslurm.errors import CommandNotFound, TransportError
from dtslurm.logs import frames
from dtslurm.logs.frames import Decoder, Frame
from dtslurm.logs.lines import Assembler
from dtslurm.remote.worker_program import BOOT, NO_PYTHON, run_with_any_python, worker_source
from dtslurm.services.wiring.login_node import NO_PYTHON as NAME_A_PYTHON
from dtslurm.transport.base import Stream, Transport
from dtslurm.worker.logtail import frames as wire

WINDOW = 4 << 20  # bytes that may be in transit unacknowledged
_SILENCE_S = 45.0  # the worker program sends a ping every ten seconds
_GREETING_S = 60.0

_MODULES = (
    "lib.json_records", "lib.rank_files", "logtail.frames", "logtail.files", "logtail.summary",
    "logtail.tailer",
)  # fmt: skip


class Link:
    """A connection to the worker program of the log follower, which is sent to the host over the connection.

    Attributes:
        since: when the link was opened, on ``clock``.
        fruitful: whether the link has delivered log data.
        streams: the log files that the link delivers, by stream number.
        grown: the files whose unfinished line grew since the last read, by stream number.
    """

    def __init__(
        self,
        transport: Transport,
        request: Mapping[str, Any],
        clock: Callable[[], float],
        python: str = "",
    ) -> None:
        """Start the worker program with ``python`` if given, else with any Python 3 on the host."""
        self.since = self._last_received_at = clock()
        self.fruitful = False
        self.streams: dict[int, Assembler] = {}
        self.grown: dict[int, Assembler] = {}
        self._clock = clock
        self._host = transport.host
        self._unacknowledged = 0
        self._decoder = Decoder()
        source = far_source()
        preferred = sys.executable if transport.local else python
        pythons = [preferred] if preferred else []
        argv = run_with_any_python("dtslurm-tailer", BOOT, str(len(source)), pythons)
        self._stack = ExitStack()
        stream_context: AbstractContextManager[Stream] = transport.stream(
            argv, stdin=source + frames.request(request)
        )
        self._stream = self._stack.enter_context(stream_context)

    @property
    def greeted(self) -> bool:
        """Whether the worker program runs."""
        return self._decoder.begun

    def read(self, timeout: float) -> Iterator[Frame]:
        """Yield the frames received within ``timeout`` seconds; answer pings, and grant credit.

        Raises:
            CommandNotFound: the host has no Python that can run the worker program.
            TransportError: the connection is lost.
        """
        if self._unacknowledged >= WINDOW // 4:
            self.send(frames.credit(self._unacknowledged))
            self._unacknowledged = 0
        data = self._receive(timeout)
        if not data and self._stream.ended:
            banner = self._decoder.banner()
            if not self.greeted and NO_PYTHON in banner:
                raise CommandNotFound(
                    f"there is no Python of version 3.6 or later on {self._host}", hint=NAME_A_PYTHON
                )
            raise TransportError("the remote log follower ended", evidence=banner)
        for frame in self._decoder.feed(data):
            if frame.kind == wire.PING:
                self.send(wire.frame(wire.PONG, 0, frame.payload))
            else:
                self.fruitful = self.fruitful or frame.kind in {wire.DATA, wire.CAUGHT_UP}
                yield frame

    def owe(self, byte_count: int) -> None:
        """Count processed bytes, for which credit is granted."""
        self._unacknowledged += byte_count

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
            raise TransportError(f"no data arrived for {now - self._last_received_at:.0f} s")
        return data


def far_source() -> bytes:
    """Return the source of the worker program, in the format that its bootstrap reads."""
    return worker_source(*_MODULES)
