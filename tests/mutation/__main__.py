"""``python -m tests.mutation [--sample N] [--seed S] [ROOM]...``: wrong programs, do tests find them?

A room is a folder of dtslurm/ that is tested without starting much: slurm, render and worker; all unless
named. From each, N of cosmic-ray's mutants are drawn by the seed, and tried in a copy of the checkout. The
score is the share that the tests found; what survived is shown as changed. All goes to docs/mutation.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.release.build import ROOT

RESULTS = ROOT / "docs" / "mutation.json"
ROOMS = ("slurm", "render", "worker")
# A room's own tests (what ShellCheck says of golden scripts follows from their text); those of worker/ are
# the files that speak of the module, or of what imports it.
SENT = {  # these are not imported here: they run where the files are, or as a program of its own
    "job_execution": "tests/scheduler/test_local_control.py",
    "scontrol": "tests/scheduler/test_local_control.py",
    "send": "tests/store/test_pull.py",
    "answer": "tests/services/test_usage_samples.py",
}
STARTING_MUCH = ("e2e", "frameworks", "lab", "sshd", "nemesis", "soak", "release")
GOLDEN = "tests/render/test_golden.py"
TESTS = {
    "slurm": (
        "tests/slurm",
        "tests/services/test_usage.py",
        "tests/scheduler/test_job_table.py",
        "tests/discover",
    ),
    "render": (
        f"{GOLDEN}::test_each_case_matches_its_golden_script",
        "tests/render/test_render.py",
        "tests/render/test_compiled.py",
    ),
}
# Swapping equal forms, or what only types see, makes no wrong program.
EQUAL = ("core/ReplaceBinaryOperator_BitOr", "core/NumberReplacer")
SLOWEST_S = 600.0


def mutants(folder: Path, room: str) -> list[Any]:
    """Return all mutants of a room's modules that could be wrong."""
    from cosmic_ray.commands.init import init
    from cosmic_ray.work_db import WorkDB, use_db

    modules = sorted((Path("dtslurm") / room).rglob("*.py"))
    with use_db(str(folder / f"{room}.sqlite"), WorkDB.Mode.create) as database:
        init(modules, database, {})
        result = [item.mutations[0] for item in database.work_items]
    return [item for item in result if not item.operator_name.startswith(EQUAL) and not _annotation(item)]


def _annotation(mutant: Any) -> bool:
    """Whether a mutant changes a type, which nothing reads when the program runs."""
    line = mutant.module_path.read_text().splitlines()[mutant.start_pos[0] - 1]
    return " | None" in line[mutant.start_pos[1] - 1 :][:8]


def tests_of(room: str, module: Path) -> tuple[str, ...]:
    """Return the tests that are to find a mutant of a module: of worker/ also those of who imports it."""
    if room in TESTS:
        return TESTS[room]
    if module.stem in SENT:
        return (SENT[module.stem],)
    seen, users = {module}, [module]
    while users:
        spoken = {str(test) for user in users for test, text in _tests().items() if _is_of(test, text, user)}
        if spoken:
            return tuple(sorted(spoken))
        users = [
            path for path in Path("dtslurm/worker").rglob("*.py") if path not in seen and _uses(path, users)
        ]
        seen.update(users)
    return ()


@cache
def _tests() -> dict[Path, str]:
    """Return the files of tests that start no cluster."""
    files = [path for path in sorted(Path("tests").rglob("test_*.py")) if path.parts[1] not in STARTING_MUCH]
    return {path: path.read_text() for path in files}


def _is_of(test: Path, text: str, module: Path) -> bool:
    stem, package = re.escape(module.stem), module.parent.name
    named = rf"worker(\.{package})?(\.{stem}\b| import .*\b{stem}\b)|\b{stem}\.py\b"
    return test.stem == f"test_{module.stem}" or re.search(named, text) is not None


def _uses(path: Path, modules: list[Path]) -> bool:
    names = "|".join(re.escape(module.stem) for module in modules)
    imported = rf"^\s*from \.+(\w+\.)*\s*(({names}) import|import .*\b({names})\b)"
    return re.search(imported, path.read_text(), re.MULTILINE) is not None


def try_mutants(room: str, drawn: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield what became of each mutant."""
    from cosmic_ray.mutating import mutate_and_test

    for number, mutant in enumerate(drawn, 1):
        tests = tests_of(room, mutant.module_path)
        row = {
            "module": str(mutant.module_path),
            "line": mutant.start_pos[0],
            "operator": mutant.operator_name,
        }
        if not tests:
            yield {**row, "outcome": "no test of its own", "diff": ""}
            continue
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-xq",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slurm and not slow",
        ]
        result = mutate_and_test([mutant], shlex.join([*words, *tests]), SLOWEST_S)
        outcome = str(result.test_outcome.value if result.test_outcome else result.worker_outcome.value)
        print(
            f"{room} {number}/{len(drawn)} {mutant.module_path}:{mutant.start_pos[0]} {outcome}", flush=True
        )
        lines = (result.diff or "").splitlines()
        changed = [line for line in lines if line[:1] in "+-" and line[:3] not in {"+++", "---"}]
        yield {**row, "outcome": outcome, "diff": "\n".join(changed)}


def copy(folder: Path) -> Path:
    """Return a copy of the checkout's files: a mutant must never be in the user's own."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    place = folder / "tree"
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def main() -> int:
    """Try a sample of each room; write down and print the scores."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=", ".join(ROOMS))
    parser.add_argument("--sample", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    chosen = parser.parse_args()
    rooms = chosen.rooms or list(ROOMS)
    if unknown := sorted(set(rooms) - set(ROOMS)):
        parser.error(f"no room {', '.join(unknown)}; there are: {', '.join(ROOMS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory(prefix="dtslurm-mutation-") as name:
        place = copy(Path(name))
        os.chdir(place)
        os.environ |= {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
        for room in rooms:
            every = mutants(Path(name), room)
            drawn = random.Random(chosen.seed).sample(every, min(chosen.sample, len(every)))
            rows = list(try_mutants(room, drawn))
            result = sum(row["outcome"] not in {"survived", "no test of its own"} for row in rows)
            lived = [row for row in rows if row["outcome"] in {"survived", "no test of its own"}]
            results[room] = {
                "mutants": len(every),
                "tried": len(rows),
                "found": result,
                "seed": chosen.seed,
                "survived": lived,
            }
            share = result / max(len(rows), 1)
            print(f"{room}: {result} of {len(rows)} found ({share:.0%}), of {len(every)} mutants")
            for row in lived:
                print(f"  {row['module']}:{row['line']} {row['outcome']}\n{row['diff']}")
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
