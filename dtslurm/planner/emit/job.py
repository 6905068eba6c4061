"""Job file for ``dtslurm submit``: nodes, launcher, and the layout as the framework's arguments."""

from __future__ import annotations

import json

from dtslurm.planner.emit import megatron, torchrun, torchtitan
from dtslurm.planner.emit.common import summary
from dtslurm.planner.hardware import Machine
from dtslurm.planner.layout import Layout
from dtslurm.planner.search import TrainingTask

_MEGATRON_FRAMEWORKS = {"megatron", "megatron-2021", "nemo"}


def check(task: TrainingTask, layout: Layout) -> list[str]:
    """Return the reasons why the task's framework cannot run a layout."""
    if task.framework in _MEGATRON_FRAMEWORKS:
        return megatron.check(task, layout)
    if task.framework == "torchtitan":
        return torchtitan.check(task, layout)
    if task.framework in {"fsdp", "deepspeed"}:
        return torchrun.check(task, layout) if task.framework == "fsdp" else []
    return [f"dtslurm has no launcher for {task.framework}: write the job file yourself"]


def script_arguments(task: TrainingTask, layout: Layout, steps: int) -> list[str] | None:
    """Return the words that pass a training script its layout and number of steps.

    None if the framework reads its layout from a file or from the script's own arguments.
    """
    if task.framework in _MEGATRON_FRAMEWORKS:
        return [*_megatron_words(task, layout), "--train-iters", str(steps)]
    return None


def _megatron_words(task: TrainingTask, layout: Layout) -> list[str]:
    return [word for line in megatron.emit(task, layout).splitlines()[1:] for word in line.split()]


def emit(task: TrainingTask, layout: Layout) -> str:
    """Return the job file."""
    lines = [f"# {summary(task, layout)}"]
    if task.framework in _MEGATRON_FRAMEWORKS:
        args = _format_args(_megatron_words(task, layout))
        lines += ["script: pretrain_gpt.py # of Megatron-LM", *args, "launcher: megatron"]
    elif task.framework == "torchtitan":
        module = torchtitan.MODULE
        lines += [
            "# before torchtitan 0.3: script: train.toml (--emit torchtitan-0.2), without module and args",
            "script: torchtitan.train",
            "module: true",
            f"args: [--module, {module}, --config, {module}] # {module}.py: what --emit torchtitan prints",
            "launcher: torchtitan",
        ]
    elif task.framework == "deepspeed":
        comment = "# what --emit deepspeed prints"
        lines += [
            "script: train.py",
            *_format_args(["--deepspeed_config", "ds.json"], comment),
            "launcher: deepspeed",
        ]
    else:
        lines += ["script: train.py", *_format_args(torchrun.batch_words(task, layout)), "launcher: torchrun"]
    machine = task.machine
    lines += [f"nodes: {machine.nodes}", f"gpus_per_node: {machine.gpus_per_node}"]
    if size := segment(machine, layout):
        comment = "keeps each group of ranks within a rack; needs Slurm's topology/block"
        lines.append(f'sbatch: ["--segment={size}"] # {comment}')
    return "\n".join([*lines, ""])


def segment(machine: Machine, layout: Layout) -> int | None:
    """Return the size in nodes for Slurm's ``--segment``; None if no group of ranks spans several nodes.

    Slurm places each segment within one block, here an NVLink domain. Tensor and context parallel groups and
    expert parallel groups are consecutive ranks (Megatron-LM's order tp-cp-ep-dp-pp). A segment must hold
    whole groups, and its size must divide the number of nodes.
    """
    per_node, nodes_per_domain = machine.gpus_per_node, machine.domain // machine.gpus_per_node
    group_nodes = [-(-size // per_node) for size in (layout.tp * layout.cp, layout.expert_ranks)]
    multi_node_groups = [nodes for nodes in group_nodes if 1 < nodes <= nodes_per_domain]
    sizes = [size for size in range(2, nodes_per_domain + 1) if machine.nodes % size == 0]
    valid_sizes = [
        size for size in sizes if multi_node_groups and all(size % nodes == 0 for nodes in multi_node_groups)
    ]
    return min(valid_sizes, default=None)


def _format_args(words: list[str], comment: str = "") -> list[str]:
    """Return the ``args`` section, with one option and its values per line."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(json.dumps(word))
    option_lines = [f"  {', '.join(group)}," for group in groups]
    return [f"args: [ {comment}".rstrip(), *option_lines, "]"]
