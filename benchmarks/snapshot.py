"""What sending 10,000 files (500 MB) to a cluster costs, the first time and after one line was changed.

``python -m benchmarks.snapshot`` prints the table. Beside it ``rsync -a`` of the same tree (Debian's package
``rsync``): alone, which overwrites the earlier copy, and with ``--link-dest``, which keeps it as we do. All
go to a real sshd on this machine over a login that is kept; nobody pays a network. What a submission leaves
to do for the next one (`prebuilt_tree`) is waited for, and told, but not counted.
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
MOST_REST = 60.0


def make_tree(folder: Path) -> None:
    """Write a committed work tree: half of each file is text, half does not pack."""
    chance = random.Random(1)
    text = b"".join(b"value_%d = compute(%d)\n" % (number, number % 97) for number in range(SIZE // 25))
    for number in range(FILES):
        place = folder / f"package{number % 100}" / f"module{number % 7}"
        place.mkdir(parents=True, exist_ok=True)
        half = SIZE // 2
        (place / f"file{number}.py").write_bytes(chance.randbytes(half) + text[:half])
    subprocess.run(["git", "init", "-q", folder], check=True)


class Counted:
    """A transport that counts what commands are given on stdin."""

    def __init__(self, transport: RemoteTransport) -> None:
        self._transport, self.sent = transport, 0
        self.local, self.host, self.name = False, transport.host, transport.name

    def run(self, argv: Sequence[str], *, stdin: Iterable[bytes] = (), **more: Any) -> Completed:
        """Run a command there."""
        return self._transport.run(argv, stdin=self._counted(stdin), **more)

    @contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Stream]:
        """Run a command, whose input may go on."""
        self.sent += len(stdin)
        with self._transport.stream(argv, stdin=stdin) as stream:
            yield cast("Stream", CountedStream(stream, self))

    def logged_in(self) -> bool:
        """Return whether there is a login."""
        return self._transport.logged_in()

    def _counted(self, stdin: Iterable[bytes]) -> Iterator[bytes]:
        for part in stdin:
            self.sent += len(part)
            yield part


class CountedStream:
    """A stream that counts what it is sent."""

    def __init__(self, stream: Stream, counted: Counted) -> None:
        self._stream, self._counted = stream, counted
        self.read, self.close_stdin = stream.read, stream.close_stdin

    @property
    def ended(self) -> bool:
        """Whether the command has ended."""
        return self._stream.ended

    def send(self, data: bytes) -> None:
        """Write to the command's stdin."""
        self._counted.sent += len(data)
        self._stream.send(data)


class Ours:
    """Sends snapshots of one tree to one far side."""

    def __init__(self, tree: Path, work: Path, transport: RemoteTransport) -> None:
        self.tree, self.work, self.transport = tree, work, transport
        self.count = 0
        self.known = KnownObjects(work / "known")

    def __call__(self) -> int:
        """Submit once: snapshot, transfer, placing; return the bytes sent."""
        self.count += 1
        far = cast("Transport", Counted(self.transport))
        python = str(Path(sys.executable).resolve())
        worker = RemoteWorker(far, MODULES, python)
        worker.begin()  # as `dtslurm submit` does
        snapshot = take(LocalTransport(), self.tree, hash_cache=self.work / "cache")
        parcel = Delivery(
            str(self.work / f"runs/{self.count}"), str(self.work / "runs/.objects"), {}, snapshot
        )
        deliver(far, parcel, worker=worker, known=self.known, timeout=600)
        worker.close()
        return cast("Counted", far).sent

    def rest(self) -> float:
        """Wait for what is done after the answer; return its seconds."""
        begin = time.perf_counter()
        while not list((self.work / "runs/.objects/spare").glob("*/list")):
            if time.perf_counter() - begin > MOST_REST:
                sys.exit("the far side makes no tree ahead")
            time.sleep(0.01)
        return time.perf_counter() - begin


class Rsync:
    """Copies the tree with rsync, over the last copy or into a new one that links to it."""

    def __init__(self, tree: Path, work: Path, ssh: str, *, linking: bool) -> None:
        self.tree, self.work, self.ssh, self.linking = tree, work, ssh, linking
        self.count = 0

    def __call__(self) -> int:
        """Copy once; return the bytes sent."""
        words = ["rsync", "-a", "--stats", "--exclude=.git", "-e", self.ssh]
        target = self.work / "copy"
        if self.linking:
            if self.count:
                words.append(f"--link-dest={self.work / f'copy{self.count}'}")
            self.count += 1
            target = self.work / f"copy{self.count}"
        done = subprocess.run(
            [*words, f"{self.tree}/", f"login:{target}/"], check=True, capture_output=True, text=True
        )
        found = re.search(r"Total bytes sent: ([\d,.]+)", done.stdout)
        return int(re.sub(r"\D", "", found[1])) if found else 0


def change(tree: Path, number: int) -> None:
    """Change one line of one file."""
    path = tree / "package3" / f"module{3 % 7}" / "file3.py"
    path.write_bytes(path.read_bytes() + b"changed = %d\n" % number)


def timed(act: Callable[[], int]) -> tuple[float, int]:
    """Return seconds and bytes sent."""
    begin = time.perf_counter()
    sent = act()
    return time.perf_counter() - begin, sent


def measure() -> dict[str, dict[str, float]]:
    """Return for each way the seconds and bytes of the first and, as medians, of the later times."""
    with tempfile.TemporaryDirectory() as name, ssh_lab() as lab:
        work = Path(name)
        tree = work / "tree"
        make_tree(tree)
        lab.server("login", env={"HOME": str(lab.home("login"))})
        ssh = f"ssh -F {lab.config} -o ControlPath={lab.root}/bare"
        master = [*ssh.split(), "-o", "ControlMaster=yes", "-N", "-f", "login"]
        subprocess.run(master, check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        link = connect("login", transport="openssh", env=lab.environ())
        assert isinstance(link, RemoteTransport)
        link.run(["true"])
        ours = Ours(tree, work / "a", link)
        ways: dict[str, Callable[[], int]] = {
            "dtslurm": ours,
            "rsync -a": Rsync(tree, work / "b", ssh, linking=False),
            "rsync -a --link-dest": Rsync(tree, work / "c", ssh, linking=True),
        }
        for folder in "abc":
            (work / folder).mkdir()
        first = {way: timed(act) for way, act in ways.items()}
        ours.rest()
        timed(ours)  # files are remembered once they are older than their clock's step
        later: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
        rests: list[float] = []
        for number in range(ROUNDS):  # interleaved: a busy moment hits all alike
            change(tree, number)
            for way, act in ways.items():
                rests.append(ours.rest())
                later[way].append(timed(act))
        subprocess.run([*ssh.split(), "-O", "exit", "login"], check=True, capture_output=True)
    base_first = first["rsync -a"][0]
    base_again = statistics.median(seconds for seconds, _ in later["rsync -a"])
    results = {"made ahead": {"s": round(max(rests), 2)}}
    for way, times in later.items():
        again = statistics.median(seconds for seconds, _ in times)
        results[way] = {
            "first_s": round(first[way][0], 2),
            "first_bytes": first[way][1],
            "first_ratio": round(first[way][0] / base_first, 2),
            "again_s": round(again, 2),
            "again_bytes": max(sent for _, sent in times),
            "again_ratio": round(again / base_again, 2),
        }
    return results


def main() -> None:
    """Print the table, or JSON with ``--json``."""
    if shutil.which("rsync") is None:
        sys.exit("rsync is needed: apt-get install rsync")
    results = measure()
    if "--json" in sys.argv:
        print(json.dumps({"schema": 1, "snapshot": results}, indent=1))
        return
    print(f"{'':<22}{'first s':>9}{'x rsync':>9}{'sent':>13}{'again s':>9}{'x rsync':>9}{'sent':>13}")
    ahead = results.pop("made ahead")["s"]
    for way, one in results.items():
        print(
            f"{way:<22}{one['first_s']:>9}{one['first_ratio']:>9}{one['first_bytes']:>13,}"
            f"{one['again_s']:>9}{one['again_ratio']:>9}{one['again_bytes']:>13,}"
        )
    print(f"after its answer a submission goes on for up to {ahead} s, at low priority, for the next one")


if __name__ == "__main__":
    main()
