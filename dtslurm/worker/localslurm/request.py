"""From a script's directives to what the job asks of this machine, and whether the machine has it."""

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


def _read_values(options: Dict[str, Optional[str]]) -> Dict[str, Any]:
    read: Dict[str, Any] = {}
    problems = []
    for name, text in options.items():
        try:
            read[name] = _READERS[name](text or "") if name in _READERS else text
        except ValueError as error:
            problems.append("--{}: {}".format(name, error))
    if read.get("open-mode") not in (None, "append", "truncate", "a", "t"):
        problems.append("--open-mode must be append or truncate, not {!r}".format(read["open-mode"]))
    if read.get("kill-on-invalid-dep") not in (None, "yes", "no"):
        told = read["kill-on-invalid-dep"]
        problems.append("--kill-on-invalid-dep must be yes or no, not {!r}".format(told))
    if problems:
        raise Refused(problems)
    return read


def spread(tasks: int, room: List[int]) -> List[int]:
    """Spread tasks over nodes evenly, first nodes first, without exceeding the room of any.

    Raises:
        ValueError: there is no room for all.
    """
    placed = [0] * len(room)
    left = tasks
    while left:
        before = left
        for index, most in enumerate(room):
            if left and placed[index] < most:
                placed[index] += 1
                left -= 1
        if left == before:
            raise ValueError("no room for {} more tasks".format(left))
    return placed


def _place(read: Dict[str, Any], machine: Machine) -> List[int]:
    """Return the number of tasks of each node."""
    tasks, per_node = read.get("ntasks"), read.get("ntasks-per-node")
    cpus_each = read.get("cpus-per-task", 1)
    nodes = read.get("nodes")
    if tasks is None:
        return [per_node or 1] * (nodes or 1)
    if nodes is None:
        room = per_node or max(1, machine["cpus"] // cpus_each)
        nodes = -(-tasks // room)
    nodes = min(nodes, tasks)
    return spread(tasks, [per_node if per_node and per_node * nodes == tasks else tasks] * nodes)


def _gpus_per_node(read: Dict[str, Any], nodes: int) -> int:
    if "gpus-per-node" in read or "gres" in read:
        return int(read.get("gpus-per-node", read.get("gres", 0)))
    total = int(read.get("gpus", 0))
    if total % nodes:
        raise Refused(
            ["--gpus={} cannot be divided among {} nodes; use --gpus-per-node".format(total, nodes)]
        )
    return total // nodes


def read_request(text: str, machine: Machine) -> Request:
    """Return what the script asks for; keys are the fields of a job record.

    Raises:
        Refused: the script is none, or asks in words that sbatch does not take.
    """
    options = read_options(text)
    read = _read_values(options)
    tasks = _place(read, machine)
    cpus = [max(1, count * read.get("cpus-per-task", 1)) for count in tasks]
    memory = read.get("mem")
    if memory is None and "mem-per-cpu" in read:
        memory = read["mem-per-cpu"] * max(cpus)
    array = read.get("array")
    return {
        "name": read.get("job-name"),
        "nodes": len(tasks),
        "ntasks": sum(tasks),
        "ntasks_asked": "ntasks" in read or "ntasks-per-node" in read,
        "ntasks_per_node": read.get("ntasks-per-node"),
        "cpus_per_task": read.get("cpus-per-task"),
        "tasks_per_node": tasks,
        "cpus_per_node": cpus,
        "gpus": _gpus_per_node(read, len(tasks)),
        "gpus_per_node_asked": read.get("gpus-per-node"),
        "memory_mib": memory,
        "time_limit": read.get("time"),
        "signal": read.get("signal"),
        "array_tasks": array.tasks if array else None,
        "array_limit": array.limit if array else 0,
        "array_step": array.step if array else 1,
        "dependency": read.get("dependency", []),
        "kill_on_invalid_dep": read.get("kill-on-invalid-dep") == "yes",
        "output": read.get("output"),
        "error": read.get("error"),
        "input": read.get("input"),
        "append": (read.get("open-mode") or "").startswith("a"),
        "requeue": "no-requeue" not in options,
        "export": read.get("export"),
        "comment": read.get("comment") or "",
        "chdir": read.get("chdir"),
        "held": "hold" in options,
        "partition": read.get("partition") or "local",
    }


def emulated_gpus(request: Request, machine: Machine) -> bool:
    """Return whether GPUs are asked of a machine that has none: they are played by the CPU."""
    return bool(request["gpus"]) and not machine["gpus"]


def misfits(request: Request, machine: Machine) -> List[str]:
    """Return, a line each, what is asked and what the machine has instead."""
    problems = []
    if request["nodes"] > MAX_NODES:
        problems.append(
            "{} nodes are asked for; at most {} are emulated on one machine".format(
                request["nodes"], MAX_NODES
            )
        )
    memory, available = request["memory_mib"], machine["memory_mib"]
    if memory and available and memory > available:
        problems.append("{} MiB of memory are asked for; this machine has {}".format(memory, available))
    gpus = request["nodes"] * request["gpus"]
    if machine["gpus"] and gpus > len(machine["gpus"]):
        problems.append(
            "{} GPUs are asked for ({} nodes x {}); this machine has {}".format(
                gpus, request["nodes"], request["gpus"], len(machine["gpus"])
            )
        )
    return problems


def notices(request: Request, machine: Machine) -> List[str]:
    """Return what the user should know of how this machine stands in for a cluster, a line each."""
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
