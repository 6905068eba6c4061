"""One connection to the far side of log following: to the program sent there, or to a mere shell."""

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

WINDOW = 4 << 20  # bytes that may be on the way
_SILENCE_S = 45.0  # the far side gives a sign of life every ten seconds
_GREETING_S = 60.0
_SHELL_LOOK_S = 1.0

_MODULES = ("logtail.frames", "logtail.files", "logtail.summary", "logtail.tailer")


class NoPython(TransportError):
    """There is no Python on that host that could run the far side."""

    transient = False


class Link:
    """What both kinds have: a stream, its age, and whether it bore fruit.

    Attributes:
        since: when it was made, on ``clock``.
        fruitful: whether anything of use came over it.
        streams: the files that came over it; ``grown``: those that left an unfinished line.
    """

    def __init__(
        self, transport: Transport, argv: Sequence[str], stdin: bytes, clock: Callable[[], float]
    ) -> None:
        self.since = self._heard = clock()
        self.fruitful = False
        self.streams: dict[int, Assembler] = {}
        self.grown: dict[int, Assembler] = {}
        self._clock = clock
        self._stack = ExitStack()
        opened: AbstractContextManager[Stream] = transport.stream(argv, stdin=stdin)
        self._stream = self._stack.enter_context(opened)

    @property
    def greeted(self) -> bool:
        """Whether the far side has spoken."""
        raise NotImplementedError

    def read(self, timeout: float) -> Iterator[Frame]:
        """Yield frames that came, waiting up to ``timeout`` seconds for them.

        Raises:
            TransportError: the link is lost.
        """
        raise NotImplementedError

    def owe(self, amount: int) -> None:
        """Count bytes as taken."""

    def send(self, data: bytes) -> None:
        """Send frames."""
        self._stream.send(data)

    def close(self) -> None:
        """End it."""
        with suppress(TransportError):
            self._stack.close()

    def _receive(self, timeout: float) -> bytes:
        data = self._stream.read(timeout)
        now = self._clock()
        if data:
            self._heard = now
        elif not self._stream.ended and now - self._heard > (_SILENCE_S if self.greeted else _GREETING_S):
            raise TransportError(f"no sign of life for {now - self._heard:.0f} s")
        return data


class PythonLink(Link):
    """To the program that is sent there."""

    def __init__(
        self,
        transport: Transport,
        request: Mapping[str, Any],
        clock: Callable[[], float],
        python: str = "",
    ) -> None:
        """Start it with ``python``, or else with what is there."""
        self._owed = 0
        self._decoder = Decoder()
        source = far_source()
        first = sys.executable if transport.local else python
        pythons = [first] if first else []
        argv = run_with_any_python("dtslurm-tailer", BOOT, str(len(source)), pythons)
        super().__init__(transport, argv, source + frames.request(request), clock)

    @property
    def greeted(self) -> bool:
        """Whether the far side's program runs."""
        return self._decoder.begun

    def read(self, timeout: float) -> Iterator[Frame]:
        """Yield frames that came; answer signs of life; give credit for what was taken."""
        if self._owed >= WINDOW // 4:
            self.send(frames.credit(self._owed))
            self._owed = 0
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
        """Count bytes as taken."""
        self._owed += amount


class ShellLink(Link):
    """To a shell, which is asked every second."""

    def __init__(self, transport: Transport, request: Mapping[str, Any], clock: Callable[[], float]) -> None:
        if request.get("nodes") is not None:
            raise NoPython("without Python 3.6 or later on that host, ranks cannot be chosen by node")
        self._tail = ShellTail(request)
        self._banner: bytes | None = b""
        self._next_look = 0.0
        program = assets.worker("logtail/tailer.sh").read_text("utf-8")
        super().__init__(transport, ["sh", "-c", program, "dtslurm-tailer", str(request["run"])], b"", clock)

    @property
    def greeted(self) -> bool:
        """Whether the shell waits for questions."""
        return self._banner is None

    def read(self, timeout: float) -> Iterator[Frame]:
        """Yield frames made of what the shell answers."""
        now = self._clock()
        if self.greeted and self._tail.idle and now >= self._next_look:
            self._next_look = now + _SHELL_LOOK_S
            self._stream.send(self._tail.look())
        elif self.greeted and self._tail.idle:
            timeout = min(timeout, self._next_look - now)
        data = self._receive(timeout)
        if not data and self._stream.ended:
            words = self._last_words()
            if any("there is no folder" in line for line in words):
                raise StoreError(words[-1])
            raise TransportError("the far side of log following ended", evidence=words)
        if self._banner is not None:
            before, found, data = (self._banner + data).partition(GREETING)
            self._banner = None if found else before[-10_000:]
        if self.greeted:
            for item in self._tail.feed(data):
                if isinstance(item, bytes):
                    self._stream.send(item)
                else:
                    self.fruitful = True
                    yield item

    def _last_words(self) -> list[str]:
        return (self._banner or b"").decode("utf-8", "replace").splitlines()[-10:]

    def send(self, data: bytes) -> None:
        """Do what the frame says, as far as a shell can."""
        if wire.HEAD.unpack_from(data)[1] == wire.DRAIN:
            self._tail.draining = True
            self._next_look = 0.0


def far_source() -> bytes:
    """Return the far side's program, as its bootstrap reads it."""
    return worker_source(*_MODULES)
