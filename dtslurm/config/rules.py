"""What the values of a file must satisfy beyond their types, each rule a plain sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping

from dtslurm.config.tree import Items, MappingEntry, Problem, Scalar, Table
from dtslurm.model.jobs.destination import names_in
from dtslurm.model.jobs.sbatch import refusal, srun_refusal
from dtslurm.model.jobs.variables import own_variable
from dtslurm.model.units import Walltime
from dtslurm.suggestions import suggest_name

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
# (least, most) of numbers; every other number must be above zero.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "SlurmCustoms.min_poll_s": (1, 86400),
    "SlurmCustoms.requeue_exit_codes": (1, 255),
    "NodeType.threads_per_core": (1, 8),
    "Placement.gpus_per_node": (0, math.inf),
    "JobOptions.max_restarts": (0, math.inf),
    "JobOptions.spare_nodes": (0, math.inf),
    "Sweep.seed": (0, math.inf),
}
_VARIABLES = {"Fabric.environment", "EnvironmentSetup.variables", "Defaults.env"}
_OPTIONS = {"SlurmCustoms.extra_options", "SlurmCustoms.srun_options", "JobOptions.sbatch"}
_OF_SBATCH = {"SlurmCustoms.extra_options": True, "JobOptions.sbatch": False}  # whether it is a profile's
_CPUS = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", re.ASCII)
_CHECKED = re.compile(r"(on a live cluster|documentation) 20\d\d(-\d\d(-\d\d)?)?", re.ASCII)
_FORMS = {
    "NodeType.rank_cpus": (_CPUS, "CPUs such as 0-6 or 0-6,64-70"),
    "ClusterProfile.checked": (_CHECKED, "'on a live cluster DATE' or 'documentation DATE'"),
}
_MANY_LINES = {
    "EnvironmentSetup.setup",
    "EnvironmentSetup.teardown",
    "JobOptions.setup",
    "JobOptions.teardown",
    "Defaults.env",
    "Variable.value",
    "Variable.why",
    "Partition.note",
    "LocalDisk.note",
}


def number_problem(name: str, text: str, *, whole: bool) -> str | None:
    """Return what is wrong with a number's size, None where it is fine or no number at all.

    Args:
        name: the field, as ``Class.field``.
    """
    if whole and not _WHOLE.fullmatch(text):
        large = re.fullmatch(r"[+-]?[0-9]+", text)
        return "is too large a number" if large else f"should be a whole number, not {quoted(text)}"
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return f"should be a number, not {quoted(text)}"
    if name in _BOUNDS:
        least, most = _BOUNDS[name]
        if number < least:
            return f"should be at least {least:g}, not {text}"
        return f"should be at most {most:g}, not {text}" if number > most else None
    return None if number > 0 else f"should be more than 0, not {text}"


def text_problem(name: str, text: str) -> str | None:
    """Return what is wrong with a text, None where it is fine."""
    if "\0" in text:
        return "holds a NUL character"
    if len(text.splitlines()) > 1 and name not in _MANY_LINES:
        return "should be one line"
    if name in _FORMS and not _FORMS[name][0].fullmatch(text):
        return f"should be {_FORMS[name][1]}, not {text!r}"
    if name in _OPTIONS and not re.match(r"--?[A-Za-z]", text):
        return f"should be an option such as --exclusive or --name=value, not {text!r}"
    if name in _OF_SBATCH:
        return refusal(text, profile=_OF_SBATCH[name])
    if name in _OPTIONS and re.match(r"[^=]*\s", text):
        return f"should be one word, --name=value, not {text!r}"
    return srun_refusal(text) if name in _OPTIONS else None


def key_problem(name: str, key: str) -> str | None:
    """Return what is wrong with a key that the file's author chose, None where it is fine."""
    if name in _VARIABLES and not _NAME.fullmatch(key):
        return "is no name for a variable; letters, digits and _ only"
    if name in _VARIABLES and (why := own_variable(key)):
        return why
    if not key.isprintable():
        return "holds a character that cannot be printed"
    return None


def profile_problems(root: Table) -> Iterator[Problem]:
    """Yield what does not fit together in a profile: names of nothing, defaults over their limits."""
    types = _table(root, "node_types")
    slurm = _table(root, "slurm")
    partitions = _table(slurm, "partitions")
    yield from _named(root, "default_node_type", "", types, "node type")
    if partitions and partitions.entries:
        what = "partition in slurm.partitions"
        yield from _named(slurm, "partition", "slurm.", partitions, what, several=True)
    for name, entry in partitions.entries.items() if partitions else ():
        if isinstance(entry.value, Table):
            yield from _named(entry.value, "node_type", f"slurm.partitions.{name}.", types, "node type")
    yield from _over(slurm, "default_time", "max_time", "slurm.", Walltime.parse)
    for name, entry in types.entries.items() if types else ():
        if isinstance(entry.value, Table):
            yield from _cores(entry.value, f"node_types.{name}.")
            yield from _rank_cpus(entry.value, f"node_types.{name}.")
    yield from _gpu_request(slurm, _with_gpus(types))


def _table(root: Table | None, key: str) -> Table | None:
    entry = root.entries.get(key) if root else None
    return entry.value if entry and isinstance(entry.value, Table) else None


def _text(table: Table | None, key: str) -> tuple[MappingEntry, str] | None:
    entry = table.entries.get(key) if table else None
    if entry and isinstance(entry.value, Scalar) and entry.value.text is not None:
        return entry, entry.value.text
    return None


def _named(
    table: Table | None, key: str, above: str, among: Table | None, what: str, *, several: bool = False
) -> Iterator[Problem]:
    """Yield the names that are none of those there are; ``several`` takes a list such as ``a,b``."""
    found = _text(table, key)
    if found is None:
        return
    entry, text = found
    known = list(among.entries) if among else []
    for name in (names_in(text) or [text]) if several else [text]:
        if name not in known:
            meant = suggest_name(name, known)
            message = f"there is no {what} {name!r}{meant} ({', '.join(known) or 'none is given'})"
            yield Problem(entry.source, entry.line, above + key, message)


def _over(
    table: Table | None, key: str, limit: str, above: str, parse: Callable[[str], Walltime]
) -> Iterator[Problem]:
    value, most = _text(table, key), _text(table, limit)
    if value is None or most is None:
        return
    try:
        over = parse(value[1]) > parse(most[1])
    except ValueError:
        return
    if over:
        message = f"{value[1]} is more than {limit}, which is {most[1]}"
        yield Problem(value[0].source, value[0].line, above + key, message)


def _cores(node: Table, above: str) -> Iterator[Problem]:
    numbers = {
        key: int(found[1])
        for key in ("sockets", "cores_per_socket", "usable_cores")
        if (found := _text(node, key)) and _WHOLE.fullmatch(found[1])
    }
    if len(numbers) == 3 and numbers["usable_cores"] > numbers["sockets"] * numbers["cores_per_socket"]:
        entry = node.entries["usable_cores"]
        cores = numbers["sockets"] * numbers["cores_per_socket"]
        message = f"{numbers['usable_cores']} is more than the node's {cores} cores"
        yield Problem(entry.source, entry.line, f"{above}usable_cores", message)


def _rank_cpus(node: Table, above: str) -> Iterator[Problem]:
    entry, count = node.entries.get("rank_cpus"), _text(_table(node, "gpus"), "count")
    if entry is None or count is None or not isinstance(entry.value, Items):
        return
    if count[1].isdecimal() and len(entry.value.items) != int(count[1]):
        message = f"has CPUs for {len(entry.value.items)} ranks, and a node has {count[1]} GPUs"
        yield Problem(entry.source, entry.line, f"{above}rank_cpus", message)


def _with_gpus(types: Table | None) -> dict[str, Table]:
    nodes = {name: entry.value for name, entry in types.entries.items()} if types else {}
    return {name: node for name, node in nodes.items() if isinstance(node, Table) and _table(node, "gpus")}


def _gpu_request(slurm: Table | None, nodes: Mapping[str, Table]) -> Iterator[Problem]:
    """Yield what a form of asking for GPUs needs and is not there: it would ask for others, or for none.

    Args:
        nodes: the node types that have GPUs.
    """
    found = _text(slurm, "gpu_request")
    if found is None:
        return
    entry, form = found
    lacking: list[str] = []
    if form == "constraint" and not _text(slurm, "constraint"):
        bare = [
            f"node_types.{name}.constraint" for name, node in nodes.items() if not _text(node, "constraint")
        ]
        lacking = bare if nodes else ["slurm.constraint"]
    elif form.endswith("-typed") and not any(_slurm_type(node) for node in nodes.values()):
        lacking = [f"node_types.{name}.gpus.slurm_type" for name in nodes]
    if lacking:
        instead = "none" if form == "constraint" else form.removesuffix("-typed")
        message = f"{form} needs {' and '.join(lacking)}; write that, or {instead}"
        yield Problem(entry.source, entry.line, "slurm.gpu_request", message)


def _slurm_type(node: Table) -> tuple[MappingEntry, str] | None:
    return _text(_table(node, "gpus"), "slurm_type")


def quoted(text: str) -> str:
    """Return a text in quotes, cut off where it is long."""
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
