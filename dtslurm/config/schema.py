"""JSON Schemas of cluster profiles and job files, for editors: ``python -m dtslurm.config.schema [KIND]``.

The schemas are built from the dataclasses and their docstrings. They are slightly less strict than the
loader, which alone resolves ``extends`` (so nothing is required) and checks consistency between values.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_args, get_origin

from dtslurm.config import decode
from dtslurm.model.cluster import ClusterProfile, Variable
from dtslurm.model.jobs.job_file import JobFile
from dtslurm.model.jobs.sweep import Condition, Distribution
from dtslurm.model.units import Memory, Walltime

_ATTRIBUTE_LINE = re.compile(r"^    (\w+): (.*(?:\n {6,}.*)*)", re.MULTILINE)  # below "Attributes:"
# Plain scalars are read as text, whatever type YAML 1.2 would give them.
_TEXT_TYPES = ["string", "number", "boolean"]
_SCALARS: dict[Any, dict[str, Any]] = {
    str: {"type": _TEXT_TYPES},
    bool: {"type": ["boolean"]},
    int: {"type": ["integer"]},
    float: {"type": ["number"]},
    Walltime: {"type": ["string", "integer"], "description": "minutes, HH:MM:SS, D-HH:MM:SS or 2h30m"},
    Memory: {"type": ["string", "number"], "description": "such as 64G, 1.5T, or a number of MiB"},
    Distribution: {
        "type": ["string"],
        "description": "uniform, loguniform, normal, randint (LOW, HIGH) or choice(…)",
    },
    Condition: {"type": ["string", "boolean"], "description": "such as lr < 1e-3 and seed in (0, 1)"},
}


def profile_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a cluster profile."""
    return _build_file_schema(
        "dtslurm cluster profile", ClusterProfile, "Another profile's name (or a .yaml path from here)"
    )


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file, in which a variable may replace every value."""
    schema = _build_file_schema("dtslurm job file", JobFile, "Another job file, from this one's folder,")
    schema["properties"] = {name: _allow_text(value) for name, value in schema["properties"].items()}
    return schema


def _allow_text(schema: dict[str, Any]) -> dict[str, Any]:
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if {"integer", "number", "boolean"}.isdisjoint(types) or "string" in types:
        return schema
    return {**schema, "type": [*types, "string"]}


def _build_file_schema(title: str, kind: type, extended_file: str) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    root = _build_object(kind, definitions)
    extends = {
        "type": "string",
        "description": f"{extended_file} whose values are used for the keys that this file "
        "lacks. Mappings are merged, lists replaced, null takes a value away, in a profile also a "
        "whole partition, node type or variable.",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **root,
        "properties": {"extends": extends, **root["properties"]},
        "$defs": dict(sorted(definitions.items())),
    }


SCHEMAS = {"profile": profile_schema, "job": job_schema}


def text(kind: str = "profile") -> str:
    """Return a schema as JSON text, as stored in ``cluster_profiles/schema.json`` for profiles."""
    return json.dumps(SCHEMAS[kind](), indent=2, ensure_ascii=False) + "\n"


def _build_object(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    description_by_name = _parse_attributes(kind)
    hints = decode.get_field_types(kind)
    properties = {}
    for field in fields(kind):
        hint, nullable = decode.remove_none(hints[field.name])
        schema = _build_value(hint, definitions, nullable=nullable or field.default_factory is not MISSING)
        notes = [
            description_by_name.get(field.name, ""),
            schema.pop("description", ""),
            _describe_default(field),
        ]
        note = "; ".join(note for note in notes if note)
        properties[field.name] = {**schema, "description": note} if note else schema
    return {
        "description": _get_summary(kind),
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _build_value(hint: Any, definitions: dict[str, Any], *, nullable: bool = False) -> dict[str, Any]:
    null = ["null"] if nullable else []
    if hint in _SCALARS:
        schema = dict(_SCALARS[hint])
        types = [*schema["type"], *null]
        return {**schema, "type": types if len(types) > 1 else types[0]}
    if choices := decode.get_literal_values(hint):
        return {"enum": [*choices, *([None] if nullable else [])]}
    if get_origin(hint) is tuple:
        return {"type": ["array", *null], "items": _build_value(get_args(hint)[0], definitions)}
    if decode.is_mapping(hint):
        element, element_nullable = decode.remove_none(get_args(hint)[1])
        values = _build_value(element, definitions, nullable=element_nullable or is_dataclass(element))
        return {"type": ["object", *null], "additionalProperties": values}
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = {}  # a placeholder, in case types refer to each other
        definitions[hint.__name__] = _build_object(hint, definitions)
    reference = {"$ref": f"#/$defs/{hint.__name__}"}
    types = [*(_TEXT_TYPES if hint is Variable else []), *(["null"] if nullable else [])]
    return {"anyOf": [reference, *({"type": kind} for kind in types)]} if types else reference


def _get_summary(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _parse_attributes(kind: type) -> dict[str, str]:
    # Python 3.13 removes the indentation from docstrings itself.
    attributes = _ATTRIBUTE_LINE.findall(inspect.cleandoc(kind.__doc__ or ""))
    return {name: " ".join(note.replace("``", "").split()).rstrip(".") for name, note in attributes}


def _describe_default(item: Field[Any]) -> str:
    if item.default is MISSING or item.default is None or item.default == ():
        return ""
    return f"default: {json.dumps(item.default)}"


if __name__ == "__main__":
    sys.stdout.write(text(*sys.argv[1:]))
