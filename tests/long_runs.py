"""The site's page of the long runs: nemesis, soak, fuzz."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from tests import robustness

Result = Mapping[str, Any]
HEAD = """# Long runs

What `make nemesis`, `make soak` and `make fuzz` saw when they last ran. A short form
of each is part of `make test`.
"""
NEMESIS = """
## Nemesis

Each schedule is made of a seed: two to four runs, some with a supervisor, some submitted by two clients
under one key; clients that cancel, requeue, clean, follow logs and look at the state all the time; and one
to three faults, on a real Slurm of three nodes. When all is mended and every run is over, a checker goes
through the history of everything that clients were told and training code did. Nothing may be

- lost: accepted, and nobody can tell what became of it;
- doubled: two jobs of one run at work, an attempt's number used twice, a run done twice;
- revived: at work again after it was cancelled;
- told falsely: an end that training code denies, an end that is none, another exit code;
- stale: committed by an attempt after a later one has begun.

`make nemesis NEMESIS_ARGS='--seed 7'` lives a schedule again: what happens is the same, how it
interleaves is not.

UNKNOWN, with its reason, is a true answer: a controller that is killed right after its answer may forget
the job. Slow networks (N5) and SSH (N10) are not among the faults here: `tests/e2e/test_far_faults.py`
and `tests/e2e/test_fault_matrix.py` make them.
"""
NEMESES = {
    "N1": "controller stopped",
    "N2": "controller killed, started again",
    "N3": "slurmd killed, started again beside its jobs",
    "N4": "node off the network",
    "N6": "munge stopped or killed",
    "N7": "a job's slurmstepd killed",
    "N8": "a rank stopped or killed",
    "N9": "disk of the runs full",
    "N11": "sbatch, squeue, scontrol or scancel slow, dead, babbling or silent",
    "N12": "a client's clock 400 s behind or 100 s ahead",
    "N13": "preempted",
    "N14": "prolog fails",
    "N15": "a client killed or interrupted",
    "N16": "a hostile name in the queue",
    "N17": "a supervisor stopped or killed",
    "N18": "the supervisor's agent on a node stopped or killed",
    "N19": "the file server of the runs gives jobs stale handles or errors, or is a second late each time",
    "N20": "the clock of jobs' processes 50 s behind or 100 s ahead",
}
SOAK = """
## Soak

Compressed life on a cluster, at its login node and over SSH: in each round runs are submitted, followed,
cancelled, requeued and looked at; old ones are cleaned away. One process stays for all rounds.
"""
FUZZ = """
## Fuzz

Parsers under atheris, guided by coverage. What reached something new is kept, and tried by the suite.

| parser | seconds | inputs tried | edges reached | inputs kept |
|---|---|---|---|---|"""


def page() -> str:
    """Return what the long runs saw, and what was mended for it."""
    parts = [HEAD]
    results = robustness.read()
    for name, words in (("nemesis", _nemesis), ("soak", _soak), ("fuzz", _fuzz)):
        if result := results.get(name):
            where = f"{result['machine']}; {result['date']}, commit {result['commit']}, {result['seconds']} s"
            parts += [*words(result), f"\n*{where}*\n"]
    parts += ["\n## Found and mended\n", "| by | found | now |\n|---|---|---|"]
    found = yaml.safe_load((robustness.ROOT / "docs" / "robustness.yaml").read_text())
    parts += [f"| {one['by']} | {one['found']} | {one['mended']} |" for one in found]
    return "\n".join(parts)


def _nemesis(result: Result) -> Iterator[str]:
    ends = ", ".join(f"{count} {state}" for state, count in result["ends"].items())
    wrong, failed = result["violations"], result["errors"]
    yield NEMESIS
    seeds, by_hand = result["seeds"], result["by_hand"]
    yield f"{len(seeds)} schedules, seeds {ranges(seeds)}: {result['runs']} runs ({ends}),"
    yield f"{result['attempts']} attempts, {result['looks']} looks. Jobs whose end Slurm did not see,"
    yield f"ended by hand: {by_hand}. **{len(wrong)} violations**, {len(failed)} errors of clients.\n"
    yield from (f"- seed {seed}: {kind}: {run}: `{words}`" for seed, kind, run, words in wrong)
    if wrong or failed:
        yield "\nThe code has changed since they were lived. What became of each seed is told below."
    yield "\n| | fault | schedules |\n|---|---|---|"
    for kind, words in NEMESES.items():
        yield f"| {kind} | {words} | {result['faults'].get(kind, 0)} |"


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as in ``1-3, 7``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in found)


def _soak(result: Result) -> Iterator[str]:
    yield SOAK
    done = ", ".join(f"{count} × {name}" for name, count in result["done"].items())
    yield f"{result['rounds']} rounds: {done}. Found: {'; '.join(result['found']) or 'nothing'}.\n"
    yield "| held, median of | the second quarter | the last quarter |\n|---|---|---|"
    for name, (before, after) in result["held"].items():
        yield f"| {name.replace('_', ' ')} | {before:g} | {after:g} |"


def _fuzz(result: Result) -> Iterator[str]:
    yield FUZZ
    for name, one in result["targets"].items():
        failed = ", one fails" if one["failed"] else ""
        yield f"| {name} | {one['seconds']} | {one['tried']:,} | {one['edges']} | {one['kept']}{failed} |"
