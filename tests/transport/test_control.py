"""OpenSSH control sockets: private, replaced when dead, shared by processes; the choice of a transport."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.errors import HostUnavailable, TransportError
from dtslurm.transport.connect import choose, connect
from dtslurm.transport.local import LocalTransport
from dtslurm.transport.ssh import control
from dtslurm.transport.ssh.openssh import OpenSSHTransport
from tests.processes import ends_in_time
from tests.sshd.servers import SshLab
from tests.transport.conftest import reach
from tests.waiting import busyness


@pytest.fixture(scope="module")
def lab(sshd_lab: SshLab) -> SshLab:
    sshd_lab.server("login", env={"HOME": str(sshd_lab.home("login"))})
    return sshd_lab


@pytest.fixture
def there(lab: SshLab) -> Iterator[OpenSSHTransport]:
    transport = reach(lab, "login", "openssh")
    assert isinstance(transport, OpenSSHTransport)
    yield transport
    transport.logout()


def sockets(lab: SshLab) -> list[Path]:
    return [path for path in (lab.root / "run/dtslurm").glob("*") if path.is_socket()]


def master(path: Path) -> int:
    """The process behind a socket."""
    (pid,) = control.masters(path)
    return pid


def logins(lab: SshLab) -> int:
    return lab.servers["login"].log.count("Accepted publickey for ")


def test_commands_share_a_single_login(there: OpenSSHTransport, lab: SshLab) -> None:
    before = logins(lab)
    for number in range(3):
        assert there.run(["echo", str(number)]).ok
    other = reach(lab, "login", "openssh")
    assert other.run(["true"]).ok
    other.close()
    assert there.run(["true"]).ok
    assert logins(lab) == before + 1


def test_c13_control_sockets_are_private(there: OpenSSHTransport, lab: SshLab) -> None:
    there.open()
    folder = lab.root / "run/dtslurm"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(sockets(lab)) == 1


@pytest.mark.parametrize("fault", ["mode", "link", "file"])
def test_c13_socket_directory_open_to_other_users_is_refused(lab: SshLab, fault: str) -> None:
    runtime = lab.root / fault
    runtime.mkdir()
    place = runtime / "dtslurm"
    if fault == "mode":
        place.mkdir()
        place.chmod(0o770)
    elif fault == "link":
        (runtime / "elsewhere").mkdir(mode=0o700)
        place.symlink_to("elsewhere")
    else:
        place.touch()
    with pytest.raises(TransportError, match="is not a private folder of your user"):
        control.folder({"XDG_RUNTIME_DIR": str(runtime)})


def test_c13_socket_directory_of_another_user_is_replaced_by_the_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, home = Path(tempfile.mkdtemp(dir="/tmp")), Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(control, "TMP", str(shared))
    squatted = shared / f"dtslurm-{os.getuid()}"
    squatted.mkdir()
    squatted.chmod(0o777)
    uid, number = os.getuid(), squatted.stat().st_ino
    lstat = Path.lstat

    def of_another(path: Path) -> os.stat_result:
        answer = list(lstat(path))
        answer[4] += lstat(path).st_ino == number  # its owner
        return os.stat_result(answer)

    monkeypatch.setattr(Path, "lstat", of_another)
    try:
        place = control.folder({"HOME": str(home)})
        assert place.parent == home / ".cache/dtslurm"
        assert place.stat().st_mode & 0o777 == 0o700
        assert place.stat().st_uid == uid
        with pytest.raises(TransportError, match=f"{squatted} is not a private folder of your user"):
            control.folder({})
    finally:
        for item in (shared, home):
            shutil.rmtree(item)


@pytest.mark.parametrize("runtime", ["", "/no/such/folder", "long"])
def test_c13_socket_path_is_short_enough(tmp_path: Path, runtime: str) -> None:
    if runtime == "long":
        place = tmp_path / ("x" * 100)
        place.mkdir()
        runtime = str(place)
    path = control.socket_path({"XDG_RUNTIME_DIR": runtime}, "host", None, "config")
    assert path.parent == Path(f"/tmp/dtslurm-{os.getuid()}")
    assert len(str(path)) + 17 < 104


def test_socket_path_depends_on_host_user_and_configuration(tmp_path: Path, lab: SshLab) -> None:
    what: list[tuple[str | None, ...]] = [
        ("a", None, None),
        ("a", "b", None),
        ("a", None, "b"),
        ("ab", None, None),
    ]
    assert len({control.socket_path(lab.env, *item) for item in what}) == 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_f57_dead_or_stopped_master_is_replaced(
    there: OpenSSHTransport, lab: SshLab, number: signal.Signals
) -> None:
    there.run(["true"])
    pid = master(sockets(lab)[0])
    os.kill(pid, number)
    other = reach(lab, "login", "openssh")
    assert other.run(["echo", "x"]).stdout == "x\n"
    assert there.run(["echo", "y"]).stdout == "y\n"
    assert ends_in_time(pid, 20 * busyness()), "the old master is still there"


def test_f57_master_stopped_during_a_stream_is_replaced(there: OpenSSHTransport, lab: SshLab) -> None:
    with there.stream(["sh", "-c", "echo on; sleep 60"]) as stream:
        assert next(stream) == b"on\n"
        os.kill(master(sockets(lab)[0]), signal.SIGSTOP)
        assert there.run(["echo", "x"], timeout=20).stdout == "x\n"


def test_concurrent_processes_share_a_single_login(there: OpenSSHTransport, lab: SshLab) -> None:
    there.logout()
    before = logins(lab)
    code = (
        "from dtslurm.transport.connect import connect\n"
        "print(connect('login', transport='openssh').run(['echo', 'x'], timeout=600).stdout)"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=lab.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for _ in range(4)
    ]
    assert [racer.communicate(timeout=600)[0].strip() for racer in racers] == ["x"] * 4
    assert logins(lab) == before + 1


def test_existing_master_of_the_user_is_used(lab: SshLab, there: OpenSSHTransport) -> None:
    own = lab.root / "mine"
    lab.host("mine", lab.servers["login"].port, f"ControlPath {own}")
    argv = ["ssh", "-F", str(lab.config), "-M", "-N", "-f", "mine"]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600)
    try:
        before = logins(lab)
        transport = reach(lab, "mine", "openssh")
        assert transport.run(["echo", "x"]).stdout == "x\n"
        assert logins(lab) == before
        assert control.alive(own), "the user's master is not ours to end"
    finally:
        subprocess.run(["ssh", "-F", str(lab.config), "-O", "exit", "mine"], capture_output=True, check=False)


@pytest.mark.parametrize("fault", ["", "no socket", "open folder", "gone", "link"])
def test_control_socket_must_be_private_to_the_user(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "f"
    folder.mkdir(0o700)
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(folder)  # a socket's path is short
        listening.bind("s")
        os.chdir(here)
        if fault == "no socket":
            path.unlink()
            path.write_text("")
        elif fault == "open folder":
            folder.chmod(0o777)
        elif fault == "gone":
            path.unlink()
        elif fault == "link":
            path = tmp_path / "link"
            path.symlink_to(folder / "s")
        assert control.is_own_socket(path) is not bool(fault)
        if not fault:
            folder.chmod(0o1777)
            assert control.is_own_socket(path)
            if os.geteuid() == 0:
                os.chown(path, 65534, 65534)
                assert not control.is_own_socket(path)


def test_at_most_three_turns_are_held_at_once_by_all_programs(tmp_path: Path) -> None:
    path = tmp_path / "s"
    holding = threading.Semaphore(0)
    free = threading.Event()

    def hold() -> None:
        with control.turn(path, 3, time.monotonic() + 30):
            holding.release()
            free.wait(30)

    threads = [threading.Thread(target=hold) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert holding.acquire(timeout=30)
    with pytest.raises(TimeoutError), control.turn(path, 3, time.monotonic() + 0.2):
        pass
    free.set()
    with control.turn(path, 3, time.monotonic() + 30):
        pass
    for thread in threads:
        thread.join()


def test_at_most_three_channels_are_open_in_a_process(there: OpenSSHTransport) -> None:
    from contextlib import ExitStack

    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(there.stream(["cat"]))
        with pytest.raises(HostUnavailable, match="accepts no more concurrent commands"):
            there.run(["true"], timeout=0.5)
    assert there.run(["true"]).ok


def test_socket_directory_with_special_characters_works(lab: SshLab) -> None:
    runtime = lab.root / "a %h b"
    runtime.mkdir(mode=0o700)
    transport = connect("login", transport="openssh", env={**lab.environ(), "XDG_RUNTIME_DIR": str(runtime)})
    assert transport.run(["echo", "x"]).stdout == "x\n"
    for path in (runtime / "dtslurm").glob("*"):
        if path.is_socket():
            control.clear(path)


# ---- which transport


def test_missing_host_selects_the_local_transport() -> None:
    assert isinstance(connect(None), LocalTransport)
    assert isinstance(connect("login", transport="local"), LocalTransport)


def test_openssh_is_chosen_when_ssh_is_installed(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\n")
    assert choose(None, {"PATH": str(tmp_path)})[0] == "paramiko"
    (tmp_path / "ssh").chmod(0o755)
    assert choose("auto", {"PATH": str(tmp_path)}) == ("openssh", f"{tmp_path}/ssh is installed")
    assert choose("paramiko", {"PATH": str(tmp_path)})[0] == "paramiko"


def test_creating_a_transport_has_no_side_effects(tmp_path: Path) -> None:
    env = {"PATH": "", "XDG_RUNTIME_DIR": str(tmp_path), "DTSLURM_SSH_CONFIG": "/no/such/file"}
    for kind in ("openssh", "paramiko"):
        connect("login", transport=kind, env=env).close()
    assert list(tmp_path.iterdir()) == []
