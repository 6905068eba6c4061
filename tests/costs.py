"""The time and CPU time of each test: `pytest --costs=FILE`, then `python -m tests.costs FILE`.

The CPU time of a test is that of this process and all that it has started, a Slurm and its jobs included.
A control group of Linux (version 2) counts it, which root alone can make.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
GROUPS = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
CPU_FILE: list[Path] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--costs``."""
    parser.addoption(
        "--costs", metavar="FILE", help="append each test's seconds and CPU seconds to FILE, as lines of JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count the CPU time."""
    if config.option.costs:
        join_own_group()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Append what a test and its fixtures took."""
    file = item.config.option.costs
    if not file:
        return (yield)
    began, cpu, machine = time.monotonic(), cpu_seconds(), machine_cpu_seconds()
    result = yield
    row = {
        "test": item.nodeid,
        "seconds": round(time.monotonic() - began, 3),
        "cpu": round(cpu_seconds() - cpu, 2),
        "machine": [round(machine, 2), round(machine_cpu_seconds(), 2)],
    }
    with Path(file).open("a") as lines:  # one write a line: the worker processes share the file
        lines.write(json.dumps(row) + "\n")
    return result


def join_own_group() -> None:
    """Move this process into a control group of its own, in which all that it starts remains."""
    groups = next(folder for folder in GROUPS if (folder / "cgroup.procs").exists())
    group = groups / f"tests-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    CPU_FILE.append(group / "cpu.stat")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all that it has started, detached processes included."""
    return int(CPU_FILE[0].read_text().split()[1]) / 1e6


def machine_cpu_seconds() -> float:
    """Return the CPU seconds of the whole machine since its start."""
    user, nice, system, _idle, _iowait, irq, softirq = map(
        int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:8]
    )
    return (user + nice + system + irq + softirq) / TICKS


def directory(test: str) -> str:
    """Return the directory of `tests/` that a test is in."""
    parts = test.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "."


def main(file: str) -> None:
    """Print a table by directory, and the dearest files and tests."""
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    for title, key, most in (
        ("directory", directory, 99),
        ("file", lambda test: test.partition("::")[0], 60),
        ("test", lambda test: test, 60),
    ):
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for row in rows:
            result = sums[key(row["test"])]
            result[0] += 1
            result[1] += row["seconds"]
            result[2] += row["cpu"]
        print(f"\n| {title} | tests | seconds | CPU seconds |\n|---|---|---|---|")
        for name, (count, seconds, cpu) in sorted(sums.items(), key=lambda item: -item[1][2])[:most]:
            print(f"| {name} | {count:.0f} | {seconds:.1f} | {cpu:.1f} |")
    seconds, cpu = (sum(row[name] for row in rows) for name in ("seconds", "cpu"))
    begins, ends = zip(*(row["machine"] for row in rows), strict=True)
    machine = max(ends) - min(begins)
    print(f"\nAll tests: {seconds:.0f} s, {cpu:.0f} s of CPU; the machine: {machine:.0f} s of CPU.")


if __name__ == "__main__":
    main(sys.argv[1])
