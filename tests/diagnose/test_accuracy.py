"""Whether generated failed runs are judged right; ``python -m benchmarks.diagnose`` prints the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnose.generator import KINDS, make, right
from tests.diagnose.judge import verdict
from tests.diagnose.phrases import PHRASES, Half

# What nothing was tuned on has seeds of its own. Twelve of them use each of up to four phrases equally often.
SEEDS: dict[Half, range] = {"tuning": range(1, 7), "held-out": range(1001, 1013)}
LEAST: dict[Half, float] = {"tuning": 0.98, "held-out": 0.95}


@pytest.mark.slow
@pytest.mark.parametrize("half", ["tuning", "held-out"])
def test_top_1_accuracy(half: Half, tmp_path: Path) -> None:
    wrong, count = [], 0
    for name in KINDS:
        for seed in SEEDS[half]:
            made = make(tmp_path / name / str(seed), name, seed, half)
            told = verdict(made.folder, made.facts, made.batch)
            count += 1
            if not right(made, told.cause, told.rank):
                wrong.append(f"{name} {seed}: {told.cause} rank {told.rank}: {told.summary}")
    assert count >= 25 * 3
    assert 1 - len(wrong) / count >= LEAST[half], "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exception", "hang-nccl", "node-unsaid", "gpu-memory-and-timeouts"])
def test_4096_ranks(name: str, tmp_path: Path) -> None:
    made = make(tmp_path / "run", name, 3, "held-out", world=4096)
    told = verdict(made.folder, made.facts, made.batch)
    assert (told.cause, told.rank in made.ranks) == (made.cause, True)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.blame is not None])
def test_blame(name: str, tmp_path: Path) -> None:
    made = make(tmp_path / "run", name, 2, "tuning", world=16)
    told = verdict(made.folder, made.facts, made.batch)
    assert (told.cause, told.blame) == (made.cause, made.blame)
    assert told.evidence


def test_the_halves_say_the_same_things_in_other_words() -> None:
    assert set(PHRASES["tuning"]) == set(PHRASES["held-out"])
    both = {way for ways in PHRASES["tuning"].values() for way in ways if way}
    alike = [way for ways in PHRASES["held-out"].values() for way in ways if way in both]
    slurms_own = ("DUE TO", "CANCELLED AT", "Node failure", "Loss is nan")
    assert not [way for way in alike if not any(words in way[0] for words in slurms_own)]
