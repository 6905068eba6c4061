"""How long ``dtslurm diagnose`` takes on 1,024 ranks with 1 MB of log each, and how often it is right.

``python -m benchmarks.diagnose`` prints both beside what people do by hand: the first line with "error" in
it. ``--quick`` leaves the accuracy out.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dtslurm.diagnose.verdict import judge
from dtslurm.services.observe.diagnose import gather
from dtslurm.transport.local import LocalTransport
from tests.diagnose.generator import KINDS, Made, make, right
from tests.diagnose.judge import SIGNATURES, verdict
from tests.diagnose.phrases import Half

RANKS, BYTES, ROUNDS = 1024, 1_000_000, 5
STEPS = {"90 % and more": 0.9, "75 to 89 %": 0.75, "50 to 74 %": 0.5, "less than 50 %": 0.0}
SEEDS: dict[Half, range] = {"tuning": range(12), "held-out": range(1000, 1012)}


def fill(made: Made) -> int:
    """Put training output before what stands in each log, to a megabyte; return the bytes of all logs."""
    dice = random.Random(1)
    lines = [
        f"2026-11-21 16:{dice.randrange(60):02}:{dice.randrange(60):02},123 INFO trainer.py:214 step {number}"
        f" loss {dice.random():.4f} grad_norm {dice.random():.3f} lr 3e-04 tokens/s {dice.randrange(99999)}\n"
        for number in range(BYTES // 105)
    ]
    before = "".join(lines).encode()
    logs = list((made.folder / "logs" / "0").glob("*.log"))
    for log in logs:
        log.write_bytes(before + log.read_bytes())
    return sum(log.stat().st_size for log in logs)


def timed(run: Callable[[], object]) -> list[float]:
    """Return the seconds of each of some rounds after a first that warms up the page cache."""
    seconds = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def speed(folder: Path) -> dict[str, object]:
    """Return the seconds of a diagnosis and of grep for one word, over the same files."""
    made = make(folder / "run", "hang-nccl", 7, "held-out", world=RANKS)
    size = fill(made)
    transport = LocalTransport()

    def diagnose() -> None:
        found = gather(transport, sys.executable, made.folder, 0, made.batch, SIGNATURES, RANKS)
        told = judge(made.facts, found, SIGNATURES)
        assert right(made, told.cause, told.rank)

    def grep() -> None:
        subprocess.run(["grep", "-rci", "error", made.folder], stdout=subprocess.DEVNULL, check=False)

    ours, theirs = timed(diagnose), timed(grep)
    before = os.times()
    diagnose()
    after = os.times()
    return {
        "ranks": RANKS,
        "megabytes": round(size / 1e6),
        "diagnose_s": [round(one, 2) for one in sorted(ours)],
        "diagnose_cpu_s": round(sum(after[:4]) - sum(before[:4]), 2),
        "load_average": os.getloadavg()[0],
        "grep_error_s": [round(one, 2) for one in sorted(theirs)],
        "ratio": round(sorted(ours)[ROUNDS // 2] / sorted(theirs)[ROUNDS // 2], 2),
    }


def by_hand(made: Made) -> int | None:
    """Return the rank with the first line that has "error" in it, by rank: what grep -m1 shows."""
    for log in sorted((made.folder / "logs" / "0").glob("rank-*.log"), key=lambda path: int(path.stem[5:])):
        if re.search(rb"error", log.read_bytes(), re.IGNORECASE):
            return int(log.stem[5:])
    return None


def accuracy(folder: Path, half: Half) -> dict[str, object]:
    """Return how many of the generated runs are judged right, and for how many grep finds the rank."""
    total, ours, theirs, with_rank = 0, 0, 0, 0
    by_confidence: dict[str, list[bool]] = {name: [] for name in STEPS}
    for name in KINDS:
        for seed in SEEDS[half]:
            made = make(folder / half / name / str(seed), name, seed, half)
            told = verdict(made.folder, made.facts, made.batch)
            total += 1
            is_right = right(made, told.cause, told.rank)
            ours += is_right
            by_confidence[next(name for name, least in STEPS.items() if told.confidence >= least)].append(
                is_right
            )
            if made.ranks and len(made.ranks) < made.facts.world_size:
                with_rank += 1
                theirs += by_hand(made) in made.ranks
    return {
        "runs": total,
        "kinds": len(KINDS),
        "cause_and_rank_right": round(ours / total, 4),
        "grep_error_rank_right": round(theirs / with_rank, 4),
        "right_by_confidence": {
            name: {"runs": len(found), "right": round(sum(found) / len(found), 4)}
            for name, found in by_confidence.items()
            if found
        },
    }


def main() -> None:
    """Print the figures as JSON."""
    with tempfile.TemporaryDirectory() as name:
        results: dict[str, object] = {"speed": speed(Path(name))}
    if "--quick" not in sys.argv:
        for half in SEEDS:
            with tempfile.TemporaryDirectory() as name:
                results[half] = accuracy(Path(name), half)
    print(json.dumps({"schema": 1, "diagnose": results}, indent=1))


if __name__ == "__main__":
    main()
