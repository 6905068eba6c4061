"""srun's options, and the distribution of a step's tasks over nodes."""

import os
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import hostlist, values
from .options import Refused, parse, table
from .request import spread
from .state import Record

OPTIONS = table(
    """
    nodes N =
    ntasks n =
    ntasks-per-node - =
    cpus-per-task c =
    gpus-per-node - =
    gres - =
    mem - =
    gpu-bind - =
    cpu-bind - =
    distribution m =
    kill-on-bad-exit K ?
    wait W =
    output o =
    error e =
    input i =
    open-mode - =
    label l
    export - =
    overlap
    exact
    nodelist w =
    exclude x =
    chdir D =
    job-name J =
    unbuffered u
    mpi - =
    no-kill k ?
    quiet Q
    verbose v
    """,
    is_supported=True,
)

# Environment variables for options, as srun reads them; the command line takes precedence.
_VARIABLES = {
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "cpus-per-task": ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK"),
    "distribution": ("SLURM_DISTRIBUTION",),
    "export": ("SRUN_EXPORT_ENV", "SLURM_EXPORT_ENV"),
    "kill-on-bad-exit": ("SLURM_KILL_BAD_EXIT",),
    "wait": ("SLURM_WAIT",),
    "open-mode": ("SLURM_OPEN_MODE",),
}

TOO_MANY = "Unable to create step for job {}: More processors requested than permitted"


class Node(NamedTuple):
    """One node of a step.

    Attributes:
        place: index of the node in the job.
        tasks: ids of the tasks on this node.
        cpus: number of CPUs that the step uses on this node.
        gpus: GPUs that the step uses on this node.
    """

    place: int
    tasks: List[int]
    cpus: int
    gpus: List[str]


class LocalStep(NamedTuple):
    """One srun step as parsed from the command line."""

    command: List[str]
    nodes: List[Node]
    options: Dict[str, Optional[str]]
    cpus_per_task: Optional[int]
    warnings: List[str]

    @property
    def ntasks(self) -> int:
        """Number of tasks of the whole step."""
        return sum(len(node.tasks) for node in self.nodes)


def read_options(words: Sequence[str], environment: Mapping[str, str]) -> Tuple[Dict[str, Any], List[str]]:
    """Return the options by name and the command; the names from the command line are under ``given``.

    Raises:
        Refused: an option that the embedded scheduler does not support, or no command.
    """
    try:
        parsed, command = parse(words, OPTIONS)
    except Refused as error:
        problem = error.problems[0]
        if " " not in problem:
            problem = "the embedded scheduler's srun does not offer the option {}".format(problem)
        raise Refused([problem]) from None
    if not command:
        raise Refused(["No command given to execute."])
    given_options: Dict[str, Any] = dict(parsed)
    options = dict(given_options)
    for name, variables in _VARIABLES.items():
        for variable in variables:
            if name not in options and environment.get(variable):
                options[name] = environment[variable]
    options["given"] = set(given_options)
    return options, command


def _parse_number(options: Dict[str, Any], name: str) -> Optional[int]:
    text = options.get(name)
    if text is None:
        return None
    try:
        return values.node_count(text) if name == "nodes" else values.count(text)
    except ValueError as error:
        raise Refused(["Invalid --{} specification: {}".format(name, error)]) from None


def _node_indices(text: str, record: Record) -> List[int]:
    try:
        names = hostlist.expand(text)
    except ValueError as error:
        raise Refused([str(error)]) from None
    for name in names:
        if not 1 <= hostlist.number_of(name) <= record["nodes"]:
            raise Refused(["Requested node {} is not in this job's allocation".format(name)])
    return [hostlist.number_of(name) - 1 for name in names]


def _choose_nodes(options: Dict[str, Any], record: Record, count: int) -> List[int]:
    excluded = _node_indices(options["exclude"], record) if options.get("exclude") else []
    required = sorted(set(_node_indices(options["nodelist"], record))) if options.get("nodelist") else []
    free = [index for index in range(record["nodes"]) if index not in excluded]
    if len(free) < count:
        raise Refused(["Only allocated {} nodes asked for {}".format(len(free), count)])
    if any(index in excluded for index in required):
        raise Refused(["A node is both required and excluded"])
    not_required = [index for index in free if index not in required]
    return sorted((required + not_required)[: max(count, len(required))])


class _Counts(NamedTuple):
    tasks: int
    nodes: int
    per_node: Optional[int]
    warnings: List[str]


def _count_tasks(options: Dict[str, Any], record: Record) -> _Counts:
    """Determine the numbers of tasks and nodes as srun does, with srun's warnings."""
    warnings: List[str] = []
    per_node = _parse_number(options, "ntasks-per-node")
    nodes = _parse_number(options, "nodes") or record["nodes"]
    tasks = _parse_number(options, "ntasks")
    if tasks is None:
        return _Counts(nodes * (per_node or 1), nodes, per_node, warnings)
    if tasks < nodes:
        warnings.append(
            "Warning: can't run {} processes on {} nodes, setting nnodes to {}".format(tasks, nodes, tasks)
        )
        nodes = tasks
    if per_node and tasks != per_node * nodes:
        if "ntasks-per-node" in options["given"]:
            warnings.append(
                "Warning: can't honor --ntasks-per-node set to {} which doesn't match the requested tasks {} "
                "with the number of requested nodes {}. Ignoring --ntasks-per-node.".format(
                    per_node, tasks, nodes
                )
            )
        per_node = None
    return _Counts(tasks, nodes, per_node, warnings)


def _distribute(counts: List[int], distribution: str) -> List[List[int]]:
    """Return each node's task ids: ``block`` fills node after node, ``cyclic`` assigns tasks round-robin."""
    ids: List[List[int]] = [[] for _ in counts]
    kind = distribution.partition(":")[0].partition(",")[0].lower()
    plane = 1
    if kind.startswith("plane="):
        size = kind[len("plane=") :]
        if not size.isdecimal() or int(size) == 0:
            raise Refused(["Invalid --distribution specification: {}".format(distribution)])
        plane = int(size)
    elif kind in ("", "*", "block"):
        plane = max(counts)
    elif kind != "cyclic":
        raise Refused(["the embedded scheduler does not offer --distribution={}".format(distribution)])
    task, total = 0, sum(counts)
    while task < total:
        for index, count in enumerate(counts):
            for _ in range(min(plane, count - len(ids[index]))):
                ids[index].append(task)
                task += 1
    return ids


def _select_gpus(options: Dict[str, Any], record: Record, index: int) -> List[str]:
    allocated: List[str] = record["gpu_ids"][index]
    try:
        if "gpus-per-node" in options["given"]:
            requested = values.gpu_count(options["gpus-per-node"])
        elif "gres" in options["given"]:
            requested = values.gres(options["gres"])
        else:
            return allocated
    except ValueError as error:
        raise Refused([str(error)]) from None
    if requested > len(allocated):
        raise Refused(
            [
                "Unable to create step for job {}: Invalid generic resource (gres) specification".format(
                    record["id"]
                )
            ]
        )
    return allocated[:requested]


def _place_tasks(count: _Counts, nodes: List[int], each: Optional[int], record: Record) -> List[int]:
    """Return the number of tasks for each of the chosen nodes."""
    tasks_that_fit = [record["cpus_per_node"][index] // (each or 1) for index in nodes]
    if count.per_node and count.per_node <= min(tasks_that_fit):
        return [count.per_node] * len(nodes)
    if count.tasks == record["ntasks"] and len(nodes) == record["nodes"] and not each:
        return list(record["tasks_per_node"])
    try:
        return spread(count.tasks, tasks_that_fit)
    except ValueError:
        raise Refused([TOO_MANY.format(record["id"])]) from None


def plan(words: Sequence[str], environment: Mapping[str, str], record: Record) -> LocalStep:
    """Return the step that the command line describes.

    Raises:
        Refused: the step cannot run in this job.
    """
    options, command = read_options(words, environment)
    counts = _count_tasks(options, record)
    node_indices = _choose_nodes(options, record, counts.nodes)
    cpus_per_task = _parse_number(options, "cpus-per-task")
    if "cpus-per-task" not in options["given"] and not environment.get("SRUN_CPUS_PER_TASK"):
        cpus_per_task = (
            cpus_per_task
            if cpus_per_task
            and all(record["cpus_per_node"][index] >= cpus_per_task for index in node_indices)
            else None
        )
    ids = _distribute(
        _place_tasks(counts, node_indices, cpus_per_task, record), options.get("distribution") or "block"
    )
    # Without --exact or --cpus-per-task, a step takes all CPUs of its nodes.
    exact = "exact" in options or (cpus_per_task is not None and "cpus-per-task" in options["given"])
    nodes = [
        Node(
            node_index,
            ids[index],
            len(ids[index]) * (cpus_per_task or 1) if exact else record["cpus_per_node"][node_index],
            _select_gpus(options, record, node_index),
        )
        for index, node_index in enumerate(node_indices)
        if ids[index]
    ]
    warnings = counts.warnings
    mpi = options.get("mpi")
    if mpi not in (None, "none", "list"):
        warnings.append(
            "Warning: the embedded scheduler has no MPI plugin; --mpi={} has no effect".format(mpi)
        )
    return LocalStep(command, nodes, options, cpus_per_task, warnings)


class Task(NamedTuple):
    """One task of a step, with its node."""

    id: int
    local_id: int
    node_id: int
    node: Node

    @property
    def node_name(self) -> str:
        """The name of the emulated node that the task runs on."""
        return hostlist.name(self.node.place + 1)


def tasks_of(step: LocalStep) -> List[Task]:
    """Return the step's tasks in the order of their ids."""
    tasks = [
        Task(task, local_id, node_id, node)
        for node_id, node in enumerate(step.nodes)
        for local_id, task in enumerate(node.tasks)
    ]
    return sorted(tasks, key=lambda task: task.id)


def bind_gpus(binding: Optional[str], gpus: List[str], local_id: int) -> List[str]:
    """Return the GPUs of the node that a task sees.

    Raises:
        Refused: a --gpu-bind type that the embedded scheduler does not support.
    """
    kind, _, detail = (binding or "none").replace("verbose,", "").partition(":")
    if kind in ("none", "closest", "verbose", "v", ""):
        return gpus
    try:
        if kind in ("single", "per_task"):
            number = values.count(detail or "1")
            return (
                [gpus[(local_id * number + offset) % len(gpus)] for offset in range(number)] if gpus else []
            )
        if kind == "map_gpu":
            indices = detail.split(",")
            return [gpus[int(indices[local_id % len(indices)])]] if gpus else []
    except (ValueError, IndexError):
        raise Refused(["Invalid --gpu-bind specification: {}".format(binding)]) from None
    raise Refused(["the embedded scheduler does not offer --gpu-bind={}".format(binding)])


def working_folder(step: LocalStep) -> str:
    """Return the working directory of the tasks."""
    return str(step.options.get("chdir") or os.getcwd())
