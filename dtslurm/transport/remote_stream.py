"""The stream of a remote command: the output between its frames, and its exit status."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dtslurm.transport import exit_status, remote_command
from dtslurm.transport.base import CommandFailed, tail
from dtslurm.transport.channel import Channel
from dtslurm.transport.streams import ChannelStream

if TYPE_CHECKING:
    from dtslurm.transport.remote import RemoteTransport

STUCK_S = 60.0  # a transfer without progress for this long is aborted


class RemoteStream(ChannelStream):
    """The stream of a remote command, with the frames removed."""

    def __init__(
        self, owner: RemoteTransport, channel: Channel, call: remote_command.Call, program: str, stdin: bytes
    ) -> None:
        self.answer = remote_command.CallOutputs(call.nonce)
        self._owner = owner
        self._early_output = b""
        super().__init__(channel, program, call.preamble + stdin)

    def begin(self, deadline: float) -> None:
        """Wait until the command runs.

        Raises:
            SessionRefused: the server accepts no more sessions.
            TransportError: the command did not start.
        """
        while not self.answer.begun and not self._channel.ended:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise self._owner._timeout_error(self.answer, [self._program], STUCK_S, b"")  # noqa: SLF001
            self._early_output += self._payload(*self._channel.read(remaining_s))
        if not self.answer.begun:
            raise self._owner._disconnect_error(self.answer, self._program)  # noqa: SLF001

    def read(self, timeout: float) -> bytes:
        """Return the next chunk; see `Stream.read`."""
        if self._early_output:
            chunk, self._early_output = self._early_output, b""
            return chunk
        return super().read(timeout)

    def _payload(self, stdout_bytes: bytes, stderr_bytes: bytes) -> bytes:
        stdout, stderr = self.answer.feed(stdout_bytes, stderr_bytes)
        self._note_errors(stderr)
        return stdout

    def _has_ended(self) -> bool:
        return self.answer.ended or self._channel.ended

    def _check_exit(self) -> None:
        if not self.answer.ended:
            raise self._owner._disconnect_error(self.answer, self._program)  # noqa: SLF001
        code, flag = self.answer.verdict()
        exit_status.check_start(self._owner.host, self._program, code, flag, self._errors)
        if code:
            raise CommandFailed(self._program, code, tail(self._errors))

    def stop(self) -> None:
        """Stop writing to stdin, and end the session."""
        super().stop()
        self._channel.end()
