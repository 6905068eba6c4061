"""Evidence from a script's source: imported and used names, relevant strings and assignments."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from typing import Any

from dtslurm.launch.detection.conditions import Use, UseReader
from dtslurm.model.values import dataclass

CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")
RANK_VARIABLES = "RANK|WORLD_SIZE|SLURM_PROCID|OMPI_COMM_WORLD_RANK|PMI_RANK|PMIX_RANK"
LIGHTNING = r"(lightning|pytorch_lightning|lightning_fabric)(\.\w+)*\.(Trainer|Fabric|LightningCLI)"
_RANK_STRINGS = re.compile(
    rf"{RANK_VARIABLES}|LOCAL_RANK|SLURM_LOCALID|--local[_-]rank|(tcp|file)://.*", re.DOTALL
)
_LAUNCHER_PROGRAMS = {
    "torchrun",
    "accelerate",
    "deepspeed",
    "llamafactory-cli",
    "horovodrun",
    "ft_launcher",
}
_LAUNCHER_CALL = re.compile(
    r"^[ \t]*(?:exec[ \t]+|\w+=\S*[ \t]+)*(torchrun|accelerate launch|deepspeed|llamafactory-cli|horovodrun|"
    r"mpirun|mpiexec|srun|python3?[ \t]+-m[ \t]+torch\.distributed\.\w+)\b",
    re.MULTILINE,
)


@dataclass
class ScriptEvidence:
    """The evidence from a script and from the sibling files that it imports.

    Attributes:
        calls, variables: calls, and variables read with ``os.environ[NAME]``, with their conditions.
    """

    names: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> verb, location
    imports: list[str] = field(default_factory=list)
    env: list[tuple[str, str, str]] = field(default_factory=list)  # name, literal value, location
    trainers: list[tuple[dict[str, Any], str]] = field(default_factory=list)  # literal keywords, location
    devices: dict[str, str] = field(default_factory=dict)  # "first" or "current" GPU -> location

    calls: list[Use] = field(default_factory=list)
    variables: list[Use] = field(default_factory=list)

    def note(self, name: str, verb: str, location: str) -> None:
        """Record a name with the location of its first use."""
        self.names.setdefault(name, (verb, location))

    def first(self, pattern: str) -> tuple[str, str, str] | None:
        """Return (name, verb, location) of the first name that the pattern matches in full."""
        matches = re.compile(pattern, re.DOTALL).fullmatch
        return next(((name, *use) for name, use in self.names.items() if matches(name)), None)

    def has(self, pattern: str) -> bool:
        """Return whether the pattern matches a name in full."""
        return self.first(pattern) is not None


def imported_files(source: str) -> tuple[str, ...]:
    """Return the possible paths of the modules that a script imports, relative to the script's folder."""
    tree, _ = parse_source(source)
    modules: dict[str, None] = {}
    for node, conditions in _walk_with_conditions(tree) if tree else ():
        if "TYPE_CHECKING" in conditions:
            continue
        if isinstance(node, ast.Import):
            modules.update(dict.fromkeys(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.level <= 1:
            parent = [node.module] if node.module else []
            modules.update(
                dict.fromkeys([*parent, *(".".join([*parent, alias.name]) for alias in node.names)])
            )
    paths = [module.replace(".", "/") for module in modules if "*" not in module]
    return tuple(dict.fromkeys(path + ending for path in paths for ending in (".py", "/__init__.py")))


def parse_source(source: str) -> tuple[ast.Module | None, str]:
    """Return the syntax tree and an empty text, or None and the syntax error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the script are not dtslurm's concern
            return ast.parse(source.lstrip("\ufeff")), ""
    except SyntaxError as error:
        return None, error.msg if error.lineno is None else f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return None, str(error) or type(error).__name__


def _walk_with_conditions(tree: ast.AST) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """Yield every node in order, with the strings in the conditions of the ``if`` statements around it."""
    stack: list[tuple[ast.AST, frozenset[str]]] = [(tree, frozenset())]
    while stack:
        node, conditions = stack.pop()
        yield node, conditions
        body_ids: set[int] = set()
        body_conditions = conditions
        if isinstance(node, ast.If):
            constants = {
                constant.value for constant in ast.walk(node.test) if isinstance(constant, ast.Constant)
            }
            conditions = body_conditions = conditions | {word for word in constants if isinstance(word, str)}
            body_ids = {id(child) for child in node.body}
            if getattr(node.test, "id", getattr(node.test, "attr", "")) == "TYPE_CHECKING":
                body_conditions = body_conditions | {"TYPE_CHECKING"}
        children = list(ast.iter_child_nodes(node))
        stack += [
            (child, body_conditions if id(child) in body_ids else conditions) for child in reversed(children)
        ]


def read(tree: ast.Module, file: str, evidence: ScriptEvidence, local: Collection[str] = ()) -> None:
    """Add the evidence from one file to ``evidence``.

    Args:
        local: the modules beside the script; they take precedence over installed packages of the same name.
    """
    nodes = [
        (node, conditions)
        for node, conditions in _walk_with_conditions(tree)
        if "TYPE_CHECKING" not in conditions
    ]
    bound_names: dict[str, str] = {}
    for node, _ in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            _record_import(node, f"{file}:{node.lineno}", bound_names, evidence, local)
    uses = UseReader(lambda node: _resolve_name(node, bound_names))
    with contextlib.suppress(RecursionError):  # a script that is nested so deeply gives no evidence
        uses.visit(tree)
        evidence.calls += uses.calls
        evidence.variables += uses.variables
    ignored_strings: set[int] = set()  # ids of string nodes that are no evidence
    for node, conditions in nodes:
        location = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute | ast.Name):
            evidence.note(_resolve_name(node, bound_names), "uses", location)
        elif isinstance(node, ast.Constant) and id(node) not in ignored_strings:
            _record_string(node.value, location, evidence)
        elif isinstance(node, ast.Call):
            ignored_strings |= {id(item.value) for item in node.keywords if item.arg == "map_location"}
            _record_call(node, _resolve_name(node.func, bound_names), location, evidence)
        for name, value in _find_assignments(node, bound_names, ignored_strings):
            if value is None:
                evidence.note(f"${name}", "sets", location)
            elif name not in conditions:
                evidence.env.append((name, value, location))


def _record_string(value: object, location: str, evidence: ScriptEvidence) -> None:
    if isinstance(value, str) and _RANK_STRINGS.fullmatch(value):
        evidence.note(f"'{value}'", "says", location)
    elif isinstance(value, str) and re.fullmatch(r"cuda:\d+", value):
        evidence.devices.setdefault("first", location)


def _record_import(
    node: ast.Import | ast.ImportFrom,
    location: str,
    bound_names: dict[str, str],
    evidence: ScriptEvidence,
    local: Collection[str],
) -> None:
    module = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        full_name = f"{module}.{alias.name}" if module else alias.name
        package = full_name.partition(".")[0]
        bound_name = full_name if alias.asname or module else package
        if package in local:
            full_name, bound_name = f".{full_name}", f".{bound_name}"
        elif module:
            evidence.note(module, "imports", location)
        evidence.note(full_name, "imports", location)
        bound_names[alias.asname or (alias.name if module else package)] = bound_name
        if package and package not in sys.stdlib_module_names:
            evidence.imports.append(package)


def _record_call(node: ast.Call, callee: str, location: str, evidence: ScriptEvidence) -> None:
    evidence.note(f"{callee}()", "uses", location)
    if re.fullmatch(LIGHTNING, callee) and not callee.endswith("CLI"):
        keywords = {keyword.arg or "**": _evaluate_literal(keyword.value) for keyword in node.keywords}
        evidence.trainers.append((keywords, location))
    method = node.func.attr if isinstance(node.func, ast.Attribute) else callee.rpartition(".")[2]
    first_argument = _evaluate_literal(node.args[0]) if node.args else None
    if method == "cuda" and (not node.args or isinstance(first_argument, int)):
        evidence.devices.setdefault("first" if node.args else "current", location)
    elif method in {"to", "device"} and first_argument == "cuda":
        evidence.devices.setdefault("current", location)


def _resolve_name(node: ast.AST, bound_names: Mapping[str, str]) -> str:
    """Return the full name of an expression such as ``dist.barrier``, with ``?.`` before unknown names."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute) and len(parts) < 12:
        parts.append(node.attr)
        node = node.value
    root = bound_names.get(node.id, f"?.{node.id}") if isinstance(node, ast.Name) else "?"
    return ".".join([root, *reversed(parts)])


def _evaluate_literal(node: ast.AST) -> Any:
    """Return the value of a literal, or ``...`` for a computed value."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ...


def _find_assignments(
    node: ast.AST, bound_names: Mapping[str, str], skipped_ids: set[int]
) -> Iterator[tuple[str, str | None]]:
    """Yield (name, value) of the environment variables that a node sets; a computed value is None."""
    pairs: list[tuple[ast.AST | None, ast.AST]] = []
    if isinstance(node, ast.Assign):
        targets = [child for child in node.targets if isinstance(child, ast.Subscript)]
        pairs += [
            (child.slice, node.value)
            for child in targets
            if _resolve_name(child.value, bound_names) == "os.environ"
        ]
    elif isinstance(node, ast.Call) and _resolve_name(node.func, bound_names) == "os.environ.update":
        dicts = [child for child in node.args if isinstance(child, ast.Dict)]
        pairs += [pair for dict_node in dicts for pair in zip(dict_node.keys, dict_node.values, strict=True)]
        pairs += [(ast.Constant(child.arg), child.value) for child in node.keywords if child.arg]
    for key, value in pairs:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            skipped_ids.add(id(key))
            literal = value.args[0] if isinstance(value, ast.Call) and len(value.args) == 1 else value
            is_literal = isinstance(literal, ast.Constant) and isinstance(literal.value, str | int)
            yield key.value, str(_evaluate_literal(literal)) if is_literal else None


def own_launcher(source: str, name: str) -> str:
    """Return the evidence that a program is a launcher or calls one, an empty text if there is none."""
    if name in _LAUNCHER_PROGRAMS:
        return f"{name} starts ranks itself"
    match = _LAUNCHER_CALL.search(source)
    return f"{name}:{source.count(chr(10), 0, match.start(1)) + 1} calls {match[1]}" if match else ""


def configuration(source: str, name: str) -> tuple[str, str]:
    """Return (framework, launcher) for a framework's configuration file, empty texts if it is unknown."""
    keys = set(re.findall(r"^([A-Za-z_]\w*)[ \t]*:", source, re.MULTILINE))
    if name.endswith(".json"):
        try:
            values = json.loads(source)
        except (ValueError, RecursionError):
            values = None
        keys = set(values) if isinstance(values, dict) else set()
    if "model_name_or_path" in keys and keys & {"finetuning_type", "stage", "dataset_dir"}:
        return "LLaMA-Factory", "llamafactory"
    tables = set(re.findall(r"^\[(\w+)\]", source, re.MULTILINE)) if name.endswith(".toml") else set()
    return ("torchtitan", "torchtitan") if {"model", "training"} <= tables else ("", "")
