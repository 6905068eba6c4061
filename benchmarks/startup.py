"""The start time of commands and imports, beside a bare Python interpreter and other tools.

Each command runs in a new process, and each tool in a separate environment (`benchmarks/peers`). The commands
run alternately in rounds; the first round is not counted. A command that fails is shown as failed with its
error message. `dtslurm --help` is also compared with `cscope --help`, the help text of clusterscope.

Run it with ``python -m benchmarks.startup [--rounds N]``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.charts import compare_rounds, print_charts
from benchmarks.peers import PeerMissing, environment

ROUNDS = 15
PYTHON, DTSLURM, CSCOPE = "python -c pass", "dtslurm --help", "cscope --help"
Commands = dict[str, tuple[str, list[str]]]  # name -> (environment, argv with a program of its bin directory)
HELP: Commands = {
    PYTHON: ("dtslurm", ["python", "-c", "pass"]),
    DTSLURM: ("dtslurm", ["dtslurm", "--help"]),
    CSCOPE: ("clusterscope", ["cscope", "--help"]),
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


def time_commands(commands: Commands, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the milliseconds of each command by round, and the error messages of failed commands."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        (folder / "train.py").write_text("print('hello')\n")
        env = {"PATH": "/usr/bin:/bin", "HOME": home, "XDG_STATE_HOME": home}
        for number in range(rounds + 1):  # the first round warms up the page cache
            for name, (peer, argv) in commands.items():
                if name in failed:
                    continue
                try:
                    program = environment(peer) / "bin" / argv[0]
                except PeerMissing as error:
                    failed[name] = f"cannot be installed: {error}"
                    continue
                start = time.perf_counter()
                process = subprocess.run(
                    [program, *argv[1:]], cwd=folder, env=env, capture_output=True, text=True, check=False
                )
                if process.returncode:
                    lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
                    failed[name], times[name] = lines[-1], []
                elif number:
                    times[name].append((time.perf_counter() - start) * 1000)
    return times, failed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    times, failed = time_commands(HELP, rounds)
    import_times, failed_imports = time_commands(IMPORTS, rounds)
    print_charts(
        [
            compare_rounds("Time of a command", "ms", PYTHON, times, failed),
            compare_rounds("Time of an import", "ms", "import dtslurm.api", import_times, failed_imports),
        ]
    )
    if times[CSCOPE]:
        pairs = zip(times[DTSLURM], times[CSCOPE], strict=True)
        ratio = statistics.median_high(dtslurm / cscope for dtslurm, cscope in pairs)
        print(f"{DTSLURM}, ratio to {CSCOPE}: {ratio:.2f}")


if __name__ == "__main__":
    main()
