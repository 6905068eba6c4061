"""Conversion of a tree to frozen dataclasses, with all problems reported at once in plain words."""

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
_EXPECTED = {
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
    extra_keys: Iterable[str] = (),
) -> _T:
    """Return an instance of the dataclass ``kind`` with the tree's values.

    Args:
        problems: problems found earlier, to report together with those of this tree.
        check: yields inconsistencies between values of the tree.
        extra_keys: further valid keys of the top level, for suggestions.

    Raises:
        ProfileInvalid: there are problems; ``problems`` has one line for each, sorted by file and line.
    """
    value, all_problems = read(kind, root, extra_keys=extra_keys)
    all_problems += problems
    if check is not None:
        all_problems += check(root)
    if all_problems or value is None:
        raise invalid(all_problems)
    return value


def read(kind: type[_T], root: Table, *, extra_keys: Iterable[str] = ()) -> tuple[_T | None, list[Problem]]:
    """Return an instance of ``kind`` with the tree's values, or None, and all problems of the tree."""
    converter = _TreeConverter([], tuple(extra_keys))
    plain_values = converter.table(kind, root, "")
    value, validation_errors = _validate(kind, plain_values)
    return value, converter.problems + [_locate_problem(kind, root, error) for error in validation_errors]


def invalid(problems: Iterable[Problem]) -> ProfileInvalid:
    """Return the error that lists these problems, each once, sorted by file and line."""
    unique = sorted(set(problems), key=lambda problem: (problem.source, problem.line, problem.key))
    sources = list(dict.fromkeys(problem.source for problem in unique))
    message = f"{len(unique)} problems in {' and '.join(sources)}" if len(unique) > 1 else ""
    return ProfileInvalid([str(problem) for problem in unique], message=message)


def remove_null_sections(kind: type, table: Table) -> Table:
    """Return the tree of a ``kind`` without the named sections that ``null`` removes.

    An empty section stays, with the default values.
    """
    remaining = {
        key: _remove_null_sections(get_field_types(kind).get(key), entry)
        for key, entry in table.entries.items()
    }
    return table._replace(entries=remaining)


def _remove_null_sections(hint: Any, entry: MappingEntry) -> MappingEntry:
    hint, node = remove_none(hint)[0], entry.value
    if not isinstance(node, Table):
        return entry
    if is_dataclass(hint) and isinstance(hint, type):
        return entry._replace(value=remove_null_sections(hint, node))
    section = remove_none(get_args(hint)[1])[0] if is_mapping(hint) else None
    if not is_dataclass(section):
        return entry
    remaining = {key: child for key, child in node.entries.items() if not _is_removed(child.value)}
    return entry._replace(value=node._replace(entries=remaining))


@cache
def get_field_types(kind: type) -> dict[str, Any]:
    """Return the field types of a dataclass by field name."""
    return get_type_hints(kind)


def remove_none(hint: Any) -> tuple[Any, bool]:
    """Return a type without its ``None``, and whether the type had a ``None``."""
    if get_origin(hint) in {Union, types.UnionType}:
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return kinds[0], len(kinds) < len(get_args(hint))
    return hint, False


def is_mapping(hint: Any) -> bool:
    """Return whether a type is a ``Mapping`` of names to values."""
    return get_origin(hint) in {Mapping, dict}


def _validate(kind: type, data: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    from pydantic_core import ValidationError

    from dtslurm.config.validator import validator

    try:
        return validator(kind).validate_python(data), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


class _TreeConverter:
    """Converts a tree to plain values, guided by the field types, and records problems that types miss."""

    def __init__(self, problems: list[Problem], extra_keys: tuple[str, ...]) -> None:
        self.problems = problems
        self._also = extra_keys

    def table(self, kind: type, table: Table, path: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        optional = {field.name for field in fields(kind) if not _is_required(field)}
        for key, entry in table.entries.items():
            key_path = f"{path}{key}"
            if key not in get_field_types(kind):
                self._report(entry, key_path, self._describe_unknown_key(kind, key, is_top=not path))
                continue
            hint, nullable = remove_none(get_field_types(kind)[key])
            if _is_null(entry.value) and nullable:
                values[key] = None
            elif not _is_null(entry.value) or key not in optional:
                values[key] = self._convert_value(
                    hint, entry, f"{_find_defining_class(kind, key)}.{key}", key_path
                )
            # else an empty section or a removed value: the field keeps its default
        return values

    def _convert_value(self, hint: Any, entry: MappingEntry, name: str, path: str) -> Any:
        node = entry.value
        if isinstance(node, Scalar):
            if node.text is None:
                return {} if is_dataclass(hint) and not node.written else None
            if hint is Variable:  # a variable without a reason is written as its value alone
                self._check_scalar(str, node.text, entry, "Variable.value", path)
                return {"value": node.text}
            self._check_scalar(hint, node.text, entry, name, path)
            return node.text
        if isinstance(node, Items):
            element_type = get_args(hint)[0] if get_origin(hint) is tuple else Any
            return [
                self._convert_value(
                    element_type, MappingEntry(item.source, item.line, item), name, f"{path}[{number}]"
                )
                for number, item in enumerate(node.items)
            ]
        if is_dataclass(hint) and isinstance(hint, type):
            return self.table(hint, node, f"{path}.")
        if not is_mapping(hint):
            return {}
        values = {}
        for key, child in node.entries.items():
            problem = rules.key_problem(name, key)
            if problem:
                self._report(child, f"{path}.{key}", problem)
            values[key] = self._convert_value(remove_none(get_args(hint)[1])[0], child, name, f"{path}.{key}")
        return values

    def _check_scalar(self, hint: Any, text: str, entry: MappingEntry, name: str, path: str) -> None:
        problem = None
        if hint in {int, float}:
            problem = rules.number_problem(name, text, is_whole=hint is int)
        elif hint is str:
            problem = rules.text_problem(name, text)
        if problem:
            self._report(entry, path, problem)

    def _describe_unknown_key(self, kind: type, key: str, *, is_top: bool) -> str:
        field_names = list(get_field_types(kind))
        suggestion = suggest_name(key, field_names + (list(self._also) if is_top else []))
        if not suggestion:
            sections = {name: remove_none(hint)[0] for name, hint in get_field_types(kind).items()}
            matching_keys = [
                f"{name}.{key}"
                for name, hint in sections.items()
                if is_dataclass(hint) and key in _field_names(hint)
            ]
            suggestion = (
                f"; did you mean {matching_keys[0]!r}?" if matching_keys else f" ({', '.join(field_names)})"
            )
        return f"unknown key{suggestion}"

    def _report(self, entry: MappingEntry, key: str, message: str) -> None:
        self.problems.append(Problem(entry.source, entry.line, key, message))


def _find_defining_class(kind: type, key: str) -> str:
    """Return the name of the class that first defines a field; rules are named after that class."""
    return next(base.__name__ for base in reversed(kind.__mro__) if key in get_annotations(base))


def _field_names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def _is_required(item: Any) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.text is None


def _is_removed(node: Node) -> bool:
    return isinstance(node, Scalar) and node.text is None and node.written


def _locate_problem(kind: type, root: Table, fault: Any) -> Problem:
    """Return a validation error as a problem with its location in the file."""
    entry: MappingEntry = MappingEntry(root.source, root.line, root)
    path = ""
    location = [part for part in fault["loc"] if part != "[key]"]
    missing = fault["type"] in {"missing", "missing_argument", "missing_keyword_only_argument"}
    for part in location[:-1] if missing else location:
        node = entry.value
        if isinstance(node, Table) and part in node.entries:
            entry = node.entries[part]
            path = f"{path}.{part}" if path else str(part)
        elif isinstance(node, Items) and isinstance(part, int):
            item = node.items[part]
            entry = MappingEntry(item.source, item.line, item)
            path = f"{path}[{part}]"
    if missing:
        path = f"{path}.{location[-1]}" if path else str(location[-1])
        return Problem(entry.source, entry.line, path, "is missing")
    return Problem(entry.source, entry.line, path, _describe_fault(fault, entry.value))


def _describe_fault(fault: Any, node: Node) -> str:
    code, context = fault["type"], fault.get("ctx", {})
    if code == "value_error":
        return str(context["error"])
    if _is_null(node):
        return "is empty; give a value or leave the key out"
    if code == "literal_error" and isinstance(node, Scalar):
        choices = [part.strip("'") for part in context["expected"].replace(" or ", ", ").split(", ")]
        suggestion = suggest_name(node.text or "", choices)
        return f"should be one of {', '.join(choices)}, not {_describe_value(node)}{suggestion}"
    expected_kind = "a single value" if code == "literal_error" else _EXPECTED.get(code.split("_")[0])
    return f"should be {expected_kind}, not {_describe_value(node)}" if expected_kind else fault["msg"]


def _describe_value(node: Node) -> str:
    if isinstance(node, Scalar):
        return rules.quoted(node.text or "")
    return "a list" if isinstance(node, Items) else "a mapping"


def get_literal_values(hint: Any) -> tuple[str, ...]:
    """Return the words that a ``Literal`` allows, an empty tuple for other types."""
    return get_args(hint) if get_origin(hint) is Literal else ()
