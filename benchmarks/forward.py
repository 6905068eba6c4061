"""The throughput of `dtslurm forward`, beside bare ``ssh -L`` to the same service.

The benchmark starts a Slurm and two SSH servers on this machine, so that the CPU limits the throughput, not a
network. A service listens at a port that the login node can connect to. In each round, the same number of
bytes is downloaded, and then uploaded, through ``ssh -L`` and `dtslurm forward` with each transport. The
ratios are computed within a round. "through the step" is the way of the bytes if the SSH server forbids
forwarding, or if a service listens on loopback of its node only. Fewer bytes are sent there.

Run it with ``python -m benchmarks.forward``.
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

from benchmarks.charts import median_and_quartiles
from tests.lab.cluster import SlurmLab
from tests.lab.software import find_or_unpack
from tests.ports import free_port
from tests.sshd.servers import SshLab, ssh_lab
from tests.waiting import wait_until

ROUNDS = 7
SIZE, STEP_SIZE = 256 << 20, 32 << 20
CHUNK = 1 << 18
BARE = "ssh -L"
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


@contextlib.contextmanager
def run(argv: list[str], log: Path) -> Iterator[None]:
    """Run a program in the background."""
    with log.open("wb") as output, subprocess.Popen(argv, stdout=output, stderr=output) as process:
        try:
            yield
        finally:
            process.terminate()


@contextlib.contextmanager
def forwarded_ports(root: Path, ssh: SshLab, port: int) -> Iterator[dict[str, int]]:
    """Forward a service in each way; yield the ports of this machine."""
    dtslurm = [str(Path(sys.executable).with_name("dtslurm"))]
    ports = {BARE: free_port()}
    bare = ["ssh", "-F", str(ssh.config), "-N", "-L", f"127.0.0.1:{ports[BARE]}:127.0.0.1:{port}", "login"]
    ways = {
        "openssh": ("login", "openssh"),
        "paramiko": ("login", "paramiko"),
        "openssh, through the step": ("closed", "openssh"),
        "paramiko, through the step": ("closed", "paramiko"),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(run(bare, root / "bare"))
        for name, (host, transport) in ways.items():
            profile = root / "config/dtslurm/cluster_profiles" / f"{host}-{transport}.yaml"
            profile.parent.mkdir(parents=True, exist_ok=True)
            profile.write_text(PROFILE.format(host=host, transport=transport, root=root / "runs"))
            words = ["submit", "--cluster", profile.stem, "--parsable", "-t", "60", "--no-check", "wait.py"]
            submission = subprocess.run([*dtslurm, *words], check=False, capture_output=True, text=True)
            if submission.returncode:
                raise RuntimeError(f"{submission.stdout}{submission.stderr}")
            job = submission.stdout.strip()
            log = root / f"forward-{host}-{transport}"
            stack.callback(
                subprocess.run, [*dtslurm, "cancel", job, "--cluster", profile.stem], capture_output=True
            )
            argv = [*dtslurm, "forward", job, f"0:{port}", "--cluster", profile.stem]
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
        os.chdir(root)
        (root / "wait.py").write_text("import time\ntime.sleep(3600)\n")
        (root / "serve.py").write_text(SERVER)
        with (
            run([sys.executable, "serve.py", str(port)], root / "serve"),
            forwarded_ports(root, ssh, port) as ports,
        ):
            results = measure(ports)
    print(f"medians of {ROUNDS} rounds; ratios within a round: median, and quartiles")
    for direction, throughputs in results.items():
        for name_of_way, values in throughputs.items():
            pairs = zip(values, throughputs[BARE], strict=True)
            ratio, low, high = median_and_quartiles([value / bare for value, bare in pairs])
            median, _, _ = median_and_quartiles(values)
            print(
                f"{direction:9} {name_of_way:27} {median:7.1f} MB/s {ratio:6.2f} x  ({low:.2f} to {high:.2f})"
            )


if __name__ == "__main__":
    main()
