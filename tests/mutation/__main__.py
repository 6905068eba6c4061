"""``python -m tests.mutation [OPTIONS] [PACKAGE]...``: small changes to packages, which tests must detect.

The packages are those whose tests start few processes: slurm, render and worker; by default all. cosmic-ray
lists the mutants of a package, N of them are drawn by the seed, and the tests run on each in a copy of the
checkout. The score is the share of mutants that the tests detect. The scores and the surviving mutants are
printed, and written to docs/mutation.json unless they are of some modules only.
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
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.release.build import ROOT

RESULTS = ROOT / "docs" / "mutation.json"
PACKAGES = ("slurm", "render", "worker")
# A package's own tests, without ShellCheck of golden scripts, which depends on their text alone. The tests of
# a module of worker/ are the files that name the module, or else a module that imports it.
TESTS_OF_PROGRAMS = {  # modules that tests run as programs of their own, so that no test file names them
    "job_execution": "tests/scheduler/test_local_control.py",
    "scontrol": "tests/scheduler/test_local_control.py",
    "send": "tests/store/test_pull.py",
    "answer": "tests/services/test_usage_samples.py",
}
WITH_CLUSTERS = ("e2e", "frameworks", "lab", "sshd", "nemesis", "soak", "release")
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
# These operators produce programs that behave the same.
EQUIVALENT = ("core/ReplaceBinaryOperator_BitOr", "core/NumberReplacer")
TIME_LIMIT_S = 240.0


def list_mutants(folder: Path, package: str) -> list[Any]:
    """Return all mutants of a package that may behave differently."""
    from cosmic_ray.commands.init import init
    from cosmic_ray.work_db import WorkDB, use_db

    modules = sorted((Path("dtslurm") / package).rglob("*.py"))
    with use_db(str(folder / f"{package}.sqlite"), WorkDB.Mode.create) as database:
        init(modules, database, {})
        result = [item.mutations[0] for item in database.work_items]
    return [
        item
        for item in result
        if not item.operator_name.startswith(EQUIVALENT) and not _changes_annotation(item)
    ]


def _changes_annotation(mutant: Any) -> bool:
    """Return whether a mutant changes a type annotation, which has no effect when the program runs."""
    line = mutant.module_path.read_text().splitlines()[mutant.start_pos[0] - 1]
    return " | None" in line[mutant.start_pos[1] - 1 :][:8]


def find_tests(package: str, module: Path) -> tuple[str, ...]:
    """Return the tests that should detect a mutant of a module.

    For a module of worker/ these are the tests that name it, else those of the modules that import it.
    """
    if package in TESTS:
        return TESTS[package]
    if module.stem in TESTS_OF_PROGRAMS:
        return (TESTS_OF_PROGRAMS[module.stem],)
    visited, modules = {module}, [module]
    while modules:
        tests = {
            str(test)
            for current in modules
            for test, text in _read_tests().items()
            if _names_module(test, text, current)
        }
        if tests:
            return tuple(sorted(tests))
        modules = [
            path
            for path in Path("dtslurm/worker").rglob("*.py")
            if path not in visited and _imports_any(path, modules)
        ]
        visited.update(modules)
    return ()


@cache
def _read_tests() -> dict[Path, str]:
    """Return the texts of the test files that start no cluster, by path."""
    files = [path for path in sorted(Path("tests").rglob("test_*.py")) if path.parts[1] not in WITH_CLUSTERS]
    return {path: path.read_text() for path in files}


def _names_module(test: Path, text: str, module: Path) -> bool:
    stem, package = re.escape(module.stem), re.escape(module.parent.name)
    folder = rf"worker(\.\w+)*?(\.{package})?"  # worker itself has modules too, and its folders have folders
    named = rf"{folder}(\.{stem}\b| import .*\b{stem}\b)|\b{stem}\.py\b"
    is_namesake = test.parts[1] == "worker" and test.stem == f"test_{module.stem}"
    return is_namesake or re.search(named, text) is not None


def _imports_any(path: Path, modules: list[Path]) -> bool:
    names = "|".join(re.escape(module.stem) for module in modules)
    imported = rf"^\s*from \.+(\w+\.)*\s*(({names}) import|import .*\b({names})\b)"
    return re.search(imported, path.read_text(), re.MULTILINE) is not None


def check_mutant(package: str, mutant: Any) -> dict[str, Any]:
    """Return the outcome of a mutant, tested in this process's copy of the checkout."""
    from cosmic_ray.mutating import mutate_and_test

    tests = find_tests(package, mutant.module_path)
    row = {
        "module": str(mutant.module_path),
        "line": mutant.start_pos[0],
        "operator": mutant.operator_name,
    }
    if not tests:
        return {**row, "outcome": "no test of its own", "diff": ""}
    words = [*in_own_process_space(), sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider"]
    words += ["-m", "not slurm"]
    # Python would take the bytecode of another mutant of the same size and second for that of this one.
    shutil.rmtree(mutant.module_path.parent / "__pycache__", ignore_errors=True)
    result = mutate_and_test([mutant], shlex.join([*words, *tests]), 2 * TIME_LIMIT_S)
    outcome = str(result.test_outcome.value if result.test_outcome else result.worker_outcome.value)
    print(f"{package} {mutant.module_path}:{mutant.start_pos[0]} {outcome}", flush=True)
    lines = (result.diff or "").splitlines()
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in {"+++", "---"}]
    return {**row, "outcome": outcome, "diff": "\n".join(changed)}


def enter_copy(folder: Path) -> None:
    """Work in a copy of the checkout, so that no mutant is ever in the user's own files or another lane's."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tree = Path(tempfile.mkdtemp(dir=folder))
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def in_own_process_space() -> list[str]:
    """Return the words with which a program sees only its own processes, all of which end with it or in time.

    A mutant of ``kill`` may signal all processes, or all of its process group. Another may start processes
    without end, which cosmic-ray would leave behind.
    """
    words = ["setsid", "--wait", "timeout", "--signal=KILL", f"{TIME_LIMIT_S:g}"]
    words += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*words, *([] if os.geteuid() == 0 else ["--user", "--map-current-user"])]


def main() -> int:
    """Test a sample of mutants of each package; print and store the scores."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=", ".join(PACKAGES))
    parser.add_argument("--sample", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--lanes", type=int, default=2, metavar="N", help="mutants tested at the same time")
    parser.add_argument("--module", default="", metavar="M", help="only modules with M in their path")
    arguments = parser.parse_args()
    packages = arguments.packages or list(PACKAGES)
    if unknown := sorted(set(packages) - set(PACKAGES)):
        parser.error(f"no package {', '.join(unknown)}; there are: {', '.join(PACKAGES)}")
    scores = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory(prefix="dtslurm-mutation-") as name:
        enter_copy(Path(name))
        for package in packages:
            every = list_mutants(Path(name), package)
            mutants = [item for item in every if arguments.module in str(item.module_path)]
            sample = random.Random(arguments.seed).sample(mutants, min(arguments.sample, len(mutants)))
            with ProcessPoolExecutor(
                arguments.lanes, initializer=enter_copy, initargs=(Path(name),)
            ) as lanes:
                rows = list(lanes.map(partial(check_mutant, package), sample))
            survivors = [row for row in rows if row["outcome"] in {"survived", "no test of its own"}]
            detected = len(rows) - len(survivors)
            scores[package] = {
                "mutants": len(mutants),
                "tried": len(rows),
                "found": detected,
                "seed": arguments.seed,
                "survived": survivors,
            }
            share = detected / max(len(rows), 1)
            print(f"{package}: {detected} of {len(rows)} detected ({share:.0%}), of {len(mutants)} mutants")
            for row in survivors:
                print(f"  {row['module']}:{row['line']} {row['outcome']}\n{row['diff']}")
            if not arguments.module:
                RESULTS.write_text(json.dumps(scores, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
