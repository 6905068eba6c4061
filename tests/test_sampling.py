"""The choice of sampled cases by seed, and all cases with --everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = """
import pytest

@pytest.fixture(params=["local", "slurm", "far"])
def cli(request):
    return request.param

@pytest.mark.parametrize("size", [1, 2])
def test_of_three_ways(cli, size): ...

@pytest.mark.parametrize("cli", ["local", "slurm"])
def test_of_two_ways(cli): ...

@pytest.mark.parametrize("cli", ["local"])
def test_of_one_way(cli): ...

@pytest.mark.quick
def test_of_every_way(cli): ...

@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", range(9))
def test_of_nine(case): ...

@pytest.mark.sampled(1, "either")
def test_of_either(): ...

@pytest.mark.sampled(1, "either")
def test_of_or(): ...
"""


def collect_names(folder: Path, *words: str) -> list[str]:
    """Return the names of the collected sample tests."""
    (folder / "test_cases.py").write_text(CASES)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "tests.sampling",
        "-p",
        "no:cacheprovider",
    ]
    settings = ["-c", "/dev/null", "--rootdir", str(folder), str(folder)]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*argv, *words, *settings],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def count_prefixed(tests: list[str], *beginnings: str) -> int:
    return sum(test.startswith(beginnings) for test in tests)


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_seed_determines_the_sampled_cases(tmp_path: Path, seed: str) -> None:
    chosen = collect_names(tmp_path, "--seed", seed)
    assert count_prefixed(chosen, "test_of_three_ways") == 2
    assert sum("-1]" in name for name in chosen) == sum("-2]" in name for name in chosen) == 1
    assert count_prefixed(chosen, "test_of_two_ways") == 1
    assert count_prefixed(chosen, "test_of_one_way") == 1
    assert count_prefixed(chosen, "test_of_every_way") == 3
    assert count_prefixed(chosen, "test_of_nine") == 2
    assert count_prefixed(chosen, "test_of_either", "test_of_or") == 1
    assert collect_names(tmp_path, "--seed", seed) == chosen


def test_everything_collects_all_cases(tmp_path: Path) -> None:
    assert len(collect_names(tmp_path, "--everything")) == 6 + 2 + 1 + 3 + 9 + 2
