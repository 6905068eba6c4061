"""The cost of describing a cluster of 1,000 nodes of five types: seconds, and requests to the controller.

The benchmark starts a Slurm with 1,000 nodes, of which all but one exist only in slurm.conf. It measures
`dtslurm cluster discover` without and with a probe job, beside the listing commands of Slurm from which a
profile can be written by hand. The requests are counted by Slurm itself (`sdiag`).

Run it with ``python -m benchmarks.discover``.
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


def time_command(
    lab: ManyNodes, argv: Sequence[str], env: dict[str, str], rounds: int
) -> tuple[float, float]:
    """Return the median seconds and the mean number of requests of a command."""
    times = []
    requests_before = sum(lab.asked().values())
    for _ in range(rounds):
        start = time.monotonic()
        subprocess.run(list(argv), env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        times.append(time.monotonic() - start)
    return statistics.median(times), (sum(lab.asked().values()) - requests_before) / rounds


def measure(lab: ManyNodes, folder: Path) -> list[tuple[str, float, float]]:
    """Return (name, seconds, requests) of each command."""
    folder.mkdir()
    variables = {"DTSLURM_RUN_ROOT": str(folder / "runs"), "PYTHONPATH": str(Path(__file__).parents[1])}
    variables |= {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CACHE", "CONFIG")}
    env = {**lab.environ(), **variables}
    listings = [
        "sh",
        "-c",
        "sinfo -N -o '%N %P %c %m %G %f'; scontrol show node; scontrol show partition",
    ]
    return [
        ("dtslurm cluster discover --no-probe", *time_command(lab, [*DTSLURM, "--no-probe"], env, ROUNDS)),
        ("dtslurm cluster discover, one probe job", *time_command(lab, [*DTSLURM, "-p", "short"], env, 2)),
        ("sinfo -N, scontrol show node, partition", *time_command(lab, listings, env, ROUNDS)),
    ]


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="dtslurm-lab-", dir="/tmp") as name:
        lab = ManyNodes(Path(name))
        with lab:
            rows = measure(lab, Path(name) / "user")
    print(f"{'1,000 nodes of five types':42} {'s':>6} {'requests'}")
    for command, seconds, requests in rows:
        print(f"  {command:40} {seconds:6.2f} {requests:6.1f}")


if __name__ == "__main__":
    main()
