"""The stream of a command that runs far away: what comes between its frames, and how it ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dtslurm.errors import TransportError
from dtslurm.transport import exit_status, remote_command
from dtslurm.transport.base import tail
from dtslurm.transport.channel import Channel
from dtslurm.transport.streams import ChannelStream

if TYPE_CHECKING:
    from dtslurm.transport.remote import RemoteTransport

STUCK_S = 60.0  # a transfer that moves nothing for so long is given up
_STDERR_KEPT = 1 << 16


class CommandFailed(TransportError):
    """The command of a stream ended with another code than 0."""


class RemoteStream(ChannelStream):
    """A stream from far away, without frames."""

    def __init__(
        self, owner: RemoteTransport, channel: Channel, call: remote_command.Call, program: str, stdin: bytes
    ) -> None:
        self.answer = remote_command.CallOutputs(call.nonce)
        self._owner = owner
        self._errors = b""
        self._first = b""
        super().__init__(channel, program, call.preamble + stdin)

    def begin(self, deadline: float) -> None:
        """Return when the command runs.

        Raises:
            SessionRefused: the server takes no more sessions.
            TransportError: it does not run.
        """
        while not self.answer.begun and not self._channel.ended:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._owner._late(self.answer, [self._program], STUCK_S, b"")  # noqa: SLF001
            self._first += self._payload(*self._channel.read(left))
        if not self.answer.begun:
            raise self._owner._cut(self.answer, self._program)  # noqa: SLF001

    def read(self, timeout: float) -> bytes:
        """Return the next chunk; see `Stream.read`."""
        if self._first:
            first, self._first = self._first, b""
            return first
        return super().read(timeout)

    def _payload(self, out: bytes, err: bytes) -> bytes:
        mine, words = self.answer.feed(out, err)
        self._errors = (self._errors + words)[-_STDERR_KEPT:]
        return mine

    def _over(self) -> bool:
        return self.answer.ended or self._channel.ended

    def _at_end(self) -> None:
        if not self.answer.ended:
            raise self._owner._cut(self.answer, self._program)  # noqa: SLF001
        code, flag = self.answer.verdict()
        exit_status.check_start(self._owner.host, self._program, code, flag, self._errors)
        if code:
            raise CommandFailed(f"{self._program} ended with exit code {code}", evidence=tail(self._errors))

    def stop(self) -> None:
        """Write no more, end the session."""
        super().stop()
        self._channel.end()
