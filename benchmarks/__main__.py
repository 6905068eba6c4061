"""``python -m benchmarks [NAME]...`` runs the named benchmarks, or all of them, and stores their output.

Each benchmark runs in a separate process; a benchmark that fails is stored as failed. The results are written
to `docs/benchmarks.json`, from which docs/benchmarks.md is generated. Results of other benchmarks are not
changed.
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
from benchmarks.charts import CHARTS_FILE
from benchmarks.page import RESULTS, ROOT
from dtslurm.services.clusters.git_version import state_of_checkout
from tests.lab.software import SlurmUnavailable, find

# In the order of the page, which takes the description of each benchmark from the docstring of its module.
NAMES = (
    "startup",
    "install",
    "overhead",
    "requests",
    "submission",
    "results",
    "ssh",
    "remote",
    "live",
    "profiling",
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
TIMEOUT_S = 3600


def main() -> int:
    """Run the named benchmarks; return 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    names = parser.parse_args().names or list(NAMES)
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"unknown benchmark: {', '.join(unknown)}. Use names from this list: {', '.join(NAMES)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    commit = (
        state_of_checkout().strip(" ()").removeprefix("commit ")
    )  # before the results modify the checkout
    for name in names:
        print(f"\n== {name}", flush=True)
        results[name] = {**run_benchmark(name), "commit": commit}
        print(results[name]["output"])
        results = {key: results[key] for key in sorted(results, key=_position)}
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    page.write_page()
    return int(any(not results[name]["ok"] for name in names))


def _position(name: str) -> int:
    return NAMES.index(name) if name in NAMES else len(NAMES)


def run_benchmark(name: str) -> dict[str, object]:
    """Run a benchmark; return its output and charts, the machine, the date, the load and the duration."""
    start, load = time.monotonic(), os.getloadavg()[0]
    charts_file = Path(tempfile.mkdtemp(prefix="dtslurm-benchmark-"), "charts.json")
    try:
        process = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, CHARTS_FILE: str(charts_file)},
            check=False,
        )
        ok, output = process.returncode == 0, process.stdout
        if not ok:
            output += f"failed with exit code {process.returncode}\n{process.stderr[-2000:]}"
    except subprocess.TimeoutExpired:
        ok, output = False, f"stopped after {TIMEOUT_S} s\n"
    charts = json.loads(charts_file.read_text()) if charts_file.exists() else []
    shutil.rmtree(charts_file.parent)
    return {
        "ok": ok,
        "output": output.replace(str(ROOT), "."),
        "charts": charts,
        "seconds": round(time.monotonic() - start),
        "load": round(load, 1),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "machine": describe_machine(),
    }


def describe_machine() -> str:
    """Return the CPUs, the memory, and the versions of the system, Python and Slurm."""
    cpus = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory_kib = Path("/proc/meminfo").read_text().split()[1]
    system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    parts = (
        f"{len(cpus)} x {cpus[0] if cpus else platform.machine()}",
        f"{int(memory_kib) >> 20} GiB",
        f"{system}, Linux {platform.release()}",
        f"Python {platform.python_version()}",
    )
    return ", ".join([*parts, slurm_version()])


def slurm_version() -> str:
    """Return the version of the Slurm that the benchmarks start."""
    try:
        return f"Slurm {find().version()}"
    except SlurmUnavailable:
        return "no Slurm"


if __name__ == "__main__":
    sys.exit(main())
