"""What can be told from the partitions' limits before a job is queued. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtslurm.model.jobs.job import Submission
from dtslurm.model.units import Walltime
from dtslurm.slurm.arrays import task_ranges
from dtslurm.slurm.parse_sacctmgr import Association
from dtslurm.slurm.parse_scontrol import PartitionInfo
from dtslurm.slurm.script import options
from dtslurm.suggestions import list_nearest, suggest_name


def check(
    submission: Submission, partitions: Sequence[PartitionInfo], config: Mapping[str, str]
) -> list[str]:
    """Return every reason, one line each, why these partitions could not take the submission.

    Without any, the site keeps them private: then Slurm's dry run has to tell.
    """
    asked = options(submission.script)
    resources = submission.spec.resources
    chosen = asked.get("partition") or resources.partition or ""
    problems = _array_problems(asked.get("array") or submission.spec.array or "", config)
    known = {partition.name: partition for partition in partitions}
    if not known:
        return problems
    names = [name for name in chosen.split(",") if name] or [p.name for p in partitions if p.default]
    if not names:
        return [*problems, f"no partition is asked for and Slurm has no default; there are: {_names(known)}"]
    unknown = [name for name in names if name not in known]
    problems += [f"there is no partition {name!r}{_meant(name, known)}" for name in unknown]
    if unknown:
        return problems
    nodes = _least_nodes(asked.get("nodes", ""), submission.layout.nodes)
    limit = _time(asked.get("time", "")) or submission.layout.time
    account = asked.get("account") or resources.account or ""
    qos = asked.get("qos") or resources.qos or ""
    found = [partition_problems(known[name], nodes, limit, account, qos) for name in names]
    # A job may name several partitions: one that takes it is enough.
    return problems if not all(found) else problems + [line for lines in found for line in lines]


def partition_problems(
    partition: PartitionInfo, nodes: int, limit: Walltime | None, account: str, qos: str
) -> list[str]:
    """Return why one partition could not take the request."""
    name, problems = f"partition {partition.name!r}", []
    if partition.state in {"INACTIVE", "DRAIN"}:
        problems.append(f"{name} takes no jobs: its state is {partition.state}")
    if partition.max_nodes is not None and nodes > partition.max_nodes:
        problems.append(
            f"{nodes} nodes are more than {name} allows: at most {partition.max_nodes} (MaxNodes)"
        )
    elif partition.total_nodes is not None and nodes > partition.total_nodes:
        problems.append(f"{nodes} nodes are more than {name} has: {partition.total_nodes}")
    if limit is not None and partition.max_time is not None and limit > partition.max_time:
        problems.append(f"a time limit of {limit} is more than {name} allows: {partition.max_time} (MaxTime)")
    problems += _permission(name, "account", account, partition.allow_accounts, partition.deny_accounts)
    problems += _permission(name, "QOS", qos, partition.allow_qos, partition.deny_qos)
    return problems


def _permission(
    where: str, what: str, value: str, allowed: Sequence[str], denied: Sequence[str]
) -> list[str]:
    if not value:
        return []
    lower = value.lower()  # Slurm keeps these names in lower case
    if allowed and lower not in {name.lower() for name in allowed}:
        return [f"{what} {value!r} may not use {where}; allowed: {', '.join(allowed)}"]
    if not allowed and lower in {name.lower() for name in denied}:
        return [f"{what} {value!r} may not use {where}"]
    return []


def association_problems(submission: Submission, known: Sequence[Association]) -> list[str]:
    """Return why the user's associations could not take the submission; without any, nothing is known."""
    asked, resources = options(submission.script), submission.spec.resources
    account = asked.get("account") or resources.account or ""
    if not known:
        return []
    fitting = [one for one in known if not account or one.account.lower() == account.lower()]
    if not fitting:
        accounts = ", ".join(sorted({one.account for one in known}))
        return [f"you have no account {account!r} on this cluster; yours: {accounts}"]
    if not account and len({one.account for one in fitting}) > 1:
        return []  # the default one, which sacctmgr keeps elsewhere
    partitions = set((asked.get("partition") or resources.partition or "").split(","))
    named = [one for one in fitting if not one.partition or one.partition in partitions]
    if not named:
        allowed = ", ".join(sorted({one.partition for one in fitting}))
        return [f"account {fitting[0].account!r} is yours in these partitions only: {allowed}"]
    found = [_limit_problems(submission, one) for one in named]
    return [] if not all(found) else list(dict.fromkeys(line for lines in found for line in lines))


def _limit_problems(submission: Submission, one: Association) -> list[str]:
    """Return why one association could not take the submission."""
    asked, layout = options(submission.script), submission.layout
    name, problems = f"account {one.account!r}", []
    qos = asked.get("qos") or submission.spec.resources.qos or ""
    if qos and one.qos and qos.lower() not in {allowed.lower() for allowed in one.qos}:
        problems.append(f"QOS {qos!r} is not yours under {name}; yours: {', '.join(one.qos)}")
    limit = _time(asked.get("time", "")) or layout.time
    if limit is not None and one.max_wall is not None and limit > one.max_wall:
        problems.append(f"a time limit of {limit} is more than {name} allows: {one.max_wall} (MaxWall)")
    if one.max_submit == 0 or one.max_jobs == 0:
        problems.append(f"{name} takes no jobs of yours now (MaxJobs or MaxSubmit is 0)")
    tasks = sum(len(tasks) for tasks in task_ranges(asked.get("array") or submission.spec.array or ""))
    if one.max_submit and tasks > one.max_submit:
        problems.append(f"{tasks} array tasks are more than {name} may queue: {one.max_submit} (MaxSubmit)")
    nodes = _least_nodes(asked.get("nodes", ""), layout.nodes)
    wanted = {"node": nodes, "gres/gpu": nodes * (layout.gpus_per_node or 0)}
    for limits, label in ((one.max_tres, "MaxTRES"), (one.group_tres, "GrpTRES")):
        problems += [
            f"{what}={amount} is more than {name} allows: {what}={limits[what]} ({label})"
            for what, amount in wanted.items()
            if what in limits and amount > limits[what]
        ]
    return problems


def _array_problems(expression: str, config: Mapping[str, str]) -> list[str]:
    size = config.get("MaxArraySize", "")
    highest = max((tasks[-1] for tasks in task_ranges(expression) if tasks), default=0)
    if size.isdecimal() and highest >= int(size):
        return [f"array index {highest} is too high: this Slurm takes indices up to {int(size) - 1}"]
    return []


def _least_nodes(value: str, otherwise: int) -> int:
    least = value.partition("-")[0]
    return int(least) if least.isdecimal() else otherwise


def _time(value: str) -> Walltime | None:
    try:
        return Walltime.parse(value) if value else None
    except ValueError:
        return None


def _meant(name: str, known: Mapping[str, PartitionInfo]) -> str:
    return suggest_name(name, known) or f"; there are: {list_nearest(name, known)}"


def _names(known: Mapping[str, PartitionInfo]) -> str:
    return ", ".join(sorted(known)) or "none"
