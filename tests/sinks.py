"""Receivers of messages: an HTTP server and an SMTP server on this machine, which keep what arrives."""

from __future__ import annotations

import http.server
import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class WebhookSink:
    """A webhook.

    Attributes:
        messages: the documents that have arrived.
        status: the code of its answers.
        delay_s: how long it waits before it answers.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.status, self.delay_s, self.port = 200, 0.0, 0
        self.released = threading.Event()

    @property
    def url(self) -> str:
        """The URL of Apprise, with a part that is secret."""
        return f"json://127.0.0.1:{self.port}/hooks/c4n4ry-token"

    def titles(self) -> list[str]:
        """Return the titles of the messages."""
        return [message["title"] for message in self.messages]

    def count(self, end_of_title: str) -> int:
        """Return the number of messages whose title ends like this."""
        return sum(title.endswith(end_of_title) for title in self.titles())

    @contextmanager
    def run(self) -> Iterator[WebhookSink]:
        """Answer until the context ends."""
        sink = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if sink.delay_s:
                    sink.released.wait(sink.delay_s)
                if sink.status == 200:
                    sink.messages.append(json.loads(body))
                self.send_response(sink.status)
                self.end_headers()

            def log_message(self, *_words: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, *_words: object) -> None:
                pass  # the sender has closed the connection

        with Server(("127.0.0.1", 0), Handler) as server:
            self.port = server.server_port
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            try:
                yield self
            finally:
                self.released.set()
                server.shutdown()


class MailSink:
    """A mail server.

    Attributes:
        mails: the sources of the mails that have arrived.
        delay_s: how long it waits before it greets, as a server that checks its clients does.
    """

    def __init__(self) -> None:
        self.mails: list[str] = []
        self.delay_s, self.port = 0.0, 0

    @property
    def url(self) -> str:
        """The URL of Apprise."""
        return f"mailto://127.0.0.1:{self.port}?from=run@example.org&to=me@example.org&mode=insecure"

    @contextmanager
    def run(self) -> Iterator[MailSink]:
        """Answer until the context ends."""
        sink = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                time.sleep(sink.delay_s)
                self.wfile.write(b"220 mail.example.org\r\n")
                while line := self.rfile.readline():
                    word = line[:4].upper()
                    if word == b"DATA":
                        self.wfile.write(b"354 go ahead\r\n")
                        lines = iter(self.rfile.readline, b".\r\n")
                        sink.mails.append(b"".join(lines).decode())
                    self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 fine\r\n")
                    if word == b"QUIT":
                        return

        with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads = True
            self.port = server.server_address[1]
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            try:
                yield self
            finally:
                server.shutdown()


def find_closed_port() -> int:
    """Return a port at which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
