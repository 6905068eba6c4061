"""Tells from the words of a failed Slurm command what kind of failure it was."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


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


def trouble(stderr: str) -> Trouble:
    """Classify a failed command by its words; ``REFUSED`` if they are of no other kind."""
    for (
        kind,
        patterns,
    ) in _PATTERNS:  # compiled when they are needed, by re's own cache: most answers are good
        if re.search("|".join(patterns), stderr, re.IGNORECASE):
            return kind
    return Trouble.REFUSED


_HINTS = (
    (r"invalid partition", "see the partitions with sinfo -s, and choose one with --partition"),
    (r"no partition specified", "this cluster has no default partition: give --partition"),
    (r"invalid account", "see your accounts with sacctmgr show assoc user=$USER; choose one with --account"),
    (r"invalid qos", "see your QOS with sacctmgr show assoc user=$USER; choose one with --qos"),
    (
        r"node configuration is not available|node count specification",
        "no nodes of the partition have that many CPUs, GPUs or that much memory: ask for less",
    ),
    (r"time limit is invalid", "ask for less --time; scontrol show partition tells MaxTime"),
    (r"invalid --time|invalid time", "write --time as minutes, HH:MM:SS or D-HH:MM:SS"),
    (
        r"violates accounting/qos policy|maxsubmit|submit limit",
        "a limit of your account or QOS is reached: wait until jobs of yours end, or ask for less",
    ),
    (r"invalid generic resource|gres", "see how GPUs are named here with sinfo -o '%N %G'"),
    (r"invalid feature", "see the features for --constraint with sinfo -o '%N %f'"),
    (r"invalid job array", "the highest index must stay below MaxArraySize (scontrol show config)"),
    (r"access/permission denied|group not permitted", "you may not use this partition or reservation"),
    (r"reservation", "see reservations with scontrol show reservation"),
    (r"dependency", "the job named in --dependency is unknown or over"),
    (
        r"topology configuration is not available|--segment",
        "--segment must divide --nodes and fit a block (scontrol show topology); before Slurm 23.11 omit it",
    ),
    (r"unrecognized option", "this cluster's sbatch has no such option (sbatch --version tells its release)"),
    (r"dos line breaks", "write the script with Unix line ends (dos2unix)"),
    (r"memory specification|memory required", "ask for less --mem"),
    (r"rate limit|temporarily|queue full", "the queue is full for now: try again in some minutes"),
)


def hint_for(stderr: str) -> str:
    """Return what to do about a refusal, empty if its own words are all there is."""
    return next((hint for pattern, hint in _HINTS if re.search(pattern, stderr, re.IGNORECASE)), "")


_FOR_GOOD = (
    r"invalid (?:partition|account|qos|node name|feature|generic resource|job array|licen[cs]e|reservation)"
    r"|permission denied|not permitted|time limit is invalid"
)
# A dry run also fails so where nodes are drained or down just now (22.05), which a queued job outlives.
_FOR_WANT_OF_NODES = (
    r"node configuration is not available|memory required|(?:memory|(?:cpu|node) count) specification"
    r"|cpu count per node"
)


def cannot_run(stderr: str) -> bool:
    """Whether ``sbatch --test-only`` says that the job can never run as it is."""
    return re.search(_FOR_GOOD, stderr, re.IGNORECASE) is not None


def lacks_nodes(stderr: str) -> bool:
    """Whether it says that no nodes have what the job asks: none at all, or none that take jobs just now."""
    return re.search(_FOR_WANT_OF_NODES, stderr, re.IGNORECASE) is not None


def private(stderr: str) -> bool:
    """Whether Slurm does not tell this user, as with ``PrivateData``."""
    return "access/permission denied" in stderr.lower()


def words(stderr: str) -> list[str]:
    """Return the lines of a command's stderr worth showing, without repeated and empty ones."""
    return list(dict.fromkeys(line.strip() for line in stderr.split("\n") if line.strip()))


# Of a whole array: "23_0-1,3: No error"; of a job: "Job is pending execution for job 7" (scontrol, 22.05).
_ABOUT_TASKS = re.compile(r"(\d+(?:_\S+)?): (.+)")
_ABOUT_JOB = re.compile(r"(.+) for job (\d\S*)")


class JobAnswer(NamedTuple):
    """What scontrol says of a job or of tasks of an array (``23_0-1,3``); without a job, of anything else."""

    job: str
    words: str

    @property
    def done(self) -> bool:
        """Whether it was done."""
        return bool(self.job) and self.words.lower() == "no error"

    @property
    def pending(self) -> bool:
        """Whether it could not be requeued because it waits already."""
        return bool(self.job) and self.words.lower().startswith("job is pending execution")


def by_job(stderr: str) -> list[JobAnswer]:
    """Return what scontrol says job by job where it could not do all; of plain jobs only failures."""
    answers = []
    for line in words(stderr):
        if tasks := _ABOUT_TASKS.fullmatch(line):
            answers.append(JobAnswer(tasks[1], tasks[2]))
        elif job := _ABOUT_JOB.fullmatch(line):
            answers.append(JobAnswer(job[2], job[1]))
        else:
            answers.append(JobAnswer("", line))
    return answers
