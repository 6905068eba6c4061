"""Build the ``#SBATCH`` lines of a script, and quote their values for sbatch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtslurm.errors import RequestInvalid
from dtslurm.model.cluster import ClusterProfile, NodeType
from dtslurm.model.jobs.components import count_gpus_of_node, find_component_destination
from dtslurm.model.jobs.destination import choose_destination
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.jobs.sbatch import split_option

_UNQUOTED = re.compile(r"[A-Za-z0-9_./:=,@%+^\[\]*-]+")
_OPPOSITES = {"requeue": "no-requeue", "no-requeue": "requeue"}
MEMORY_PER = ("mem-per-cpu", "mem-per-gpu")  # each excludes --mem
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


def quoted(value: str) -> str:
    """Quote a value for sbatch's directive parser.

    The parser supports double quotes and backslash escapes (src/sbatch/opt.c), but no line breaks.
    """
    if _UNQUOTED.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def find_control_characters(flag: str, value: str) -> list[str]:
    """Return a problem if ``value`` contains a control character, which a directive cannot contain."""
    if match := _CONTROL_CHARACTER.search(value):
        return [f"{flag} contains a control character ({match[0]!r}), which Slurm does not accept"]
    return []


class Directives:
    """sbatch options in order, each name once; setting a name again replaces the earlier value."""

    def __init__(self) -> None:
        self._options: dict[str, str | None] = {}

    def set(self, name: str, value: object = None) -> None:
        """Set ``--name=value``, or ``--name`` if there is no value."""
        self._options.pop(name, None)
        self._options[name] = None if value is None else str(value)

    def set_if(self, name: str, value: object) -> None:
        """Set ``--name=value`` unless the value is None or empty."""
        if value is not None and value != "":
            self.set(name, value)

    def drop(self, name: str) -> None:
        """Remove an option if it is set."""
        self._options.pop(name, None)

    def value(self, name: str) -> str | None:
        """Return the value of an option, None if the option has no value or is not set."""
        return self._options.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._options

    def text(self) -> str:
        """Return the ``#SBATCH`` lines.

        Raises:
            RequestInvalid: a value contains a control character.
        """
        problems = [
            p
            for name, value in self._options.items()
            for p in find_control_characters(f"--{name}", value or "")
        ]
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
    end_options: Sequence[str],
) -> Directives:
    """Build the directives of a job by the rules of the cluster profile.

    Args:
        end_options: what Slurm does when a node fails: ``requeue`` or ``no-requeue``, and ``no-kill`` if the
            job keeps its other nodes.
    """
    resources, slurm_rules = spec.resources, profile.slurm
    job_destination = choose_destination(resources, profile)
    node = job_destination.node
    lines = Directives()
    lines.set("job-name", spec.name)
    lines.set_if("account", resources.account or slurm_rules.account)
    lines.set_if("partition", job_destination.partition)
    lines.set_if("qos", job_destination.qos)
    lines.set_if("constraint", job_destination.constraint)
    lines.set_if("reservation", resources.reservation or slurm_rules.reservation)
    lines.set("nodes", layout.nodes + spec.extra_nodes)
    lines.set("ntasks-per-node", tasks_per_node)
    lines.set_if("cpus-per-task", cpus_per_task(layout, tasks_per_node))
    _set_gpus(lines, profile, layout.gpus_per_node, node)
    if slurm_rules.mem != "forbidden" and not passes(spec, *MEMORY_PER):
        lines.set_if("mem", layout.mem)
    lines.set_if("time", layout.time)
    if slurm_rules.exclusive:
        lines.set("exclusive")
    lines.set_if("nodelist", resources.nodelist)
    lines.set_if("exclude", resources.exclude)
    lines.set_if("array", spec.array)
    lines.set_if("dependency", spec.dependency)
    if spec.signal_before is not None:
        lines.set("signal", f"{spec.signal}@{spec.signal_before}")
    for name in end_options:
        lines.set(name)
    if slurm_rules.export != "forbidden":
        lines.set("export", "NONE")
    lines.set_if("output", output or spec.output)
    if output is None:  # otherwise the script copies its output
        lines.set_if("error", spec.error)
    lines.set("open-mode", "append")
    for option in (*slurm_rules.extra_options, *spec.sbatch_options):
        if not says_the_same(option, layout):
            _add_extra_option(lines, *split_option(option))
    return lines


def build_components(
    spec: JobSpec, profile: ClusterProfile, layout: TaskLayout, end_options: Sequence[str]
) -> str:
    """Return the lines of the further components of a heterogeneous job; empty if there are none.

    A component has whole nodes, for one role. Slurm applies the job's name, time limit, signal and excluded
    nodes to all components, and its memory, which is replaced here. It does not apply its constraint, GPUs,
    CPUs and ``--exclusive`` (seen with Slurm 22.05).
    """
    texts = []
    for role in spec.roles.components if spec.roles is not None else ():
        destination = find_component_destination(role, profile)
        lines = Directives()
        lines.set_if("partition", destination.partition)
        lines.set_if("qos", destination.qos)
        lines.set_if("constraint", destination.constraint)
        lines.set("nodes", role.nodes)
        lines.set("ntasks-per-node", 1)
        gpus = count_gpus_of_node(role, spec.roles, layout, profile) if spec.roles is not None else 0
        _set_gpus(lines, profile, gpus, destination.node)
        if profile.slurm.mem != "forbidden":
            lines.set("mem", 0)
        lines.set("exclusive")
        for name in end_options:
            lines.set(name)
        texts += [f"#SBATCH hetjob # the nodes of the role {role.name}", lines.text()]
    return "\n".join(texts)


def passes(spec: JobSpec, *names: str) -> bool:
    """Return whether the job passes one of these options on to sbatch."""
    return any(text.removeprefix("--").partition("=")[0] in names for text in spec.sbatch_options)


def says_the_same(text: str, layout: TaskLayout) -> bool:
    """Return whether an option repeats a task or GPU count of the layout, so that it can be left out."""
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


def _add_extra_option(lines: Directives, name: str, value: str | None) -> None:
    """Add an option of the profile or the user; merge a --gres for a disk with the --gres for GPUs."""
    if name == "gres" and value:
        gres_names = {item.partition(":")[0] for item in value.split(",")}
        existing_resources = (lines.value(name) or "").split(",")
        value = ",".join(
            [
                *(item for item in existing_resources if item and item.partition(":")[0] not in gres_names),
                value,
            ]
        )
    if name in _OPPOSITES:
        lines.drop(_OPPOSITES[name])
    lines.set(name, value)


def cpus_per_task(layout: TaskLayout, tasks_per_node: int) -> int | None:
    """Return the CPUs of one srun task: those of one rank, or of all ranks of a node for an agent.

    None lets Slurm decide, if the number is unknown. Without GPUs, an agent of several ranks then gets one
    CPU per rank. With GPUs no number is guessed, because it would replace DefCpuPerGPU, by which many
    clusters give several CPUs per GPU.
    """
    ranks_per_task = layout.ranks_per_node // tasks_per_node
    if layout.cpus_per_rank is not None:
        return layout.cpus_per_rank * ranks_per_task
    return ranks_per_task if ranks_per_task > 1 and not layout.gpus_per_node else None


def _set_gpus(lines: Directives, profile: ClusterProfile, count: int, node: NodeType | None) -> None:
    request_form, slurm_type = profile.slurm.gpu_request, node.gpus.slurm_type if node and node.gpus else None
    if not count:
        return
    gres_value = f"{slurm_type}:{count}" if request_form.endswith("typed") and slurm_type else str(count)
    if request_form.startswith("gpus-per-node"):
        lines.set("gpus-per-node", gres_value)
    elif request_form.startswith("gres"):
        lines.set("gres", f"gpu:{gres_value}")
