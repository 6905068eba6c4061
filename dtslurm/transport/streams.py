"""The stream of a running command's output, over any channel."""

from __future__ import annotations

import queue
import time

from dtslurm.errors import TransportError
from dtslurm.transport.channel import Channel, Feeder

_FOREVER_S = 3600.0


class ChannelStream:
    """A `Stream` over a channel; what the bytes of the channel mean is told by those who inherit."""

    def __init__(self, channel: Channel, program: str, stdin: bytes) -> None:
        self._channel = channel
        self._program = program
        self._ended = False
        self._words: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._feeder = Feeder(channel, iter(self._words.get, None), close=True)
        self._feeder.start()
        if stdin:
            self._words.put(stdin)

    def _payload(self, out: bytes, err: bytes) -> bytes:
        """Return what of the channel's bytes is the command's stdout."""
        raise NotImplementedError

    def _over(self) -> bool:
        """Whether the command has ended and nothing more will come."""
        return self._channel.ended

    def _at_end(self) -> None:
        """Raise ``TransportError`` if the command failed."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Whether the command has ended and every chunk was taken."""
        return self._ended

    def read(self, timeout: float) -> bytes:
        """Return the next chunk; see `Stream.read`."""
        deadline = time.monotonic() + timeout
        while not self._ended:
            if self._over():
                self._ended = True
                self._at_end()
            elif chunk := self._payload(*self._channel.read(max(0.0, deadline - time.monotonic()))):
                return chunk
            elif time.monotonic() >= deadline and not self._over():
                break
        return b""

    def __iter__(self) -> ChannelStream:
        return self

    def __next__(self) -> bytes:
        while not self._ended:
            if chunk := self.read(_FOREVER_S):
                return chunk
        raise StopIteration

    def send(self, data: bytes) -> None:
        """Write to the command's stdin; see `Stream.send`. It waits for nothing: a thread writes in order."""
        if self._feeder.refused or self._ended:
            raise TransportError(f"{self._program} reads no more")
        self._words.put(data)

    def close_stdin(self) -> None:
        """Tell the command that nothing more will come."""
        self._words.put(None)

    def stop(self) -> None:
        """Write no more."""
        self._feeder.stop()
        self._words.put(None)
