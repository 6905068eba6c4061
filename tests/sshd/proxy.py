"""A TCP connection that can be slowed, frozen and cut."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from types import TracebackType


class Proxy:
    """Forwards a port of loopback to another one, each byte `delay` seconds late in either direction."""

    def __init__(self, target: int, *, delay: float = 0.0) -> None:
        self.delay = delay
        self.target = target
        self.passed = 0  # bytes on their way to the target
        self._moving = threading.Event()
        self._moving.set()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:  # noqa: PYI034 (Self is not in typing before Python 3.11)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection now, as a reset does."""
        self._moving.set()
        for item in self._open:
            with contextlib.suppress(OSError):
                item.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                item.shutdown(socket.SHUT_RDWR)
            item.close()
        self._open.clear()

    def freeze(self) -> None:
        """Let nothing through any more, and say nothing."""
        self._moving.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                for item in (client, server):
                    item.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open += [client, server]
                self._pump(client, server, count=True)
                self._pump(server, client, count=False)

    def _pump(self, source: socket.socket, sink: socket.socket, *, count: bool) -> None:
        waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(1000)

        def take() -> None:
            data = b"x"
            while data:
                try:
                    data = source.recv(65536)
                except OSError:
                    data = b""
                waiting.put((time.monotonic() + self.delay, data))

        def give() -> None:
            with contextlib.suppress(OSError):
                while True:
                    due, data = waiting.get()
                    time.sleep(max(0.0, due - time.monotonic()))
                    self._moving.wait()
                    if not data:
                        sink.shutdown(socket.SHUT_WR)
                        return
                    sink.sendall(data)
                    self.passed += len(data) if count else 0

        for work in (take, give):
            threading.Thread(target=work, daemon=True).start()
