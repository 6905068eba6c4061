"""Tells from the words of a failed Slurm command what kind of failure it was."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Trouble(Enum):
    """Kinds of failure; they differ in what may have happened to the request."""

    NOT_SENT = "the controller could not be reached"
    AUTH = "authentication failed on this machine"
    SETUP = "Slurm is not configured on this machine"
    LOST = "the connection broke before the answer came"
    BUSY = "Slurm asks to come back later"
    NO_ACCOUNTING = "accounting is not available"
    NO_JOB = "Slurm knows no such job"
    OVER = "the job is over"
    REFUSED = "Slurm refused"


# Order matters: what may have queued a job (LOST) outweighs everything that queued none.
_PATTERNS: tuple[tuple[Trouble, tuple[str, ...]], ...] = (
    (
        Trouble.LOST,
        (
            "socket timed out",
            "zero bytes were transmitted",
            "unexpected message received",
            "message receive failure",
            r"controller \((?:send|receive|shutdown) failure\)",
            "connection timed out (?:reading|writing)",
            "communication shutdown failure",
            "insane message length",
            "connection reset by peer",
            "broken pipe",
            "transport endpoint is not connected",
            "standby mode",
        ),
    ),
    (
        Trouble.NO_ACCOUNTING,
        ("accounting storage is disabled", "slurmdbd", "persist_conn", "sacct: error: .*connect"),
    ),
    (Trouble.AUTH, ("munge", "authentication error", "invalid (?:authentication )?credential", "auth_g_")),
    (
        Trouble.SETUP,
        (
            "could not establish a configuration source",
            "cannot stat file",
            "unable to process configuration",
            "dns srv lookup failed",
            r"slurm\.conf.*no such file",
        ),
    ),
    (
        Trouble.NOT_SENT,
        (
            "unable to contact slurm controller",
            "communication connection failure",
            "connection timed out establishing",
            "connection refused",
        ),
    ),
    (
        Trouble.BUSY,
        (
            "rate limit exceeded",
            "back ?off",
            "resource temporarily unavailable",
            "queue full",
            "temporarily unable to accept job",
            "try again later",
            "retry (?:momentarily|later)",
        ),
    ),
    (Trouble.OVER, ("already (?:completing|completed|finished)", "job has (?:already )?finished")),
    (Trouble.NO_JOB, ("invalid job id",)),
)
_COMPILED = tuple((kind, re.compile("|".join(patterns), re.IGNORECASE)) for kind, patterns in _PATTERNS)


def trouble(stderr: str) -> Trouble:
    """Classify a failed command by its words; ``REFUSED`` if they are of no other kind."""
    return next((kind for kind, pattern in _COMPILED if pattern.search(stderr)), Trouble.REFUSED)


@dataclass(frozen=True)
class _Advice:
    pattern: re.Pattern[str]
    hint: str


def _advice(pattern: str, hint: str) -> _Advice:
    return _Advice(re.compile(pattern, re.IGNORECASE), hint)


_HINTS = (
    _advice(r"invalid partition", "see the partitions with sinfo -s, and choose one with --partition"),
    _advice(r"no partition specified", "this cluster has no default partition: give --partition"),
    _advice(
        r"invalid account", "see your accounts with sacctmgr show assoc user=$USER; choose one with --account"
    ),
    _advice(r"invalid qos", "see your QOS with sacctmgr show assoc user=$USER; choose one with --qos"),
    _advice(
        r"node configuration is not available|node count specification",
        "no nodes of the partition have that many CPUs, GPUs or that much memory: ask for less",
    ),
    _advice(r"time limit is invalid", "ask for less --time; scontrol show partition tells MaxTime"),
    _advice(r"invalid --time|invalid time", "write --time as minutes, HH:MM:SS or D-HH:MM:SS"),
    _advice(
        r"violates accounting/qos policy|maxsubmit|submit limit",
        "a limit of your account or QOS is reached: wait until jobs of yours end, or ask for less",
    ),
    _advice(r"invalid generic resource|gres", "see how GPUs are named here with sinfo -o '%N %G'"),
    _advice(r"invalid feature", "see the features for --constraint with sinfo -o '%N %f'"),
    _advice(r"invalid job array", "the highest index must stay below MaxArraySize (scontrol show config)"),
    _advice(r"access/permission denied|group not permitted", "you may not use this partition or reservation"),
    _advice(r"reservation", "see reservations with scontrol show reservation"),
    _advice(r"dependency", "the job named in --dependency is unknown or over"),
    _advice(r"dos line breaks", "write the script with Unix line ends (dos2unix)"),
    _advice(r"memory specification|memory required", "ask for less --mem"),
    _advice(r"rate limit|temporarily|queue full", "the queue is full for now: try again in some minutes"),
)


def hint_for(stderr: str) -> str:
    """Return what to do about a refusal, empty if its own words are all there is."""
    return next((advice.hint for advice in _HINTS if advice.pattern.search(stderr)), "")


# A dry run also fails where nodes are drained or down just now (22.05), which a queued job outlives.
_FOR_GOOD = re.compile(
    r"invalid (?:partition|account|qos|node name|feature|generic resource|job array|licen[cs]e|reservation)"
    r"|permission denied|not permitted|time limit is invalid",
    re.IGNORECASE,
)


def cannot_run(stderr: str) -> bool:
    """Whether ``sbatch --test-only`` says that the job can never run as it is."""
    return _FOR_GOOD.search(stderr) is not None


def words(stderr: str) -> list[str]:
    """Return the lines of a command's stderr worth showing, without repeated and empty ones."""
    return list(dict.fromkeys(line.strip() for line in stderr.split("\n") if line.strip()))
