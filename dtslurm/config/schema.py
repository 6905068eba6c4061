"""JSON Schemas of cluster profiles and job files, for editors: ``python -m dtslurm.config.schema [KIND]``.

They are made from the dataclasses and their docstrings. They are a little looser than the loader, which alone
knows what ``extends`` brings (so nothing is required) and what fits together.
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

_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {6,}.*)*)", re.MULTILINE)  # below "Attributes:"
# Plain scalars are read as text, whatever YAML 1.2 would make of them.
_TEXT = ["string", "number", "boolean"]
_SCALARS: dict[Any, dict[str, Any]] = {
    str: {"type": _TEXT},
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
    """Return the JSON Schema (draft 2020-12) of a profile's file."""
    return _file(
        "dtslurm cluster profile", ClusterProfile, "Another profile's name (or a .yaml path from here)"
    )


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file, in which a variable may stand for every value."""
    schema = _file("dtslurm job file", JobFile, "Another job file, from this one's folder,")
    schema["properties"] = {name: _or_text(value) for name, value in schema["properties"].items()}
    return schema


def _or_text(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if {"integer", "number", "boolean"}.isdisjoint(kinds) or "string" in kinds:
        return schema
    return {**schema, "type": [*kinds, "string"]}


def _file(title: str, kind: type, extended: str) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    root = _object(kind, definitions)
    extends = {
        "type": "string",
        "description": f"{extended} whose values hold where this file "
        "says nothing. Mappings are merged, lists replaced, null takes a value away, in a profile also a "
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
    """Return a schema as ``cluster_profiles/schema.json`` has that of profiles."""
    return json.dumps(SCHEMAS[kind](), indent=2, ensure_ascii=False) + "\n"


def _object(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    told = _attributes(kind)
    hints = decode.hints(kind)
    properties = {}
    for item in fields(kind):
        hint, nullable = decode.without_none(hints[item.name])
        schema = _of(hint, definitions, nullable=nullable or item.default_factory is not MISSING)
        notes = [told.get(item.name, ""), schema.pop("description", ""), _default(item)]
        note = "; ".join(note for note in notes if note)
        properties[item.name] = {**schema, "description": note} if note else schema
    return {
        "description": _summary(kind),
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _of(hint: Any, definitions: dict[str, Any], *, nullable: bool = False) -> dict[str, Any]:
    null = ["null"] if nullable else []
    if hint in _SCALARS:
        schema = dict(_SCALARS[hint])
        kinds = [*schema["type"], *null]
        return {**schema, "type": kinds if len(kinds) > 1 else kinds[0]}
    if words := decode.choices(hint):
        return {"enum": [*words, *([None] if nullable else [])]}
    if get_origin(hint) is tuple:
        return {"type": ["array", *null], "items": _of(get_args(hint)[0], definitions)}
    if decode.is_mapping(hint):
        inner, inner_null = decode.without_none(get_args(hint)[1])
        values = _of(inner, definitions, nullable=inner_null or is_dataclass(inner))
        return {"type": ["object", *null], "additionalProperties": values}
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = {}  # holds the place, should types ever refer to each other
        definitions[hint.__name__] = _object(hint, definitions)
    reference = {"$ref": f"#/$defs/{hint.__name__}"}
    kinds = [*(_TEXT if hint is Variable else []), *(["null"] if nullable else [])]
    return {"anyOf": [reference, *({"type": kind} for kind in kinds)]} if kinds else reference


def _summary(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _attributes(kind: type) -> dict[str, str]:
    found = _ATTRIBUTE.findall(inspect.cleandoc(kind.__doc__ or ""))  # Python 3.13 strips it itself
    return {name: " ".join(note.replace("``", "").split()).rstrip(".") for name, note in found}


def _default(item: Field[Any]) -> str:
    if item.default is MISSING or item.default is None or item.default == ():
        return ""
    return f"default: {json.dumps(item.default)}"


if __name__ == "__main__":
    sys.stdout.write(text(*sys.argv[1:]))
