"""Schedules: what is submitted, done to it and broken, and when. A seed gives always the same one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

NODES = ("n1", "n2", "n3")
HORIZON_S = 7.0  # nothing is begun later
SPLIT = 1000  # from this seed on: long runs, on nodes that Slurm gives up while they work
PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel")

# What a fault can hit, and how long it lasts at most.
FAULTS: dict[str, tuple[Sequence[str], float]] = {
    "N1": (("controller",), 6.0),  # stopped
    "N2": (("controller",), 3.0),  # killed, and started again
    "N3": (NODES, 4.0),  # slurmd killed, what runs there goes on
    "N4": (NODES, 9.0),  # cut off the network
    "N6": (("stopped", "killed"), 4.0),  # munged
    "N7": (("first", "last"), 0.0),  # a job's slurmstepd killed
    "N8": (("stopped", "killed"), 4.0),  # one rank
    "N9": (("full",), 3.0),  # the disk of the run directories
    "N11": (  # a program of Slurm
        (
            *(f"{program} {way}" for program in PROGRAMS for way in ("slow", "dies", "answers no more")),
            "sbatch babbles",
            "squeue babbles",
            "squeue tells nothing",
        ),
        3.0,
    ),
    "N12": (("-400", "100"), 5.0),  # a client's clock, in seconds off
    "N13": (NODES, 1.5),  # preempted
    "N14": (NODES, 2.0),  # its prolog fails
    "N15": (  # a client killed, or interrupted as by Ctrl-C
        ("submit", "cancel", "requeue", "submit interrupted", "cancel interrupted"),
        0.0,
    ),
    "N16": (("escape", "bars", "lines", "bytes"), 3.0),  # a job with a hostile name in the queue
    "N17": (("stopped", "killed"), 4.0),  # a supervisor
    "N18": (("stopped", "killed"), 4.0),  # the supervisor's agent beside the ranks of a node
    "N19": (("stale", "input/output error", "late"), 4.0),  # the file server, as jobs see it
    "N20": (("-50", "100"), 0.0),  # the clock of all jobs' processes but training code, in seconds off
}
NETWORKED = {"N4"}  # needs nodes with networks of their own
NOT_NETWORKED = {"N3"}
DAEMONS = {"N1", "N2", "N6"}  # one of them at a time: a controller does not start without munge


@dataclass(frozen=True)
class Run:
    """One run: training code of `ticks` steps; attempts end with `codes`, all others with the last."""

    name: str
    at: float
    ticks: int
    codes: tuple[int, ...]
    supervised: bool
    submitters: int  # more than one: all at once, under one key
    command: bool  # by a process of its own
    check: bool


@dataclass(frozen=True)
class Act:
    """A client does something to a run: cancel, requeue, status, logs, follow; or cleans what is over."""

    at: float
    verb: str
    run: str
    command: bool


@dataclass(frozen=True)
class Fault:
    """Something breaks at `at`, for so many seconds."""

    at: float
    kind: str
    target: str
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """All that happens, but for how it interleaves."""

    seed: int
    networked: bool
    runs: tuple[Run, ...]
    acts: tuple[Act, ...]
    faults: tuple[Fault, ...]


def make(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    dice = random.Random(seed)
    networked = seed % 4 == 3
    if seed >= SPLIT:
        return _split(dice, seed, networked)
    runs = tuple(_run(dice, f"s{seed}-r{number}") for number in range(dice.randint(2, 4)))
    acts = [_act(dice, run) for run in runs if dice.random() < 0.5]
    acts += [_look(dice, dice.choice(runs)) for _ in range(2)]
    if dice.random() < 0.3:
        acts.append(Act(round(dice.uniform(HORIZON_S, 2 * HORIZON_S), 2), "clean", "", command=False))
    allowed = sorted(set(FAULTS) - (NOT_NETWORKED if networked else NETWORKED))
    kinds = dice.choices(allowed, k=dice.randint(1, 3))
    if networked and dice.random() < 0.7:
        kinds[0] = "N4"
    daemons = [kind for kind in kinds if kind in DAEMONS]
    kinds = [kind for kind in kinds if kind not in daemons[1:] or kind == daemons[0]]
    faults = tuple(_fault(dice, kind) for kind in dict.fromkeys(kinds))
    return Schedule(seed, networked, runs, tuple(sorted(acts, key=lambda act: act.at)), faults)


def _split(dice: random.Random, seed: int, networked: bool) -> Schedule:
    """Return one in which a node is gone for longer than Slurm waits, and what runs there goes on."""
    runs = [_run(dice, f"s{seed}-r{number}") for number in range(3)]
    runs = [replace(run, ticks=dice.randint(50, 90), submitters=1, codes=run.codes[-1:]) for run in runs]
    node = dice.choice(NODES)
    gone = Fault(
        round(dice.uniform(4, 6), 2), "N4" if networked else "N3", node, round(dice.uniform(9, 16), 2)
    )
    other = _fault(dice, dice.choice(sorted(set(FAULTS) - NETWORKED - NOT_NETWORKED)))
    acts = [_look(dice, dice.choice(runs))]
    return Schedule(seed, networked, tuple(runs), tuple(acts), (gone, other))


def _run(dice: random.Random, name: str) -> Run:
    supervised = dice.random() < 0.5
    codes = dice.choice([(0,), (0,), (0,), (3,), (85, 0)]) if supervised else dice.choice([(0,), (0,), (3,)])
    return Run(
        name=name,
        at=round(dice.uniform(0, 3), 2),
        ticks=dice.randint(3, 20),
        codes=codes,
        supervised=supervised,
        submitters=dice.choice([1, 1, 1, 2]),
        command=dice.random() < 0.2,
        check=dice.random() < 0.5,
    )


def _act(dice: random.Random, run: Run) -> Act:
    verb = dice.choice(["cancel", "requeue"])
    return Act(round(run.at + dice.uniform(0.5, 4), 2), verb, run.name, dice.random() < 0.2)


def _look(dice: random.Random, run: Run) -> Act:
    verb = dice.choice(["status", "logs", "follow"])
    return Act(round(dice.uniform(1, HORIZON_S), 2), verb, run.name, command=True)


def _fault(dice: random.Random, kind: str) -> Fault:
    targets, longest = FAULTS[kind]
    return Fault(
        round(dice.uniform(0.2, HORIZON_S - 2), 2),
        kind,
        dice.choice(list(targets)),
        round(dice.uniform(0.3, 1) * longest, 2),
    )
