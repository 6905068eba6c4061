"""What describing a cluster of 1,000 nodes of five kinds costs: seconds, and requests by Slurm's own count.

``python -m benchmarks.discover`` brings up a Slurm of its own; its nodes but one are in slurm.conf alone.
Beside it: the listings of Slurm's own that people write profiles from.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.lab.many import ManyNodes

ROUNDS = 5
DTSLURM = [sys.executable, "-m", "dtslurm", "cluster", "discover"]


def measure(lab: ManyNodes, argv: Sequence[str], env: dict[str, str], rounds: int) -> tuple[float, float]:
    """Return the median of seconds, and the requests of one run."""
    took = []
    before = sum(lab.asked().values())
    for _ in range(rounds):
        begin = time.monotonic()
        subprocess.run(list(argv), env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        took.append(time.monotonic() - begin)
    return statistics.median(took), (sum(lab.asked().values()) - before) / rounds


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="dtslurm-lab-", dir="/tmp") as name:
        lab = ManyNodes(Path(name))
        with lab:
            rows = measured(lab, Path(name) / "user")
    print(f"{'1,000 nodes of five kinds':42} {'s':>6} {'requests'}")
    for what, seconds, requests in rows:
        print(f"  {what:40} {seconds:6.2f} {requests:6.1f}")


def measured(lab: ManyNodes, folder: Path) -> list[tuple[str, float, float]]:
    """Return (what, seconds, requests) of each way."""
    folder.mkdir()
    own = {"DTSLURM_RUN_ROOT": str(folder / "runs"), "PYTHONPATH": str(Path(__file__).parents[1])}
    own |= {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CACHE", "CONFIG")}
    env = {**lab.environ(), **own}
    listings = [
        "sh",
        "-c",
        "sinfo -N -o '%N %P %c %m %G %f'; scontrol show node; scontrol show partition",
    ]
    return [
        ("dtslurm cluster discover --no-probe", *measure(lab, [*DTSLURM, "--no-probe"], env, ROUNDS)),
        ("dtslurm cluster discover, one probe job", *measure(lab, [*DTSLURM, "-p", "short"], env, 2)),
        ("sinfo -N, scontrol show node, partition", *measure(lab, listings, env, ROUNDS)),
    ]


if __name__ == "__main__":
    main()
