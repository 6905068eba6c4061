"""How long command lines and imports take, beside a bare interpreter and the tools next door.

``python -m benchmarks.startup``. Each tool has an environment of its own (benchmarks/peers), and all take
turns, so that a busy moment hits all alike. What fails is shown as failed.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.figures import chart, show
from benchmarks.peers import PeerMissing, environment

ROUNDS = 15
BARE, OURS = "python -c pass", "dtslurm --help"
Commands = dict[str, tuple[str, list[str]]]  # name -> (environment, argv in its bin folder)
HELP: Commands = {
    BARE: ("dtslurm", ["python", "-c", "pass"]),
    OURS: ("dtslurm", ["dtslurm", "--help"]),
    "cscope --help": ("clusterscope", ["cscope", "--help"]),
    "simple_slurm --help": ("simple-slurm", ["simple_slurm", "--help"]),
    "torchx --help": ("torchx", ["torchx", "--help"]),
    "nemorun --help": ("nemo-run", ["nemorun", "--help"]),
    "dtslurm --version": ("dtslurm", ["dtslurm", "--version"]),
    "torchx --version": ("torchx", ["torchx", "--version"]),
    "dtslurm status": ("dtslurm", ["dtslurm", "status"]),
    "dtslurm render": (
        "dtslurm",
        ["dtslurm", "render", "--cluster", "a100x8-ib", "-N4", "-t", "60", "-A", "x", "train.py"],
    ),
}
IMPORTS: Commands = {
    f"import {module}": (name, ["python", "-c", f"import {module}"])
    for module, name in (
        ("dtslurm", "dtslurm"),
        ("dtslurm.api", "dtslurm"),
        ("submitit", "submitit"),
        ("simple_slurm", "simple-slurm"),
        ("clusterscope", "clusterscope"),
        ("torchx.runner", "torchx"),
        ("nemo_run", "nemo-run"),
    )
}


def measure(commands: Commands, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return each command's milliseconds by round, and why those failed that did."""
    taken: dict[str, list[float]] = {name: [] for name in commands}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text("print('hello')\n")
        env = {"PATH": "/usr/bin:/bin", "HOME": name, "XDG_STATE_HOME": name}
        for number in range(rounds + 1):  # the first round warms up
            for key, (peer, argv) in commands.items():
                if key in failed:
                    continue
                try:
                    program = environment(peer) / "bin" / argv[0]
                except PeerMissing as error:
                    failed[key] = f"does not install: {error}"
                    continue
                begin = time.perf_counter()
                done = subprocess.run(
                    [program, *argv[1:]], cwd=folder, env=env, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                    failed[key], taken[key] = said, []
                elif number:
                    taken[key].append((time.perf_counter() - begin) * 1000)
    return taken, failed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    taken, failed = measure(HELP, rounds)
    imported, broken = measure(IMPORTS, rounds)
    show(
        [
            chart("Start of a command", "ms", BARE, taken, failed),
            chart("Import", "ms", "import dtslurm.api", imported, broken),
        ]
    )
    if taken["cscope --help"]:
        show_ratio = sorted(
            one / other for one, other in zip(taken[OURS], taken["cscope --help"], strict=True)
        )
        print(f"dtslurm --help over cscope --help: {show_ratio[len(show_ratio) // 2]:.2f}")


if __name__ == "__main__":
    main()
