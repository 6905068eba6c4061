"""What a source says: names it imports and uses, strings and assignments that matter. Nothing is run."""

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
_STRINGS = re.compile(
    rf"{RANK_VARIABLES}|LOCAL_RANK|SLURM_LOCALID|--local[_-]rank|(tcp|file)://.*", re.DOTALL
)
_LAUNCHERS_THEMSELVES = {
    "torchrun",
    "accelerate",
    "deepspeed",
    "llamafactory-cli",
    "horovodrun",
    "ft_launcher",
}
_CALLS_LAUNCHER = re.compile(
    r"^[ \t]*(?:exec[ \t]+|\w+=\S*[ \t]+)*(torchrun|accelerate launch|deepspeed|llamafactory-cli|horovodrun|"
    r"mpirun|mpiexec|srun|python3?[ \t]+-m[ \t]+torch\.distributed\.\w+)\b",
    re.MULTILINE,
)


@dataclass
class ScriptEvidence:
    """What the script and the files beside it say.

    Attributes:
        calls, variables: the calls, and the variables read by ``os.environ[NAME]``, with their conditions.
    """

    names: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> verb, place
    imports: list[str] = field(default_factory=list)
    env: list[tuple[str, str, str]] = field(default_factory=list)  # name, literal value, place
    trainers: list[tuple[dict[str, Any], str]] = field(default_factory=list)  # literal keywords, place
    devices: dict[str, str] = field(default_factory=dict)  # "first" or "current" GPU -> place

    calls: list[Use] = field(default_factory=list)
    variables: list[Use] = field(default_factory=list)

    def note(self, name: str, verb: str, place: str) -> None:
        """Keep a name with the place where it is first seen."""
        self.names.setdefault(name, (verb, place))

    def first(self, pattern: str) -> tuple[str, str, str] | None:
        """Return (name, verb, place) of the first name that matches wholly."""
        matches = re.compile(pattern, re.DOTALL).fullmatch
        return next(((name, *seen) for name, seen in self.names.items() if matches(name)), None)

    def has(self, pattern: str) -> bool:
        """Tell whether a name matches wholly."""
        return self.first(pattern) is not None


def imported_files(source: str) -> tuple[str, ...]:
    """Return where the modules that a script imports would lie, as paths from the script's folder."""
    tree, _ = parsed(source)
    modules: dict[str, None] = {}
    for node, guards in _nodes(tree) if tree else ():
        if "TYPE_CHECKING" in guards:
            continue
        if isinstance(node, ast.Import):
            modules.update(dict.fromkeys(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.level <= 1:
            base = [node.module] if node.module else []
            modules.update(dict.fromkeys([*base, *(".".join([*base, alias.name]) for alias in node.names)]))
    paths = [module.replace(".", "/") for module in modules if "*" not in module]
    return tuple(dict.fromkeys(path + end for path in paths for end in (".py", "/__init__.py")))


def parsed(source: str) -> tuple[ast.Module | None, str]:
    """Return the syntax tree, or None and what is wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are the script's affair
            return ast.parse(source.lstrip("\ufeff")), ""
    except SyntaxError as error:
        return None, error.msg if error.lineno is None else f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return None, str(error) or type(error).__name__


def _nodes(tree: ast.AST) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """Yield every node in order, with the strings in the conditions around it."""
    stack: list[tuple[ast.AST, frozenset[str]]] = [(tree, frozenset())]
    while stack:
        node, guards = stack.pop()
        yield node, guards
        within: set[int] = set()
        body = guards
        if isinstance(node, ast.If):
            words = {item.value for item in ast.walk(node.test) if isinstance(item, ast.Constant)}
            guards = body = guards | {word for word in words if isinstance(word, str)}
            within = {id(child) for child in node.body}
            if getattr(node.test, "id", getattr(node.test, "attr", "")) == "TYPE_CHECKING":
                body = body | {"TYPE_CHECKING"}
        children = list(ast.iter_child_nodes(node))
        stack += [(child, body if id(child) in within else guards) for child in reversed(children)]


def read(tree: ast.Module, file: str, seen: ScriptEvidence, local: Collection[str] = ()) -> None:
    """Add to ``seen`` what a file says; ``local`` modules lie beside it, whatever else has their name."""
    nodes = [(node, guards) for node, guards in _nodes(tree) if "TYPE_CHECKING" not in guards]
    names: dict[str, str] = {}
    for node, _ in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            _read_import(node, f"{file}:{node.lineno}", names, seen, local)
    uses = UseReader(lambda node: _dotted(node, names))
    with contextlib.suppress(RecursionError):  # of a script nested that deeply nothing is known
        uses.visit(tree)
        seen.calls += uses.calls
        seen.variables += uses.variables
    skipped: set[int] = set()  # strings that are no evidence where they stand
    for node, guards in nodes:
        place = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute | ast.Name):
            seen.note(_dotted(node, names), "uses", place)
        elif isinstance(node, ast.Constant) and id(node) not in skipped:
            _read_text(node.value, place, seen)
        elif isinstance(node, ast.Call):
            skipped |= {id(item.value) for item in node.keywords if item.arg == "map_location"}
            _read_call(node, _dotted(node.func, names), place, seen)
        for name, value in _assignments(node, names, skipped):
            if value is None:
                seen.note(f"${name}", "sets", place)
            elif name not in guards:
                seen.env.append((name, value, place))


def _read_text(value: object, place: str, seen: ScriptEvidence) -> None:
    if isinstance(value, str) and _STRINGS.fullmatch(value):
        seen.note(f"'{value}'", "says", place)
    elif isinstance(value, str) and re.fullmatch(r"cuda:\d+", value):
        seen.devices.setdefault("first", place)


def _read_import(
    node: ast.Import | ast.ImportFrom,
    place: str,
    names: dict[str, str],
    seen: ScriptEvidence,
    local: Collection[str],
) -> None:
    module = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        whole = f"{module}.{alias.name}" if module else alias.name
        top = whole.partition(".")[0]
        bound = whole if alias.asname or module else top
        if top in local:
            whole, bound = f".{whole}", f".{bound}"
        elif module:
            seen.note(module, "imports", place)
        seen.note(whole, "imports", place)
        names[alias.asname or (alias.name if module else top)] = bound
        if top and top not in sys.stdlib_module_names:
            seen.imports.append(top)


def _read_call(node: ast.Call, called: str, place: str, seen: ScriptEvidence) -> None:
    seen.note(f"{called}()", "uses", place)
    if re.fullmatch(LIGHTNING, called) and not called.endswith("CLI"):
        keywords = {item.arg or "**": _literal(item.value) for item in node.keywords}
        seen.trainers.append((keywords, place))
    method = node.func.attr if isinstance(node.func, ast.Attribute) else called.rpartition(".")[2]
    given = _literal(node.args[0]) if node.args else None
    if method == "cuda" and (not node.args or isinstance(given, int)):
        seen.devices.setdefault("first" if node.args else "current", place)
    elif method in {"to", "device"} and given == "cuda":
        seen.devices.setdefault("current", place)


def _dotted(node: ast.AST, names: Mapping[str, str]) -> str:
    """Return the full name of what an expression like ``dist.barrier`` means; ``?.`` before unknown ones."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute) and len(parts) < 12:
        parts.append(node.attr)
        node = node.value
    root = names.get(node.id, f"?.{node.id}") if isinstance(node, ast.Name) else "?"
    return ".".join([root, *reversed(parts)])


def _literal(node: ast.AST) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ...


def _assignments(
    node: ast.AST, names: Mapping[str, str], skipped: set[int]
) -> Iterator[tuple[str, str | None]]:
    """Yield (name, value) of environment variables set here, None for a value that is computed."""
    pairs: list[tuple[ast.AST | None, ast.AST]] = []
    if isinstance(node, ast.Assign):
        targets = [item for item in node.targets if isinstance(item, ast.Subscript)]
        pairs += [(item.slice, node.value) for item in targets if _dotted(item.value, names) == "os.environ"]
    elif isinstance(node, ast.Call) and _dotted(node.func, names) == "os.environ.update":
        tables = [item for item in node.args if isinstance(item, ast.Dict)]
        pairs += [pair for table in tables for pair in zip(table.keys, table.values, strict=True)]
        pairs += [(ast.Constant(item.arg), item.value) for item in node.keywords if item.arg]
    for key, value in pairs:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            skipped.add(id(key))
            inner = value.args[0] if isinstance(value, ast.Call) and len(value.args) == 1 else value
            plain = isinstance(inner, ast.Constant) and isinstance(inner.value, str | int)
            yield key.value, str(_literal(inner)) if plain else None


def own_launcher(source: str, name: str) -> str:
    """Return the evidence that a program is, or calls, a launcher."""
    if name in _LAUNCHERS_THEMSELVES:
        return f"{name} starts ranks itself"
    found = _CALLS_LAUNCHER.search(source)
    return f"{name}:{source.count(chr(10), 0, found.start(1)) + 1} calls {found[1]}" if found else ""


def configuration(source: str, name: str) -> tuple[str, str]:
    """Return the framework whose configuration a file is, and its launcher; empty if unknown."""
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
