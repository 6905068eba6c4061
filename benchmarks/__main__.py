"""``python -m benchmarks [NAME]...`` runs benchmarks, all unless named, and writes down what they printed.

Each runs in a process of its own; one that fails is written down as failed. The results go to
`docs/benchmarks.json`, of which docs/benchmarks.md is made; those that were not run stay as they were.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import page
from benchmarks.figures import HANDED
from benchmarks.page import RESULTS, ROOT
from dtslurm.services.clusters.git_version import state_of_checkout
from tests.lab.software import SlurmUnavailable, find

# In the order of the page; what each is about is the first line of its module.
NAMES = (
    "startup",
    "install",
    "overhead",
    "requests",
    "submission",
    "results",
    "ssh",
    "remote",
    "snapshot",
    "logs",
    "diagnose",
    "sampler",
    "top",
    "recovery",
    "train",
    "staging",
    "discover",
    "scale",
    "planner",
)
LONGEST_S = 3600


def main() -> int:
    """Run the benchmarks named; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    names = parser.parse_args().names or list(NAMES)
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    commit = state_of_checkout().strip(" ()").removeprefix("commit ")  # before the results change it
    for name in names:
        print(f"\n== {name}", flush=True)
        results[name] = {**measured(name), "commit": commit}
        print(results[name]["output"])
        results = {one: results[one] for one in sorted(results, key=_place)}
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    page.write()
    return int(any(not results[name]["ok"] for name in names))


def _place(name: str) -> int:
    return NAMES.index(name) if name in NAMES else len(NAMES)


def measured(name: str) -> dict[str, object]:
    """Run one benchmark; return what it printed, on which machine and when."""
    began, load = time.monotonic(), os.getloadavg()[0]
    handed = Path(tempfile.mkdtemp(prefix="dtslurm-benchmark-"), "charts.json")
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            env={**os.environ, HANDED: str(handed)},
            check=False,
        )
        ok, output = done.returncode == 0, done.stdout
        if not ok:
            output += f"failed with exit code {done.returncode}\n{done.stderr[-2000:]}"
    except subprocess.TimeoutExpired:
        ok, output = False, f"not over after {LONGEST_S} s\n"
    charts = json.loads(handed.read_text()) if handed.exists() else []
    shutil.rmtree(handed.parent)
    return {
        "ok": ok,
        "output": output.replace(str(ROOT), "."),
        "charts": charts,
        "seconds": round(time.monotonic() - began),
        "load": round(load, 1),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "machine": machine(),
    }


def machine() -> str:
    """Return the machine in words."""
    cpus = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    pages = Path("/proc/meminfo").read_text().split()[1]
    system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    words = (
        f"{len(cpus)} x {cpus[0] if cpus else platform.machine()}",
        f"{int(pages) >> 20} GiB",
        f"{system}, Linux {platform.release()}",
        f"Python {platform.python_version()}",
    )
    return ", ".join([*words, slurm()])


def slurm() -> str:
    """Return which Slurm the benchmarks bring up."""
    try:
        return f"Slurm {find().version()}"
    except SlurmUnavailable:
        return "no Slurm"


if __name__ == "__main__":
    sys.exit(main())
