"""``python -m tests.fuzz [--seconds N] [TARGET]...``: fuzz parsers, guided by coverage (atheris).

The corpus is kept in `tests/fuzz/corpus`, one folder for each target; input that fails stays there as
``crash-*``, and from then on `tests/fuzz/test_fuzz.py` tries it too.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests import robustness
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
_MOST_KEPT = 40  # files of a target


class Fuzzed(NamedTuple):
    """What came of one target."""

    tried: int
    edges: int
    kept: int
    seconds: int
    failed: bool


def main() -> int:
    """Fuzz each target for its share of the time; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=3600, help="for all targets together")
    parser.add_argument("--record", action="store_true", help="for the site")
    parser.add_argument("targets", nargs="*", default=[], metavar="TARGET", help=", ".join(TARGETS))
    args = parser.parse_args()
    names = args.targets or list(TARGETS)
    print(f"{'target':<14} {'inputs tried':>12} {'edges':>7} {'kept':>5}")
    answer = {name: _fuzz(name, args.seconds // len(names)) for name in names}
    if args.record:
        result = {name: item._asdict() for name, item in answer.items()}
        before = robustness.read().get("fuzz", {}).get("targets", {})
        every = {**before, **result}
        robustness.write("fuzz", {"targets": every}, sum(item["seconds"] for item in every.values()))
    return int(any(item.failed for item in answer.values()))


def _fuzz(name: str, seconds: int) -> Fuzzed:
    kept = CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as grown, tempfile.TemporaryDirectory() as seeds:
        for number, seed in enumerate(TARGETS[name].seeds()):
            Path(seeds, str(number)).write_bytes(seed)
        words = [
            f"-max_total_time={seconds}",
            "-max_len=4096",
            f"-artifact_prefix={kept}/",
            "-print_final_stats=1",
        ]
        done = _libfuzzer(name, *words, grown, str(kept), seeds)
        tried = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
        edges = re.findall(r"cov: (\d+)", done.stderr)
        if done.returncode:
            print(done.stdout, done.stderr[-4000:], sep="\n")
        _keep(Path(grown), kept)
    count = len(list(kept.iterdir()))
    counts = int(tried[1]) if tried else 0, int(edges[-1]) if edges else 0, count
    result = Fuzzed(*counts, seconds, failed=done.returncode != 0)
    print(f"{name:<14} {result.tried:>12} {result.edges:>7} {result.kept:>5}", flush=True)
    return result


def _libfuzzer(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.fuzz.one", name, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def _keep(grown: Path, kept: Path) -> None:
    """Add what reached something new; of too much the smallest files stay."""
    for path in grown.iterdir():
        shutil.copy(path, kept / path.name)
    names = sorted(
        (path for path in kept.iterdir() if "-" not in path.name), key=lambda path: path.stat().st_size
    )
    for path in names[_MOST_KEPT:]:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
