"""The meaning of Slurm's reason codes for pending jobs, and how to resolve them.

A code is looked up exactly, then by family (the codes for limits of QOS and associations are built from
parts), then as the free text that Slurm prints for unavailable nodes.
"""

from __future__ import annotations

import re
from dataclasses import replace

from dtslurm.model.values import dataclass


@dataclass(frozen=True)
class Explanation:
    """The meaning of a reason code.

    Attributes:
        text: the meaning.
        fix: what the user can do.
        will_start: True if the job will start by itself, False if it will never start without a change, None
            if that is not known and for reasons that only ended jobs have.
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
    "Resources": Explanation(
        "next in line, waiting for nodes or GPUs to become free",
        "nothing needs doing; fewer nodes or a shorter --time may start sooner",
        True,
    ),
    "Dependency": Explanation(
        "waits for the jobs named in its dependency",
        "scontrol show job JOB names them; to start without them: scontrol update JobId=JOB dependency=",
        True,
    ),
    "DependencyNeverSatisfied": Explanation(
        "the job it depends on did not end as required",
        "cancel it (dtslurm cancel JOB), or let it go: scontrol update JobId=JOB dependency=",
        False,
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
    "Reservation": Explanation(
        "waits for its reservation to begin or to have room", "scontrol show reservation tells when", True
    ),
    "BeginTime": Explanation(
        "not to be started before its begin time; after a requeue Slurm waits about two minutes",
        "nothing needs doing; to start sooner: scontrol update JobId=JOB StartTime=now",
        True,
    ),
    "Licenses": Explanation(
        "no licence is free", "starts when others give theirs back: scontrol show licenses", True
    ),
    "FedJobLock": Explanation("waits for the clusters of the federation to agree", "usually seconds", True),
    "JobArrayTaskLimit": Explanation(
        "as many tasks of the array run as its %N allows",
        "your own limit: scontrol update JobId=JOB ArrayTaskThrottle=N raises it",
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
        "asks for what the partition's limits do not allow",
        "ask for less: scontrol update JobId=JOB NumNodes=N (or TimeLimit=TIME, Partition=NAME)",
        False,
    ),
    "PartitionDown": Explanation(
        "the partition is closed for starts", "wait, or choose another --partition", None
    ),
    "PartitionInactive": Explanation("the partition is inactive", "choose another --partition", None),
    "BadConstraints": Explanation(
        "no node can ever satisfy the request, so Slurm holds it",
        "let it run anywhere: scontrol update JobId=JOB Features= and then dtslurm release JOB; "
        "or submit it anew with another --constraint, --gpus-per-node or --mem",
        False,
    ),
    "Constraints": Explanation("no node satisfies the request at the moment", "change --constraint", None),
    "AccountNotAllowed": Explanation("the account may not use this partition", "change --account", False),
    "QOSNotAllowed": Explanation("the QOS may not be used here", "change --qos or --partition", False),
    "InvalidAccount": Explanation("the account is not valid", "change --account", False),
    "InvalidQOS": Explanation("the QOS is not valid", "change --qos", False),
    "AccountingPolicy": Explanation("the accounting policy forbids it", "change --account or --qos", False),
    "QOSUsageThreshold": Explanation("the account's usage is over the QOS's threshold", "change --qos", None),
    "MaxMemPerLimit": Explanation("asks for more memory than a job may have", "lower --mem", False),
    "AssociationResourceLimit": Explanation(
        "a resource limit of the account is reached",
        "starts when jobs of it end, unless it asks for more",
        None,
    ),
    "AssociationTimeLimit": Explanation("the account's time limit is reached", "lower --time", None),
    "QOSResourceLimit": Explanation(
        "a resource limit of the QOS is reached", "starts when jobs end, unless it asks for more", None
    ),
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
    "MpiPortsBusy": Explanation("the ports for MPI are in use", "usually minutes", True),
    "NvidiaImexChannels": Explanation(
        "no NVLink (IMEX) channel is free", "starts when jobs that use them end", True
    ),
    "MaxPoweredUpNodes": Explanation(
        "as many nodes are powered up as the site allows", "starts when nodes become free", True
    ),
    "PowerNotAvail": Explanation(
        "there is not enough electric power for more nodes", "starts when jobs end", True
    ),
    "PowerReserved": Explanation("the electric power is reserved", "starts when the reservation ends", True),
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
    "InactiveLimit": Explanation(
        "it was inactive for too long", "ask the site's support about InactiveLimit"
    ),
}

_UNAVAILABLE_NODES = r"(?:unavailable ?nodes|unavail\w*):?\s*([\w\[\],.-]+)"

# (pattern of the code, text, fix, will_start). The first match counts: "PerUser" is before the general "Max".
_FAMILIES = (
    (
        r"(?:QOS|Assoc)Grp\w*RunMin\w*",
        "the time that the group's running jobs still have is all it may have",
        "starts when they have run for longer; a shorter --time may fit in sooner",
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
        "your, or your account's, limit of what may run at once is full",
        "starts when your own jobs end",
        True,
    ),
    (
        r"AssocMax(?:Submit)?Jobs?\w*",
        "your own limit is full",
        "starts when your own jobs end",
        True,
    ),
    (
        r"(?:QOS|Assoc)?Max\w*(?:PerJob|PerNode|Wall)\w*",
        "this request breaks a limit of one job",
        "ask for less: --nodes, --gpus-per-node, --cpus-per-task, --mem or --time",
        False,
    ),
    (r"(?:QOS|Assoc)Max\w*", "a limit of yours is full", "starts when your own jobs end", None),
    (r"BurstBuffer\w*", "its burst buffer is being prepared", "usually minutes", True),
    (r"(?:Partition|Association|QOS)\w*Limit", "a limit is reached", "ask for less, or wait", None),
    (r"\w+PerAccount", "the account's limit is full", "starts when jobs of the account end", True),
)
_FREE_TEXT = (
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
    (
        r"No suitable topology unit",
        "no rack (block) has enough free nodes for a --segment of the job",
        "starts when enough nodes of one rack are free; a smaller --segment may start sooner",
        True,
    ),
    (r"RaisedSignal", "its script was ended by a signal", "see its log: dtslurm diagnose JOB", None),
)

_FIX_EXCLUDED = "to allow them again: scontrol update JobId=JOB ExcNodeList= and then dtslurm release JOB"
_FIX_UNKNOWN = "scontrol show job JOB tells more"
_RESOURCES = (
    ("GRES", "GPUs or other generic resources"),
    ("Cpu|CPU", "CPUs"),
    ("Mem", "memory"),
    ("Node", "nodes"),
    ("(?:Submit)?Job", "jobs"),
    ("License", "licences"),
    ("BB", "burst buffer"),
    ("Energy", "energy"),
    ("Billing", "billing units"),
    ("Wall", "wall-clock time"),
)
_EXACT_BY_LOWER = {code.lower(): explanation for code, explanation in _EXACT.items()}


def explain(reason: str, job_id: str = "JOB", excluded_nodes: str = "") -> Explanation:
    """Explain a reason as squeue or scontrol prints it; return an unknown reason unchanged.

    Args:
        job_id: inserted into the suggested commands.
        excluded_nodes: the nodes that the job excludes, which may be why too few nodes are left.
    """
    explanation = _find_explanation(reason)
    if excluded_nodes and explanation is _EXACT["BadConstraints"]:
        text = f"{explanation.text}; the job excludes {excluded_nodes}"
        explanation = Explanation(text, f"{_FIX_EXCLUDED}; else {explanation.fix}", explanation.will_start)
    return replace(explanation, fix=re.sub(r"\bJOB\b", lambda _: job_id, explanation.fix))


def only_explains_waiting(reason: str) -> bool:
    """Return whether the reason only explains why a job is pending.

    Such a reason does not explain the end of a job that was cancelled while it was pending.
    """
    return reason.startswith("JobHeld") or explain(reason).will_start is True


def _find_explanation(reason: str) -> Explanation:
    reason_text = reason.strip().strip("()").replace("_", " ")
    if reason_text.lower() in _EXACT_BY_LOWER:
        return _EXACT_BY_LOWER[reason_text.lower()]
    for pattern, text, fix, will_start in _FAMILIES:  # compiled on first use; re caches them
        if re.fullmatch(pattern, reason_text, re.IGNORECASE):
            return _add_resource(Explanation(text, fix, will_start), reason_text)
    for pattern, text, fix, will_start in _FREE_TEXT:
        if re.search(pattern, reason_text, re.IGNORECASE):
            return _add_nodes(Explanation(text, fix, will_start), reason_text)
    code, separator, detail = reason_text.partition(",")
    if separator and code.lower() in _EXACT_BY_LOWER:
        explanation = _EXACT_BY_LOWER[code.lower()]
        return Explanation(f"{explanation.text} ({detail.strip()})", explanation.fix, explanation.will_start)
    return Explanation(
        f"the scheduler's reason is: {reason_text}" if reason_text else "the scheduler gives no reason",
        _FIX_UNKNOWN,
    )


def _add_resource(explanation: Explanation, code: str) -> Explanation:
    """Add the name of the limited resource: ``QOSMaxNodePerUserLimit`` limits nodes."""
    for word, meaning in _RESOURCES:
        if re.search(rf"(?:Grp|Max|Min)(?:{word})", code, re.IGNORECASE):
            return replace(explanation, text=f"{explanation.text}: {meaning}")
    return explanation


def _add_nodes(explanation: Explanation, reason: str) -> Explanation:
    nodes = re.search(_UNAVAILABLE_NODES, reason, re.IGNORECASE)
    if not nodes:
        return explanation
    return Explanation(f"{explanation.text}: {nodes[1]}", explanation.fix, explanation.will_start)
