"""The stream of a running command's output, over any channel."""

from __future__ import annotations

import queue
import time

from dtslurm.errors import TransportError
from dtslurm.transport.channel import Channel, Feeder

_STDERR_TAIL_BYTES = 1 << 16
_NO_TIMEOUT_S = 3600.0  # an iteration reads again after this time


class ChannelStream:
    """A `Stream` over a channel; subclasses decode the channel's bytes."""

    def __init__(self, channel: Channel, program: str, stdin: bytes) -> None:
        self._channel = channel
        self._program = program
        self._ended = False
        self._errors = b""
        self._new_errors = b""
        self._stdin_chunks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._feeder = Feeder(channel, iter(self._stdin_chunks.get, None), close=True)
        self._feeder.start()
        if stdin:
            self._stdin_chunks.put(stdin)

    def _payload(self, stdout: bytes, stderr: bytes) -> bytes:
        """Return the bytes of the command's stdout among the channel's bytes."""
        raise NotImplementedError

    def _has_ended(self) -> bool:
        """Return whether the command has ended and no more bytes will arrive."""
        return self._channel.ended

    def _check_exit(self) -> None:
        """Raise ``TransportError`` if the command failed."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Whether the command has ended and every chunk was read."""
        return self._ended

    def read(self, timeout: float) -> bytes:
        """Return the next chunk; see `Stream.read`."""
        deadline = time.monotonic() + timeout
        while not self._ended:
            if self._has_ended():
                self._ended = True
                self._check_exit()
            elif chunk := self._payload(*self._channel.read(max(0.0, deadline - time.monotonic()))):
                return chunk
            elif time.monotonic() >= deadline and not self._has_ended():
                break
        return b""

    def __iter__(self) -> ChannelStream:
        return self

    def __next__(self) -> bytes:
        while not self._ended:
            if chunk := self.read(_NO_TIMEOUT_S):
                return chunk
        raise StopIteration

    def read_stderr(self) -> bytes:
        """Return what has arrived of stderr; see `Stream.read_stderr`."""
        errors, self._new_errors = self._new_errors, b""
        return errors

    def _note_errors(self, stderr: bytes) -> None:
        self._errors = (self._errors + stderr)[-_STDERR_TAIL_BYTES:]
        self._new_errors = (self._new_errors + stderr)[-_STDERR_TAIL_BYTES:]

    def send(self, data: bytes) -> None:
        """Queue data for the command's stdin, without blocking; see `Stream.send`."""
        if self._feeder.refused or self._ended:
            raise TransportError(f"{self._program} no longer reads its input")
        self._stdin_chunks.put(data)

    def close_stdin(self) -> None:
        """Close the command's stdin after the queued data."""
        self._stdin_chunks.put(None)

    def stop(self) -> None:
        """Stop writing to stdin."""
        self._feeder.stop()
        self._stdin_chunks.put(None)
