"""The checks of an instance over the network, by servers in this process, and in its files."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dtslurm.worker.supervisor.roles import probes
from tests.worker.test_role_plan import METRICS, plan_of, replace_check, role

HOST = "127.0.0.1"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, text = {
            "/health": (200, ""),
            "/empty": (204, ""),
            "/moved": (302, ""),
            "/broken": (503, "loading"),
            "/metrics": (200, METRICS),
        }.get(self.path, (404, ""))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/health")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of an HTTP server."""
    with ThreadingHTTPServer((HOST, 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def closed_port() -> Iterator[int]:
    """A port that refuses connections."""
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        yield unused.getsockname()[1]


@pytest.mark.parametrize(
    ("path", "is_ready"),
    [("/health", True), ("/empty", True), ("/moved", True), ("/broken", False), ("/none", False)],
)
def test_server_is_ready_if_it_answers_the_path_with_success(
    port: int, tmp_path: Path, path: str, is_ready: bool
) -> None:
    plan = plan_of(tmp_path, role("rollout")).roles[0]._replace(http=path)
    assert probes.is_ready(plan, HOST, {"http": port}, "", "") is is_ready


def test_server_that_refuses_connections_is_not_ready(port: int, closed_port: int, tmp_path: Path) -> None:
    plan = replace_check(plan_of(tmp_path, role("rollout")), tcp=True)
    assert probes.is_ready(plan, HOST, {"http": port}, "", "")
    assert not probes.is_ready(plan, HOST, {"http": closed_port}, "", "")
    assert not probes.is_ready(plan, HOST, {}, "", "")  # its address is not known yet
    assert not probes.answers_http(HOST, closed_port, "/health")
    assert probes.read_load(HOST, closed_port, "/metrics") == {}


def test_load_is_read_from_the_metrics_of_a_server(port: int) -> None:
    assert probes.read_load(HOST, port, "/metrics") == {"running": 3.0, "waiting": 7.0, "requests": 100.0}
    assert probes.read_load(HOST, port, "/broken") == {}


def test_metrics_after_a_line_that_is_no_sample_are_read() -> None:
    text = "vllm:num_requests_swapped x\nsglang:num_running_reqs 2\nsglang:num_requests_total 8\n"
    assert probes.parse_load(text) == {"running": 2.0, "requests": 8.0}


def test_line_is_found_in_the_last_mebibyte_of_a_log(tmp_path: Path) -> None:
    plan = replace_check(plan_of(tmp_path, role("rollout")), line="^ready$")
    log = tmp_path / "log"
    for size, is_ready in ((1 << 16, True), ((1 << 20) - 7, True), (1 << 20, False)):
        log.write_text("\nready\n" + "x" * size)
        assert probes.is_ready(plan, "", {}, str(log), "") is is_ready


@pytest.mark.parametrize(
    "answer", [b"\x15\x03\x01\x00\x02\x02\x16\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nvll"]
)
def test_answer_that_is_no_http_or_breaks_off_is_none(answer: bytes) -> None:
    with socket.create_server((HOST, 0)) as server:

        def answer_both() -> None:
            for _ in range(2):
                connection, _address = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=answer_both)
        thread.start()
        port = server.getsockname()[1]
        assert probes.answers_http(HOST, port, "/health") is answer.startswith(b"HTTP")
        assert probes.read_load(HOST, port, "/metrics") == {}
        thread.join()
