"""Turns a tree into frozen dataclasses and says everything wrong with it at once, in plain words."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from inspect import get_annotations
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dtslurm.config import rules
from dtslurm.config.tree import Items, MappingEntry, Node, Problem, Scalar, Table
from dtslurm.errors import ProfileInvalid
from dtslurm.model.cluster import Variable
from dtslurm.suggestions import suggest_name

_T = TypeVar("_T")
_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a single value",
    "tuple": "a list",
    "mapping": "a mapping",
    "dict": "a mapping",
    "dataclass": "a mapping",
}


def decode(
    kind: type[_T],
    root: Table,
    *,
    problems: Iterable[Problem] = (),
    check: Callable[[Table], Iterable[Problem]] | None = None,
    also: Iterable[str] = (),
) -> _T:
    """Return a ``kind`` (a dataclass) with the tree's values.

    Args:
        problems: what was already found wrong, to be told together with the rest.
        check: finds what does not fit together in the tree.
        also: keys of the top level that somebody else reads, for suggestions.

    Raises:
        ProfileInvalid: something is wrong; ``problems`` has one line for each fault, sorted by file and line.
    """
    value, found = read(kind, root, also=also)
    found += problems
    if check is not None:
        found += check(root)
    if found or value is None:
        raise invalid(found)
    return value


def read(kind: type[_T], root: Table, *, also: Iterable[str] = ()) -> tuple[_T | None, list[Problem]]:
    """Return a ``kind`` with the tree's values, or None, and everything that is wrong with it."""
    walk = _Walk([], tuple(also))
    data = walk.table(kind, root, "")
    value, faults = _validate(kind, data)
    return value, walk.problems + [_told(kind, root, fault) for fault in faults]


def invalid(problems: Iterable[Problem]) -> ProfileInvalid:
    """Return the error that tells these problems, each once, in the order of files and lines."""
    unique = sorted(set(problems), key=lambda problem: (problem.source, problem.line, problem.key))
    sources = list(dict.fromkeys(problem.source for problem in unique))
    message = f"{len(unique)} problems in {' and '.join(sources)}" if len(unique) > 1 else ""
    return ProfileInvalid([str(problem) for problem in unique], message=message)


def without_taken(kind: type, table: Table) -> Table:
    """Return the tree of a ``kind`` without the named sections that ``null`` takes away.

    A section with nothing written in it stays: its values are the defaults.
    """
    kept = {key: _without_taken(hints(kind).get(key), entry) for key, entry in table.entries.items()}
    return table._replace(entries=kept)


def _without_taken(hint: Any, entry: MappingEntry) -> MappingEntry:
    hint, node = without_none(hint)[0], entry.value
    if not isinstance(node, Table):
        return entry
    if is_dataclass(hint) and isinstance(hint, type):
        return entry._replace(value=without_taken(hint, node))
    section = without_none(get_args(hint)[1])[0] if is_mapping(hint) else None
    if not is_dataclass(section):
        return entry
    kept = {key: below for key, below in node.entries.items() if not _is_taken(below.value)}
    return entry._replace(value=node._replace(entries=kept))


@cache
def hints(kind: type) -> dict[str, Any]:
    """Return a dataclass's field types by name."""
    return get_type_hints(kind)


def without_none(hint: Any) -> tuple[Any, bool]:
    """Return a type without its ``None``, and whether it had one."""
    if get_origin(hint) in {Union, types.UnionType}:
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return kinds[0], len(kinds) < len(get_args(hint))
    return hint, False


def is_mapping(hint: Any) -> bool:
    """Tell whether a type is a ``Mapping`` of names to values."""
    return get_origin(hint) in {Mapping, dict}


def _validate(kind: type, data: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    from pydantic_core import ValidationError

    from dtslurm.config.validator import validator

    try:
        return validator(kind).validate_python(data), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


class _Walk:
    """Goes over the tree beside the types: makes plain data of it and sees what types alone do not tell."""

    def __init__(self, problems: list[Problem], also: tuple[str, ...]) -> None:
        self.problems = problems
        self._also = also

    def table(self, kind: type, table: Table, path: str) -> dict[str, Any]:
        data: dict[str, Any] = {}
        optional = {item.name for item in fields(kind) if not _required(item)}
        for key, entry in table.entries.items():
            below = f"{path}{key}"
            if key not in hints(kind):
                self._report(entry, below, self._unknown(kind, key, top=not path))
                continue
            hint, nullable = without_none(hints(kind)[key])
            if _is_null(entry.value) and nullable:
                data[key] = None
            elif not _is_null(entry.value) or key not in optional:
                data[key] = self._value(hint, entry, f"{_home(kind, key)}.{key}", below)
            # else a section with nothing in it, or a value taken back: the default
        return data

    def _value(self, hint: Any, entry: MappingEntry, name: str, path: str) -> Any:
        node = entry.value
        if isinstance(node, Scalar):
            if node.text is None:
                return {} if is_dataclass(hint) and not node.written else None
            if hint is Variable:  # most have no reason to tell
                self._check_scalar(str, node.text, entry, "Variable.value", path)
                return {"value": node.text}
            self._check_scalar(hint, node.text, entry, name, path)
            return node.text
        if isinstance(node, Items):
            item_hint = get_args(hint)[0] if get_origin(hint) is tuple else Any
            return [
                self._value(item_hint, MappingEntry(item.source, item.line, item), name, f"{path}[{number}]")
                for number, item in enumerate(node.items)
            ]
        if is_dataclass(hint) and isinstance(hint, type):
            return self.table(hint, node, f"{path}.")
        if not is_mapping(hint):
            return {}
        data = {}
        for key, below in node.entries.items():
            problem = rules.key_problem(name, key)
            if problem:
                self._report(below, f"{path}.{key}", problem)
            data[key] = self._value(without_none(get_args(hint)[1])[0], below, name, f"{path}.{key}")
        return data

    def _check_scalar(self, hint: Any, text: str, entry: MappingEntry, name: str, path: str) -> None:
        problem = None
        if hint in {int, float}:
            problem = rules.number_problem(name, text, whole=hint is int)
        elif hint is str:
            problem = rules.text_problem(name, text)
        if problem:
            self._report(entry, path, problem)

    def _unknown(self, kind: type, key: str, *, top: bool) -> str:
        known = list(hints(kind))
        close = suggest_name(key, known + (list(self._also) if top else []))
        if not close:
            sections = {name: without_none(hint)[0] for name, hint in hints(kind).items()}
            homes = [
                f"{name}.{key}"
                for name, hint in sections.items()
                if is_dataclass(hint) and key in _names(hint)
            ]
            close = f"; did you mean {homes[0]!r}?" if homes else f" ({', '.join(known)})"
        return f"unknown key{close}"

    def _report(self, entry: MappingEntry, key: str, message: str) -> None:
        self.problems.append(Problem(entry.source, entry.line, key, message))


def _home(kind: type, key: str) -> str:
    """Return the name of the class that a field was first written in: rules are of that."""
    return next(one.__name__ for one in reversed(kind.__mro__) if key in get_annotations(one))


def _names(kind: Any) -> set[str]:
    return {item.name for item in fields(kind)}


def _required(item: Any) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.text is None


def _is_taken(node: Node) -> bool:
    return isinstance(node, Scalar) and node.text is None and node.written


def _told(kind: type, root: Table, fault: Any) -> Problem:
    """Return a validator's finding with its place in the file, in our words."""
    place: MappingEntry = MappingEntry(root.source, root.line, root)
    path = ""
    loc = [part for part in fault["loc"] if part != "[key]"]
    missing = fault["type"] in {"missing", "missing_argument", "missing_keyword_only_argument"}
    for part in loc[:-1] if missing else loc:
        node = place.value
        if isinstance(node, Table) and part in node.entries:
            place = node.entries[part]
            path = f"{path}.{part}" if path else str(part)
        elif isinstance(node, Items) and isinstance(part, int):
            item = node.items[part]
            place = MappingEntry(item.source, item.line, item)
            path = f"{path}[{part}]"
    if missing:
        path = f"{path}.{loc[-1]}" if path else str(loc[-1])
        return Problem(place.source, place.line, path, "is missing")
    return Problem(place.source, place.line, path, _message(fault, place.value))


def _message(fault: Any, node: Node) -> str:
    code, context = fault["type"], fault.get("ctx", {})
    if code == "value_error":
        return str(context["error"])
    if _is_null(node):
        return "is empty; give a value or leave the key out"
    if code == "literal_error" and isinstance(node, Scalar):
        choices = [part.strip("'") for part in context["expected"].replace(" or ", ", ").split(", ")]
        close = suggest_name(node.text or "", choices)
        return f"should be one of {', '.join(choices)}, not {_written(node)}{close}"
    wanted = "a single value" if code == "literal_error" else _WANTED.get(code.split("_")[0])
    return f"should be {wanted}, not {_written(node)}" if wanted else fault["msg"]


def _written(node: Node) -> str:
    if isinstance(node, Scalar):
        return rules.quoted(node.text or "")
    return "a list" if isinstance(node, Items) else "a mapping"


def choices(hint: Any) -> tuple[str, ...]:
    """Return the words a ``Literal`` allows, nothing for other types."""
    return get_args(hint) if get_origin(hint) is Literal else ()
