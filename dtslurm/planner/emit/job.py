"""A job file for ``dtslurm submit``: nodes, launcher, and the framework's own words for the layout."""

from __future__ import annotations

import json

from dtslurm.planner.emit import megatron, torchrun, torchtitan
from dtslurm.planner.emit.common import summary
from dtslurm.planner.hardware import Machine
from dtslurm.planner.layout import Layout
from dtslurm.planner.search import TrainingTask

_LIKE_MEGATRON = {"megatron", "megatron-2021", "nemo"}


def check(task: TrainingTask, layout: Layout) -> list[str]:
    """Return why the framework that was planned for cannot run a layout."""
    if task.framework in _LIKE_MEGATRON:
        return megatron.check(task, layout)
    if task.framework == "torchtitan":
        return torchtitan.check(task, layout)
    if task.framework in {"fsdp", "deepspeed"}:
        return torchrun.check(task, layout) if task.framework == "fsdp" else []
    return [f"a job for {task.framework} is yours to write: there is no launcher that knows its words"]


def emit(task: TrainingTask, layout: Layout) -> str:
    """Return the job file."""
    lines = [f"# {summary(task, layout)}"]
    if task.framework in _LIKE_MEGATRON:
        words = [word for line in megatron.emit(task, layout).splitlines()[1:] for word in line.split()]
        lines += ["script: pretrain_gpt.py # of Megatron-LM", *_args(words), "launcher: megatron"]
    elif task.framework == "torchtitan":
        name = torchtitan.MODULE
        lines += [
            "# before torchtitan 0.3: script: train.toml (--emit torchtitan-0.2), without module and args",
            "script: torchtitan.train",
            "module: true",
            f"args: [--module, {name}, --config, {name}] # {name}.py: what --emit torchtitan prints",
            "launcher: torchtitan",
        ]
    elif task.framework == "deepspeed":
        told = "# what --emit deepspeed prints"
        lines += ["script: train.py", *_args(["--deepspeed_config", "ds.json"], told), "launcher: deepspeed"]
    else:
        lines += ["script: train.py", *_args(torchrun.batch_words(task, layout)), "launcher: torchrun"]
    machine = task.machine
    lines += [f"nodes: {machine.nodes}", f"gpus_per_node: {machine.gpus_per_node}"]
    if size := segment(machine, layout):
        told = "keeps each group of ranks within a rack; needs Slurm's topology/block"
        lines.append(f'sbatch: ["--segment={size}"] # {told}')
    return "\n".join([*lines, ""])


def segment(machine: Machine, layout: Layout) -> int | None:
    """Return the size in nodes for Slurm's ``--segment``; None if no group of ranks spans several nodes.

    Slurm places each segment within one block, here an NVLink domain. Tensor and context parallel groups and
    expert parallel groups are consecutive ranks (Megatron-LM's order tp-cp-ep-dp-pp). A segment must hold
    whole groups, and its size must divide the number of nodes.
    """
    per_node, room = machine.gpus_per_node, machine.domain // machine.gpus_per_node
    groups = [-(-size // per_node) for size in (layout.tp * layout.cp, layout.expert_ranks)]
    needed = [nodes for nodes in groups if 1 < nodes <= room]
    sizes = [size for size in range(2, room + 1) if machine.nodes % size == 0]
    fitting = [size for size in sizes if needed and all(size % nodes == 0 for nodes in needed)]
    return min(fitting, default=None)


def _args(words: list[str], told: str = "") -> list[str]:
    """Return the ``args`` section, an option and its values to a line."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(json.dumps(word))
    body = [f"  {', '.join(group)}," for group in groups]
    return [f"args: [ {told}".rstrip(), *body, "]"]
