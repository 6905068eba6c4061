"""A paramiko connection that sends nothing for a session after the message that closes it."""

from __future__ import annotations

import socket

import paramiko
from paramiko.common import (
    MSG_CHANNEL_CLOSE,
    MSG_CHANNEL_FAILURE,
    MSG_CHANNEL_WINDOW_ADJUST,
)


class OrderedLink(paramiko.Transport):
    """A connection whose server never sees a message of a session that is closed.

    paramiko makes a message under the session's lock and sends it after releasing the lock. If the session
    is closed in between, the message follows the closing one, and OpenSSH's server ends the connection, with
    all commands that run over it (github.com/paramiko/paramiko/issues/1115). Such a message is dropped here.
    """

    def __init__(
        self, byte_stream: socket.socket | paramiko.Channel, *, window_size: int, max_packet_size: int
    ) -> None:
        self._closed_sessions: set[int] = set()
        super().__init__(
            byte_stream, default_window_size=window_size, default_max_packet_size=max_packet_size
        )

    def _send_message(self, data: paramiko.Message) -> None:
        # paramiko calls this for one message at a time, under its lock of the connection.
        message = data.asbytes()
        if MSG_CHANNEL_WINDOW_ADJUST <= message[0] <= MSG_CHANNEL_FAILURE:
            session = int.from_bytes(message[1:5], "big")
            if session in self._closed_sessions:
                return
            if message[0] == MSG_CHANNEL_CLOSE:
                self._closed_sessions.add(session)
        super()._send_message(data)  # type: ignore[misc]

    def _parse_channel_open_success(self, message: paramiko.Message) -> None:
        # The server gives the number of a closed session to a new one.
        position = message.packet.tell()
        message.get_int()
        self._closed_sessions.discard(message.get_int())
        message.packet.seek(position)
        super()._parse_channel_open_success(message)  # type: ignore[misc]
