"""The client's end of a relay: connections to the ports of a node of a running job.

The program `dtslurm.worker.relay.relay` runs on the node in a step of its own, and finds out whether a
process of the user listens at a port. If the process listens on the address by which the login node reaches
the node, the connection is made from the login node, over the SSH connection that dtslurm uses. Otherwise the
program on the node makes the connection, and its bytes pass through the step.
"""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from dtslurm.errors import CommandNotFound, TransportError
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.remote.worker_program import NO_PYTHON
from dtslurm.transport.base import CommandFailed, Stream, TcpConnection, Transport, tail
from dtslurm.worker.relay import connections as wire

_SENDER = "the relay on the node"
_SILENCE_S = 45.0  # the node sends a ping every ten seconds
_GREETING_S = 90.0  # srun waits up to twenty seconds for the nodes
_ANSWER_S = 20.0
_TEST_S = 10.0
_END_S = 5.0
_CHUNK = 1 << 18
_PROBLEMS = {"nothing": "nothing listens at port {} of {}", "other user": "port {} of {} is another user's"}


@dataclass(frozen=True)
class PortAnswer:
    """Whether the user's job listens at a port of the node.

    Attributes:
        problem: why a connection cannot be made, else empty.
        address: where the login node may reach the service; empty if only the node itself can.
    """

    problem: str
    address: str = ""


class RelayLink:
    """A connection to the relay on a node. Use it as a context manager; call `read` again and again.

    Args:
        argv: the command that starts the relay on the node.
        report: receives the problems of connections, as texts for the user.

    Attributes:
        is_greeted: whether the relay runs.
    """

    def __init__(
        self, transport: Transport, argv: Sequence[str], node: str, report: Callable[[int, str], None]
    ) -> None:
        self.node = node
        self._transport = transport
        self._argv = argv
        self._report = report
        self._stack = ExitStack()
        self._stream: Stream | None = None
        self._decoder = wire.FrameDecoder(is_greeted=False)
        self._received_at = time.monotonic()
        self._numbers = itertools.count(1)
        self._ports: dict[int, int] = {}
        self._questions: dict[int, queue.SimpleQueue[PortAnswer]] = {}
        self._connections = wire.Connections(self._send, self._report_break)
        self._lock = threading.Lock()
        self._tested = threading.Event()
        self._address = ""
        self._reaches_node = False
        self._closed = False
        self.is_greeted = False

    def __enter__(self) -> RelayLink:  # noqa: PYI034 (typing.Self is of Python 3.11)
        self._stream = self._stack.enter_context(self._transport.stream(self._argv))
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def read(self, timeout: float) -> None:
        """Handle the frames that arrive within ``timeout`` seconds.

        Raises:
            CommandNotFound: the node has no Python that can run the relay.
            CommandFailed: the step could not be started, or the process of the job has ended.
            TransportError: the connection was lost, or the relay ended.
        """
        stream = self._stream
        if stream is None:
            raise TransportError("the relay is closed")
        data = stream.read(timeout)
        if data:
            self._received_at = time.monotonic()
            try:
                for kind, number, payload in self._decoder.feed(data):
                    self._receive(kind, number, payload)
            except wire.ProtocolError as error:
                raise answers.invalid(_SENDER, str(error)) from None
        elif stream.ended:
            printed = self._decoder.unread
            if NO_PYTHON.encode() in printed:
                raise CommandNotFound(f"{self.node} has no Python 3.6 or later")
            raise TransportError("the relay on the node ended", evidence=tail(printed))
        elif time.monotonic() - self._received_at > (_SILENCE_S if self.is_greeted else _GREETING_S):
            raise TransportError(f"{self.node} sent nothing for {time.monotonic() - self._received_at:.0f} s")

    def ask(self, port: int) -> PortAnswer:
        """Return whether the user's job listens at a port; waits for the node's answer."""
        number, answer = next(self._numbers), queue.SimpleQueue[PortAnswer]()
        lost = PortAnswer(f"{self.node} does not answer")
        with self._lock:
            if self._closed:
                return lost
            self._questions[number] = answer
        self._send(wire.ASK, number, wire.PORT.pack(port))
        try:
            found = answer.get(timeout=_ANSWER_S)
        except queue.Empty:
            found = lost
        self._questions.pop(number, None)
        return PortAnswer(found.problem.format(port, self.node), found.address)

    def carry(self, connection: socket.socket, port: int) -> str:
        """Connect ``connection`` to a port of the node; return the problem, empty if there is none.

        The connection is closed when the other end closes it, or if there is a problem.
        """
        answer = self.ask(port)
        if answer.problem:
            connection.close()
            return answer.problem
        self._tested.wait(2 * _TEST_S)
        if answer.address and self._reaches_node:
            with suppress(TransportError, OSError):
                copy_both_ways(connection, self._transport.connect_tcp(answer.address, port))
                return ""
        number = next(self._numbers)

        def open_on_node() -> socket.socket:
            self._send(wire.OPEN, number, wire.PORT.pack(port))
            return connection

        with self._lock:
            if self._closed:
                connection.close()
                return f"the connection to {self.node} was lost"
            self._ports[number] = port
            self._connections.add(number, open_on_node)
        return ""

    def close(self) -> None:
        """End the relay and its connections."""
        with self._lock:
            self._closed = True
            questions = list(self._questions.values())
        for question in questions:
            question.put(PortAnswer("the connection to {1} was lost"))
        self._connections.close()
        self._tested.set()
        stream, self._stream = self._stream, None
        with suppress(TransportError):
            if stream is not None and not stream.ended:
                _end(stream)
        with suppress(TransportError):
            self._stack.close()

    def _send(self, kind: int, number: int, payload: bytes) -> None:
        stream = self._stream
        if stream is not None:
            with suppress(TransportError):  # the next read raises the error
                stream.send(wire.encode(kind, number, payload))

    def _receive(self, kind: int, number: int, payload: bytes) -> None:
        if kind == wire.PING:
            self._send(wire.PONG, 0, b"")
        elif kind == wire.HELLO and not self.is_greeted:
            self._begin_test(payload)
            self.is_greeted = True
        elif kind == wire.ANSWER:
            values = answers.parse_object(payload, _SENDER)
            problem, address = (answers.read_text(values, key, _SENDER) for key in ("problem", "address"))
            if question := self._questions.get(number):
                question.put(
                    PortAnswer(_PROBLEMS.get(problem, ""), address if address == self._address else "")
                )
        else:
            self._connections.receive(kind, number, payload)

    def _begin_test(self, payload: bytes) -> None:
        """Test in a thread whether the login node reaches the node."""
        values = answers.parse_object(payload, _SENDER)
        self._address = answers.read_text(values, "address", _SENDER)
        port = answers.read_whole(values, "port", _SENDER, maximum=65535)
        nonce = answers.read_text(values, "nonce", _SENDER)
        if self._address:
            threading.Thread(target=self._test, args=(port, nonce), daemon=True, name="dtslurm-test").start()
        else:
            self._tested.set()

    def _test(self, port: int, nonce: str) -> None:
        received = b""
        with suppress(TransportError, OSError):
            connection = self._transport.connect_tcp(self._address, port)
            connection.settimeout(_TEST_S)
            while len(received) < len(nonce) and (chunk := connection.recv(len(nonce) - len(received))):
                received += chunk
            connection.close()
        self._reaches_node = received == nonce.encode()
        self._tested.set()

    def _report_break(self, number: int, reason: str) -> None:
        port = self._ports.get(number)
        if port is not None:
            self._report(port, f"no connection to port {port} of {self.node}: {reason}")


def copy_both_ways(first: TcpConnection, second: TcpConnection) -> None:
    """Copy between two connections until both directions have ended, then close them."""
    back = threading.Thread(target=_copy, args=(second, first), daemon=True, name="dtslurm-copy")
    back.start()
    _copy(first, second)
    back.join()
    for connection in (first, second):
        connection.close()


def _copy(source: TcpConnection, target: TcpConnection) -> None:
    try:
        while data := source.recv(_CHUNK):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for connection in (source, target):  # wakes the other direction
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _end(stream: Stream) -> None:
    """End the relay on the node by ending its input, and wait for that."""
    stream.close_stdin()
    deadline = time.monotonic() + _END_S
    while not stream.ended and time.monotonic() < deadline:
        with suppress(CommandFailed):
            stream.read(0.2)
