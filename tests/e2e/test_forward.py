"""``dtslurm forward``: ports of this machine that lead to the nodes of a run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail, skip_or_fail_without_slurm
from tests.e2e.conftest import Cli, far_profile
from tests.lab.network import NetworkLab, possible
from tests.lab.software import SlurmUnavailable, Software
from tests.ports import free_port
from tests.sshd.servers import Server, SshLab
from tests.waiting import busyness, wait_until

pytestmark = pytest.mark.timeout(600)

# When a client has sent all its data, the answer is the rank, the node, the client's address, and the data.
SERVER = """
import os, socket, sys, threading
rank = int(os.environ.get("RANK", "0"))
listener = socket.create_server((sys.argv[1], int(sys.argv[2]) + rank))
print("listens", flush=True)

def answer(connection, peer):
    data = b""
    while chunk := connection.recv(1 << 16):
        data += chunk
    node = os.environ.get("SLURMD_NODENAME")
    connection.sendall(f"rank {rank} on {node}, {peer[0]}: ".encode() + data)
    connection.close()

while not os.path.exists("stop"):
    threading.Thread(target=answer, args=listener.accept()).start()
"""
CLIENT = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(sys.argv[2].encode() * int(sys.argv[3]))
connection.shutdown(socket.SHUT_WR)
data = b""
while chunk := connection.recv(1 << 16):
    data += chunk
head, _, rest = data.partition(b": ")
sys.stdout.write(f"{head.decode()}: {rest[:1].decode()} {len(rest)}")
"""


class Forward:
    """A running ``dtslurm forward``, or another command that forwards; its messages are in a file."""

    def __init__(
        self, cli: Cli, *words: str, command: str = "forward", env: dict[str, str] | None = None
    ) -> None:
        self._cli = cli
        self._output = cli.folder / f"forward-{len(list(cli.folder.glob('forward-*')))}"
        argv = [*cli.prefix, sys.executable, "-m", "dtslurm", command, *words]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                argv, cwd=cli.folder, env={**os.environ, **cli.env, **(env or {})},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str, count: int = 1) -> None:
        try:
            wait_until(lambda: self.text.count(text) >= count or self.process.poll() is not None, text)
        finally:
            assert self.text.count(text) >= count, self.text

    def local_ports(self) -> list[int]:
        self.wait_for("forwarding")
        return [int(number) for number in re.findall(r"^127\.0\.0\.1:(\d+) -> ", self.text, re.MULTILINE)]

    def exchange(self, port: int, data: str = "x", count: int = 1) -> str:
        """Send data to a port of this machine as a client beside dtslurm does; return the answer's begin."""
        argv = [*self._cli.prefix, sys.executable, "-c", CLIENT, str(port), data, str(count)]
        limit = 60 * busyness()
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=limit)
        return done.stdout

    def wait_for_answer(self, port: int, begin: str) -> None:
        wait_until(lambda: self.exchange(port).startswith(begin), begin)

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60 * busyness())


@contextlib.contextmanager
def forwarded(
    cli: Cli, *words: str, command: str = "forward", env: dict[str, str] | None = None
) -> Iterator[Forward]:
    result = Forward(cli, *words, command=command, env=env)
    try:
        yield result
    finally:
        result.process.kill()
        result.process.wait()


@pytest.fixture
def port() -> int:
    """The first of three ports that nobody uses."""
    return free_port(3)


@pytest.fixture
def job(cli: Cli, port: int) -> str:
    """A job whose two ranks listen on loopback, rank 1 at the port after that of rank 0."""
    layout = ["--ntasks-per-node", "2"] if cli.cluster == "local" else ["-N2"]
    script = cli.script(SERVER)
    words = [*layout, "-l", "srun", "--no-snapshot", "--python", sys.executable, script]
    job = cli.submit(*words, "127.0.0.1", str(port))
    cli.wait_until(lambda: cli("logs", job, code=None).stdout.count("listens") == 2)
    return job


def test_bytes_pass_in_both_directions_and_the_end_of_each(cli: Cli, job: str, port: int) -> None:
    node = "local1" if cli.cluster == "local" else "n"
    with forwarded(cli, job, f"0:{port + 1}", f"0:{port + 2}", "--rank", "1") as forward:
        first, second = forward.local_ports()
        assert forward.exchange(first, "x", 0).startswith(f"rank 1 on {node}")
        assert forward.exchange(first, "0123456789", 1_000_000).endswith(": 0 10000000")
        assert not forward.exchange(second).startswith("rank")
        forward.wait_for(f"nothing listens at port {port + 2} of {node}")
        assert forward.exchange(first).startswith("rank 1 on")  # it goes on
        assert forward.interrupt() == 130
        assert "Traceback" not in forward.text


def test_forwarding_ends_with_the_run(cli: Cli, job: str, port: int) -> None:
    with forwarded(cli, job, f"0:{port}") as forward:
        forward.local_ports()
        cli("cancel", job)
        assert forward.process.wait(120 * busyness()) == 0
        assert forward.text.splitlines()[-1] == f"job {job} has ended: CANCELLED"
    stderr = cli("forward", job, f"0:{port}", code=2).stderr
    assert f"job {job} is not running: its state is CANCELLED" in stderr


def test_bad_requests_are_refused_with_a_fix(cli: Cli, job: str, port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        for words, problem in {
            (): f"give a port\nhint: dtslurm forward {job} 8888",
            ("8888", "--rank", "0,1"): "--rank 0,1: ports lead to the node of one rank",
            ("8888", "--rank", "2"): "the run has no rank 2, only ranks 0 to 1",
            ("8888", "--node", "nowhere"): f"no rank of job {job} runs on 'nowhere'",
            ("8888", "--role", "rollout"): f"job {job} has no role 'rollout'",
            ("--role", "rollout"): f"job {job} has no role 'rollout'",
            ("8888", "--role", "a", "--node", "b"): "--node and --role exclude each other",
            ("http",): "'http': a port has a name only in a role",
            ("99999",): "'99999' is not a port",
            ("8888", "8888:80"): "port 8888 of this machine cannot lead to two ports",
            (f"{number}:80",): f"port {number} of this machine is in use\nhint: 0:80 takes a free port",
        }.items():
            assert problem in cli("forward", job, *words, code=2).stderr, words
    assert "no run '17000' is known" in cli("forward", "17000", "1", code=3).stderr


def test_pending_run_is_waited_for_and_the_browser_opened(cli: Cli, port: int) -> None:
    script = cli.script(SERVER)
    options = ["-l", "single", "--no-snapshot", "--python", sys.executable, "--sbatch=--hold"]
    job = cli.submit(*options, script, "127.0.0.1", str(port))
    browser = cli.folder / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >{cli.folder}/opened\n')
    browser.chmod(0o700)
    local = free_port()
    with forwarded(cli, job, f"{local}:{port}", "--open", env={"BROWSER": str(browser)}) as forward:
        forward.wait_for(f"job {job} is PENDING (JobHeldUser); waiting until it runs")
        cli("release", job)
        forward.wait_for(f"opened http://127.0.0.1:{local}/")
        assert (cli.folder / "opened").read_text() == f"http://127.0.0.1:{local}/\n"
        assert forward.exchange(local).startswith("rank 0")
        assert forward.interrupt() == 130
    without = {"DISPLAY": "", "WAYLAND_DISPLAY": "", "BROWSER": ""}
    with forwarded(cli, job, f"{local}:{port}", "--open", env=without) as forward:
        forward.wait_for(f"there is no browser here; open http://127.0.0.1:{local}/")


# ---- Nodes on networks of their own, and a login node behind a jump host ----


class InnerSshLab(SshLab):
    """Servers on the network of the cluster, which this process cannot reach."""

    def _await(self, server: Server) -> None:
        wait_until(lambda: "Server listening" in server.log, "the sshd")


@dataclass
class Site:
    """A cluster, its login nodes, and the command line beside its controller."""

    lab: NetworkLab
    ssh: SshLab
    root: Path

    def cli(self, folder: Path, host: str, transport: str) -> Cli:
        far_profile(folder, host, transport, self.root / "runs")
        env = {
            **self.ssh.env,
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        (folder / "project").mkdir()
        return Cli("far", folder / "project", env, prefix=self.lab.inside([]))


@pytest.fixture(scope="module")
def site(slurm_software: Software, sshd_software: None) -> Iterator[Site]:
    if not possible():
        skip_or_fail("permission to create networks")
    root = Path(tempfile.mkdtemp(prefix="dtfwd-", dir="/tmp"))
    (root / "ssh").mkdir()
    try:
        with NetworkLab(root / "lab", nodes=2, software=slurm_software, accounting=False) as lab:
            ssh = InnerSshLab(root / "ssh").prepare()
            env = {**lab.env, "HOME": str(ssh.home("login"))}
            try:
                ssh.server("jump", prefix=lab.inside([]), lines=["ForceCommand /bin/false"])
                login = ssh.server("login", prefix=lab.inside([]), env=env)
                ssh.host("login-jump", login.port, "ProxyJump jump")
                lines = ["AllowTcpForwarding no"]
                ssh.server("closed", prefix=lab.inside([]), env=env, lines=lines)
                yield Site(lab, ssh, root)
            finally:
                ssh.down()
    except SlurmUnavailable as error:
        skip_or_fail_without_slurm(error)
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def served(cli: Cli, address: str, port: int, *options: str) -> Iterator[str]:
    """Run a job on the site that listens at an address."""
    words = ["-l", "single", "--no-snapshot", "--python", sys.executable, *options]
    job = cli.submit(*words, cli.script(SERVER), address, str(port))
    try:
        yield job
    finally:
        cli("cancel", job, code=None)


TRANSPORTS = pytest.mark.parametrize("transport", ["openssh", "paramiko"])
LOGIN = "10.213.77.1"  # the login node's address on the network of the nodes


@pytest.mark.slurm
@pytest.mark.ssh
@TRANSPORTS
@pytest.mark.parametrize(
    ("host", "address", "peer"),
    [
        ("login-jump", "0.0.0.0", LOGIN),
        ("login-jump", "127.0.0.1", "127.0.0.1"),
        ("closed", "0.0.0.0", "127.0.0.1"),
    ],
)
def test_login_node_connects_if_it_can_else_the_step_does(
    site: Site, tmp_path: Path, transport: str, host: str, address: str, peer: str
) -> None:
    cli = site.cli(tmp_path, host, transport)
    port = 7000
    with served(cli, address, port) as job, forwarded(cli, job, f"0:{port}") as forward:
        [local] = forward.local_ports()
        forward.wait_for_answer(local, f"rank 0 on n1, {peer}: x")
        assert forward.exchange(local, "0123456789", 300_000).endswith(": 0 3000000")
        assert forward.interrupt() == 130
        if transport == "openssh":
            leftovers = [path.name for path in (site.ssh.root / "run/dtslurm").iterdir() if path.is_socket()]
            assert len(leftovers) <= 3  # the logins, and no forwarding


@pytest.mark.slurm
@pytest.mark.ssh
@TRANSPORTS
def test_forwarding_follows_the_run_and_survives_a_lost_connection(
    site: Site, tmp_path: Path, transport: str
) -> None:
    cli = site.cli(tmp_path, "login-jump", transport)
    port = 7100
    with (
        served(cli, "0.0.0.0", port, "--requeue") as job,
        forwarded(cli, job, f"0:{port}") as forward,
    ):
        [local] = forward.local_ports()
        forward.wait_for_answer(local, f"rank 0 on n1, {LOGIN}")
        site.ssh.servers["login"].cut()
        forward.wait_for("connecting again")
        forward.wait_for("connected to n1 again")
        forward.wait_for_answer(local, f"rank 0 on n1, {LOGIN}")
        site.lab.run(["scontrol", "update", "nodename=n1", "state=drain", "reason=test"])
        try:
            cli("requeue", job)
            forward.wait_for(f"job {job} is PENDING")
            forward.wait_for("connected: the ports lead to n2 now")
            forward.wait_for_answer(local, f"rank 0 on n2, {LOGIN}")
        finally:
            site.lab.run(["scontrol", "update", "nodename=n1", "state=resume"])
        cli("cancel", job)
        assert forward.process.wait(120 * busyness()) == 0
        assert forward.text.splitlines()[-1] == f"job {job} has ended: CANCELLED"
