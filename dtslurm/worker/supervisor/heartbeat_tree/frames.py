"""Signed messages on a TCP connection between two processes of one attempt.

Each end first sends a random nonce. Every message has a length, a signature and a payload. The signature is
HMAC-SHA256 over the payload, its direction and its number, with a key that depends on the attempt's secret
key and on both nonces: other users of the cluster can neither write a message nor repeat one.
"""

import contextlib

# The socket module would import this hours later, when an upgrade of Python may have removed it.
import encodings.idna  # noqa: F401
import hmac
import os
import socket
import struct
import time
from typing import List

NONCE = 16
_HEAD = struct.Struct(">I32s")
MOST = 1 << 26  # bytes of a payload
MOST_UNKNOWN = 1 << 16  # bytes of the first payload, whose sender is not known yet
READ = 1 << 18
TRUST_S = 5.0  # for a peer to send its first message

REGISTER, PLACE, JOIN, BEATS, ORDERS = b"R", b"P", b"J", b"B", b"O"  # first byte of a payload
READ_ALL = b"A"  # the answer to the end of a connection, with the number of messages that were read


class Untrusted(OSError):
    """The peer does not have the attempt's key, or the connection was tampered with."""


class Connection:
    """One end of a connection; it never blocks.

    Attributes:
        trusted: whether the peer has sent a message with a valid signature.
        opened: when the connection was opened, by the monotonic clock.
    """

    def __init__(self, link: socket.socket, key: bytes, *, accepted: bool) -> None:
        self.link = link
        self.trusted = False
        self.opened = time.monotonic()
        self._key, self._accepted = key, accepted
        self._nonce = os.urandom(NONCE)
        self._session = b""
        self._unsigned: List[bytes] = []
        self._received, self._outgoing = bytearray(), bytearray(self._nonce)
        self._sent_count = self._received_count = 0
        self._unread: List[bytes] = []
        link.setblocking(False)
        with contextlib.suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self.link.fileno()

    @property
    def is_sending(self) -> bool:
        """Whether messages wait until the peer receives more."""
        return bool(self._outgoing or self._unsigned)

    @property
    def is_overdue(self) -> bool:
        """Whether the peer has not proved in time that it has the key."""
        return not self.trusted and time.monotonic() - self.opened > TRUST_S

    def send(self, payload: bytes) -> None:
        """Send a message, or as much of it as the peer receives now.

        Raises:
            OSError: the connection is closed.
        """
        if self._session:
            self._sign(payload)
        else:
            self._unsigned.append(payload)
        self.flush()

    def _sign(self, payload: bytes) -> None:
        signature = self._signature(payload, self._sent_count, accepted=self._accepted)
        self._outgoing += _HEAD.pack(len(payload), signature) + payload
        self._sent_count += 1

    def _signature(self, payload: bytes, number: int, *, accepted: bool) -> bytes:
        message = hmac.new(self._session, b"%c%d " % (b"a"[0] if accepted else b"c"[0], number), "sha256")
        message.update(payload)
        return message.digest()

    def flush(self) -> None:
        """Send what waits, as much as the peer receives now.

        Raises:
            OSError: the connection is closed.
        """
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: self.link.send(self._outgoing)]

    def put_back(self, payloads: List[bytes]) -> None:
        """Let the next `receive` return messages again that it has returned before."""
        self._unread = payloads

    def receive(self) -> List[bytes]:
        """Return the messages that have arrived.

        Raises:
            Untrusted: a signature is wrong.
            OSError: the peer has closed the connection.
        """
        is_closed = False
        with contextlib.suppress(BlockingIOError):
            data = self.link.recv(READ)
            is_closed = not data
            self._received += data
        payloads, self._unread = self._unread + self._messages(), []
        if is_closed and not payloads:
            with contextlib.suppress(OSError):
                self.send(READ_ALL + str(self._received_count).encode())
            raise ConnectionResetError("the peer has closed the connection")
        return payloads

    def finish(self, patience_s: float) -> None:
        """Wait until the peer confirms that it has read all messages; then close this end.

        A peer that closes the connection without a confirmation may have done so before the last messages.

        Raises:
            OSError: the peer has not read all of them.
        """
        end = time.monotonic() + patience_s
        self.link.setblocking(True)
        try:
            self.link.settimeout(patience_s)
            self.link.sendall(self._outgoing)
            self.link.shutdown(socket.SHUT_WR)
            data = self.link.recv(READ)
            while data:
                self._received += data
                self.link.settimeout(max(0.01, end - time.monotonic()))
                data = self.link.recv(READ)
            if READ_ALL + str(self._sent_count).encode() not in self._messages():
                raise OSError("the peer has not confirmed the last messages")
        finally:
            self.close()

    def _messages(self) -> List[bytes]:
        if not self._session and len(self._received) >= NONCE:
            peer_nonce = bytes(self._received[:NONCE])
            del self._received[:NONCE]
            nonces = peer_nonce + self._nonce if self._accepted else self._nonce + peer_nonce
            self._session = hmac.new(self._key, nonces, "sha256").digest()
            for payload in self._unsigned:
                self._sign(payload)
            self._unsigned = []
            self.flush()
        payloads = []
        while self._session and len(self._received) >= _HEAD.size:
            length, signature = _HEAD.unpack_from(self._received)
            if length > (MOST if self.trusted else MOST_UNKNOWN):
                raise Untrusted("a message of {} bytes".format(length))
            if len(self._received) < _HEAD.size + length:
                break
            payload = bytes(self._received[_HEAD.size : _HEAD.size + length])
            expected = self._signature(payload, self._received_count, accepted=not self._accepted)
            if not hmac.compare_digest(expected, signature):
                raise Untrusted("the signature of a message is wrong")
            del self._received[: _HEAD.size + length]
            self._received_count += 1
            self.trusted = True
            payloads.append(payload)
        return payloads

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.link.close()


def listen(address: str, backlog: int) -> socket.socket:
    """Return a listening socket with a free port, on one address of this node or on all.

    Raises:
        OSError: there is no free port.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        try:
            listener.bind((address, 0))
        except OSError:  # the address is not on this node, for example because of NAT
            listener.bind(("", 0))
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def connect(hosts: List[str], port: int, patience_s: float) -> socket.socket:
    """Return a connection to the first host that accepts one.

    Raises:
        OSError: none does.
    """
    error: OSError = OSError("no host is known")
    for host in hosts:
        try:
            return socket.create_connection((host, port), patience_s)
        except (OSError, UnicodeError) as problem:
            error = problem if isinstance(problem, OSError) else OSError(str(problem))
    raise error
