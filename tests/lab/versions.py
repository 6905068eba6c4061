"""The end-to-end tests on Slurms of four Debian releases, and the documentation's table of how they ended.

``python -m tests.lab.versions [SUITE]... [--column NAME]...`` unpacks each suite's Slurm into a cache, runs
on it every test that speaks to a Slurm and is not a slow one, and writes down what came of it in
`docs/slurm-versions.json` and in docs/tested.md. What was not run stays as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dtslurm.services.clusters.git_version import state_of_checkout
from tests.lab.software import at_prefix, cached_prefix
from tests.lab.suites import unpack

ROOT = Path(__file__).parents[2]
RECORD, PAGE = ROOT / "docs" / "slurm-versions.json", ROOT / "docs" / "tested.md"
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->\n"
SUITES = ("bullseye", "bookworm", "trixie", "sid")
FOLDERS = ("tests/e2e", "tests/scheduler")
MARKS = "slurm and not slow and not frameworks"
NAMES = "not far and not local"  # those over SSH and of the embedded scheduler speak of other things
LONGEST_S = 1800
# The table's columns, and the files of tests that fill each.
COLUMNS = {
    "submit": (
        "test_runs", "test_exactly_once", "test_slurm_limits", "test_secrets", "test_environment_canary",
        "test_resubmit", "test_executor", "test_submitits_own", "test_hydras_own", "test_python",
        "test_requests", "test_sbatch_scripts", "test_segments",
    ),
    "states, control": ("test_slurm_live", "test_slurm_bare"),
    "logs, top, report": (
        "test_logs", "test_top", "test_top_web", "test_sampler", "test_report", "test_report_look",
        "test_usage", "test_durations",
    ),
    "diagnose": (
        "test_diagnose", "test_live", "test_exec", "test_profile_steps", "test_forward", "test_sessions",
        "test_allocation", "test_notify", "test_stalled", "test_ranks_apart",
    ),
    "signals, survival, health": (
        "test_signals", "test_survive", "test_survival", "test_health", "test_elastic", "test_held",
        "test_supervisor_killed", "test_clock_skew", "test_lost_agents",
        "test_large_layout", "test_roles",
    ),
    "data, sweeps": ("test_staging", "test_sweeps"),
    "cluster discover, check": ("test_discover", "test_init", "test_fabric_check"),
}  # fmt: skip
Record = Mapping[str, Mapping[str, Any]]


def column_of(file: str) -> str:
    """Return the column of a file of tests."""
    return next(column for column, files in COLUMNS.items() if file in files)


def recorded() -> dict[str, Any]:
    """Return what was written down; empty before the first run."""
    result: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return result


def places(columns: Collection[str]) -> list[str]:
    """Return the files of tests that fill these columns."""
    files = [f"{name}.py" for column in columns for name in COLUMNS[column]]
    return [f"{folder}/{file}" for file in files for folder in FOLDERS if (ROOT / folder / file).exists()]


def prefix_of(suite: str) -> Path:
    """Return where a suite's Slurm is unpacked: for root a cache that everyone can read.

    Root's tests run some of its commands as nobody, who cannot look below root's own folder.
    """
    cache = Path("/var/cache/dtslurm") if os.geteuid() == 0 else cached_prefix().parent
    return cache / "slurm" / suite


def measured(suite: str, columns: Collection[str], commit: str) -> tuple[str, dict[str, Any]]:
    """Run the tests on a suite's Slurm; return its version and what came of it."""
    prefix = prefix_of(suite)
    unpack(suite, prefix)
    version = at_prefix(prefix).version()
    print(f"== Slurm {version} ({suite}): {', '.join(columns)}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "told.xml"
        argv = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", f"--junit-xml={path}"]
        env = {**os.environ, "DTSLURM_SLURM_PREFIX": str(prefix), "DTSLURM_REQUIRE_SLURM": "1"}
        words = [*argv, "-m", MARKS, "-k", NAMES, *places(columns)]
        subprocess.run(words, cwd=ROOT, env=env, timeout=LONGEST_S, check=False)
        cells, failed = outcomes(ET.parse(path).getroot())
    for cell in cells.values():
        cell |= {"date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "commit": commit}
    return version, {"suite": suite, "cells": cells, "failed": failed}


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a version after some of its columns were run again."""
    kept = [name for name in old.get("failed", ()) if column_of(name.partition("::")[0]) not in new["cells"]]
    cells = {**old.get("cells", {}), **new["cells"]}
    ordered = {column: cells[column] for column in COLUMNS if column in cells}
    return {"suite": new["suite"], "cells": ordered, "failed": sorted([*kept, *new["failed"]])}


def outcomes(root: ET.Element) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Read a JUnit report: how many tests of each column there were and passed, and which failed.

    A test that was skipped counts for nothing. One that was run again counts once, by its last try.
    """
    ended: dict[tuple[str, str], bool] = {}
    for case in root.iter("testcase"):
        if case.find("skipped") is None:
            key = case.get("classname", "").rpartition(".")[2], case.get("name", "")
            ended[key] = case.find("failure") is None and case.find("error") is None
    of, passed = Counter[str](), Counter[str]()
    for (file, _), fine in ended.items():
        of[column_of(file)] += 1
        passed[column_of(file)] += fine
    cells: dict[str, dict[str, Any]] = {
        column: {"passed": passed[column], "of": of[column]} for column in COLUMNS if of[column]
    }
    return cells, sorted(f"{file}::{name}" for (file, name), fine in ended.items() if not fine)


def table(record: Record) -> str:
    """Return the documentation's table, as Markdown; nothing where no version was run."""
    if not record:
        return ""
    lines = [f"| Slurm | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for version, row in sorted(record.items()):
        shown = []
        for column in COLUMNS:
            cell = row["cells"].get(column)
            if cell is None:
                shown.append("not run")
            elif cell["passed"] == cell["of"]:
                shown.append(f"all {cell['of']}")
            else:
                shown.append(f"{cell['passed']} of {cell['of']}")
        lines.append(f"| {version} | {' | '.join(shown)} |")
    failed = [f"{version}: `{name}`" for version, row in sorted(record.items()) for name in row["failed"]]
    return "\n".join([*lines, "", *(["Failed: " + ", ".join(failed) + ".", ""] if failed else [])]) + "\n"


def in_page(text: str, record: Record) -> str:
    """Return the page's text with the table of this record in it."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(record)}{END}{after}"


def main() -> int:
    """Run the suites named, all unless named; return 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.versions")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--column", action="append", choices=COLUMNS, help="these columns only")
    chosen = parser.parse_args()
    failed = []
    commit = state_of_checkout().strip(" ()").removeprefix("commit ")  # before the record is written
    for suite in chosen.suites or SUITES:
        version, row = measured(suite, chosen.column or list(COLUMNS), commit)
        record = recorded()
        row = merged(record.get(version, {}), row)
        others = {key: value for key, value in record.items() if value["suite"] != suite}
        record = dict(sorted({**others, version: row}.items()))
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(in_page(PAGE.read_text(), record))
        failed += row["failed"]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
