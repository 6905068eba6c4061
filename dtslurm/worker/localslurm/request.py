"""Convert a script's directives into a job's resource request, and check the request against this machine."""

from typing import Any, Callable, Dict, List, Optional

from . import values
from .directives import read_options
from .machine import Machine
from .options import Refused

MAX_NODES = 64

Request = Dict[str, Any]

_READERS: Dict[str, Callable[[str], Any]] = {
    "nodes": values.node_count,
    "ntasks": values.count,
    "ntasks-per-node": values.count,
    "cpus-per-task": values.count,
    "gpus-per-node": values.gpu_count,
    "gpus": values.gpu_count,
    "gres": values.gres,
    "mem": values.memory,
    "mem-per-cpu": values.memory,
    "time": values.seconds,
    "signal": values.early_signal,
    "array": values.array,
    "dependency": values.dependency,
}


def _parse_values(options: Dict[str, Optional[str]]) -> Dict[str, Any]:
    parsed_values: Dict[str, Any] = {}
    problems = []
    for name, text in options.items():
        try:
            parsed_values[name] = _READERS[name](text or "") if name in _READERS else text
        except ValueError as error:
            problems.append("--{}: {}".format(name, error))
    if parsed_values.get("open-mode") not in (None, "append", "truncate", "a", "t"):
        problems.append("--open-mode must be append or truncate, not {!r}".format(parsed_values["open-mode"]))
    if parsed_values.get("kill-on-invalid-dep") not in (None, "yes", "no"):
        setting = parsed_values["kill-on-invalid-dep"]
        problems.append("--kill-on-invalid-dep must be yes or no, not {!r}".format(setting))
    if problems:
        raise Refused(problems)
    return parsed_values


def spread(tasks: int, room: List[int]) -> List[int]:
    """Distribute tasks over nodes evenly, first nodes first, within each node's capacity.

    Raises:
        ValueError: the capacity is too small for all tasks.
    """
    placed = [0] * len(room)
    remaining = tasks
    while remaining:
        remaining_before = remaining
        for index, capacity in enumerate(room):
            if remaining and placed[index] < capacity:
                placed[index] += 1
                remaining -= 1
        if remaining == remaining_before:
            raise ValueError("no room for {} more tasks".format(remaining))
    return placed


def _count_tasks_per_node(options: Dict[str, Any], machine: Machine) -> List[int]:
    """Return the number of tasks on each node."""
    tasks, per_node = options.get("ntasks"), options.get("ntasks-per-node")
    cpus_per_task = options.get("cpus-per-task", 1)
    nodes = options.get("nodes")
    if tasks is None:
        return [per_node or 1] * (nodes or 1)
    if nodes is None:
        tasks_that_fit = per_node or max(1, machine["cpus"] // cpus_per_task)
        nodes = -(-tasks // tasks_that_fit)
    nodes = min(nodes, tasks)
    return spread(tasks, [per_node if per_node and per_node * nodes == tasks else tasks] * nodes)


def _gpus_per_node(options: Dict[str, Any], nodes: int) -> int:
    if "gpus-per-node" in options or "gres" in options:
        return int(options.get("gpus-per-node", options.get("gres", 0)))
    total = int(options.get("gpus", 0))
    if total % nodes:
        raise Refused(
            ["--gpus={} cannot be divided among {} nodes; use --gpus-per-node".format(total, nodes)]
        )
    return total // nodes


def read_request(text: str, machine: Machine) -> Request:
    """Return the script's request; the keys are the fields of a job record.

    Raises:
        Refused: the text is no batch script, or it has invalid directives.
    """
    options = read_options(text)
    parsed_values = _parse_values(options)
    tasks_per_node = _count_tasks_per_node(parsed_values, machine)
    cpus_per_node = [max(1, count * parsed_values.get("cpus-per-task", 1)) for count in tasks_per_node]
    memory = parsed_values.get("mem")
    if memory is None and "mem-per-cpu" in parsed_values:
        memory = parsed_values["mem-per-cpu"] * max(cpus_per_node)
    array = parsed_values.get("array")
    return {
        "name": parsed_values.get("job-name"),
        "nodes": len(tasks_per_node),
        "ntasks": sum(tasks_per_node),
        "ntasks_asked": "ntasks" in parsed_values or "ntasks-per-node" in parsed_values,
        "ntasks_per_node": parsed_values.get("ntasks-per-node"),
        "cpus_per_task": parsed_values.get("cpus-per-task"),
        "tasks_per_node": tasks_per_node,
        "cpus_per_node": cpus_per_node,
        "gpus": _gpus_per_node(parsed_values, len(tasks_per_node)),
        "gpus_per_node_asked": parsed_values.get("gpus-per-node"),
        "memory_mib": memory,
        "time_limit": parsed_values.get("time"),
        "signal": parsed_values.get("signal"),
        "array_tasks": array.tasks if array else None,
        "array_limit": array.limit if array else 0,
        "array_step": array.step if array else 1,
        "dependency": parsed_values.get("dependency", []),
        "kill_on_invalid_dep": parsed_values.get("kill-on-invalid-dep") == "yes",
        "output": parsed_values.get("output"),
        "error": parsed_values.get("error"),
        "input": parsed_values.get("input"),
        "append": (parsed_values.get("open-mode") or "").startswith("a"),
        "requeue": "no-requeue" not in options,
        "export": parsed_values.get("export"),
        "comment": parsed_values.get("comment") or "",
        "chdir": parsed_values.get("chdir"),
        "held": "hold" in options,
        "partition": parsed_values.get("partition") or "local",
    }


def emulated_gpus(request: Request, machine: Machine) -> bool:
    """Return whether a job requests GPUs on a machine without GPUs; the CPU emulates them."""
    return bool(request["gpus"]) and not machine["gpus"]


def find_excess_requests(request: Request, machine: Machine) -> List[str]:
    """Return one line for each requested resource that exceeds this machine's resources."""
    problems = []
    if request["nodes"] > MAX_NODES:
        problems.append(
            "{} nodes are requested; at most {} are emulated on one machine".format(
                request["nodes"], MAX_NODES
            )
        )
    memory, available = request["memory_mib"], machine["memory_mib"]
    if memory and available and memory > available:
        problems.append("{} MiB of memory are requested; this machine has {}".format(memory, available))
    gpus = request["nodes"] * request["gpus"]
    if machine["gpus"] and gpus > len(machine["gpus"]):
        problems.append(
            "{} GPUs are requested ({} nodes x {}); this machine has {}".format(
                gpus, request["nodes"], request["gpus"], len(machine["gpus"])
            )
        )
    return problems


def notices(request: Request, machine: Machine) -> List[str]:
    """Return one line for each difference between this machine and a cluster that concerns the job."""
    lines = []
    if request["nodes"] > 1:
        lines.append("{} nodes are emulated on this machine; they share its CPUs".format(request["nodes"]))
    cpus = max(request["cpus_per_node"])
    if cpus > machine["cpus"]:
        lines.append(
            "{} CPUs per node are requested and this machine has {}: the ranks share them".format(
                cpus, machine["cpus"]
            )
        )
    if emulated_gpus(request, machine):
        lines.append(
            "this machine has no GPU: the {} GPUs per node are emulated, training runs on the CPU".format(
                request["gpus"]
            )
        )
    return lines
