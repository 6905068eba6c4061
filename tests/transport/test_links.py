"""Links as users have them, and links that break: OpenSSH and paramiko against real sshd's."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtslurm.errors import (
    CommandTimeout,
    HostUnavailable,
    LoginRefused,
    RequestInvalid,
    TransportError,
)
from dtslurm.transport.base import Transport
from dtslurm.transport.connect import connect
from tests.conftest import slurm_required
from tests.sshd.proxy import Proxy
from tests.sshd.servers import AS_ROOT, Server, SshLab, fingerprint, free_port, make_key, program
from tests.transport.conftest import REMOTE, reach

Reach = Callable[[str], Transport]


@pytest.fixture(params=REMOTE)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def to(kind: str, sshd_lab: SshLab) -> Iterator[Reach]:
    """A transport of either kind to a host of the lab."""
    made: list[Transport] = []

    def make(host: str) -> Transport:
        made.append(reach(sshd_lab, host, kind))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


def server(lab: SshLab, alias: str, **more: object) -> Server:
    """A server of the module, started once."""
    if alias not in lab.servers:
        env = {"HOME": str(lab.home(alias)), **(more.pop("env", None) or {})}  # type: ignore[dict-item]
        lab.server(alias, env=env, **more)  # type: ignore[arg-type]
    return lab.servers[alias]


def home(lab: SshLab, alias: str) -> Path:
    return lab.root / "homes" / alias


def logins(one: Server) -> int:
    return len(re.findall(r"Accepted \S+ for ", one.log))


def soon(happened: Callable[[], object], limit: float = 30) -> None:
    end = time.monotonic() + limit
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def when(happened: Callable[[], object], then: Callable[[], None]) -> None:
    soon(happened)
    then()


def name_for(lab: SshLab, proxy: Proxy, one: Server, *client: str) -> str:
    """A new name of a server behind a proxy, its key known."""
    alias = f"{one.alias}-{proxy.port}"
    with lab.known_hosts.open("a") as file:
        file.write(f"[127.0.0.1]:{proxy.port} {one.host_key}\n")
    lab.host(alias, proxy.port, *client)
    return alias


# ---- hosts as they are


def test_f19_a_banner_and_noisy_start_up_files(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    banner = sshd_lab.root / "banner"
    banner.write_text("*** WELCOME ***\nThe site was down yesterday.\n")
    one = server(sshd_lab, "noisy", lines=[f"Banner {banner}"])
    noise = "echo 'sourced: .bashrc'; printf 'no end of line'; echo oops >&2; printf '\\036x-begin 1\\036'\n"
    (home(sshd_lab, one.alias) / ".bashrc").write_text(noise)
    there = to("noisy")
    done = there.run(["sh", "-c", "printf out; printf err >&2; exit 5"])
    assert (done.code, done.stdout, done.stderr) == (5, "out", "err")
    there.put(b"data", str(tmp_path / "file"))
    assert there.get(str(tmp_path / "file")) == b"data"
    with there.stream(["printf", "x"]) as stream:
        assert b"".join(stream) == b"x"


def test_f20_what_start_up_files_set_does_not_bend_slurm(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "settings")
    lines = "export SBATCH_PARTITION=x SQUEUE_STATES=F SLURM_JOB_ID=7 SLURM_CONF=/c RANK=1\n"
    lines += "export MINE='a\nSLURM_B=c'\n"
    lines += "module() { echo loaded; }; export -f module\n"
    (home(sshd_lab, "settings") / ".bashrc").write_text(lines)
    script = 'echo "$SBATCH_PARTITION,$SQUEUE_STATES,$SLURM_JOB_ID,$RANK,$SLURM_CONF,$MINE"'
    script += "; env | grep -c BASH_FUNC"
    done = to("settings").run(["sh", "-c", script])
    assert done.stdout == ",,,,/c,a\nSLURM_B=c\n0\n"


def test_programs_that_only_login_shells_find(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "modules")
    folder = home(sshd_lab, "modules") / "opt slurm/bin"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sbatch-here").write_text("#!/bin/sh\necho $SLURM_CONF\n")
    (folder / "sbatch-here").chmod(0o755)
    profile = f"echo welcome\nexport PATH='{folder}':$PATH SLURM_CONF=/opt/conf\n"
    (home(sshd_lab, "modules") / ".bash_profile").write_text(profile)
    assert to("modules").run(["sbatch-here"]).stdout == "/opt/conf\n"


@pytest.mark.parametrize("shell", ["bash", "dash", "zsh", "tcsh", "fish"])
def test_f22_any_login_shell(sshd_lab: SshLab, to: Reach, shell: str, tmp_path: Path) -> None:
    found = shutil.which(shell)
    if found is None:
        (pytest.fail if slurm_required() else pytest.skip)(f"no {shell} on this machine")
    # sshd hands the line to the login shell as its last word: so does this
    server(sshd_lab, f"with-{shell}", lines=[f'ForceCommand exec {found} -c "$SSH_ORIGINAL_COMMAND"'])
    there = to(f"with-{shell}")
    odd = ["a b", "$HOME", "!x", "'", '"', "\\", "a\nb", "*", "~", "`id`", ""]
    done = there.run(["printf", "%s|", *odd], env={"X": "y"})
    assert done.stdout == "".join(f"{word}|" for word in odd)
    assert there.run(["sh", "-c", "cat; exit 3", "x" * 130_000], stdin=b"in").stdout == "in"
    there.put(b"\0\xff", str(tmp_path / "a b"))
    assert there.get(str(tmp_path / "a b")) == b"\0\xff"
    with pytest.raises(CommandTimeout):
        there.run(["sleep", "600"], timeout=2)


def test_a_home_with_spaces_and_unicode(sshd_lab: SshLab, to: Reach) -> None:
    odd = sshd_lab.root / "homes" / "Jürgen & Søn's 家"
    odd.mkdir(parents=True, exist_ok=True)
    server(sshd_lab, "odd-home", env={"HOME": str(odd)})
    (odd / ".bashrc").write_text("cd\n")
    there = to("odd-home")
    assert there.run(["pwd"]).stdout == f"{odd}\n"
    there.put(b"x", f"{odd}/runs/a file")
    assert there.get(f"{odd}/runs/a file") == b"x"


def test_no_sftp_is_needed(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    one = server(sshd_lab, "plain")
    assert "sftp" not in (one.folder / "sshd_config").read_text()
    there = to("plain")
    there.put(b"x" * 5_000_000, str(tmp_path / "file"))
    assert there.get(str(tmp_path / "file")) == b"x" * 5_000_000


def test_f58_more_commands_than_sessions(sshd_lab: SshLab, to: Reach) -> None:
    one = server(sshd_lab, "two-sessions", lines=["MaxSessions 2"])
    there = to("two-sessions")
    there.open()
    before = logins(one)
    answers = []

    def ask(number: int) -> None:
        answers.append(there.run(["sh", "-c", f"sleep 0.3; echo {number}"], timeout=120).stdout)

    with there.stream(["sh", "-c", "echo on; read x"]) as stream:
        assert next(stream) == b"on\n"
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answers) == [f"{number}\n" for number in range(5)]
    assert logins(one) == before, "a refused session must not become a login of its own"


def test_f58_no_session_left(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    one = server(sshd_lab, "one-session", lines=["MaxSessions 1"])
    there = to("one-session")
    there.open()
    before = logins(one)
    with there.stream(["cat"]) as stream:
        with pytest.raises(HostUnavailable, match="takes no more commands at once; this one was not started"):
            there.run(["touch", str(tmp_path / "ran")], timeout=2)
        stream.close_stdin()
    assert there.run(["echo", "again"], timeout=60).stdout == "again\n"
    assert not (tmp_path / "ran").exists()
    assert logins(one) == before


def test_a_host_that_runs_something_else(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "forced", lines=["ForceCommand echo This host only forwards."])
    with pytest.raises(TransportError) as caught:
        to("forced").run(["true"], timeout=20)
    assert "This host only forwards." in caught.value.evidence
    assert "unknown" in caught.value.message


@pytest.mark.skipif(not AS_ROOT, reason="only root may give sshd a PAM stack of its own")
def test_f59_a_host_that_drops_every_login(sshd_lab: SshLab, to: Reach) -> None:
    folder = sshd_lab.root / "pam-dropping"
    folder.mkdir(exist_ok=True)
    stack = "auth required pam_permit.so\naccount required pam_permit.so\nsession required pam_deny.so\n"
    (folder / "sshd").write_text(stack)
    bind = f'mount --bind {folder} /etc/pam.d && exec "$@"'
    one = server(
        sshd_lab, "drops", lines=["UsePAM yes"], prefix=["unshare", "--mount", "sh", "-c", bind, "sh"]
    )
    before = logins(one)
    with pytest.raises(TransportError):
        to("drops").run(["true"], timeout=20)
    assert logins(one) - before <= 2


def test_c14_a_host_that_never_stops_printing(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "flood", lines=["ForceCommand yes"])
    with pytest.raises(TransportError, match="prints without end"):
        to("flood").run(["true"], timeout=60)


# ---- on the way


def test_through_a_jump_host(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    jump = server(sshd_lab, "jump", lines=["ForceCommand /bin/false"])
    far_one = server(sshd_lab, "behind")
    sshd_lab.host("behind-jump", far_one.port, "ProxyJump jump")
    before = logins(jump)
    there = to("behind-jump")
    assert there.run(["echo", "x"]).stdout == "x\n"
    there.put(b"y" * 1_000_000, str(tmp_path / "file"))
    assert there.get(str(tmp_path / "file")) == b"y" * 1_000_000
    assert logins(jump) == before + 1


def test_through_two_jump_hosts(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "jump", lines=["ForceCommand /bin/false"])
    server(sshd_lab, "jump2", lines=["ForceCommand /bin/false"])
    far_one = server(sshd_lab, "behind")
    sshd_lab.host("behind-two", far_one.port, "ProxyJump jump,jump2")
    assert to("behind-two").run(["echo", "x"]).stdout == "x\n"


def test_through_a_command(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "jump", lines=["ForceCommand /bin/false"])
    far_one = server(sshd_lab, "behind")
    ssh = f"{program('ssh')} -F {sshd_lab.config} -W %h:%p jump"
    sshd_lab.host("behind-command", far_one.port, f"ProxyCommand {ssh}")
    assert to("behind-command").run(["echo", "x"]).stdout == "x\n"


def test_a_jump_host_that_cannot_reach_the_host(sshd_lab: SshLab, to: Reach) -> None:
    server(sshd_lab, "jump", lines=["ForceCommand /bin/false"])
    sshd_lab.host("behind-nothing", free_port(), "ProxyJump jump")
    with pytest.raises(HostUnavailable, match="the jump host cannot reach behind-nothing"):
        to("behind-nothing").run(["true"])


def test_c11_a_jump_host_with_an_unknown_key(sshd_lab: SshLab, to: Reach) -> None:
    stranger = server(sshd_lab, "strange-jump", known=False)
    far_one = server(sshd_lab, "behind")
    sshd_lab.host("behind-strange", far_one.port, "ProxyJump strange-jump")
    with pytest.raises(LoginRefused, match="not known") as caught:
        to("behind-strange").run(["true"])
    assert fingerprint(stranger.folder / "hostkey") in caught.value.message


def test_50_ms_of_latency(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    one = server(sshd_lab, "plain")
    with Proxy(one.port, delay=0.05) as proxy:
        there = to(name_for(sshd_lab, proxy, one))
        assert there.run(["echo", "x"]).stdout == "x\n"
        data = os.urandom(1 << 20) * 10
        there.put(data, str(tmp_path / "file"))
        assert there.get(str(tmp_path / "file")) == data
        with there.stream(["sh", "-c", "while read x; do echo got $x; done"]) as stream:
            for number in range(5):
                stream.send(f"{number}\n".encode())
            stream.close_stdin()
            assert b"".join(stream) == b"".join(f"got {number}\n".encode() for number in range(5))


# ---- keys of hosts


def test_c11_an_unknown_host_key_is_refused(sshd_lab: SshLab, to: Reach) -> None:
    one = server(sshd_lab, "unknown", known=False)
    before = sshd_lab.known_hosts.read_text()
    with pytest.raises(LoginRefused, match="the host key of unknown is not known here") as caught:
        to("unknown").run(["true"])
    assert fingerprint(one.folder / "hostkey") in caught.value.message
    assert caught.value.hint
    assert not caught.value.transient
    assert sshd_lab.known_hosts.read_text() == before
    assert logins(one) == 0


def test_c11_a_changed_host_key_is_refused(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    one = server(sshd_lab, "changed", known=False)
    if f":{one.port} " not in sshd_lab.known_hosts.read_text():
        with sshd_lab.known_hosts.open("a") as file:
            file.write(f"[127.0.0.1]:{one.port} {make_key(tmp_path / 'other')}\n")
    with pytest.raises(LoginRefused, match="the host key of changed has changed") as caught:
        to("changed").run(["true"])
    assert fingerprint(one.folder / "hostkey") in caught.value.message
    assert str(sshd_lab.known_hosts) in "\n".join(caught.value.evidence)
    assert logins(one) == 0


def test_c11_a_revoked_host_key_is_refused(sshd_lab: SshLab, to: Reach) -> None:
    one = server(sshd_lab, "revoked")
    if "@revoked" not in sshd_lab.known_hosts.read_text():
        with sshd_lab.known_hosts.open("a") as file:
            file.write(f"@revoked * {one.host_key}\n")
    with pytest.raises(LoginRefused, match="was revoked"):
        to("revoked").run(["true"])
    assert logins(one) == 0


# ---- no link


def test_a_host_that_refuses_the_connection(sshd_lab: SshLab, to: Reach) -> None:
    sshd_lab.host("down", free_port())
    with pytest.raises(HostUnavailable, match="down refused the connection") as caught:
        to("down").run(["true"])
    assert caught.value.transient


def test_a_name_that_does_not_resolve(sshd_lab: SshLab, to: Reach) -> None:
    sshd_lab.host("lost", 22, "HostName no-such-host.invalid")
    with pytest.raises(HostUnavailable, match="the name of lost cannot be resolved"):
        to("lost").run(["true"])


def test_a_host_that_does_not_answer(sshd_lab: SshLab, to: Reach) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        sshd_lab.host("silent", silent.getsockname()[1], "ConnectTimeout 2")
        with pytest.raises(HostUnavailable, match="silent did not answer"):
            to("silent").run(["true"])
    sshd_lab.hosts = [one for one in sshd_lab.hosts if not one.startswith("Host silent\n")]


def test_f59_a_refused_login_is_not_tried_again(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    one = server(sshd_lab, "plain")
    make_key(tmp_path / "wrong")
    sshd_lab.host(f"denied-{tmp_path.name}", one.port, f"IdentityFile {tmp_path}/wrong")
    # its own key comes first, the lab's second: leave only the wrong one
    lines = [line for line in sshd_lab.config.read_text().splitlines() if "/id" not in line]
    sshd_lab.config.write_text("\n".join(lines) + "\n")
    try:
        there = to(f"denied-{tmp_path.name}")
        with pytest.raises(LoginRefused, match="refused the login") as caught:
            there.run(["true"])
        assert "publickey" in caught.value.message
        assert not caught.value.transient
        before = one.log.count("Connection from")
        with pytest.raises(LoginRefused, match="refused the login"):
            there.run(["true"])
        assert one.log.count("Connection from") == before
    finally:
        sshd_lab.host("unused", one.port)


@pytest.mark.parametrize("host", ["-oProxyCommand=touch /tmp/x", "a b", "a;b", "", "a\nb", "$(id)", "a/b"])
def test_c10_a_host_is_never_an_option(kind: str, host: str) -> None:
    with pytest.raises(RequestInvalid, match="is no name of a host"):
        connect(host, transport=kind)


@pytest.mark.parametrize("user", ["-l", "a b", "a;b", "", "a\nb"])
def test_c10_a_user_is_never_an_option(kind: str, user: str) -> None:
    with pytest.raises(RequestInvalid, match="is no name of a user"):
        connect("host", user=user, transport=kind)


# ---- links that break


def test_f57_the_server_is_killed_in_the_middle(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    one = server(sshd_lab, "plain")
    there = to("plain")
    note = tmp_path / "begun"
    killer = threading.Thread(target=when, args=(note.exists, one.cut))
    killer.start()
    with pytest.raises(TransportError, match="was cut while sh ran; what it did is unknown"):
        there.run(["sh", "-c", f"echo part; touch {note}; sleep 30"], timeout=60)
    killer.join()
    assert there.run(["echo", "again"]).stdout == "again\n"


def test_f57_the_connection_is_reset_in_the_middle(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    one = server(sshd_lab, "plain")
    with Proxy(one.port) as proxy:
        there = to(name_for(sshd_lab, proxy, one))
        with there.stream(["sh", "-c", "echo one; sleep 30"]) as stream:
            assert next(stream) == b"one\n"
            proxy.cut()
            with pytest.raises(TransportError, match="was cut"):
                next(stream)
        assert there.run(["echo", "again"]).stdout == "again\n"


def test_f16_a_file_whose_link_is_cut_stays_as_it_was(sshd_lab: SshLab, to: Reach, tmp_path: Path) -> None:
    one = server(sshd_lab, "plain")
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with Proxy(one.port, delay=0.005) as proxy:
        there = to(name_for(sshd_lab, proxy, one))
        there.open()
        start = proxy.passed
        cutter = threading.Thread(target=when, args=(lambda: proxy.passed > start + 3_000_000, proxy.cut))
        cutter.start()
        with pytest.raises(TransportError):
            there.put(b"new" * 30_000_000, str(target))
        cutter.join()
    assert target.read_bytes() == b"old"
    soon(lambda: list(tmp_path.iterdir()) == [target])


def test_f57_a_server_that_is_stopped(sshd_lab: SshLab, to: Reach) -> None:
    one = server(sshd_lab, "stopped")
    there = to("stopped")
    assert there.run(["echo", "x"]).stdout == "x\n"
    one.signal(signal.SIGSTOP)
    try:
        with pytest.raises((CommandTimeout, HostUnavailable), match="did not answer"):
            there.run(["echo", "x"], timeout=3)
    finally:
        one.signal(signal.SIGCONT)
    assert there.run(["echo", "again"]).stdout == "again\n"


def test_f57_a_network_that_swallows_everything(sshd_lab: SshLab, to: Reach) -> None:
    one = server(sshd_lab, "plain")
    with Proxy(one.port) as proxy:
        there = to(name_for(sshd_lab, proxy, one, "ConnectTimeout 2"))
        with there.stream(["sh", "-c", "echo on; sleep 60"]) as stream:
            assert next(stream) == b"on\n"
            proxy.freeze()
            with pytest.raises((CommandTimeout, HostUnavailable), match="did not answer"):
                there.run(["echo", "x"], timeout=3)


def test_f57_a_link_that_was_lost_between_commands(sshd_lab: SshLab, to: Reach) -> None:
    one = server(sshd_lab, "plain")
    there = to("plain")
    there.run(["true"])
    one.cut()
    soon(lambda: not one.connections())
    assert there.run(["echo", "again"]).stdout == "again\n"


def test_f2_a_killed_client_leaves_no_command_for_ever(sshd_lab: SshLab, kind: str, tmp_path: Path) -> None:
    import subprocess
    import sys

    server(sshd_lab, "plain")
    note = tmp_path / "pid"
    code = (
        "import sys\nfrom dtslurm.transport.connect import connect\n"
        f"connect('plain', transport={kind!r}).run(['sh', '-c', 'echo $$ > {note}; sleep 600'], timeout=1.0)"
    )
    client = subprocess.Popen([sys.executable, "-c", code], env=sshd_lab.environ(), stdin=subprocess.DEVNULL)
    soon(lambda: note.exists() and note.read_text().strip())
    client.kill()
    client.wait()
    pid = int(note.read_text())
    soon(lambda: not Path(f"/proc/{pid}").exists())
