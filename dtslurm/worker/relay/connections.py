"""TCP connections in frames: the form and the rules of both ends of a relay.

A frame is ``length u32 | kind u8 | number u32 | payload | newline``, big-endian; the number is that of a
connection or of a question. The newline makes srun, which passes output on by lines, send each frame at once.
The frames to the client begin after ``MAGIC``, so that output of a prolog before it is ignored.
"""

import contextlib
import queue
import socket
import struct
import threading
from typing import Callable, Dict, Iterator, Optional, Tuple

MAGIC = b"\0dtslurm relay\0"
HEAD = struct.Struct(">IBI")
SIZE = struct.Struct(">I")
PORT = struct.Struct(">H")
LARGEST = 1 << 20  # maximum payload size in bytes
WINDOW = 1 << 21  # bytes of a connection that may be in transit in one direction
CHUNK = 1 << 17
_END = b"\n"

# To both ends, about a connection.
DATA = 1
END = 2  # no more data follows
CLOSE = 3  # the connection is broken; its text is the reason; an empty text: the other end has closed it
CREDIT = 4  # u32: the number of bytes that were delivered
# To the node.
OPEN = 5  # u16: connect to this port
ASK = 6  # u16: whether a process of the user listens at this port
PONG = 7
# To the client.
HELLO = (
    8  # JSON: address, port and nonce of the listener with which the client tests whether it reaches the node
)
ANSWER = 9  # JSON: address, and problem; see `relay.describe_port`
PING = 10  # the client answers with PONG

Frame = Tuple[int, int, bytes]
Send = Callable[[int, int, bytes], None]


class ProtocolError(Exception):
    """The other end violates the rules; the message explains how."""


def encode(kind: int, number: int, payload: bytes = b"") -> bytes:
    """Return an encoded frame."""
    return HEAD.pack(len(payload), kind, number) + payload + _END


class FrameDecoder:
    """A decoder of bytes into frames; the bytes may be split at any point."""

    def __init__(self, *, is_greeted: bool) -> None:
        """Expect `MAGIC` before the first frame unless ``is_greeted``."""
        self.is_greeted = is_greeted
        self._data = bytearray()

    @property
    def unread(self) -> bytes:
        """The bytes that are no complete frame yet."""
        return bytes(self._data)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add bytes and yield the frames that are complete.

        Raises:
            ProtocolError: the bytes are not valid frames.
        """
        self._data += data
        if not self.is_greeted:
            position = self._data.find(MAGIC)
            if position < 0:
                if len(self._data) > LARGEST:
                    raise ProtocolError("a megabyte of text before its greeting")
                return
            del self._data[: position + len(MAGIC)]
            self.is_greeted = True
        position = 0
        try:
            while len(self._data) - position >= HEAD.size:
                length, kind, number = HEAD.unpack_from(self._data, position)
                if length > LARGEST:
                    raise ProtocolError("a frame of {} bytes".format(length))
                begin, end = position + HEAD.size, position + HEAD.size + length
                if len(self._data) <= end:
                    break
                payload = bytes(self._data[begin:end])
                position = end + len(_END)
                yield kind, number, payload
        finally:
            del self._data[:position]


class Connections:
    """The open connections of one end. Each has two threads; `receive` never waits for a connection.

    Args:
        send: sends a frame to the other end; called by several threads.
        report: receives the number of a connection that the other end broke, and its reason.
    """

    def __init__(self, send: Send, report: Callable[[int, str], None]) -> None:
        self._send = send
        self._report = report
        self._lock = threading.Lock()
        self._connections: Dict[int, RelayedConnection] = {}

    def add(self, number: int, connect: Callable[[], socket.socket]) -> None:
        """Begin a connection with the socket that ``connect`` returns; ``connect`` runs in its own thread.

        Raises:
            ProtocolError: there is a connection with this number.
        """
        connection = RelayedConnection(number, self._send, self._forget)
        with self._lock:
            if number in self._connections:
                raise ProtocolError("a second connection with the number {}".format(number))
            self._connections[number] = connection
        threading.Thread(target=connection.run, args=(connect,), daemon=True, name="dtslurm-relay").start()

    def receive(self, kind: int, number: int, payload: bytes) -> None:
        """Handle a frame about a connection.

        Raises:
            ProtocolError: the frame violates the rules.
        """
        with self._lock:
            connection = self._connections.get(number)
        if connection is None:
            return  # it was closed here, and the other end has not received that yet
        if kind == CLOSE:
            connection.close()
            if payload:
                self._report(number, payload[:500].decode("utf-8", "replace"))
        elif kind in (DATA, END):
            connection.deliver(payload, is_last=kind == END)
        elif kind == CREDIT and len(payload) == SIZE.size:
            connection.grant(SIZE.unpack(payload)[0])
        else:
            raise ProtocolError("an unknown frame ({})".format(kind))

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()

    def _forget(self, number: int) -> None:
        with self._lock:
            self._connections.pop(number, None)


class RelayedConnection:
    """One end of a relayed connection: copies between a socket and frames."""

    def __init__(self, number: int, send: Send, forget: Callable[[int], None]) -> None:
        self._number = number
        self._send = send
        self._forget = forget
        self._socket: Optional[socket.socket] = None
        self._incoming: "queue.Queue[Optional[bytes]]" = queue.Queue()  # None: closed; empty: the end
        self._changed = threading.Condition()
        self._credit = WINDOW
        self._undelivered = 0
        self._closed = False
        self._open_halves = 2

    def run(self, connect: Callable[[], socket.socket]) -> None:
        """Connect, and copy in both directions until both have ended."""
        try:
            connected = connect()
        except OSError as error:
            self._break(str(error.strerror or error))
            return
        with self._changed:
            if self._closed:
                connected.close()
                return
            self._socket = connected
        threading.Thread(
            target=self._copy_to_frames, args=(connected,), daemon=True, name="dtslurm-relay"
        ).start()
        self._copy_to_socket(connected)

    def deliver(self, data: bytes, *, is_last: bool) -> None:
        """Queue received data for the socket."""
        with self._changed:
            self._undelivered += len(data)
            if self._undelivered > WINDOW:
                raise ProtocolError("more data than it may send")
        if data:
            self._incoming.put(data)
        if is_last:
            self._incoming.put(b"")

    def grant(self, size: int) -> None:
        """Permit the other direction this many further bytes."""
        with self._changed:
            self._credit = min(WINDOW, self._credit + size)
            self._changed.notify_all()

    def close(self) -> None:
        """Close the socket; both copies end."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._incoming.put(None)
        self._forget(self._number)
        if self._socket is not None:
            with contextlib.suppress(OSError):  # wakes a thread that waits in recv
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _break(self, reason: str = "") -> None:
        """Close the connection, and notify the other end unless that closed it."""
        if not self._closed:
            self.close()
            self._send(CLOSE, self._number, reason.encode())

    def _copy_to_socket(self, connected: socket.socket) -> None:
        try:
            while True:
                data = self._incoming.get()
                if data is None:
                    return
                if not data:
                    break
                connected.sendall(data)
                with self._changed:
                    self._undelivered -= len(data)
                self._send(CREDIT, self._number, SIZE.pack(len(data)))
            connected.shutdown(socket.SHUT_WR)
        except OSError:
            self._break()
        self._end_half()

    def _copy_to_frames(self, connected: socket.socket) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._credit > 0 or self._closed)
                    if self._closed:
                        return
                    size = min(self._credit, CHUNK)
                data = connected.recv(size)
                if not data:
                    break
                with self._changed:
                    self._credit -= len(data)
                self._send(DATA, self._number, data)
            self._send(END, self._number, b"")
        except OSError:
            self._break()
        self._end_half()

    def _end_half(self) -> None:
        with self._changed:
            self._open_halves -= 1
            has_ended = self._open_halves == 0
        if has_ended:
            self.close()
