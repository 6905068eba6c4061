"""What can be told from the partitions' limits before a job is queued. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from dtslurm.model.job import Submission
from dtslurm.model.units import Walltime
from dtslurm.slurm.arrays import task_ranges
from dtslurm.slurm.parse_scontrol import PartitionInfo
from dtslurm.slurm.script import options


def check(
    submission: Submission, partitions: Sequence[PartitionInfo], config: Mapping[str, str]
) -> list[str]:
    """Return every reason, one line each, why these partitions could not take the submission."""
    asked = options(submission.script)
    resources = submission.spec.resources
    chosen = asked.get("partition") or resources.partition or ""
    problems = _array_problems(asked.get("array") or submission.spec.array or "", config)
    known = {partition.name: partition for partition in partitions}
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
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; there are: {_names(known)}"


def _names(known: Mapping[str, PartitionInfo]) -> str:
    return ", ".join(sorted(known)) or "none"
