"""Classifies failures of Slurm commands by their error messages."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class Trouble(Enum):
    """Kinds of failure. They differ in whether the controller may have handled the request."""

    NOT_SENT = "the controller could not be reached"
    AUTH = "authentication failed on this machine"
    SETUP = "Slurm is not configured on this machine"
    LOST = "the connection broke before the answer came"
    BUSY = "Slurm asks to come back later"
    NO_ACCOUNTING = "accounting is not available"
    NO_JOB = "Slurm knows no such job"
    OVER = "the job is over"
    REFUSED = "Slurm refused"


# Order matters: a failure after which a job may exist (LOST) takes precedence over all others.
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


def classify_error(stderr: str) -> Trouble:
    """Classify a failed command by its stderr; ``REFUSED`` if no pattern matches."""
    # The patterns are compiled on first use (re caches them), since most commands succeed.
    for kind, patterns in _PATTERNS:
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
        "no nodes of the partition have that many CPUs, GPUs or that much memory: request less",
    ),
    (r"time limit is invalid", "request less --time; scontrol show partition prints MaxTime"),
    (r"invalid --time|invalid time", "write --time as minutes, HH:MM:SS or D-HH:MM:SS"),
    (
        r"violates accounting/qos policy|maxsubmit|submit limit",
        "a limit of your account or QOS is reached: wait until jobs of yours end, or request less",
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
    (r"unrecognized option", "this sbatch has no such option (sbatch --version prints its release)"),
    (r"dos line breaks", "write the script with Unix line ends (dos2unix)"),
    (r"memory specification|memory required", "request less --mem"),
    (r"rate limit|temporarily|queue full", "the queue is full for now: try again in some minutes"),
)


def hint_for(stderr: str) -> str:
    """Return how to fix a refusal, or "" if there is no hint for its message."""
    return next((hint for pattern, hint in _HINTS if re.search(pattern, stderr, re.IGNORECASE)), "")


_PERMANENT = (
    r"invalid (?:partition|account|qos|node name|feature|generic resource|job array|licen[cs]e|reservation)"
    r"|permission denied|not permitted|time limit is invalid"
)
# A dry run also fails with these messages while nodes are drained or down (22.05); a queued job would wait.
_LACKS_NODES = (
    r"node configuration is not available|memory required|(?:memory|(?:cpu|node) count) specification"
    r"|cpu count per node"
)


def can_never_run(stderr: str) -> bool:
    """Return whether ``sbatch --test-only`` reports that the job can never run unless it is changed."""
    return re.search(_PERMANENT, stderr, re.IGNORECASE) is not None


def lacks_nodes(stderr: str) -> bool:
    """Return whether ``sbatch --test-only`` reports that no nodes match the request.

    Either no such nodes exist, or none of them accept jobs at the moment.
    """
    return re.search(_LACKS_NODES, stderr, re.IGNORECASE) is not None


def private(stderr: str) -> bool:
    """Return whether Slurm refuses this user the answer, as with ``PrivateData``."""
    return "access/permission denied" in stderr.lower()


def distinct_lines(stderr: str) -> list[str]:
    """Return the lines of a command's stderr without empty and repeated ones."""
    return list(dict.fromkeys(line.strip() for line in stderr.split("\n") if line.strip()))


# scontrol (22.05) prints "23_0-1,3: No error" for arrays and "Job is pending execution for job 7" for jobs.
_ARRAY_MESSAGE = re.compile(r"(\d+(?:_\S+)?): (.+)")
_JOB_MESSAGE = re.compile(r"(.+) for job (\d\S*)")


class JobAnswer(NamedTuple):
    """A message of scontrol on a job or on tasks of an array.

    Attributes:
        job: the job id, or the array tasks (``23_0-1,3``); empty if the message names no job.
        words: the message.
    """

    job: str
    words: str

    @property
    def done(self) -> bool:
        """Whether the change was made."""
        return bool(self.job) and self.words.lower() == "no error"

    @property
    def pending(self) -> bool:
        """Whether the job was not requeued because it is already pending."""
        return bool(self.job) and self.words.lower().startswith("job is pending execution")


def split_by_job(stderr: str) -> list[JobAnswer]:
    """Return scontrol's messages job by job after a change failed for some jobs.

    For arrays, scontrol also reports the tasks that it changed; for other jobs only failures.
    """
    answers = []
    for line in distinct_lines(stderr):
        if array_match := _ARRAY_MESSAGE.fullmatch(line):
            answers.append(JobAnswer(array_match[1], array_match[2]))
        elif job_match := _JOB_MESSAGE.fullmatch(line):
            answers.append(JobAnswer(job_match[2], job_match[1]))
        else:
            answers.append(JobAnswer("", line))
    return answers
