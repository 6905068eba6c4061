"""Checks a submission against the limits of partitions and associations before it is queued.

The functions here run no command.
"""

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
    """Return all reasons, one line each, why these partitions cannot accept the submission.

    If ``partitions`` is empty, the site hides them, and only Slurm's dry run can check the request.
    """
    script_options = options(submission.script)
    resources = submission.spec.resources
    partition_names = script_options.get("partition") or resources.partition or ""
    problems = _check_array_size(script_options.get("array") or submission.spec.array or "", config)
    by_name = {partition.name: partition for partition in partitions}
    if not by_name:
        return problems
    names = [name for name in partition_names.split(",") if name] or [p.name for p in partitions if p.default]
    if not names:
        return [
            *problems,
            (
                "no partition is requested, and Slurm has no default partition; the partitions are: "
                f"{_join_names(by_name)}"
            ),
        ]
    unknown_names = [name for name in names if name not in by_name]
    problems += [
        f"partition {name!r} does not exist{_suggest_partition(name, by_name)}" for name in unknown_names
    ]
    if unknown_names:
        return problems
    nodes = _parse_min_nodes(script_options.get("nodes", ""), submission.layout.nodes)
    limit = _parse_time(script_options.get("time", "")) or submission.layout.time
    account = script_options.get("account") or resources.account or ""
    qos = script_options.get("qos") or resources.qos or ""
    problem_lists = [partition_problems(by_name[name], nodes, limit, account, qos) for name in names]
    # A job may name several partitions: one that accepts the job is enough.
    return (
        problems if not all(problem_lists) else problems + [line for lines in problem_lists for line in lines]
    )


def partition_problems(
    partition: PartitionInfo, nodes: int, limit: Walltime | None, account: str, qos: str
) -> list[str]:
    """Return the reasons why one partition cannot accept the request."""
    name, problems = f"partition {partition.name!r}", []
    if partition.state in {"INACTIVE", "DRAIN"}:
        problems.append(f"{name} accepts no jobs: its state is {partition.state}")
    if partition.max_nodes is not None and nodes > partition.max_nodes:
        problems.append(
            f"{nodes} nodes are more than {name} allows: at most {partition.max_nodes} (MaxNodes)"
        )
    elif partition.total_nodes is not None and nodes > partition.total_nodes:
        problems.append(f"{nodes} nodes are more than {name} has: {partition.total_nodes}")
    if limit is not None and partition.max_time is not None and limit > partition.max_time:
        problems.append(f"a time limit of {limit} is more than {name} allows: {partition.max_time} (MaxTime)")
    problems += _check_permission(name, "account", account, partition.allow_accounts, partition.deny_accounts)
    problems += _check_permission(name, "QOS", qos, partition.allow_qos, partition.deny_qos)
    return problems


def _check_permission(
    partition_label: str, noun: str, value: str, allowed: Sequence[str], denied: Sequence[str]
) -> list[str]:
    if not value:
        return []
    lower_value = value.lower()  # Slurm stores these names in lower case
    if allowed and lower_value not in {name.lower() for name in allowed}:
        return [f"{noun} {value!r} is not allowed in {partition_label}; allowed: {', '.join(allowed)}"]
    if not allowed and lower_value in {name.lower() for name in denied}:
        return [f"{noun} {value!r} is not allowed in {partition_label}"]
    return []


def find_association_problems(submission: Submission, associations: Sequence[Association]) -> list[str]:
    """Return the reasons why none of the user's associations can accept the submission.

    If ``associations`` is empty, the associations are not known and the result is empty.
    """
    script_options, resources = options(submission.script), submission.spec.resources
    account = script_options.get("account") or resources.account or ""
    if not associations:
        return []
    matches = [assoc for assoc in associations if not account or assoc.account.lower() == account.lower()]
    if not matches:
        accounts = ", ".join(sorted({assoc.account for assoc in associations}))
        return [f"you have no account {account!r} on this cluster; yours: {accounts}"]
    if not account and len({assoc.account for assoc in matches}) > 1:
        return []  # Slurm uses the user's default account, which this table does not show
    partitions = set((script_options.get("partition") or resources.partition or "").split(","))
    usable_associations = [assoc for assoc in matches if not assoc.partition or assoc.partition in partitions]
    if not usable_associations:
        allowed = ", ".join(sorted({assoc.partition for assoc in matches}))
        return [f"account {matches[0].account!r} is yours in these partitions only: {allowed}"]
    problem_lists = [_check_limits(submission, assoc) for assoc in usable_associations]
    return (
        []
        if not all(problem_lists)
        else list(dict.fromkeys(line for lines in problem_lists for line in lines))
    )


def _check_limits(submission: Submission, association: Association) -> list[str]:
    """Return the reasons why one association cannot accept the submission."""
    script_options, layout = options(submission.script), submission.layout
    name, problems = f"account {association.account!r}", []
    qos = script_options.get("qos") or submission.spec.resources.qos or ""
    if qos and association.qos and qos.lower() not in {allowed.lower() for allowed in association.qos}:
        problems.append(f"you cannot use QOS {qos!r} with {name}; your QOS: {', '.join(association.qos)}")
    limit = _parse_time(script_options.get("time", "")) or layout.time
    if limit is not None and association.max_wall is not None and limit > association.max_wall:
        problems.append(
            f"a time limit of {limit} is more than {name} allows: {association.max_wall} (MaxWall)"
        )
    if association.max_submit == 0 or association.max_jobs == 0:
        problems.append(f"{name} accepts no jobs of yours now (MaxJobs or MaxSubmit is 0)")
    tasks = sum(
        len(tasks) for tasks in task_ranges(script_options.get("array") or submission.spec.array or "")
    )
    if association.max_submit and tasks > association.max_submit:
        problems.append(
            f"{tasks} array tasks are more than {name} allows: {association.max_submit} (MaxSubmit)"
        )
    nodes = _parse_min_nodes(script_options.get("nodes", ""), layout.nodes)
    requested_tres = {"node": nodes, "gres/gpu": nodes * (layout.gpus_per_node or 0)}
    for limits, label in ((association.max_tres, "MaxTRES"), (association.group_tres, "GrpTRES")):
        problems += [
            f"{tres}={count} is more than {name} allows: {tres}={limits[tres]} ({label})"
            for tres, count in requested_tres.items()
            if tres in limits and count > limits[tres]
        ]
    return problems


def _check_array_size(expression: str, config: Mapping[str, str]) -> list[str]:
    size = config.get("MaxArraySize", "")
    highest = max((tasks[-1] for tasks in task_ranges(expression) if tasks), default=0)
    if size.isdecimal() and highest >= int(size):
        return [f"array index {highest} is too high: this Slurm accepts indices up to {int(size) - 1}"]
    return []


def _parse_min_nodes(value: str, default: int) -> int:
    minimum = value.partition("-")[0]
    return int(minimum) if minimum.isdecimal() else default


def _parse_time(value: str) -> Walltime | None:
    try:
        return Walltime.parse(value) if value else None
    except ValueError:
        return None


def _suggest_partition(name: str, partitions: Mapping[str, PartitionInfo]) -> str:
    return suggest_name(name, partitions) or f"; the partitions are: {list_nearest(name, partitions)}"


def _join_names(partitions: Mapping[str, PartitionInfo]) -> str:
    return ", ".join(sorted(partitions)) or "none"
