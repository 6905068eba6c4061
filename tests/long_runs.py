"""The documentation page of the long runs: nemesis, soak and fuzz."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from tests import robustness

Result = Mapping[str, Any]
HEAD = """# Long runs

This page shows the last results of `make nemesis`, `make soak` and `make fuzz`. `make test` runs a short form
of each.
"""
NEMESIS = """
## Nemesis

Nemesis runs fault schedules on a real Slurm of three nodes. A seed determines each schedule: two to four
runs, some with a supervisor and some submitted by two clients with the same idempotency key; clients that
cancel, requeue, clean, follow logs and query the state continuously; and one to three faults. When the faults
are removed and all runs have ended, a checker compares the history of the clients' answers with the history
of the training processes. The kinds of violations are

- lost: a run was accepted, but its final state is unknown;
- doubled: two jobs of a run train at the same time, an attempt number is used twice, or training is done
  twice;
- revived: a run trains again after it was cancelled;
- false verdict: a reported end did not happen, or has another state or exit code than the training process;
- stale commit: an attempt commits a result after a later attempt has started;
- lost progress: an attempt of training starts before the latest checkpoint of the attempts before it;
- other result: the final state of training differs from the state of a training that nothing disturbs;
- omitted: a job is in the queue, and `status` does not list it or a cancel by its job id does not find it;
- bad node used: a submission does not exclude a node that the supervisor of another run has noted as bad.

The schedules from seed 2000 on contain a fault of N21 to N26. In some of them a run trains with
`dtslurm.train`: its state has a parameter without gradients, a tensor that grows with each step, and a loader
with a worker process. Some of their clients are of an earlier version of dtslurm, and share the run root with
the others. `clean` and `requeue` act at the same moment.

The schedules from seed 3000 on contain runs with roles, N27, and clients that scale a role. Training must
begin after all its servers have served; no instance may be alive twice, and no server after its run; one lost
server must not end a run. They have a table of their own.

The schedules from seed 4000 on contain job arrays of three to eight tasks, most of them with preemptions.
Each task is judged as a run of its own.

`make nemesis NEMESIS_ARGS='--seed 7'` repeats a schedule. The events are the same, but their interleaving
can differ.

UNKNOWN with a reason is a correct answer, because a controller that is killed immediately after its answer
can lose the job. Slow networks (N5) and SSH (N10) are not among these faults;
`tests/e2e/test_fault_matrix.py` and `tests/e2e/test_remote_faults.py` test them.
"""
NEMESES = {
    "N1": "controller stopped",
    "N2": "controller killed and restarted",
    "N3": "slurmd killed, and restarted while its jobs run",
    "N4": "node disconnected from the network",
    "N6": "munge stopped or killed",
    "N7": "slurmstepd of a job killed",
    "N8": "a rank stopped or killed",
    "N9": "disk of the run directories full",
    "N11": "sbatch, squeue, scontrol or scancel slow, failing, or with unexpected or no output",
    "N12": "clock of a client 400 s behind or 100 s ahead",
    "N13": "job preempted",
    "N14": "prolog failed",
    "N15": "a client killed or interrupted",
    "N16": "job with a malicious name in the queue",
    "N17": "a supervisor stopped or killed",
    "N18": "agent of a supervisor on a node stopped or killed",
    "N19": "file server of the runs returns stale handles or errors, or delays each request by a second",
    "N20": "clock of the processes of jobs 50 s behind or 100 s ahead",
    "N21": "training killed, and its checkpoints unreadable for some seconds when it starts again",
    "N22": "run directory moved away and back; a client lists the jobs or cancels the job by its id",
    "N23": "record of a run of a later version for some seconds; the client acts as for N22",
    "N24": "health check of a node fails, and a run is submitted later",
    "N25": "jobs cannot create symbolic links, which they claim their runs with",
    "N26": "home of the clients full or read-only",
    "N27": "server of a run with roles killed, or stopped for up to 20 s",
}
SOAK = """
## Soak

The soak test compresses months of use into an hour, on a login node and over SSH. In each round it submits,
follows, cancels, requeues and queries runs, and removes old ones. One client process runs for all rounds.
"""
RESOURCES = {
    "memory_mib": "memory of the client, MiB",
    "files": "open files of the client",
    "threads": "threads of the client",
    "children": "child processes of the client",
    "connections": "SSH connections at the server",
    "far": "processes of the user on the login node",
    "dashboard_mib": "memory of the dashboard, MiB",
    "state": "files in state and cache directories",
}
FUZZ = """
## Fuzz

The parsers are fuzzed with atheris, guided by coverage. Inputs that reached new edges are kept, and every run
of the test suite repeats them.

| parser | seconds | inputs tried | edges reached | inputs kept |
|---|---|---|---|---|"""


def page() -> str:
    """Return the results of the long runs, and the problems that they revealed, in Markdown."""
    parts = [HEAD]
    results = robustness.read()
    pages = {"nemesis": _nemesis, "nemesis-roles": _nemesis_with_roles, "soak": _soak, "fuzz": _fuzz}
    for name, render in pages.items():
        if result := results.get(name):
            conditions = f"{result['machine']}; {result['date']}, commit {result['commit']}"
            parts += [*render(result), f"\nMeasured on {conditions}, duration {result['seconds']} s.\n"]
    parts += ["\n## Problems and fixes\n", "| revealed by | problem | fix |\n|---|---|---|"]
    rows = yaml.safe_load((robustness.ROOT / "docs" / "robustness.yaml").read_text())
    parts += [f"| {row['by']} | {row['problem']} | {row['fix']} |" for row in rows]
    return "\n".join(parts)


def _nemesis(result: Result) -> Iterator[str]:
    yield NEMESIS
    yield from _schedules(result)


def _nemesis_with_roles(result: Result) -> Iterator[str]:
    yield "\n### Runs with roles\n"
    yield from _schedules(result)


def _schedules(result: Result) -> Iterator[str]:
    ends = ", ".join(f"{count} {state}" for state, count in result["ends"].items())
    violations, errors = result["violations"], result["errors"]
    seeds = result["seeds"]
    yield f"{len(seeds)} schedules, seeds {format_ranges(seeds)}: {result['runs']} runs ({ends}),"
    yield f"{result['attempts']} attempts, {result['looks']} queries of the state. The test itself ended"
    yield f"{result['by_hand']} jobs whose end Slurm did not notice. **{len(violations)} violations**,"
    yield f"{len(errors)} errors of clients.\n"
    yield from (f"- seed {seed}: {kind}: {run}: `{message}`" for seed, kind, run, message in violations)
    if violations or errors:
        yield "\nThe code has changed since these runs. The table below lists the fixes by seed."
    yield "\n| | fault | schedules |\n|---|---|---|"
    for kind, fault in NEMESES.items():
        yield f"| {kind} | {fault} | {result['faults'].get(kind, 0)} |"


def format_ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, such as ``1-3, 7``."""
    intervals: list[list[int]] = []
    for number in sorted(numbers):
        if intervals and number == intervals[-1][1] + 1:
            intervals[-1][1] = number
        else:
            intervals.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in intervals)


def _soak(result: Result) -> Iterator[str]:
    yield SOAK
    done = ", ".join(f"{count} × {name}" for name, count in result["done"].items())
    yield f"{result['rounds']} rounds: {done}. Problems: {'; '.join(result['found']) or 'none'}.\n"
    yield "| resource, median | in the second quarter | in the last quarter |\n|---|---|---|"
    for name, (before, after) in result["held"].items():
        yield f"| {RESOURCES.get(name, name)} | {before:g} | {after:g} |"


def _fuzz(result: Result) -> Iterator[str]:
    yield FUZZ
    for name, target in result["targets"].items():
        failed = ", one input fails" if target["failed"] else ""
        counts = f"{target['seconds']} | {target['tried']:,} | {target['edges']} | {target['kept']}{failed}"
        yield f"| {name} | {counts} |"
