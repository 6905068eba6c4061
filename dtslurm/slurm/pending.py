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
        "jobs with a higher priority wait, too",
        "a smaller or shorter request may start before them",
        True,
    ),
    "Resources": Explanation(
        "next in the queue; waits until nodes or GPUs become free",
        "no action is needed; fewer nodes or a shorter --time may start sooner",
        True,
    ),
    "Dependency": Explanation(
        "waits for the jobs named in its dependency",
        "scontrol show job JOB lists them; to start without them: scontrol update JobId=JOB dependency=",
        True,
    ),
    "DependencyNeverSatisfied": Explanation(
        "the job on which it depends did not end as required",
        "cancel it (dtslurm cancel JOB), or remove the dependency: scontrol update JobId=JOB dependency=",
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
        "waits until its reservation starts or has free nodes",
        "scontrol show reservation shows its start",
        True,
    ),
    "BeginTime": Explanation(
        "waits for its begin time; after a requeue Slurm waits about two minutes",
        "no action is needed; to start sooner: scontrol update JobId=JOB StartTime=now",
        True,
    ),
    "Licenses": Explanation(
        "no license is free", "starts when other jobs release theirs: scontrol show licenses", True
    ),
    "FedJobLock": Explanation("waits for the clusters of the federation to agree", "usually seconds", True),
    "JobArrayTaskLimit": Explanation(
        "the array runs as many tasks as its limit %N allows",
        "to raise this limit of yours: scontrol update JobId=JOB ArrayTaskThrottle=N",
        True,
    ),
    "NodeDown": Explanation("a node it needs is down", "exclude the node with --exclude, or wait", None),
    "FrontEndDown": Explanation("no front-end node is available", "wait, or ask the site's support", None),
    "PartitionNodeLimit": Explanation(
        "requests more (or fewer) nodes than the partition allows", "change --nodes or --partition", False
    ),
    "PartitionTimeLimit": Explanation(
        "requests more time than the partition allows", "lower --time or change --partition", False
    ),
    "PartitionConfig": Explanation(
        "requests more than the limits of the partition allow",
        "request less: scontrol update JobId=JOB NumNodes=N (or TimeLimit=TIME, Partition=NAME)",
        False,
    ),
    "PartitionDown": Explanation(
        "the partition starts no jobs at the moment", "wait, or choose another --partition", None
    ),
    "PartitionInactive": Explanation("the partition is inactive", "choose another --partition", None),
    "BadConstraints": Explanation(
        "no node can ever satisfy the request, so Slurm holds it",
        "remove the constraint: scontrol update JobId=JOB Features= and then dtslurm release JOB; "
        "or submit it again with another --constraint, --gpus-per-node or --mem",
        False,
    ),
    "Constraints": Explanation("no node satisfies the request at the moment", "change --constraint", None),
    "AccountNotAllowed": Explanation("the account may not use this partition", "change --account", False),
    "QOSNotAllowed": Explanation("the QOS is not allowed here", "change --qos or --partition", False),
    "InvalidAccount": Explanation("the account is not valid", "change --account", False),
    "InvalidQOS": Explanation("the QOS is not valid", "change --qos", False),
    "AccountingPolicy": Explanation("the accounting policy forbids it", "change --account or --qos", False),
    "QOSUsageThreshold": Explanation("the account's usage exceeds the QOS's threshold", "change --qos", None),
    "MaxMemPerLimit": Explanation("requests more memory than a job may use", "lower --mem", False),
    "AssociationResourceLimit": Explanation(
        "a resource limit of the account is reached",
        "starts when jobs of the account end, unless this job alone exceeds the limit",
        None,
    ),
    "AssociationTimeLimit": Explanation("the account's time limit is reached", "lower --time", None),
    "QOSResourceLimit": Explanation(
        "a resource limit of the QOS is reached",
        "starts when jobs of the QOS end, unless this job alone exceeds the limit",
        None,
    ),
    "QOSTimeLimit": Explanation(
        "requests more time than the QOS allows", "lower --time or change --qos", False
    ),
    "QOSJobLimit": Explanation("as many jobs run as the QOS allows", "starts when jobs of it end", True),
    "AssociationJobLimit": Explanation(
        "as many jobs run as the account allows", "starts when jobs of it end", True
    ),
    "Prolog": Explanation("its nodes are being prepared", "usually minutes", True),
    "Cleaning": Explanation("its last run is being cleaned up", "usually minutes", True),
    "SchedDefer": Explanation("the scheduler examines new jobs later", "usually minutes", True),
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
    "NonZeroExitCode": Explanation("the script ended with an error", "see its log: dtslurm diagnose JOB"),
    "RaisedSignal": Explanation("a signal ended the script", "see its log: dtslurm diagnose JOB"),
    "TimeLimit": Explanation("it reached its time limit", "raise --time, or checkpoint and restart"),
    "OutOfMemory": Explanation("it used more memory than it requested", "raise --mem"),
    "DeadLine": Explanation("it cannot end before its deadline", "raise --deadline"),
    "InactiveLimit": Explanation(
        "it was inactive for too long", "ask the site's support about InactiveLimit"
    ),
}

_UNAVAILABLE_NODES = r"(?:unavailable ?nodes|unavail\w*):?\s*([\w\[\],.-]+)"

# (pattern of the code, text, fix, will_start). The first match counts: "PerUser" is before the general "Max".
_FAMILIES = (
    (
        r"(?:QOS|Assoc)Grp\w*RunMin\w*",
        "the running jobs of the group use all the remaining time that it may reserve",
        "starts when these jobs have less time left; a shorter --time may start sooner",
        True,
    ),
    (r"(?:QOS|Assoc)Grp\w*Min\w*", "the group's budget is spent", "use another --account or --qos", None),
    (r"(?:QOS|Assoc)Grp\w*Wall\w*", "the group's time is used up", "use another --account or --qos", None),
    (
        r"(?:QOS|Assoc)Grp\w*",
        "the group has reached its common limit",
        "starts when jobs of the group end",
        True,
    ),
    (r"QOSMin\w*", "requests less than the QOS requires", "request more, or change --qos", False),
    (
        r"(?:QOS|Assoc)?Max\w*(?:PerUser|PerAccount|PerAcct)\w*",
        "the limit of running jobs of your user or account is reached",
        "starts when your own jobs end",
        True,
    ),
    (
        r"AssocMax(?:Submit)?Jobs?\w*",
        "your limit of jobs is reached",
        "starts when your own jobs end",
        True,
    ),
    (
        r"(?:QOS|Assoc)?Max\w*(?:PerJob|PerNode|Wall)\w*",
        "the request exceeds a limit per job",
        "request less: --nodes, --gpus-per-node, --cpus-per-task, --mem or --time",
        False,
    ),
    (r"(?:QOS|Assoc)Max\w*", "a limit of your user is reached", "starts when your own jobs end", None),
    (r"BurstBuffer\w*", "its burst buffer is being prepared", "usually minutes", True),
    (r"(?:Partition|Association|QOS)\w*Limit", "a limit is reached", "request less, or wait", None),
    (r"\w+PerAccount", "the account has reached its limit", "starts when jobs of the account end", True),
)
_FREE_TEXT = (
    (
        r"launch failed requeued held|requeued (?:in )?held",
        "Slurm could not launch the job and holds it",
        "find the cause (dtslurm diagnose JOB), then release it: dtslurm release JOB",
        False,
    ),
    (
        r"reserved for maintenance",
        "nodes that it needs are reserved for maintenance",
        "a job with a shorter --time may end before",
        True,
    ),
    (
        r"ReqNodeNotAvail",
        "nodes that it needs are down or reserved",
        (
            "a job with a shorter --time may end before the reservation; otherwise exclude the nodes "
            "with --exclude"
        ),
        None,
    ),
    (
        r"nodes required for job are down",
        "nodes that it needs are down, drained or reserved",
        "wait, or choose another --partition or fewer --nodes",
        None,
    ),
    (
        r"No suitable topology unit",
        "no rack (block) has enough free nodes for a --segment of the job",
        "starts when enough nodes of one rack are free; a smaller --segment may start sooner",
        True,
    ),
    (r"RaisedSignal", "a signal ended the script", "see its log: dtslurm diagnose JOB", None),
)

_FIX_EXCLUDED = "to allow them again: scontrol update JobId=JOB ExcNodeList= and then dtslurm release JOB"
_FIX_UNKNOWN = "scontrol show job JOB shows details"
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
