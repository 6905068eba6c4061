"""What Slurm's reason codes mean for the person who waits, and what to do about them.

Codes are looked up exactly, then by family (the limits of QOS and associations are built from parts),
then as the free text that Slurm prints for nodes that are not available.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """What a reason means (``text``), what one can do (``fix``), and whether waiting is enough.

    ``will_start`` is True if the job starts by itself, False if it never will unless something is changed,
    None if that cannot be told, and for reasons that only ended jobs have.
    """

    text: str
    fix: str = ""
    will_start: bool | None = None


_EXACT = {
    "None": Explanation("not examined yet in this scheduling cycle", "wait a minute", True),
    "Priority": Explanation(
        "jobs of higher priority are ahead",
        "a smaller or shorter request may be fitted in before them",
        True,
    ),
    "Resources": Explanation("next in line, waiting for nodes or GPUs to become free", "", True),
    "Dependency": Explanation("waits for the jobs named in its dependency", "", True),
    "DependencyNeverSatisfied": Explanation(
        "the job it depends on did not end as required", "cancel it, or change its dependency", False
    ),
    "JobHeldUser": Explanation("held by you", "release it: dtslurm release JOB", False),
    "JobHeldAdmin": Explanation("held by an administrator", "ask the site's support", False),
    "JobHoldMaxRequeue": Explanation(
        "requeued too often, so Slurm holds it",
        "read the last log, then release it: dtslurm release JOB",
        False,
    ),
    "ReservationDeleted": Explanation(
        "its reservation was deleted", "submit it again with another --reservation, or none", False
    ),
    "ReservationInvalid": Explanation(
        "its reservation does not exist", "submit it again with another --reservation, or none", False
    ),
    "Reservation": Explanation("waits for its reservation to begin or to have room", "", True),
    "BeginTime": Explanation("not to be started before its begin time (also after a requeue)", "", True),
    "Licenses": Explanation("no licence is free", "", True),
    "FedJobLock": Explanation("waits for the clusters of the federation to agree", "", True),
    "JobArrayTaskLimit": Explanation(
        "as many tasks of the array run as its %N allows",
        "raise it: scontrol update JobId=JOB ArrayTaskThrottle=N",
        True,
    ),
    "NodeDown": Explanation("a node it needs is down", "leave the node out with --exclude, or wait", None),
    "FrontEndDown": Explanation("no front-end node is available", "wait, or ask the site's support", None),
    "PartitionNodeLimit": Explanation(
        "asks for more (or fewer) nodes than the partition allows", "change --nodes or --partition", False
    ),
    "PartitionTimeLimit": Explanation(
        "asks for more time than the partition allows", "lower --time or change --partition", False
    ),
    "PartitionConfig": Explanation(
        "asks for what the partition's limits do not allow", "change --nodes, --time or --partition", False
    ),
    "PartitionDown": Explanation(
        "the partition is closed for starts", "wait, or choose another --partition", None
    ),
    "PartitionInactive": Explanation("the partition is inactive", "choose another --partition", None),
    "BadConstraints": Explanation(
        "no node can ever satisfy the request", "change --constraint, --gpus-per-node or --mem", False
    ),
    "Constraints": Explanation("no node satisfies the request at the moment", "change --constraint", None),
    "AccountNotAllowed": Explanation("the account may not use this partition", "change --account", False),
    "QOSNotAllowed": Explanation("the QOS may not be used here", "change --qos or --partition", False),
    "InvalidAccount": Explanation("the account is not valid", "change --account", False),
    "InvalidQOS": Explanation("the QOS is not valid", "change --qos", False),
    "AccountingPolicy": Explanation("the accounting policy forbids it", "change --account or --qos", False),
    "QOSUsageThreshold": Explanation("the account's usage is over the QOS's threshold", "change --qos", None),
    "MaxMemPerLimit": Explanation("asks for more memory than a job may have", "lower --mem", False),
    "AssociationResourceLimit": Explanation("a resource limit of the account is reached", "", None),
    "AssociationTimeLimit": Explanation("the account's time limit is reached", "lower --time", None),
    "QOSResourceLimit": Explanation("a resource limit of the QOS is reached", "", None),
    "QOSTimeLimit": Explanation(
        "asks for more time than the QOS allows", "lower --time or change --qos", False
    ),
    "QOSJobLimit": Explanation("as many jobs run as the QOS allows", "starts when jobs of it end", True),
    "AssociationJobLimit": Explanation(
        "as many jobs run as the account allows", "starts when jobs of it end", True
    ),
    "Prolog": Explanation("its nodes are being prepared", "usually minutes", True),
    "Cleaning": Explanation("its last run is being cleaned up", "usually minutes", True),
    "SchedDefer": Explanation("the scheduler looks at new jobs later", "usually minutes", True),
    "MpiPortsBusy": Explanation("the ports for MPI are in use", "", True),
    "NvidiaImexChannels": Explanation("no NVLink (IMEX) channel is free", "", True),
    "MaxPoweredUpNodes": Explanation("as many nodes are powered up as the site allows", "", True),
    "PowerNotAvail": Explanation("there is not enough electric power for more nodes", "", True),
    "PowerReserved": Explanation("the electric power is reserved", "", True),
    "BurstBufferOperation": Explanation("a burst buffer operation failed", "ask the site's support", False),
    "JobLaunchFailure": Explanation(
        "Slurm could not start it", "often the folder of its output file does not exist"
    ),
    "SystemFailure": Explanation("Slurm or a node failed", "submit it again"),
    "NonZeroExitCode": Explanation("its script ended with an error", "see its log: dtslurm diagnose JOB"),
    "RaisedSignal": Explanation("its script was ended by a signal", "see its log: dtslurm diagnose JOB"),
    "TimeLimit": Explanation("it reached its time limit", "raise --time, or checkpoint and restart"),
    "OutOfMemory": Explanation("it used more memory than it had asked for", "raise --mem"),
    "DeadLine": Explanation("it could not end before its deadline", "raise --deadline"),
    "InactiveLimit": Explanation("it was inactive for too long"),
}

_NODES = r"(?:unavailable ?nodes|unavail\w*):?\s*([\w\[\],.-]+)"

# In this order: "PerUser" before the general "Max", minutes before counts.
_FAMILIES = (
    (
        r"(?:QOS|Assoc)Grp\w*RunMin\w*",
        "the time that the group's running jobs still have is all it may have",
        "",
        True,
    ),
    (r"(?:QOS|Assoc)Grp\w*Min\w*", "the group's budget is spent", "use another --account or --qos", None),
    (r"(?:QOS|Assoc)Grp\w*Wall\w*", "the group's time is used up", "use another --account or --qos", None),
    (
        r"(?:QOS|Assoc)Grp\w*",
        "the limit that the whole group shares is full",
        "starts when jobs of the group end",
        True,
    ),
    (r"QOSMin\w*", "asks for less than the QOS demands", "ask for more, or change --qos", False),
    (
        r"(?:QOS|Assoc)?Max\w*(?:PerUser|PerAccount|PerAcct)\w*",
        "your, or your account's, limit of running jobs or resources is full",
        "starts when your own jobs end",
        True,
    ),
    (r"AssocMax(?:Submit)?Jobs?\w*", "your limit of jobs is full", "starts when your own jobs end", True),
    (
        r"(?:QOS|Assoc)?Max\w*(?:PerJob|PerNode|Wall)\w*",
        "this request breaks a limit of one job",
        "ask for less: --nodes, --gpus-per-node, --cpus-per-task, --mem or --time",
        False,
    ),
    (r"(?:QOS|Assoc)Max\w*", "a limit of yours is full", "starts when your own jobs end", None),
    (r"BurstBuffer\w*", "its burst buffer is being prepared", "usually minutes", True),
    (r"(?:Partition|Association|QOS)\w*Limit", "a limit is reached", "", None),
    (r"\w+PerAccount", "the account's limit is full", "starts when jobs of the account end", True),
)
_FREE = (
    (
        r"launch failed requeued held|requeued (?:in )?held",
        "it could not be launched and is held now",
        "see why (dtslurm diagnose JOB), then release it: dtslurm release JOB",
        False,
    ),
    (
        r"reserved for maintenance",
        "nodes it needs are reserved for maintenance",
        "a shorter --time may fit in before it",
        True,
    ),
    (
        r"ReqNodeNotAvail",
        "nodes it needs are down or reserved",
        "a shorter --time may fit in before a reservation; else leave the nodes out with --exclude",
        None,
    ),
    (
        r"nodes required for job are down",
        "nodes it needs are down, drained or reserved",
        "wait, or choose another --partition or fewer --nodes",
        None,
    ),
    (r"RaisedSignal", "its script was ended by a signal", "see its log: dtslurm diagnose JOB", None),
)

_FAMILY_PATTERNS = tuple((re.compile(p), Explanation(t, f, w)) for p, t, f, w in _FAMILIES)
_FREE_PATTERNS = tuple((re.compile(p, re.IGNORECASE), Explanation(t, f, w)) for p, t, f, w in _FREE)
_BY_LOWER = {code.lower(): explanation for code, explanation in _EXACT.items()}


def explain(reason: str) -> Explanation:
    """Explain a reason as squeue or scontrol prints it; one that nobody knows is given back as it is."""
    bare = reason.strip().strip("()").replace("_", " ")
    if bare.lower() in _BY_LOWER:
        return _BY_LOWER[bare.lower()]
    for pattern, explanation in _FAMILY_PATTERNS:
        if pattern.fullmatch(bare):
            return explanation
    for pattern, explanation in _FREE_PATTERNS:
        if pattern.search(bare):
            return _with_nodes(explanation, bare)
    code, sign, detail = bare.partition(",")
    if sign and code.lower() in _BY_LOWER:
        known = _BY_LOWER[code.lower()]
        return Explanation(f"{known.text} ({detail.strip()})", known.fix, known.will_start)
    return Explanation(f"Slurm says: {bare}" if bare else "Slurm gives no reason")


def _with_nodes(explanation: Explanation, reason: str) -> Explanation:
    nodes = re.search(_NODES, reason, re.IGNORECASE)
    if not nodes:
        return explanation
    return Explanation(f"{explanation.text}: {nodes[1]}", explanation.fix, explanation.will_start)
