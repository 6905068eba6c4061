"""The time and the bytes to send a code tree of 10,000 files (500 MB) to a cluster, beside ``rsync -a``.

The benchmark sends the tree once, and then again after each change of one line. ``rsync -a`` overwrites the
earlier copy; ``rsync -a --link-dest`` keeps it, as dtslurm does. All methods use an open connection to an SSH
server on this machine, so that the time contains no network latency, and run alternately. After a submission,
dtslurm prepares the code folder of the next one (the prebuilt tree) at low priority; this time is printed,
but not counted.

Run it with ``python -m benchmarks.snapshot [--json]``. It needs rsync.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from dtslurm.remote.remote_worker import RemoteWorker
from dtslurm.store.delivery import MODULES, Delivery, deliver
from dtslurm.store.known_objects import KnownObjects
from dtslurm.store.snapshot import take
from dtslurm.transport.base import Completed, Stream, Transport
from dtslurm.transport.connect import connect
from dtslurm.transport.local import LocalTransport
from dtslurm.transport.remote import RemoteTransport
from tests.sshd.servers import ssh_lab

FILES, SIZE, ROUNDS = 10_000, 50_000, 7
PREBUILT_TIMEOUT_S = 60.0


def make_tree(folder: Path) -> None:
    """Write a Git work tree; half of each file is text, half cannot be compressed."""
    generator = random.Random(1)
    text = b"".join(b"value_%d = compute(%d)\n" % (number, number % 97) for number in range(SIZE // 25))
    for number in range(FILES):
        package = folder / f"package{number % 100}" / f"module{number % 7}"
        package.mkdir(parents=True, exist_ok=True)
        half = SIZE // 2
        (package / f"file{number}.py").write_bytes(generator.randbytes(half) + text[:half])
    subprocess.run(["git", "init", "-q", folder], check=True)


class CountingTransport:
    """A transport that counts the bytes that it sends to the stdin of remote commands."""

    def __init__(self, transport: RemoteTransport) -> None:
        self._transport, self.sent = transport, 0
        self.local, self.host, self.name = False, transport.host, transport.name

    def run(self, argv: Sequence[str], *, stdin: Iterable[bytes] = (), **more: Any) -> Completed:
        """Run a remote command."""
        return self._transport.run(argv, stdin=self._count(stdin), **more)

    @contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Stream]:
        """Run a remote command whose stdin stays open."""
        self.sent += len(stdin)
        with self._transport.stream(argv, stdin=stdin) as stream:
            yield cast("Stream", CountingStream(stream, self))

    def logged_in(self) -> bool:
        """Return whether a connection is open."""
        return self._transport.logged_in()

    def _count(self, stdin: Iterable[bytes]) -> Iterator[bytes]:
        for part in stdin:
            self.sent += len(part)
            yield part


class CountingStream:
    """A stream that counts the bytes that it sends."""

    def __init__(self, stream: Stream, counter: CountingTransport) -> None:
        self._stream, self._counter = stream, counter
        self.read, self.close_stdin = stream.read, stream.close_stdin

    @property
    def ended(self) -> bool:
        """Whether the command has ended."""
        return self._stream.ended

    def send(self, data: bytes) -> None:
        """Write to the command's stdin."""
        self._counter.sent += len(data)
        self._stream.send(data)


class DtslurmSubmission:
    """Sends snapshots of a tree to a login node, as `dtslurm submit` does."""

    def __init__(self, tree: Path, work: Path, transport: RemoteTransport) -> None:
        self.tree, self.work, self.transport = tree, work, transport
        self.count = 0
        self.known = KnownObjects(work / "known")

    def __call__(self) -> int:
        """Take a snapshot, transfer and install it; return the bytes sent."""
        self.count += 1
        counter = CountingTransport(self.transport)
        transport = cast("Transport", counter)
        python = str(Path(sys.executable).resolve())
        worker = RemoteWorker(transport, MODULES, python)
        worker.begin()  # before the snapshot, as `dtslurm submit` does
        snapshot = take(LocalTransport(), self.tree, hash_cache=self.work / "cache")
        delivery = Delivery(
            str(self.work / f"runs/{self.count}"), str(self.work / "runs/.objects"), {}, snapshot
        )
        deliver(transport, delivery, worker=worker, known_objects=self.known)
        worker.close()
        return counter.sent

    def wait_for_prebuilt_tree(self) -> float:
        """Wait until the prebuilt tree of the next submission is complete; return the seconds."""
        start = time.perf_counter()
        while not list((self.work / "runs/.objects/spare").glob("*/list")):
            if time.perf_counter() - start > PREBUILT_TIMEOUT_S:
                sys.exit(f"no prebuilt tree within {PREBUILT_TIMEOUT_S:.0f} s")
            time.sleep(0.01)
        return time.perf_counter() - start


class Rsync:
    """Copies a tree with rsync: over the last copy, or into a new copy with hard links to the last one."""

    def __init__(self, tree: Path, work: Path, ssh: str, *, keep_copies: bool) -> None:
        self.tree, self.work, self.ssh, self.keep_copies = tree, work, ssh, keep_copies
        self.count = 0

    def __call__(self) -> int:
        """Copy once; return the bytes sent."""
        argv = ["rsync", "-a", "--stats", "--exclude=.git", "-e", self.ssh]
        target = self.work / "copy"
        if self.keep_copies:
            if self.count:
                argv.append(f"--link-dest={self.work / f'copy{self.count}'}")
            self.count += 1
            target = self.work / f"copy{self.count}"
        process = subprocess.run(
            [*argv, f"{self.tree}/", f"login:{target}/"], check=True, capture_output=True, text=True
        )
        match = re.search(r"Total bytes sent: ([\d,.]+)", process.stdout)
        return int(re.sub(r"\D", "", match[1])) if match else 0


def change_one_line(tree: Path, number: int) -> None:
    """Change one line of one file."""
    path = tree / "package3" / f"module{3 % 7}" / "file3.py"
    path.write_bytes(path.read_bytes() + b"changed = %d\n" % number)


def time_transfer(transfer: Callable[[], int]) -> tuple[float, int]:
    """Return seconds and bytes sent."""
    start = time.perf_counter()
    sent = transfer()
    return time.perf_counter() - start, sent


def measure() -> dict[str, dict[str, float]]:
    """Return the seconds and bytes of the first transfer, and the medians of the later ones, by method."""
    with tempfile.TemporaryDirectory() as name, ssh_lab() as lab:
        work = Path(name)
        tree = work / "tree"
        make_tree(tree)
        lab.server("login", env={"HOME": str(lab.home("login"))})
        ssh = f"ssh -F {lab.config} -o ControlPath={lab.root}/bare"
        master = [*ssh.split(), "-o", "ControlMaster=yes", "-N", "-f", "login"]
        subprocess.run(master, check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        transport = connect("login", transport="openssh", env=lab.environ())
        assert isinstance(transport, RemoteTransport)
        transport.run(["true"])
        dtslurm = DtslurmSubmission(tree, work / "a", transport)
        methods: dict[str, Callable[[], int]] = {
            "dtslurm": dtslurm,
            "rsync -a": Rsync(tree, work / "b", ssh, keep_copies=False),
            "rsync -a --link-dest": Rsync(tree, work / "c", ssh, keep_copies=True),
        }
        for folder in "abc":
            (work / folder).mkdir()
        first = {method: time_transfer(transfer) for method, transfer in methods.items()}
        dtslurm.wait_for_prebuilt_tree()
        time_transfer(dtslurm)  # the hash of a file is cached once the file is old enough
        later: dict[str, list[tuple[float, int]]] = {method: [] for method in methods}
        waits: list[float] = []
        for number in range(ROUNDS):
            change_one_line(tree, number)
            for method, transfer in methods.items():
                waits.append(dtslurm.wait_for_prebuilt_tree())
                later[method].append(time_transfer(transfer))
        subprocess.run([*ssh.split(), "-O", "exit", "login"], check=True, capture_output=True)
    base_first = first["rsync -a"][0]
    base_again = statistics.median(seconds for seconds, _ in later["rsync -a"])
    results = {"prebuilt tree": {"s": round(max(waits), 2)}}
    for method, times in later.items():
        again = statistics.median(seconds for seconds, _ in times)
        results[method] = {
            "first_s": round(first[method][0], 2),
            "first_bytes": first[method][1],
            "first_ratio": round(first[method][0] / base_first, 2),
            "again_s": round(again, 2),
            "again_bytes": max(sent for _, sent in times),
            "again_ratio": round(again / base_again, 2),
        }
    return results


def main() -> None:
    """Print the table, or JSON with ``--json``."""
    if shutil.which("rsync") is None:
        sys.exit(
            "rsync is not installed, but the benchmark compares with it. Install it: apt-get install rsync"
        )
    results = measure()
    if "--json" in sys.argv:
        print(json.dumps({"schema": 1, "snapshot": results}, indent=1))
        return
    print(f"{'method':<22}{'first, s':>9}{'ratio':>9}{'bytes':>13}{'again, s':>9}{'ratio':>9}{'bytes':>13}")
    prebuilt_s = results.pop("prebuilt tree")["s"]
    for method, row in results.items():
        print(
            f"{method:<22}{row['first_s']:>9}{row['first_ratio']:>9}{row['first_bytes']:>13,}"
            f"{row['again_s']:>9}{row['again_ratio']:>9}{row['again_bytes']:>13,}"
        )
    print(f"after each submission, dtslurm prepares the next one for up to {prebuilt_s} s at low priority")


if __name__ == "__main__":
    main()
