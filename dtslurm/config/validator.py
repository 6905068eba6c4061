"""A validator for frozen dataclasses, on pydantic-core.

pydantic itself builds the same schemas from the same types, and costs about 90 ms more at every start.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic_core import SchemaValidator

_SCALARS = {str: "str", int: "int", float: "float", bool: "bool"}


@cache
def validator(kind: type) -> SchemaValidator:
    """Return the validator of a dataclass; it reads numbers, truth values and sizes from text."""
    return SchemaValidator(_schema(kind))


def _schema(hint: Any) -> Any:
    """Return the pydantic-core schema of a type."""
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        [inner] = [kind for kind in arguments if kind is not type(None)]
        return {"type": "nullable", "schema": _schema(inner)}
    if origin is Literal:
        return {"type": "literal", "expected": list(arguments)}
    if origin is tuple:
        return {"type": "tuple", "items_schema": [_schema(arguments[0])], "variadic_item_index": 0}
    if origin is Mapping:
        return {"type": "dict", "keys_schema": {"type": "str"}, "values_schema": _schema(arguments[1])}
    if hasattr(hint, "parse"):  # a value with a notation of its own: Walltime, Memory
        function = {"type": "no-info", "function": hint.parse}
        return {"type": "function-after", "function": function, "schema": {"type": "str"}}
    if is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint)
    raise TypeError(f"no schema for {hint!r}")


def _dataclass(kind: type) -> Any:
    hints = get_type_hints(kind)
    items = [
        {
            "type": "dataclass-field",
            "name": item.name,
            "kw_only": True,
            "schema": _field(hints[item.name], item),
        }
        for item in fields(kind)
    ]
    names = [item.name for item in fields(kind)]
    arguments = {"type": "dataclass-args", "dataclass_name": kind.__name__, "fields": items}
    return {"type": "dataclass", "cls": kind, "fields": names, "schema": arguments}


def _field(hint: Any, item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return {"type": "default", "schema": _schema(hint), "default_factory": item.default_factory}
    if item.default is not MISSING:
        return {"type": "default", "schema": _schema(hint), "default": item.default}
    return _schema(hint)
