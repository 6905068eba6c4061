"""The program of a notebook or an editor in a job, without Jupyter and without SSH."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker import session
from tests.ports import free_port
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "POLL_S", 0.02)


def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *modules: str, idle_s: int = 1800) -> list[str]:
    monkeypatch.setattr(session, "has_module", lambda name: name in modules)
    return session.prepare_notebook(str(tmp_path), 4321, idle_s, ["--ServerApp.log_level=DEBUG"])


def test_notebook_is_the_best_jupyter_of_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = ("jupyterlab", "notebook", "jupyter_server")
    for modules, command in ((every, "lab"), (every[1:], "notebook"), (every[2:], "server")):
        argv = prepare(tmp_path, monkeypatch, *modules)
        assert argv[:4] == [sys.executable, "-m", "jupyter", command]
        assert {"--ip=127.0.0.1", "--ServerApp.port=4321", "--ServerApp.port_retries=0"} <= set(argv)
        assert argv[-1] == "--ServerApp.log_level=DEBUG"
        assert ("--allow-root" in argv) is (os.geteuid() == 0)
    with pytest.raises(SystemExit, match="has no Jupyter: install jupyterlab, or give another Python"):
        prepare(tmp_path, monkeypatch)


@pytest.mark.parametrize(("idle_s", "interval_s"), [(1, 1), (40, 10), (1800, 300)])
def test_idle_kernels_and_then_the_server_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle_s: int, interval_s: int
) -> None:
    argv = prepare(tmp_path, monkeypatch, "jupyterlab", idle_s=idle_s)
    assert {
        f"--ServerApp.shutdown_no_activity_timeout={idle_s}",
        f"--MappingKernelManager.cull_idle_timeout={idle_s}",
        f"--MappingKernelManager.cull_interval={interval_s}",
        "--MappingKernelManager.cull_connected=True",
    } <= set(argv)


def test_token_is_private_not_in_the_command_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = prepare(tmp_path, monkeypatch, "jupyterlab")
    token = session.read_token(str(tmp_path))
    assert len(token) >= 40
    assert token not in " ".join(argv)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    prepare(tmp_path, monkeypatch, "jupyterlab")
    assert session.read_token(str(tmp_path)) == token


def test_editor_gets_the_environment_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    variables = {
        "COLOUR": "dark blue",
        "A": "1",
        "HOME": "/home/me",
        "LINES": "a\nb",
        "Q": 'a "b"',
        "C": "a\\b",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert session.environment_lines() == ['SetEnv "A=1" "COLOUR=dark blue"']
    monkeypatch.delenv("A")
    monkeypatch.delenv("COLOUR")
    assert session.environment_lines() == []


def test_editor_needs_an_ssh_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SSHD_FOLDERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="this node has no SSH server"):
        session.prepare_editor(str(tmp_path), 4321, "editor.pub")


def test_private_file_replaces_an_earlier_one_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    path.write_text("earlier")
    path.chmod(0o644)
    (tmp_path / f"session.json.{os.getpid()}").write_text("of a start that was killed")
    session.write_private(str(path), "later")
    assert path.read_text() == "later"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["session.json"]


LISTENS = (
    "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(100)"
)


def test_server_is_waited_for() -> None:
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", LISTENS, str(port)]) as server:
        assert session.wait_until_it_listens(server, port)
        server.kill()
    with subprocess.Popen([sys.executable, "-c", ""]) as server:
        assert not session.wait_until_it_listens(server, free_port())


def test_server_that_never_listens_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "START_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as server:
        assert not session.wait_until_it_listens(server, free_port())
        assert server.wait() == -signal.SIGTERM


# A process with a child as long as its stdin is open, as an SSH server has for a connection.
CONNECTED = """
import subprocess, time
child = subprocess.Popen(["cat"])
print("began", flush=True)
child.wait()
time.sleep(100)
"""


def test_server_is_used_as_long_as_it_has_children(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [sys.executable, "-c", CONNECTED]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        server.stdout.readline()
        results: list[Any] = []
        waiting = threading.Thread(target=lambda: results.append(session.wait_while_used(server, 0.2)))
        waiting.start()
        time.sleep(0.5)  # longer than the limit
        assert server.poll() is None
        server.stdin.close()
        wait_until(lambda: not waiting.is_alive())
        assert results == [0]
    assert "nobody was connected for 0.2 s" in capsys.readouterr().out


def test_server_that_ends_gives_its_exit_code_and_one_without_a_limit_lasts() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(3)"]
    ) as server:
        assert session.wait_while_used(server, 0) == 3


def test_parent_of_a_process() -> None:
    assert session.parent_of(str(os.getpid())) == os.getppid()
    assert session.parent_of("4194999") is None
