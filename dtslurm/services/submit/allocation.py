"""Fit a request into an allocation that the user already holds: ``submit --in``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dtslurm.errors import DtslurmError
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.diagnostics import Checked, Diagnostics, errors, notes
from dtslurm.model.jobs.job import Allocation, JobSpec, Resources, TaskLayout
from dtslurm.model.runs.allocation import HeldAllocation
from dtslurm.model.runs.record import OUR_MARK
from dtslurm.model.runs.state import JobState
from dtslurm.presentation.quantities import pluralize
from dtslurm.scheduler.base import AllocationReader
from dtslurm.services.request.request import COMMAND_LINE, JobRequest
from dtslurm.services.wiring.context import ActiveCluster
from dtslurm.slurm.arrays import array_of_task, is_valid_job_id

HOLDS = "dtslurm-allocation"  # in the comment of a job that only holds an allocation
_FIRST_VERSION = (22, 5)  # in which a step with --overlap shares all resources of the job's other steps
_NEW_ALLOCATION = "dtslurm alloc holds an allocation"
_INAPPLICABLE = (
    "time", "partition", "account", "qos", "constraint", "reservation", "mem", "signal_before", "requeue",
    "sbatch",
)  # fmt: skip


def find_contradictions(request: JobRequest) -> list[str]:
    """Return the options of a request that cannot apply to a run in an allocation."""
    given = [
        ("--array", request.array is not None and request.trials is None, "it would need a job of its own"),
        ("a sweep", request.trials is not None, "its trials are the tasks of a job array"),
        ("--dependency", request.dependency is not None, "the run starts at once"),
        ("--once", request.once is not None, "each request starts a run"),
        ("--total-time", request.total_time is not None, "an allocation is not requeued"),
        (
            "--time",
            request.time is not None and request.origins.get("time", COMMAND_LINE) == COMMAND_LINE,
            "the time limit is that of the allocation",
        ),
    ]
    return [f"{name} contradicts --in: {reason}" for name, is_given, reason in given if is_given]


def fit_into_allocation(
    request: JobRequest, cluster: ActiveCluster | None
) -> Checked[tuple[JobRequest, HeldAllocation | None]]:
    """Return a request adapted to the allocation that it names, and this; unchanged if it names none."""
    if request.allocation is None or cluster is None:
        return Checked((request, None))
    held = read_allocation(cluster, request.allocation)
    problems = errors(find_contradictions(request))
    if held.value is None:
        return Checked((request, None), (*problems, *held.diagnostics))
    fitted = fit_request(request, held.value, cluster.profile)
    return Checked((fitted.value, held.value), (*problems, *held.diagnostics, *fitted.diagnostics))


def read_allocation(cluster: ActiveCluster, job_id: str) -> Checked[HeldAllocation | None]:
    """Return the running job in which a run is to start, or why none can start there."""
    if not isinstance(cluster.scheduler, AllocationReader):
        return Checked(
            None,
            errors(
                [f"--in {job_id}: cluster {cluster.name} has no Slurm; its jobs start at once without --in"]
            ),
        )
    if array_of_task(job_id):
        return Checked(
            None, errors([f"--in {job_id}: a task of a job array is no allocation"], _NEW_ALLOCATION)
        )
    if not is_valid_job_id(job_id):
        return Checked(None, errors([f"--in {job_id!r} is not a job id"], "squeue --me lists your jobs"))
    try:
        held = cluster.scheduler.read_allocation(job_id)
    except DtslurmError as error:
        return Checked(None, errors(["; ".join([f"--in {job_id}: {error.message}", *error.evidence])]))
    if held is None:
        return Checked(None, errors([f"--in {job_id}: Slurm knows no such job"], _NEW_ALLOCATION))
    problem, hint = _find_problem(held)
    return Checked(held, errors([f"--in {job_id}: {problem}"], hint) if problem else ())


def _find_problem(held: HeldAllocation) -> tuple[str, str]:
    """Return why no run can start in a job, and what to do; empty if one can."""
    job, runs = held.job, ", ".join(held.runs)
    reason = f" ({job.reason})" if job.reason else ""
    version = re.match(r"(\d+)\.(\d+)", held.version)
    is_too_old = version is not None and (int(version[1]), int(version[2])) < _FIRST_VERSION
    is_run = OUR_MARK in job.comment and HOLDS not in job.comment
    checks = (
        (not held.is_own, f"job {job.job_id} belongs to another user", _NEW_ALLOCATION),
        (
            bool(array_of_task(job.job_id)),
            f"job {job.job_id} is a task of a job array, not an allocation",
            _NEW_ALLOCATION,
        ),
        (
            job.state is JobState.PENDING,
            f"job {job.job_id} is pending{reason}",
            "a run starts in an allocation when that is running",
        ),
        (
            job.state.ended,
            f"job {job.job_id} has ended: its state is {job.state.value}",
            _NEW_ALLOCATION,
        ),
        (
            job.state is not JobState.RUNNING or bool(job.flags) or not held.nodes,
            f"job {job.job_id} is not running: its state is {job.word}",
            f"scontrol show job {job.job_id} shows more",
        ),
        (is_run, f"job {job.job_id} is a run itself", f"dtslurm exec {job.job_id} runs a command in it"),
        (bool(runs), f"run {runs} is running in this allocation", f"dtslurm cancel {runs} ends it"),
        (
            is_too_old,
            f"Slurm {held.version} shares only CPUs between steps, and --in needs Slurm 22.05 or later",
            "submit without --in",
        ),
    )
    return next(((problem, hint) for fails, problem, hint in checks if fails), ("", ""))


def fit_request(request: JobRequest, held: HeldAllocation, profile: ClusterProfile) -> Checked[JobRequest]:
    """Return the request with the size of the allocation where it names none.

    Notes name the options that have no effect.
    """
    partition = held.job.partition if held.job.partition in profile.slurm.partitions else None
    extra_nodes = (request.spare_nodes or 0) + sum(
        role.nodes for role in (request.roles.others if request.roles is not None else ())
    )
    ignored = [name for name in _INAPPLICABLE if getattr(request, name)]
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
    texts = [f"no effect in allocation {held.job.job_id}: {flags}"] if ignored else []
    is_single = request.launcher == "single"
    gpus_per_node = held.gpus_per_node if request.gpus_per_node is None else request.gpus_per_node
    ranks_per_node = request.ntasks_per_node or (1 if is_single else max(1, gpus_per_node))
    dropped: dict[str, Any] = {name: () if name == "sbatch" else None for name in ignored}
    fitted = replace(
        request,
        nodes=(1 if is_single else max(1, len(held.nodes) - extra_nodes))
        if request.nodes is None
        else request.nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_task=request.cpus_per_task or max(1, held.cpus_per_node // max(1, ranks_per_node)),
        **{**dropped, "requeue": False, "partition": partition},
    )
    return Checked(fitted, notes(texts))


def choose_nodes(spec: JobSpec, held: HeldAllocation | None, layout: TaskLayout | None) -> Checked[JobSpec]:
    """Return a job with its nodes in an allocation, or why the allocation is too small."""
    if held is None or layout is None:
        return Checked(spec)
    allocation = _choose_nodes(held, spec.resources, layout, spec.extra_nodes)
    return Checked(replace(spec, allocation=allocation.value), allocation.diagnostics)


def _choose_nodes(
    held: HeldAllocation, resources: Resources, layout: TaskLayout, extra_nodes: int
) -> Checked[Allocation | None]:
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    diagnostics, job_id = Diagnostics(), held.job.job_id
    needed = layout.nodes + extra_nodes
    try:
        required = list(NodeSet(resources.nodelist or ""))
        excluded = set(NodeSet(resources.exclude or ""))
    except NodeSetException as error:
        return Checked(None, errors([f"--nodelist or --exclude: {error}"]))
    if missing := [name for name in required if name not in held.nodes]:
        diagnostics.error(
            f"--nodelist: {', '.join(missing)} is not in allocation {job_id} ({_names(held.nodes)})"
        )
    usable = [name for name in held.nodes if name not in excluded]
    chosen = [
        *(name for name in usable if name in required),
        *(name for name in usable if name not in required),
    ]
    if len(chosen) < needed:
        without = f" without {resources.exclude}" if resources.exclude else ""
        diagnostics.error(
            f"the run needs {pluralize(needed, 'node')}, and allocation {job_id} has {len(usable)}{without}"
        )
    if layout.gpus_per_node > held.gpus_per_node:
        diagnostics.error(
            f"the run needs {pluralize(layout.gpus_per_node, 'GPU')} per node, and allocation {job_id} has "
            f"{held.gpus_per_node}"
        )
    cpus = layout.ranks_per_node * (layout.cpus_per_rank or 1)
    if cpus > held.cpus_per_node:
        diagnostics.error(
            f"the run needs {pluralize(cpus, 'CPU')} per node, and allocation {job_id} has "
            f"{held.cpus_per_node}; give -c or --ntasks-per-node"
        )
    if diagnostics.problems:
        return Checked(None, diagnostics.diagnostics)
    nodes = sorted(chosen[:needed], key=held.nodes.index)
    return Checked(Allocation(job_id=job_id, nodes=tuple(nodes)))


def _names(nodes: Sequence[str]) -> str:
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(list(nodes)))
