"""The program of a notebook or an editor in a job, without Jupyter and without SSH."""

from __future__ import annotations

import io
import json
import os
import pwd
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
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
    assert "no client was connected for 0.2 s" in capsys.readouterr().out


def test_server_that_ends_gives_its_exit_code_and_one_without_a_limit_lasts() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(3)"]
    ) as server:
        assert session.wait_while_used(server, 0) == 3


@pytest.mark.parametrize(("command", "code"), [("exit 0", 0), ("kill -KILL $$", 128 + 9)])
def test_exit_code_of_a_server_is_that_of_a_shell(command: str, code: int) -> None:
    with subprocess.Popen(["sh", "-c", command]) as server:
        assert session.wait_while_used(server, 0) == code


def test_parent_of_a_process() -> None:
    assert session.parent_of(str(os.getpid())) == os.getppid()
    assert session.parent_of("4194999") is None


# ---- The editor's server ----


def write_host_key(argv: list[str]) -> None:
    """Write a key where ssh-keygen would."""
    path = Path(argv[argv.index("-f") + 1])
    path.write_text("private")
    Path(f"{path}.pub").write_text("ssh-ed25519 AAAA dtslurm\n")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory, on a node with programs of the names of an SSH server's."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sshd", "ssh-keygen"):
        (programs / name).touch(0o700)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(session, "SSHD_FOLDERS", ())
    monkeypatch.setattr(subprocess, "check_call", write_host_key)
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("DTSLURM_RUN_DIR", str(folder))
    return folder


def test_editor_listens_on_loopback_and_takes_the_key_of_its_user_only(run_dir: Path) -> None:
    argv = session.prepare_editor(str(run_dir), 4321, "/runs/my run/editor.pub")
    assert argv[1:] == ["-D", "-e", "-f", str(run_dir / "sshd_config")]
    assert Path(argv[0]).name == "sshd"
    configuration = run_dir / "sshd_config"
    assert {
        "ListenAddress 127.0.0.1:4321",
        f'HostKey "{run_dir}/host_key"',
        'AuthorizedKeysFile "/runs/my run/editor.pub"',
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
    } <= set(configuration.read_text().splitlines())
    assert configuration.stat().st_mode & 0o777 == 0o600  # it has the environment of the job


def test_key_of_the_editors_server_is_kept(run_dir: Path) -> None:
    session.prepare_editor(str(run_dir), 4321, "editor.pub")
    assert session.read_host_key(str(run_dir)) == "ssh-ed25519 AAAA"
    assert (run_dir / "host_key").read_text() == "private"
    (run_dir / "host_key").write_text("of the job before its restart")
    session.prepare_editor(str(run_dir), 4321, "editor.pub")
    assert (run_dir / "host_key").read_text() == "of the job before its restart"


@pytest.mark.parametrize("missing", ["sshd", "ssh-keygen"])
def test_editor_needs_both_programs_of_the_ssh_server(run_dir: Path, missing: str) -> None:
    (run_dir.parent / "bin" / missing).unlink()
    with pytest.raises(SystemExit, match="this node has no SSH server"):
        session.prepare_editor(str(run_dir), 4321, "editor.pub")


def test_ssh_server_is_found_where_systems_have_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = run_dir.parent / "bin"
    monkeypatch.setattr(session, "SSHD_FOLDERS", (str(programs),))
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert session.prepare_editor(str(run_dir), 4321, "editor.pub")[0] == str(programs / "sshd")


# ---- The program ----


class Server:
    """What the program starts: a server that listens or not, and ends by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, listens: bool = True, code: int = 0) -> None:
        self.code, self.was_terminated = code, False
        self.argv: list[str] = []
        self.variables: dict[str, str] = {}
        self.limits: list[float] = []
        self.files: dict[str, set[str]] = {}  # in the folder of the session, when the server began and later
        self.handlers: dict[int, Callable[[int, object], object]] = {}
        monkeypatch.setattr(signal, "signal", self.handlers.__setitem__)
        monkeypatch.setattr(subprocess, "Popen", self.start)
        monkeypatch.setattr(session, "has_module", lambda name: name == "jupyterlab")
        monkeypatch.setattr(session, "wait_until_it_listens", lambda _server, _port: listens)
        monkeypatch.setattr(session, "wait_while_used", self.serve)

    def start(self, argv: list[str], env: dict[str, str]) -> Server:
        self.argv, self.variables = argv, env
        self.note_files("began")
        return self

    def serve(self, _server: object, idle_s: float) -> int:
        self.limits.append(idle_s)
        self.note_files("listens")
        return self.code

    def note_files(self, moment: str) -> None:
        folder = Path(os.environ["DTSLURM_RUN_DIR"]) / "session"
        self.files[moment] = {path.name for path in folder.iterdir()}

    def poll(self) -> int:
        return self.code

    def wait(self) -> int:
        return self.code

    def terminate(self) -> None:
        self.was_terminated = True


def read_record(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "session" / "session.json"
    assert path.stat().st_mode & 0o777 == 0o600
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_notebook_says_how_it_is_reached_when_it_listens(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(monkeypatch, code=3)
    assert session.main(["notebook", "600", "--ServerApp.log_level=DEBUG"]) == 3
    record, folder = read_record(run_dir), run_dir / "session"
    token, user = (folder / "token").read_text(), pwd.getpwuid(os.getuid()).pw_name
    assert record == {"kind": "notebook", "port": record["port"], "user": user, "token": token}
    assert {f"--ServerApp.port={record['port']}", "--ServerApp.log_level=DEBUG"} <= set(server.argv)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert server.variables["JUPYTER_TOKEN_FILE"] == str(folder / "token")
    assert Path(server.variables["JUPYTER_RUNTIME_DIR"]).parent == folder  # which no other user can enter
    assert server.variables["PATH"] == os.environ["PATH"]
    assert server.limits == [0]  # Jupyter ends by itself
    said = capsys.readouterr().out
    assert said == f"the notebook listens at port {record['port']}\nthe notebook has ended\n"


def test_log_of_the_job_says_at_once_that_the_server_listens(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del run_dir
    Server(monkeypatch)
    log, written = io.BytesIO(), [b""]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(log))

    def serve(*_: object) -> int:
        written[0] = log.getvalue()
        return 0

    monkeypatch.setattr(session, "wait_while_used", serve)
    session.main(["notebook", "600"])
    assert written[0].startswith(b"the notebook listens at port ")


def test_editor_says_how_it_is_reached_when_it_listens(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(monkeypatch)
    assert session.main(["editor", "600"]) == 0
    record = read_record(run_dir)
    user = pwd.getpwuid(os.getuid()).pw_name
    assert record == {"kind": "editor", "port": record["port"], "user": user, "host_key": "ssh-ed25519 AAAA"}
    assert Path(server.argv[0]).name == "sshd"
    assert server.limits == [600]
    # The configuration contains the environment of the job.
    assert "sshd_config" in server.files["began"]
    assert "sshd_config" not in server.files["listens"]


def test_record_of_the_job_before_its_restart_does_not_outlive_its_server(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(monkeypatch)
    session.main(["notebook", "600"])
    token = read_record(run_dir)["token"]
    assert "session.json" not in server.files["began"]
    session.main(["notebook", "600"])
    assert "session.json" not in server.files["began"]
    assert read_record(run_dir)["token"] == token


@pytest.mark.parametrize(("code", "result"), [(5, 5), (0, 1)])
def test_server_that_does_not_listen_is_a_failure(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int, result: int
) -> None:
    server = Server(monkeypatch, listens=False, code=code)
    assert session.main(["notebook", "600"]) == result
    assert server.limits == []
    assert not (run_dir / "session" / "session.json").exists()


def test_server_is_ended_in_an_orderly_way_when_slurm_sends_term(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del run_dir
    server = Server(monkeypatch)
    session.main(["notebook", "600"])
    assert not server.was_terminated
    server.handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert server.was_terminated


def test_program_ends_with_the_code_of_its_server(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, code=7)
    monkeypatch.setattr(sys, "argv", ["session.py", "editor", "600"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(session.__file__, run_name="__main__")
    assert ended.value.code == 7
    assert Path(server.argv[0]).parent == run_dir.parent / "bin"
