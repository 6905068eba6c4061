"""What one remote command costs over each transport, beside plain ``ssh HOST true`` on an open ControlMaster.

The three take turns on one login node (an sshd of our own on loopback), so that the machine's load is shared.
Ratios of medians; the round trip itself is as good as nothing here.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable

from dtslurm.transport.connect import connect
from tests.sshd.servers import ssh_lab

ROUNDS = 40


def median_times(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return each work's median seconds; they take turns."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def main() -> None:
    """Measure and print."""
    with ssh_lab() as lab:
        lab.server("login", env={"HOME": str(lab.home("login"))})
        bare = ["ssh", "-F", str(lab.config), "-o", f"ControlPath={lab.root}/bare"]
        master = ["-o", "ControlMaster=yes", "-N", "-f", "login"]
        subprocess.run([*bare, *master], check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        openssh = connect("login", transport="openssh", env=lab.environ())
        paramiko = connect("login", transport="paramiko", env=lab.environ())
        works: dict[str, Callable[[], object]] = {
            "ssh login true": lambda: subprocess.run(
                [*bare, "login", "true"], check=True, capture_output=True
            ),
            "openssh": lambda: openssh.run(["true"]),
            "paramiko": lambda: paramiko.run(["true"]),
        }
        median_times(works, 3)  # logs in
        found = median_times(works, ROUNDS)
        paramiko.close()
        subprocess.run([*bare, "-O", "exit", "login"], check=True, capture_output=True)
    base = found["ssh login true"]
    print(f"one remote command, median of {ROUNDS}")
    for name, seconds in found.items():
        more = (seconds - base) * 1000
        print(f"  {name:16} {seconds * 1000:7.1f} ms  {seconds / base:5.2f} x  {more:+7.1f} ms")


if __name__ == "__main__":
    main()
