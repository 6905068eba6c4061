"""The ``#SBATCH`` lines of a script, and how sbatch reads their values."""

from __future__ import annotations

import re

from dtslurm.errors import RequestInvalid
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.destination import destination
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.jobs.sbatch import split_option

_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+^\[\]*-]+")
_OPPOSITES = {"requeue": "no-requeue", "no-requeue": "requeue"}
MEMORY_PER = ("mem-per-cpu", "mem-per-gpu")  # each excludes --mem
_UNHOLDABLE = re.compile(r"[\x00-\x1f\x7f]")


def quoted(value: str) -> str:
    """Return a value as sbatch's own directive parser reads it back.

    It knows double quotes and backslash escapes (src/sbatch/opt.c); it cannot hold line breaks.
    """
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def unholdable(flag: str, value: str) -> list[str]:
    """Return why a directive cannot hold ``value``, if it cannot."""
    if found := _UNHOLDABLE.search(value):
        return [f"{flag} holds a control character ({found[0]!r}), which Slurm cannot take"]
    return []


class Directives:
    """Options in order, each name once; a later ``set`` of the same name replaces the earlier."""

    def __init__(self) -> None:
        self._options: dict[str, str | None] = {}

    def set(self, name: str, value: object = None) -> None:
        """Add ``--name=value``, or the bare ``--name`` without a value."""
        self._options.pop(name, None)
        self._options[name] = None if value is None else str(value)

    def set_if(self, name: str, value: object) -> None:
        """Add ``--name=value`` unless the value is None or empty."""
        if value is not None and value != "":
            self.set(name, value)

    def drop(self, name: str) -> None:
        """Remove an option, where it is set."""
        self._options.pop(name, None)

    def value(self, name: str) -> str | None:
        """Return the value of an option, None where it has none or is not set."""
        return self._options.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._options

    def text(self) -> str:
        """Return the lines.

        Raises:
            RequestInvalid: a value cannot be held in a directive.
        """
        problems = [p for name, value in self._options.items() for p in unholdable(f"--{name}", value or "")]
        if problems:
            raise RequestInvalid(problems)
        return "\n".join(
            f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={quoted(value)}"
            for name, value in self._options.items()
        )


def build(
    spec: JobSpec,
    profile: ClusterProfile,
    layout: TaskLayout,
    tasks_per_node: int,
    output: str | None,
    *,
    requeue: bool,
    no_kill: bool = False,
) -> Directives:
    """Return the directives of a job, as the profile's site wants them asked.

    Args:
        requeue: Slurm may queue the job again.
        no_kill: the job keeps its other nodes when one fails.
    """
    asked, customs = spec.resources, profile.slurm
    goes = destination(asked, profile)
    node = goes.node
    lines = Directives()
    lines.set("job-name", spec.name)
    lines.set_if("account", asked.account or customs.account)
    lines.set_if("partition", goes.partition)
    lines.set_if("qos", goes.qos)
    lines.set_if("constraint", goes.constraint)
    lines.set_if("reservation", asked.reservation or customs.reservation)
    lines.set("nodes", layout.nodes + spec.spare_nodes)
    lines.set("ntasks-per-node", tasks_per_node)
    lines.set_if("cpus-per-task", cpus_per_task(layout, tasks_per_node))
    _gpus(lines, profile, layout, node.gpus.slurm_type if node and node.gpus else None)
    if customs.mem != "forbidden" and not passes(spec, *MEMORY_PER):
        lines.set_if("mem", layout.mem)
    lines.set_if("time", layout.time)
    if customs.exclusive:
        lines.set("exclusive")
    lines.set_if("nodelist", asked.nodelist)
    lines.set_if("exclude", asked.exclude)
    lines.set_if("array", spec.array)
    lines.set_if("dependency", spec.dependency)
    if spec.signal_before is not None:
        lines.set("signal", f"{spec.signal}@{spec.signal_before}")
    lines.set("requeue" if requeue else "no-requeue")
    if no_kill or spec.spare_nodes:
        lines.set("no-kill")
    if customs.export != "forbidden":
        lines.set("export", "NONE")
    lines.set_if("output", output or spec.output)
    if output is None:  # else the script copies its output
        lines.set_if("error", spec.error)
    lines.set("open-mode", "append")
    for text in (*customs.extra_options, *spec.sbatch_options):
        if not says_the_same(text, layout):
            _pass_on(lines, *split_option(text))
    return lines


def passes(spec: JobSpec, *names: str) -> bool:
    """Return whether one of these options of sbatch is passed on."""
    return any(text.removeprefix("--").partition("=")[0] in names for text in spec.sbatch_options)


def says_the_same(text: str, layout: TaskLayout) -> bool:
    """Return whether an option counts tasks or GPUs as the job's layout does, so that it can be left out."""
    if layout.one_process:
        return False
    nodes, ranks, gpus = layout.nodes, layout.ranks_per_node, layout.gpus_per_node
    counts: dict[str, float | None] = {
        "ntasks": nodes * ranks,
        "tasks-per-node": ranks,
        "gpus": nodes * gpus or None,
        "gpus-per-task": gpus / ranks or None,
        "ntasks-per-gpu": ranks / gpus if gpus else None,
        "cpus-per-gpu": layout.cpus_per_rank * ranks / gpus if gpus and layout.cpus_per_rank else None,
    }
    name, _, value = text.removeprefix("--").partition("=")
    return value.isdecimal() and counts.get(name) == int(value)


def _pass_on(lines: Directives, name: str, value: str | None) -> None:
    """Add an option as it was given; a disk that is asked for by --gres must not take the GPUs away."""
    if name == "gres" and value:
        kinds = {item.partition(":")[0] for item in value.split(",")}
        before = (lines.value(name) or "").split(",")
        value = ",".join([*(item for item in before if item and item.partition(":")[0] not in kinds), value])
    if name in _OPPOSITES:
        lines.drop(_OPPOSITES[name])
    lines.set(name, value)


def cpus_per_task(layout: TaskLayout, tasks_per_node: int) -> int | None:
    """Return the CPUs of one srun task: one rank's, or all of a node's ranks' for an agent.

    None leaves it to Slurm, where nothing is known; but an agent of several CPU ranks needs one each. With
    GPUs a number could make them fewer: sites give some for each (DefCpuPerGPU), which any number replaces.
    """
    ranks_per_task = layout.ranks_per_node // tasks_per_node
    if layout.cpus_per_rank is not None:
        return layout.cpus_per_rank * ranks_per_task
    return ranks_per_task if ranks_per_task > 1 and not layout.gpus_per_node else None


def _gpus(lines: Directives, profile: ClusterProfile, layout: TaskLayout, slurm_type: str | None) -> None:
    count, form = layout.gpus_per_node, profile.slurm.gpu_request
    if not count:
        return
    typed = f"{slurm_type}:{count}" if form.endswith("typed") and slurm_type else str(count)
    if form.startswith("gpus-per-node"):
        lines.set("gpus-per-node", typed)
    elif form.startswith("gres"):
        lines.set("gres", f"gpu:{typed}")
