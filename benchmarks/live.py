"""The time of `dtslurm exec` beside bare ``ssh`` and ``srun``, and `dtslurm forward` beside ``ssh -L``.

The benchmark starts a Slurm and two SSH servers on this machine, so that the CPU limits both, not a network.
All ways are measured in turn, and the ratios are computed within a round.

- The command of `dtslurm exec` is ``true``, in the place of a rank. ``ssh X srun --overlap true`` starts the
  same step, with a new connection as for most users, or over an open ControlMaster.
- `dtslurm forward`: a service listens at a port that the login node can connect to. The same number of bytes
  is downloaded, and then uploaded. "through the step" is the way of the bytes if the SSH server forbids
  forwarding, or if a service listens on loopback of its node only. Fewer bytes are sent there.

Run it with ``python -m benchmarks.live``.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.charts import compare_rounds, print_charts
from tests.lab.cluster import SlurmLab
from tests.lab.software import find_or_unpack
from tests.ports import free_port
from tests.sshd.servers import SshLab, ssh_lab
from tests.waiting import wait_until

ROUNDS, EXEC_ROUNDS = 7, 20
SIZE, STEP_SIZE = 256 << 20, 32 << 20
CHUNK = 1 << 18
BARE = "ssh -L"
SSH_SRUN, MASTER_SRUN = (
    "ssh X srun --overlap true, new connection",
    "ssh X srun --overlap true, ControlMaster",
)
DTSLURM = [str(Path(sys.executable).with_name("dtslurm"))]
WAYS = {
    "openssh": ("login", "openssh"),
    "paramiko": ("login", "paramiko"),
    "openssh, through the step": ("closed", "openssh"),
    "paramiko, through the step": ("closed", "paramiko"),
}
PROFILE = """\
extends: slurm
login: {{host: {host}, transport: {transport}}}
slurm: {{partitions: {{main: {{}}}}, partition: main}}
node_types: {{any: {{cpus: 8}}}}
paths: {{run_root: {root}}}
"""
# A client sends a size and a direction; it gets so many bytes, or the number of the bytes that it sent.
SERVER = """
import os, socket, sys, threading
block = os.urandom(1 << 18)
def answer(connection):
    direction, size = connection.recv(100).decode().split()
    size = int(size)
    if direction == "download":
        while size > 0:
            connection.sendall(block[:size])
            size -= len(block)
    else:
        connection.sendall(b"ready")
        while size > 0:
            size -= len(connection.recv(1 << 18))
        connection.sendall(b"done")
    connection.close()
listener = socket.create_server(("0.0.0.0", int(sys.argv[1])))
while True:
    threading.Thread(target=answer, args=(listener.accept()[0],)).start()
"""


def measure_download(port: int, size: int) -> float:
    """Return the throughput of a download in MB/s."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        start, received = time.perf_counter(), 0
        connection.sendall(b"download %d" % size)
        while data := connection.recv(CHUNK):
            received += len(data)
        seconds = time.perf_counter() - start
    if received != size:
        raise RuntimeError(f"{received} of {size} bytes arrived")
    return size / seconds / 1e6


def measure_upload(port: int, size: int) -> float:
    """Return the throughput of an upload in MB/s."""
    block = os.urandom(CHUNK)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"upload %d" % size)
        if connection.recv(5) != b"ready":
            raise RuntimeError("the service does not answer")
        start = time.perf_counter()
        for _ in range(size // CHUNK):
            connection.sendall(block)
        if connection.recv(4) != b"done":
            raise RuntimeError("the upload did not arrive")
        return size / (time.perf_counter() - start) / 1e6


def submit(cluster: str) -> str:
    """Submit the job that waits to a cluster, and return its id."""
    words = ["submit", "--cluster", cluster, "--parsable", "-t", "60", "--no-check", "wait.py"]
    submission = subprocess.run([*DTSLURM, *words], check=False, capture_output=True, text=True)
    if submission.returncode:
        raise RuntimeError(f"{submission.stdout}{submission.stderr}")
    return submission.stdout.strip()


def measure_exec(ssh: SshLab, jobs: dict[str, str]) -> dict[str, list[float]]:
    """Return the milliseconds of each way to run ``true`` in a job."""
    ssh_argv = ["ssh", "-F", str(ssh.config)]
    master = [*ssh_argv, "-o", f"ControlPath={ssh.root}/bare"]
    subprocess.run([*master, "-o", "ControlMaster=yes", "-N", "-f", "login"], check=True)
    step = ["srun", "--jobid", jobs["login-openssh"], "--overlap", "--mem=0", "true"]
    ways = {
        SSH_SRUN: [*ssh_argv, "-o", "ControlPath=none", "login", *step],
        MASTER_SRUN: [*master, "login", *step],
        "dtslurm exec, openssh": [*DTSLURM, "exec", jobs["login-openssh"], "true"],
        "dtslurm exec, paramiko": [*DTSLURM, "exec", jobs["login-paramiko"], "true"],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(EXEC_ROUNDS + 1):  # the first round opens the connections
        for name, argv in ways.items():
            start = time.perf_counter()
            subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, capture_output=True)
            if number:
                times[name].append((time.perf_counter() - start) * 1000)
    return times


@contextlib.contextmanager
def run(argv: list[str], log: Path) -> Iterator[None]:
    """Run a program in the background."""
    with log.open("wb") as output, subprocess.Popen(argv, stdout=output, stderr=output) as process:
        try:
            yield
        finally:
            process.terminate()


@contextlib.contextmanager
def waiting_jobs(root: Path) -> Iterator[dict[str, str]]:
    """Submit a job that waits to each cluster; yield the ids by cluster."""
    folder = root / "config/dtslurm/cluster_profiles"
    folder.mkdir(parents=True)
    jobs = {}
    try:
        for host, transport in WAYS.values():
            name = f"{host}-{transport}"
            (folder / f"{name}.yaml").write_text(
                PROFILE.format(host=host, transport=transport, root=root / "runs")
            )
            jobs[name] = submit(name)
        for name, job in jobs.items():
            status = [*DTSLURM, "status", job, "--cluster", name]
            wait_until(
                lambda argv=status: (
                    b"running" in subprocess.run(argv, check=False, capture_output=True).stdout.lower()
                ),  # type: ignore[misc]
                f"job {job}",
            )
        yield jobs
    finally:
        for name, job in jobs.items():
            subprocess.run([*DTSLURM, "cancel", job, "--cluster", name], check=False, capture_output=True)


@contextlib.contextmanager
def forwarded_ports(root: Path, ssh: SshLab, port: int, jobs: dict[str, str]) -> Iterator[dict[str, int]]:
    """Forward a service in each way; yield the ports of this machine."""
    ports = {BARE: free_port()}
    bare = ["ssh", "-F", str(ssh.config), "-N", "-L", f"127.0.0.1:{ports[BARE]}:127.0.0.1:{port}", "login"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(run(bare, root / "bare"))
        for name, (host, transport) in WAYS.items():
            cluster, log = f"{host}-{transport}", root / f"forward-{host}-{transport}"
            argv = [*DTSLURM, "forward", jobs[cluster], f"0:{port}", "--cluster", cluster]
            stack.enter_context(run(argv, log))
            wait_until(lambda log=log: "forwarding" in log.read_text(), f"forwarding with {name}")  # type: ignore[misc]
            ports[name] = int(re.findall(r"127\.0\.0\.1:(\d+) ->", log.read_text())[0])
        yield ports


def measure(ports: dict[str, int]) -> dict[str, dict[str, list[float]]]:
    """Return the throughputs of all rounds by direction and way."""
    results: dict[str, dict[str, list[float]]] = {}
    for number in range(ROUNDS + 1):  # the first round opens the connections
        for direction, function in (("download", measure_download), ("upload", measure_upload)):
            for name, port in ports.items():
                value = function(port, STEP_SIZE if "step" in name else SIZE)
                if number:
                    results.setdefault(direction, {}).setdefault(name, []).append(value)
    return results


def main() -> None:
    """Measure and print."""
    software = find_or_unpack(accounting=True)
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="dtb-", dir="/tmp") as name,
        SlurmLab(Path(name) / "lab", nodes=1, accounting=False, software=software) as lab,
        ssh_lab() as ssh,
    ):
        root = Path(name)
        environment = {**lab.env, "HOME": str(ssh.home("login"))}
        ssh.server("login", env=environment)
        ssh.server("closed", env=environment, lines=["AllowTcpForwarding no"])
        os.environ.update(
            {
                **ssh.env,
                **{f"XDG_{kind.upper()}_HOME": str(root / kind) for kind in ("config", "state", "cache")},
            }
        )
        (root / "project").mkdir()
        os.chdir(root / "project")
        (root / "project/wait.py").write_text("import time\ntime.sleep(3600)\n")
        (root / "serve.py").write_text(SERVER)
        with (
            run([sys.executable, str(root / "serve.py"), str(port)], root / "serve"),
            waiting_jobs(root) as jobs,
        ):
            charts = [compare_rounds("A command in a job", "ms", SSH_SRUN, measure_exec(ssh, jobs))]
            with forwarded_ports(root, ssh, port, jobs) as ports:
                results = measure(ports)
    for direction, throughputs in results.items():
        charts.append(compare_rounds(f"Forwarded {direction}", "MB/s", BARE, throughputs))
    print_charts(charts)


if __name__ == "__main__":
    main()
