"""Schedules: runs, actions of clients, and faults, with their times. Each seed gives one schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

NODES = ("n1", "n2", "n3")
EPOCHS = 3  # of training, ten steps each
HORIZON_S = 7.0  # nothing is begun later
SPLIT = 1000  # from this seed on: long runs, on nodes that Slurm gives up while they work
MIXED = 2000  # from this seed on: real training, runs submitted later, clients of an earlier version
ROLES = 3000  # from this seed on: runs with servers beside their training
ARRAYS = 4000  # from this seed on: runs that are job arrays
SERVERS = 2  # of a run with roles
PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel")

# The targets of each fault, and its longest duration.
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
    # Only in schedules from the seed MIXED on, so that the other seeds keep their meaning:
    "N21": (  # the checkpoints cannot be read while a killed rank starts again
        ("stale checkpoints", "input/output error of checkpoints", "denied checkpoints"),
        8.0,
    ),
    "N22": (("look", "cancel"), 4.0),  # a run directory is moved away and back; meanwhile a client acts
    "N23": (("look", "cancel"), 4.0),  # a record is of a later version for a while; meanwhile a client acts
    "N24": (NODES, 10.0),  # the health check of a node fails
    "N25": (("no links",), 8.0),  # jobs cannot create symbolic links
    "N26": (("full", "read-only"), 4.0),  # the home of the clients
    # Only in schedules from the seed ROLES on:
    "N27": (("killed", "stopped"), 20.0),  # a server
}
MIXED_ONLY = {"N21", "N22", "N23", "N24", "N25", "N26"}
ROLES_ONLY = {"N27"}
NOT_ANYWHERE = MIXED_ONLY | ROLES_ONLY
UNSTEADY = {"N19", "N21", "N24", "N25"}  # one of them at a time: they share a switch
NETWORKED = {"N4"}  # needs nodes with networks of their own
NOT_NETWORKED = {"N3"}
DAEMONS = {"N1", "N2", "N6"}  # one of them at a time: a controller does not start without munge


@dataclass(frozen=True)
class Run:
    """One run of `ticks` steps; its attempts end with `codes`, further attempts with the last of them."""

    name: str
    at: float
    ticks: int
    codes: tuple[int, ...]
    supervised: bool
    submitters: int  # more than one: all at once, under one key
    command: bool  # by a process of its own
    check: bool
    trains: bool = False  # by dtslurm.train, for `EPOCHS`; without ticks and codes
    kill_step: int = 0  # the first attempt of training kills itself after this step
    earlier: bool = False  # submitted by an earlier version
    servers: str = ""  # where the run has servers: "beside" its ranks, or "apart" on a node of their own
    tasks: int = 0  # of a job array; 0 if the run is none


@dataclass(frozen=True)
class Act:
    """An action of a client on a run: cancel, requeue, status, logs, follow, scale N; or clean."""

    at: float
    verb: str
    run: str
    command: bool
    earlier: bool = False  # by an earlier version, as a command


@dataclass(frozen=True)
class Fault:
    """A fault that begins at `at` and lasts this many seconds."""

    at: float
    kind: str
    target: str
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """All runs, actions and faults of a schedule; only their interleaving is not determined."""

    seed: int
    networked: bool
    runs: tuple[Run, ...]
    acts: tuple[Act, ...]
    faults: tuple[Fault, ...]


def make(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    dice = random.Random(seed)
    networked = seed % 4 == 3
    if seed >= ARRAYS:
        return _with_arrays(dice, seed, networked)
    if seed >= ROLES:
        return _with_roles(dice, seed, networked)
    if seed >= MIXED:
        return _mixed(dice, seed, networked)
    if seed >= SPLIT:
        return _split(dice, seed, networked)
    runs = tuple(_run(dice, f"s{seed}-r{number}") for number in range(dice.randint(2, 4)))
    acts = [_act(dice, run) for run in runs if dice.random() < 0.5]
    acts += [_look(dice, dice.choice(runs)) for _ in range(2)]
    if dice.random() < 0.3:
        acts.append(Act(round(dice.uniform(HORIZON_S, 2 * HORIZON_S), 2), "clean", "", command=False))
    allowed = sorted(set(FAULTS) - NOT_ANYWHERE - (NOT_NETWORKED if networked else NETWORKED))
    kinds = dice.choices(allowed, k=dice.randint(1, 3))
    if networked and dice.random() < 0.7:
        kinds[0] = "N4"
    daemons = [kind for kind in kinds if kind in DAEMONS]
    kinds = [kind for kind in kinds if kind not in daemons[1:] or kind == daemons[0]]
    faults = tuple(_fault(dice, kind) for kind in dict.fromkeys(kinds))
    return Schedule(seed, networked, runs, tuple(sorted(acts, key=lambda act: act.at)), faults)


def _split(dice: random.Random, seed: int, networked: bool) -> Schedule:
    """Return a schedule in which Slurm loses a node whose processes continue."""
    runs = [_run(dice, f"s{seed}-r{number}") for number in range(3)]
    runs = [replace(run, ticks=dice.randint(50, 90), submitters=1, codes=run.codes[-1:]) for run in runs]
    node = dice.choice(NODES)
    gone = Fault(
        round(dice.uniform(4, 6), 2), "N4" if networked else "N3", node, round(dice.uniform(9, 16), 2)
    )
    other = _fault(dice, dice.choice(sorted(set(FAULTS) - NOT_ANYWHERE - NETWORKED - NOT_NETWORKED)))
    acts = [_look(dice, dice.choice(runs))]
    return Schedule(seed, networked, tuple(runs), tuple(acts), (gone, other))


def _mixed(dice: random.Random, seed: int, networked: bool) -> Schedule:
    """Return a schedule with a fault of `MIXED_ONLY`, and in most cases a second fault.

    A run is submitted after the others, `clean` and `requeue` meet at the end of a run, and some clients are
    of an earlier version.
    """
    first = sorted(MIXED_ONLY)[seed % len(MIXED_ONLY)]
    faults = [_fault(dice, first)]
    allowed = set(FAULTS) - ROLES_ONLY - {first, "N22", "N23"} - (NOT_NETWORKED if networked else NETWORKED)
    allowed -= UNSTEADY if first in UNSTEADY else set()
    if dice.random() < 0.7:
        faults.append(_fault(dice, dice.choice(sorted(allowed))))
    runs = [_run(dice, f"s{seed}-r{number}") for number in range(2)]
    if first == "N24":  # from the beginning, so that a supervisor finds the node bad before the last run
        faults[0] = replace(faults[0], at=0.0)
        runs = [replace(run, supervised=True, check=True) for run in runs]
    # If its home cannot be written, a client of the earlier version loses its runs.
    home_is_damaged = any(fault.kind == "N26" for fault in faults)
    runs = [
        replace(run, command=True, earlier=True) if dice.random() >= 0.8 and not home_is_damaged else run
        for run in runs
    ]
    late = _run(dice, f"s{seed}-r2")
    runs.append(replace(late, at=round(dice.uniform(10, 14), 2), command=False, check=True))
    if first == "N21" or dice.random() < 0.15:
        runs.append(_training(dice, f"s{seed}-r3", killed_by_fault=first == "N21"))
    acts = [_act(dice, run) for run in runs if dice.random() < 0.3]
    acts += [replace(_look(dice, dice.choice(runs)), earlier=dice.random() < 0.5) for _ in range(2)]
    if dice.random() < 0.4:
        meeting = dice.uniform(HORIZON_S, 2 * HORIZON_S)
        acts.append(Act(round(meeting, 2), "clean", "", command=False))
        moment = round(meeting + dice.uniform(-0.3, 0.3), 2)
        acts.append(Act(moment, "requeue", dice.choice(runs[:2]).name, command=False))
    return Schedule(seed, networked, tuple(runs), tuple(sorted(acts, key=lambda act: act.at)), tuple(faults))


def _with_roles(dice: random.Random, seed: int, networked: bool) -> Schedule:
    """Return a schedule of two runs with servers and one without, in most cases with a fault of a server."""
    runs = [_run(dice, f"s{seed}-r{number}") for number in range(3)]
    for number in range(2):
        codes = dice.choice([(0,), (0,), (3,), (85, 0)])
        servers = dice.choice(["beside", "apart"])
        run = replace(runs[number], supervised=True, submitters=1, command=True, codes=codes, servers=servers)
        runs[number] = replace(run, ticks=dice.randint(10, 60))
    allowed = sorted(set(FAULTS) - NOT_ANYWHERE - (NOT_NETWORKED if networked else NETWORKED))
    faults = [_fault(dice, "N27")] if dice.random() < 0.7 else []
    faults.append(_fault(dice, dice.choice(allowed)))
    acts = [_act(dice, run) for run in runs if dice.random() < 0.3]
    acts += [_look(dice, dice.choice(runs))]
    for run in runs[:2]:
        if dice.random() < 0.5:
            at = round(dice.uniform(4, 2 * HORIZON_S), 2)
            acts.append(Act(at, f"scale {dice.randint(1, 3)}", run.name, command=True))
    return Schedule(seed, networked, tuple(runs), tuple(sorted(acts, key=lambda act: act.at)), tuple(faults))


def _with_arrays(dice: random.Random, seed: int, networked: bool) -> Schedule:
    """Return a schedule of one or two job arrays and another run, in most cases with a preemption."""
    runs = [_run(dice, f"s{seed}-r{number}") for number in range(3)]
    for number in range(dice.randint(1, 2)):
        run = replace(runs[number], tasks=dice.randint(3, 8), ticks=dice.randint(5, 40))
        runs[number] = replace(run, submitters=1)
    allowed = sorted(set(FAULTS) - NOT_ANYWHERE - (NOT_NETWORKED if networked else NETWORKED))
    faults = [_fault(dice, "N13")] if dice.random() < 0.7 else []
    faults.append(_fault(dice, dice.choice(allowed)))
    acts = [_act(dice, run) for run in runs if dice.random() < 0.3]
    acts += [_look(dice, dice.choice(runs))]
    return Schedule(seed, networked, tuple(runs), tuple(sorted(acts, key=lambda act: act.at)), tuple(faults))


def _training(dice: random.Random, name: str, *, killed_by_fault: bool) -> Run:
    """Return a supervised run that trains; unless the fault kills its rank, it may kill itself once."""
    return Run(
        name=name,
        at=round(dice.uniform(0, 2), 2),
        ticks=0,
        codes=(0,),
        supervised=True,
        submitters=1,
        command=False,
        check=False,
        trains=True,
        kill_step=0 if killed_by_fault else dice.choice([0, dice.randint(4, 28)]),
    )


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
