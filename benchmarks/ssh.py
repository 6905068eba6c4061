"""The time of one remote command with each transport, beside ``ssh HOST true`` over an open ControlMaster.

The commands run alternately on one login node, which is an SSH server on the loopback interface, so that the
latency of a network is not included. `openssh` is the transport that starts the system's ssh, `paramiko` the
one in Python. The ratios are ratios of medians.

Run it with ``python -m benchmarks.ssh``.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable

from dtslurm.transport.connect import connect
from tests.sshd.servers import ssh_lab

ROUNDS = 40
BARE = "ssh login true"


def median_times(commands: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each command; the commands run alternately."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            start = time.perf_counter()
            command()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    """Measure and print."""
    with ssh_lab() as lab:
        lab.server("login", env={"HOME": str(lab.home("login"))})
        bare = ["ssh", "-F", str(lab.config), "-o", f"ControlPath={lab.root}/bare"]
        master = ["-o", "ControlMaster=yes", "-N", "-f", "login"]
        subprocess.run([*bare, *master], check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        openssh = connect("login", transport="openssh", env=lab.environ())
        paramiko = connect("login", transport="paramiko", env=lab.environ())
        commands: dict[str, Callable[[], object]] = {
            BARE: lambda: subprocess.run([*bare, "login", "true"], check=True, capture_output=True),
            "openssh": lambda: openssh.run(["true"]),
            "paramiko": lambda: paramiko.run(["true"]),
        }
        median_times(commands, 3)  # opens the connections
        medians = median_times(commands, ROUNDS)
        paramiko.close()
        subprocess.run([*bare, "-O", "exit", "login"], check=True, capture_output=True)
    reference = medians[BARE]
    print(f"one remote command, median of {ROUNDS}; ratio and difference to {BARE}")
    for name, seconds in medians.items():
        difference = (seconds - reference) * 1000
        print(f"  {name:16} {seconds * 1000:7.1f} ms  {seconds / reference:5.2f} x  {difference:+7.1f} ms")


if __name__ == "__main__":
    main()
