"""What sending 10,000 files (500 MB) to a cluster costs, the first time and after one line was changed.

``python -m benchmarks.snapshot`` prints the table. Beside it ``rsync -a`` of the same tree (Debian's package
``rsync``): alone, which overwrites the earlier copy, and with ``--link-dest``, which keeps it as we do. Both
ends are this machine, ours through a pipe to a Python of its own; nobody pays a network.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from dtslurm.store.delivery import Parcel, deliver
from dtslurm.store.known_objects import KnownObjects
from dtslurm.store.snapshot import take
from dtslurm.transport.base import Completed
from dtslurm.transport.local import LocalTransport

FILES, SIZE, ROUNDS = 10_000, 50_000, 3


class Pipe(LocalTransport):
    """This machine as a far side: everything goes through a command's stdin, and is counted."""

    name = "pipe"
    local = False

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run a command, counting what it is sent."""
        return super().run(argv, stdin=self._counted(stdin), timeout=timeout, env=env)

    def _counted(self, parts: bytes | Iterable[bytes]) -> Iterable[bytes]:
        for part in [parts] if isinstance(parts, bytes) else parts:
            self.sent += len(part)
            yield part


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


class Ours:
    """Sends snapshots of one tree to one far side."""

    def __init__(self, tree: Path, work: Path) -> None:
        self.tree, self.work = tree, work
        self.count = 0
        self.known = KnownObjects(work / "known.json")

    def __call__(self) -> int:
        """Submit once: snapshot, transfer, placing; return the bytes sent."""
        self.count += 1
        pipe = Pipe()
        snapshot = take(LocalTransport(), self.tree, hash_cache=self.work / "cache")
        parcel = Parcel(str(self.work / f"runs/{self.count}"), str(self.work / "runs/.objects"), {}, snapshot)
        deliver(pipe, parcel, python=sys.executable, known=self.known, timeout=600)
        return pipe.sent


class Rsync:
    """Copies the tree with rsync, over the last copy or into a new one that links to it."""

    def __init__(self, tree: Path, work: Path, *, linking: bool) -> None:
        self.tree, self.work, self.linking = tree, work, linking
        self.count = 0

    def __call__(self) -> int:
        """Copy once; return the bytes sent."""
        words = ["rsync", "-a", "--stats", "--exclude=.git"]
        target = self.work / "copy"
        if self.linking:
            if self.count:
                words.append(f"--link-dest={self.work / f'copy{self.count}'}")
            self.count += 1
            target = self.work / f"copy{self.count}"
        done = subprocess.run(
            [*words, f"{self.tree}/", f"{target}/"], check=True, capture_output=True, text=True
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
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        tree = work / "tree"
        make_tree(tree)
        ways: dict[str, Callable[[], int]] = {
            "dtslurm": Ours(tree, work / "a"),
            "rsync -a": Rsync(tree, work / "b", linking=False),
            "rsync -a --link-dest": Rsync(tree, work / "c", linking=True),
        }
        for folder in "abc":
            (work / folder).mkdir()
        first = {way: timed(act) for way, act in ways.items()}
        timed(ways["dtslurm"])  # files are remembered once they are older than their clock's step
        later: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
        for number in range(ROUNDS):  # interleaved: a busy moment hits all alike
            change(tree, number)
            for way, act in ways.items():
                later[way].append(timed(act))
    base_first = first["rsync -a"][0]
    base_again = statistics.median(seconds for seconds, _ in later["rsync -a"])
    results = {}
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
    for way, one in results.items():
        print(
            f"{way:<22}{one['first_s']:>9}{one['first_ratio']:>9}{one['first_bytes']:>13,}"
            f"{one['again_s']:>9}{one['again_ratio']:>9}{one['again_bytes']:>13,}"
        )


if __name__ == "__main__":
    main()
