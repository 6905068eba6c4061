"""Rules for the values of files beyond their types, each with its message as a plain sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping

from dtslurm.config.tree import Items, MappingEntry, Problem, Scalar, Table
from dtslurm.model.jobs.destination import split_names
from dtslurm.model.jobs.sbatch import refusal, srun_refusal
from dtslurm.model.jobs.variables import own_variable
from dtslurm.model.units import Walltime
from dtslurm.suggestions import suggest_name

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
# (minimum, maximum) of numbers; every other number must be above zero.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "SlurmCustoms.min_poll_s": (1, 86400),
    "SlurmCustoms.requeue_exit_codes": (1, 255),
    "NodeType.threads_per_core": (1, 8),
    "Placement.gpus_per_node": (0, math.inf),
    "JobSettings.max_restarts": (0, math.inf),
    "JobOptions.spare_nodes": (0, math.inf),
    "RoleOptions.nodes": (0, math.inf),
    "RoleOptions.gpus": (0, math.inf),
    "RoleOptions.restarts": (0, math.inf),
    "Sweep.seed": (0, math.inf),
}
_VARIABLE_FIELDS = {"Fabric.environment", "EnvironmentSetup.variables", "Defaults.env", "RoleOptions.env"}
_OPTION_FIELDS = {"SlurmCustoms.extra_options", "SlurmCustoms.srun_options", "JobOptions.sbatch"}
# Whether a field with sbatch options is in a profile.
_IS_PROFILE_FIELD = {"SlurmCustoms.extra_options": True, "JobOptions.sbatch": False}
_CPU_RANGES = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", re.ASCII)
_CHECK_NOTE = re.compile(r"(on a live cluster|documentation) 20\d\d(-\d\d(-\d\d)?)?", re.ASCII)
_PATTERNS = {
    "NodeType.rank_cpus": (_CPU_RANGES, "CPUs such as 0-6 or 0-6,64-70"),
    "Login.python": (re.compile(r"(?!~).*"), "the name of a program or an absolute path"),
    "ClusterProfile.checked": (_CHECK_NOTE, "'on a live cluster DATE' or 'documentation DATE'"),
}
_SECRET_NAME_FIELDS = {"JobOptions.notify", "ClusterProfile.notify"}
_MULTILINE_FIELDS = {
    "EnvironmentSetup.setup",
    "EnvironmentSetup.teardown",
    "JobSettings.setup",
    "JobSettings.teardown",
    "RoleOptions.setup",
    "Defaults.env",
    "Variable.value",
    "Variable.why",
    "Partition.note",
    "LocalDisk.note",
}


def number_problem(name: str, text: str, *, is_whole: bool) -> str | None:
    """Return what is wrong with a number's size, None if the number is valid or the text is no number.

    Args:
        name: the field, as ``Class.field``.
    """
    if is_whole and not _WHOLE_NUMBER.fullmatch(text):
        is_integer = re.fullmatch(r"[+-]?[0-9]+", text)
        return "is too large" if is_integer else f"should be a whole number, not {quoted(text)}"
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return f"should be a number, not {quoted(text)}"
    if name in _BOUNDS:
        minimum, maximum = _BOUNDS[name]
        if number < minimum:
            return f"should be at least {minimum:g}, not {text}"
        return f"should be at most {maximum:g}, not {text}" if number > maximum else None
    return None if number > 0 else f"should be more than 0, not {text}"


def text_problem(name: str, text: str) -> str | None:
    """Return what is wrong with the text of a field, None if nothing is."""
    if "\0" in text:
        return "contains a NUL character"
    if len(text.splitlines()) > 1 and name not in _MULTILINE_FIELDS:
        return "should be one line"
    if name in _SECRET_NAME_FIELDS and not _VARIABLE_NAME.fullmatch(text):
        return "should be the name of a secret with the URL; the URL itself contains a token"
    if name in _PATTERNS and not _PATTERNS[name][0].fullmatch(text):
        return f"should be {_PATTERNS[name][1]}, not {text!r}"
    if name in _OPTION_FIELDS and not re.match(r"--?[A-Za-z]", text):
        return f"should be an option such as --exclusive or --name=value, not {text!r}"
    if name in _IS_PROFILE_FIELD:
        return refusal(text, profile=_IS_PROFILE_FIELD[name])
    if name in _OPTION_FIELDS and re.match(r"[^=]*\s", text):
        return f"should be one word, --name=value, not {text!r}"
    return srun_refusal(text) if name in _OPTION_FIELDS else None


def key_problem(name: str, key: str) -> str | None:
    """Return what is wrong with a key that the file's author chose, None if nothing is."""
    if name in _VARIABLE_FIELDS and not _VARIABLE_NAME.fullmatch(key):
        return "is not a variable name; use only letters, digits and _"
    if name in _VARIABLE_FIELDS and (reason := own_variable(key)):
        return reason
    if not key.isprintable():
        return "contains a character that cannot be printed"
    return None


def profile_problems(root: Table) -> Iterator[Problem]:
    """Yield inconsistencies within a profile: undefined names, and defaults above their limits."""
    types = _get_table(root, "node_types")
    slurm = _get_table(root, "slurm")
    partitions = _get_table(slurm, "partitions")
    yield from _find_unknown_names(root, "default_node_type", "", types, "node type")
    if partitions and partitions.entries:
        name_kind = "partition in slurm.partitions"
        yield from _find_unknown_names(slurm, "partition", "slurm.", partitions, name_kind, is_list=True)
    for name, entry in partitions.entries.items() if partitions else ():
        if isinstance(entry.value, Table):
            yield from _find_unknown_names(
                entry.value, "node_type", f"slurm.partitions.{name}.", types, "node type"
            )
    yield from _find_excess(slurm, "default_time", "max_time", "slurm.", Walltime.parse)
    for name, entry in types.entries.items() if types else ():
        if isinstance(entry.value, Table):
            yield from _find_core_excess(entry.value, f"node_types.{name}.")
            yield from _find_rank_cpu_mismatch(entry.value, f"node_types.{name}.")
    yield from _find_missing_gpu_keys(slurm, _select_gpu_nodes(types))


def _get_table(root: Table | None, key: str) -> Table | None:
    entry = root.entries.get(key) if root else None
    return entry.value if entry and isinstance(entry.value, Table) else None


def _get_text(table: Table | None, key: str) -> tuple[MappingEntry, str] | None:
    entry = table.entries.get(key) if table else None
    if entry and isinstance(entry.value, Scalar) and entry.value.text is not None:
        return entry, entry.value.text
    return None


def _find_unknown_names(
    table: Table | None, key: str, prefix: str, among: Table | None, noun: str, *, is_list: bool = False
) -> Iterator[Problem]:
    """Yield a problem for each undefined name; with ``is_list``, the value is a list such as ``a,b``."""
    field = _get_text(table, key)
    if field is None:
        return
    entry, text = field
    known_names = list(among.entries) if among else []
    for name in (split_names(text) or [text]) if is_list else [text]:
        if name not in known_names:
            suggestion = suggest_name(name, known_names)
            message = (
                f"there is no {noun} {name!r}{suggestion} ({', '.join(known_names) or 'none is defined'})"
            )
            yield Problem(entry.source, entry.line, prefix + key, message)


def _find_excess(
    table: Table | None, key: str, limit: str, prefix: str, parse: Callable[[str], Walltime]
) -> Iterator[Problem]:
    value, maximum = _get_text(table, key), _get_text(table, limit)
    if value is None or maximum is None:
        return
    try:
        exceeds = parse(value[1]) > parse(maximum[1])
    except ValueError:
        return
    if exceeds:
        message = f"{value[1]} is more than {limit}, which is {maximum[1]}"
        yield Problem(value[0].source, value[0].line, prefix + key, message)


def _find_core_excess(node: Table, prefix: str) -> Iterator[Problem]:
    numbers = {
        key: int(field[1])
        for key in ("sockets", "cores_per_socket", "usable_cores")
        if (field := _get_text(node, key)) and _WHOLE_NUMBER.fullmatch(field[1])
    }
    if len(numbers) == 3 and numbers["usable_cores"] > numbers["sockets"] * numbers["cores_per_socket"]:
        entry = node.entries["usable_cores"]
        cores = numbers["sockets"] * numbers["cores_per_socket"]
        message = f"{numbers['usable_cores']} is more than the node's {cores} cores"
        yield Problem(entry.source, entry.line, f"{prefix}usable_cores", message)


def _find_rank_cpu_mismatch(node: Table, prefix: str) -> Iterator[Problem]:
    entry, count = node.entries.get("rank_cpus"), _get_text(_get_table(node, "gpus"), "count")
    if entry is None or count is None or not isinstance(entry.value, Items):
        return
    if count[1].isdecimal() and len(entry.value.items) != int(count[1]):
        message = f"has CPUs for {len(entry.value.items)} ranks, but a node has {count[1]} GPUs"
        yield Problem(entry.source, entry.line, f"{prefix}rank_cpus", message)


def _select_gpu_nodes(types: Table | None) -> dict[str, Table]:
    nodes = {name: entry.value for name, entry in types.entries.items()} if types else {}
    return {
        name: node for name, node in nodes.items() if isinstance(node, Table) and _get_table(node, "gpus")
    }


def _find_missing_gpu_keys(slurm: Table | None, nodes: Mapping[str, Table]) -> Iterator[Problem]:
    """Yield the keys that a ``gpu_request`` form needs but the profile lacks.

    Without them, the job would request other GPUs, or none.

    Args:
        nodes: the node types that have GPUs.
    """
    field = _get_text(slurm, "gpu_request")
    if field is None:
        return
    entry, form = field
    missing_keys: list[str] = []
    if form == "constraint" and not _get_text(slurm, "constraint"):
        keys_without_value = [
            f"node_types.{name}.constraint"
            for name, node in nodes.items()
            if not _get_text(node, "constraint")
        ]
        missing_keys = keys_without_value if nodes else ["slurm.constraint"]
    elif form.endswith("-typed") and not any(_get_slurm_type(node) for node in nodes.values()):
        missing_keys = [f"node_types.{name}.gpus.slurm_type" for name in nodes]
    if missing_keys:
        alternative = "none" if form == "constraint" else form.removesuffix("-typed")
        message = f"{form} needs {' and '.join(missing_keys)}; add it, or {alternative}"
        yield Problem(entry.source, entry.line, "slurm.gpu_request", message)


def _get_slurm_type(node: Table) -> tuple[MappingEntry, str] | None:
    return _get_text(_get_table(node, "gpus"), "slurm_type")


def quoted(text: str) -> str:
    """Return a text in quotes, shortened to 40 characters."""
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
