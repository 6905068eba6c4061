"""How long the command line takes to answer, beside a bare interpreter and a click-based peer.

``python -m benchmarks.startup`` prints the table; the peer (clusterscope's ``cscope``) is installed into a
venv of its own below ``.cache`` on the first run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEER = "clusterscope==0.0.32"
ROUNDS = 15


def peer_command() -> list[str]:
    """Return ``cscope --help``, installed beside us."""
    folder = ROOT / ".cache" / "peers" / "clusterscope"
    program = folder / "bin" / "cscope"
    if not program.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", PEER], check=True)
    return [str(program), "--help"]


def commands(folder: Path) -> dict[str, list[str]]:
    """Return what is measured, by name."""
    script = folder / "train.py"
    script.write_text("print('hello')\n")
    program = str(Path(sys.executable).parent / "dtslurm")
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "cscope --help": peer_command(),
        "dtslurm --help": [program, "--help"],
        "dtslurm status": [program, "status"],
        "dtslurm render": [
            program,
            "render",
            "--cluster",
            "a100x8-ib",
            "-N4",
            "-t",
            "60",
            "-A",
            "x",
            str(script),
        ],
    }


def measure() -> dict[str, dict[str, float]]:
    """Return median and spread of each command in milliseconds, and the ratio to the bare interpreter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = commands(folder)
        times: dict[str, list[float]] = {name: [] for name in chosen}
        env = {"PATH": "/usr/bin:/bin", "HOME": name, "XDG_STATE_HOME": name}
        for _ in range(
            ROUNDS + 1
        ):  # interleaved, so that a busy moment hits all alike; the first round warms up
            for key, argv in chosen.items():
                begin = time.perf_counter()
                subprocess.run(argv, cwd=folder, env=env, capture_output=True, check=True)
                times[key].append((time.perf_counter() - begin) * 1000)
    bare = statistics.median(times["python -c pass"][1:])
    return {
        key: {
            "median_ms": round(statistics.median(values[1:]), 1),
            "min_ms": round(min(values[1:]), 1),
            "max_ms": round(max(values[1:]), 1),
            "ratio_to_bare_python": round(statistics.median(values[1:]) / bare, 2),
        }
        for key, values in times.items()
    }


def main() -> None:
    """Print the table, or JSON with ``--json``."""
    results = measure()
    if "--json" in sys.argv:
        print(json.dumps({"schema": 1, "startup": results}, indent=1))
        return
    print(f"{'command':<18}{'median ms':>10}{'min':>8}{'max':>8}{'x bare':>8}")
    for key, values in results.items():
        print("{:<18}{:>10}{:>8}{:>8}{:>8}".format(key, *values.values()))


if __name__ == "__main__":
    main()
