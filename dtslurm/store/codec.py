"""Conversion of records to and from JSON: schema 1 of ``job.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from dtslurm.errors import StoreError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus, StateFlag
from dtslurm.model.shell import RawShell

SCHEMA = 1
_STATUS_FIELDS = frozenset(item.name for item in fields(JobStatus))


def plain(value: object) -> Any:
    """Return ``value`` as JSON-serializable data: dataclasses as objects, sets as sorted lists, enums as
    strings.
    """
    if is_dataclass(value) and not isinstance(value, type):
        if hasattr(type(value), "parse"):
            return str(value)
        return {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Enum | RawShell):
        return str(value.value) if isinstance(value, Enum) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, frozenset | set | list | tuple):
        plain_values = [plain(entry) for entry in value]
        return sorted(plain_values) if isinstance(value, frozenset | set) else plain_values
    return value


def encode(document: Mapping[str, object]) -> bytes:
    """Return a document as JSON bytes; bytes that were not UTF-8 are escaped surrogates."""
    return (json.dumps(plain(document), indent=1) + "\n").encode("ascii")


def decode(data: bytes, path: str) -> dict[str, Any]:
    """Return the document in ``data``.

    Raises:
        StoreError: the data is not a JSON object of a schema that this version supports.
    """
    try:
        document = json.loads(data)
    except ValueError as error:
        raise StoreError(f"{path} is not JSON: {error}", hint="the file was cut off or edited") from error
    if not isinstance(document, dict):
        raise StoreError(f"{path} is not a JSON object")
    schema = document.get("schema")
    if schema != SCHEMA:
        is_newer = isinstance(schema, int) and schema > SCHEMA
        raise StoreError(
            f"{path} has schema {schema!r}; this dtslurm reads schema {SCHEMA}",
            hint="this file is of a later version of dtslurm; install that version or a newer one"
            if is_newer
            else "",
        )
    return document


def record_from(document: Mapping[str, Any], path: str) -> JobRecord:
    """Return the record in a ``job.json`` document.

    Raises:
        StoreError: a field is missing.
    """
    field_names = {item.name for item in fields(JobRecord)}
    values = {key: value for key, value in document.items() if key in field_names}
    try:
        values["final"] = tuple(status_from(item) for item in values.get("final") or ())
        return JobRecord(**values)
    except (TypeError, AttributeError) as error:
        raise StoreError(f"{path} is not a complete record of a run: {error}") from error


def status_from(document: Mapping[str, Any]) -> JobStatus:
    """Return a job status from its JSON form; drop fields and flags that this version does not know."""
    values = {key: value for key, value in document.items() if key in _STATUS_FIELDS}
    values["state"] = JobState.__members__.get(str(values.get("state")), JobState.UNKNOWN)
    values["flags"] = frozenset(
        StateFlag[flag] for flag in values.get("flags", ()) if flag in StateFlag.__members__
    )
    return JobStatus(**values)
