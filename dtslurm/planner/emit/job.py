"""A job file for ``dtslurm submit``: nodes, launcher, and the framework's own words for the layout."""

from __future__ import annotations

import json

from dtslurm.planner.emit import megatron, torchrun, torchtitan
from dtslurm.planner.emit.common import summary
from dtslurm.planner.layout import Layout
from dtslurm.planner.search import Task

_LIKE_MEGATRON = {"megatron", "megatron-2021", "nemo"}


def check(task: Task, layout: Layout) -> list[str]:
    """Return why the framework that was planned for cannot run a layout."""
    if task.framework in _LIKE_MEGATRON:
        return megatron.check(task, layout)
    if task.framework == "torchtitan":
        return torchtitan.check(task, layout)
    if task.framework in {"fsdp", "deepspeed"}:
        return torchrun.check(task, layout) if task.framework == "fsdp" else []
    return [f"a job for {task.framework} is yours to write: there is no launcher that knows its words"]


def emit(task: Task, layout: Layout) -> str:
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
    return "\n".join([*lines, f"nodes: {machine.nodes}", f"gpus_per_node: {machine.gpus_per_node}", ""])


def _args(words: list[str], told: str = "") -> list[str]:
    """Return the ``args`` section, an option and its values to a line."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(json.dumps(word))
    body = [f"  {', '.join(group)}," for group in groups]
    return [f"args: [ {told}".rstrip(), *body, "]"]
