"""The accuracy on generated failures; ``python -m benchmarks.diagnose`` prints the figures."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from dtslurm.diagnose import findings
from dtslurm.diagnose.verdict import judge
from dtslurm.model.runs.diagnosis import JobFacts
from tests.diagnose.generator import KINDS, is_right, make_run
from tests.diagnose.judge import SIGNATURES, verdict
from tests.diagnose.phrases import PHRASES, Half

# What nothing was tuned on has seeds of its own. Twelve of them use each of up to four phrases equally often.
SEEDS: dict[Half, range] = {"tuning": range(1, 7), "held-out": range(1001, 1013)}
LEAST: dict[Half, float] = {"tuning": 0.98, "held-out": 0.95}
SAMPLED = 3  # seeds that one run of the suite takes; their part may be somewhat worse than the whole
LEAST_OF_SAMPLED: dict[Half, float] = {"tuning": 0.96, "held-out": 0.9}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("half", ["tuning", "held-out"])
def test_the_top_1_accuracy_on_generated_failures_is_high(
    half: Half, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    wrong, count = [], 0
    seeds, least = list(SEEDS[half]), LEAST[half]
    if not pytestconfig.option.everything:
        seeds = random.Random(pytestconfig.option.seed).sample(seeds, SAMPLED)
        least = LEAST_OF_SAMPLED[half]
    for name in KINDS:
        for seed in seeds:
            run = make_run(tmp_path / name / str(seed), name, seed, half)
            result = verdict(run.folder, run.facts, run.batch)
            count += 1
            if not is_right(run, result.cause, result.rank):
                wrong.append(f"{name} {seed}: {result.cause} rank {result.rank}: {result.summary}")
    assert count >= 25 * 3
    assert 1 - len(wrong) / count >= least, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["exception", "hang-nccl", "node-unsaid", "gpu-memory-and-timeouts"])
def test_a_failure_among_4096_ranks_is_diagnosed(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", name, 3, "held-out", world=4096)
    result = verdict(run.folder, run.facts, run.batch)
    assert (result.cause, result.rank in run.ranks) == (run.cause, True)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.blame is not None])
def test_the_generated_failures_are_blamed_correctly(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", name, 2, "tuning", world=16)
    result = verdict(run.folder, run.facts, run.batch)
    assert (result.cause, result.blame) == (run.cause, run.blame)
    assert result.evidence


@pytest.mark.parametrize("name", ["host-memory", "host-memory-by-state", "host-memory-in-python"])
def test_f50_every_form_of_host_out_of_memory_has_one_cause(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", name, 2, "tuning", world=16)
    assert verdict(run.folder, run.facts, run.batch).cause == "host-out-of-memory"


def test_a_warning_about_a_host_name_is_not_a_rendezvous_failure(tmp_path: Path) -> None:
    (tmp_path / "logs/0").mkdir(parents=True)
    (tmp_path / "ranks/0").mkdir(parents=True)
    line = "[W1121 23:58:19.9 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved.\n"
    for rank, code in enumerate((1, 137)):
        (tmp_path / f"logs/0/rank-{rank}.log").write_text(line)
        values = {"schema": 1, "rank": rank, "local_rank": 0, "node_rank": rank, "host": f"n{rank}", "pid": 7}
        values |= {"started": 1, "ended": 60, "exit_code": code, "signal": 9 if code == 137 else None}
        (tmp_path / f"ranks/0/{rank}.json").write_text(json.dumps(values))
    (tmp_path / "ranks/0/first-failure").write_text("1 137\n")
    facts = JobFacts(job_id="17", state="FAILED", over=True, exit_code=137, world_size=2)
    result = verdict(tmp_path, facts)
    assert (result.cause, result.rank) == ("killed", 1)


@pytest.mark.parametrize(
    ("other", "blame"),
    [
        ("", "user"),
        ("slurmstepd: error: *** STEP 17.0 ON n0 CANCELLED AT 2026-11-24T19:00:00 ***\n", "user"),
        ("loading the model\n", "node"),
    ],
)
def test_a_node_is_blamed_for_an_import_error_only_if_another_node_got_past_the_import(
    tmp_path: Path, other: str, blame: str
) -> None:
    """A rank that srun ends at once, as another one has failed, shows nothing of its own node."""
    (tmp_path / "logs/0").mkdir(parents=True)
    (tmp_path / "ranks/0").mkdir(parents=True)
    error = 'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    import absent\n'
    texts = [f"{error}ModuleNotFoundError: No module named 'absent'\n", other]
    for rank, (text, code, signal) in enumerate(zip(texts, (1, 137), (None, 9), strict=True)):
        (tmp_path / f"logs/0/rank-{rank}.log").write_text(text)
        values = {"schema": 1, "rank": rank, "local_rank": 0, "node_rank": rank, "host": f"n{rank}", "pid": 7}
        values |= {"started": 1, "ended": 2 + rank, "exit_code": code, "signal": signal}
        (tmp_path / f"ranks/0/{rank}.json").write_text(json.dumps(values))
    (tmp_path / "ranks/0/first-failure").write_text("0 1\n")
    result = verdict(tmp_path, JobFacts(job_id="17", state="FAILED", over=True, exit_code=1, world_size=2))
    assert (result.cause, result.rank, result.blame) == ("import-error", 0, blame)


def test_the_tuning_and_held_out_phrases_cover_the_same_causes_in_other_words() -> None:
    assert set(PHRASES["tuning"]) == set(PHRASES["held-out"])
    both = {way for ways in PHRASES["tuning"].values() for way in ways if way}
    alike = [way for ways in PHRASES["held-out"].values() for way in ways if way in both]
    slurms_own = ("DUE TO", "CANCELLED AT", "Node failure", "Loss is nan")
    assert not [way for way in alike if not any(words in way[0] for words in slurms_own)]


def test_without_evidence_the_cause_is_unknown_and_sacct_is_advised() -> None:
    facts = JobFacts(job_id="17", state="FAILED", over=True, exit_code=3, world_size=2)
    result = judge(facts, findings.read({}, [], 2), SIGNATURES)
    assert (result.cause, result.rank, result.exit_code) == ("unknown", None, 3)
    assert result.confidence < 0.7
    assert "sacct -j 17" in result.advice
