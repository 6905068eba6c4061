"""Real sshd's on loopback with keys of their own, and the client's configuration to reach them."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dtslurm.transport.ssh import control
from tests.ports import free_port

PATIENCE = 30.0
SYSTEM = "/usr/local/sbin:/usr/sbin:/sbin"
USER = pwd.getpwuid(os.geteuid()).pw_name
AS_ROOT = os.geteuid() == 0


class NoSshd(Exception):
    """No sshd or ssh on this machine."""


def program(name: str) -> str:
    """The file of a program; sshd wants to be called by its full path."""
    result = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{SYSTEM}")
    if result is None:
        raise NoSshd(f"no {name} on this machine")
    return result


def make_key(path: Path) -> str:
    """Make a key pair; return the public half as known_hosts and authorized_keys have it."""
    subprocess.run(
        [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    kind, key, *_ = path.with_suffix(".pub").read_text().split()
    return f"{kind} {key}"


def fingerprint(key: Path) -> str:
    """The SHA256 fingerprint of a key file."""
    done = subprocess.run(
        [program("ssh-keygen"), "-l", "-f", str(key)], capture_output=True, text=True, check=True
    )
    return done.stdout.split()[1]


@dataclass
class Server:
    """One sshd: its alias in the client's configuration, its port, its process."""

    alias: str
    port: int
    folder: Path
    process: subprocess.Popen[bytes]
    host_key: str

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def connections(self) -> list[psutil.Process]:
        """The sshd processes that serve a login (not the commands below them)."""
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.process.pid).children(recursive=True)
            return [item for item in below if item.is_running() and "sshd" in item.name()]
        return []

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and to all that serves its logins."""
        for item in [psutil.Process(self.process.pid), *self.connections()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                item.send_signal(number)

    def cut(self) -> None:
        """Kill what serves the logins: the links break, commands stay."""
        for item in self.connections():
            with contextlib.suppress(psutil.NoSuchProcess):
                item.kill()

    def down(self) -> None:
        """Kill the server and all that serves its logins."""
        self.process.send_signal(signal.SIGSTOP)  # or it accepts another login before it is killed
        for item in self.connections():
            with contextlib.suppress(psutil.NoSuchProcess):
                for below in item.children(recursive=True):
                    below.kill()
                item.kill()
        self.process.kill()
        self.process.wait()


@dataclass
class SshLab:
    """Some sshd's, one client. ``env`` makes dtslurm use them; ``ssh -F lab.config ALIAS`` does by hand.

    The lab's folder lies below /tmp whatever TMPDIR says: control sockets need a short path.
    """

    root: Path
    servers: dict[str, Server] = field(default_factory=dict)
    hosts: list[str] = field(default_factory=list)
    _ports: dict[str, int] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        return self.root / "config"

    @property
    def known_hosts(self) -> Path:
        return self.root / "known_hosts"

    @property
    def key(self) -> Path:
        return self.root / "id"

    @property
    def env(self) -> dict[str, str]:
        return {"DTSLURM_SSH_CONFIG": str(self.config), "XDG_RUNTIME_DIR": str(self.root / "run")}

    def environ(self) -> dict[str, str]:
        """A whole environment of the client, without the agent and the askpass of whoever runs the tests."""
        foreign = {"SSH_AUTH_SOCK", "SSH_ASKPASS", "DISPLAY", "SSH_ASKPASS_REQUIRE"}
        return {**{k: v for k, v in os.environ.items() if k not in foreign}, **self.env}

    def prepare(self) -> SshLab:
        (self.root / "run").mkdir(mode=0o700)
        (self.root / "authorized_keys").write_text(make_key(self.key) + "\n")
        self.known_hosts.touch()
        if AS_ROOT:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        return self

    def server(
        self,
        alias: str,
        *,
        env: Mapping[str, str] | None = None,
        lines: Sequence[str] = (),
        client: Sequence[str] = (),
        prefix: Sequence[str] = (),
        known: bool = True,
        port: int | None = None,
    ) -> Server:
        """Start an sshd and let the client know it as ``alias``.

        Args:
            alias: its name for the client.
            env: variables of its sessions.
            lines: lines of sshd_config before the usual ones, which they beat.
            client: lines of the client's configuration for it.
            prefix: words before sshd's own.
            known: whether its key goes to known_hosts.
            port: the port; a free one unless given.
        """
        folder = self.root / alias
        folder.mkdir()
        host_key = make_key(folder / "hostkey")
        port = port or free_port()
        words = " ".join(_setenv(f"{k}={v}") for k, v in (env or {}).items())
        config = [
            *lines,
            f"ListenAddress 127.0.0.1:{port}",
            f"HostKey {folder}/hostkey",
            "PidFile none",
            f"AuthorizedKeysFile {self.root}/authorized_keys",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            "MaxStartups 100",
            "LogLevel VERBOSE",
            *([f"SetEnv {words}"] if words else []),
        ]
        (folder / "sshd_config").write_text("\n".join(config) + "\n")
        process = self._spawn(folder, prefix)
        server = Server(alias, port, folder, process, host_key)
        self.servers[alias] = server
        self._await(server)
        if known:
            with self.known_hosts.open("a") as file:
                file.write(f"[127.0.0.1]:{port} {host_key}\n")
        self.host(alias, port, *client)
        return server

    def up(self, server: Server) -> None:
        """Start a server again that was down."""
        server.process = self._spawn(server.folder, ())
        self._await(server)

    def host(self, alias: str, port: int, *client: str) -> None:
        """Give the client another name for what listens on a port."""
        self.hosts.append("\n  ".join([f"Host {alias}", *client, f"Port {port}"]))
        common = [
            "Host *", "HostName 127.0.0.1", f"User {USER}", f"IdentityFile {self.key}", "IdentitiesOnly yes",
            f"UserKnownHostsFile {self.known_hosts}", "GlobalKnownHostsFile none",
        ]  # fmt: skip
        self.config.write_text("\n".join([*self.hosts, "\n  ".join(common)]) + "\n")

    def home(self, name: str) -> Path:
        """An empty home folder for sessions (`HOME` in a server's env), without the user's start-up files."""
        place = self.root / "homes" / name
        place.mkdir(parents=True, mode=0o700)
        return place

    def _spawn(self, folder: Path, prefix: Sequence[str]) -> subprocess.Popen[bytes]:
        # setpriv: the server must not outlive a test run that is killed
        argv = ["setpriv", "--pdeathsig", "KILL", *prefix]
        argv += [program("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")]
        with (folder / "log").open("ab") as log:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": f"{os.environ['PATH']}:{SYSTEM}", "LC_ALL": "C"},
                start_new_session=True,
            )

    def _await(self, server: Server) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", server.port)) == 0:
                    return
            if server.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"sshd {server.alias} did not start\n{server.log}")
            time.sleep(0.02)

    def logout(self) -> None:
        """End every master of the client."""
        folder = self.root / "run/dtslurm"
        for path in sorted(folder.glob("*")) if folder.is_dir() else []:
            if path.is_socket():
                control.clear(path)

    def down(self) -> None:
        self.logout()
        for server in self.servers.values():
            server.down()


def _setenv(pair: str) -> str:
    """A word of sshd's SetEnv."""
    return '"{}"'.format(pair.replace("\\", "\\\\").replace('"', '\\"'))


@contextlib.contextmanager
def ssh_lab() -> Iterator[SshLab]:
    """A lab without servers yet; everything ends and goes with the block."""
    root = Path(tempfile.mkdtemp(prefix="dtssh-", dir="/tmp"))
    lab = SshLab(root)
    try:
        yield lab.prepare()
    finally:
        lab.down()
        shutil.rmtree(root, ignore_errors=True)
