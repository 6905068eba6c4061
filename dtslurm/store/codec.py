"""Records to JSON and back: schema 1 of ``job.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from dtslurm.errors import StoreError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus, StateFlag
from dtslurm.model.shell import Sh

SCHEMA = 1
_STATUS_FIELDS = frozenset(item.name for item in fields(JobStatus))


def plain(value: object) -> Any:
    """Return ``value`` as JSON-able data: dataclasses become objects, sets sorted lists, enums words."""
    if is_dataclass(value) and not isinstance(value, type):
        if hasattr(type(value), "parse"):
            return str(value)
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Enum | Sh):
        return str(value.value) if isinstance(value, Enum) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set | list | tuple):
        items = [plain(item) for item in value]
        return sorted(items) if isinstance(value, frozenset | set) else items
    return value


def encode(document: Mapping[str, object]) -> bytes:
    """Return a document as JSON bytes; bytes that were not UTF-8 survive as escaped surrogates."""
    return (json.dumps(plain(document), indent=1) + "\n").encode("ascii")


def decode(data: bytes, path: str) -> dict[str, Any]:
    """Return the document in ``data``.

    Raises:
        StoreError: it is not a JSON object of a schema this version knows.
    """
    try:
        document = json.loads(data)
    except ValueError as error:
        raise StoreError(f"{path} is not JSON: {error}", hint="the file was cut off or edited") from error
    if not isinstance(document, dict):
        raise StoreError(f"{path} is not a JSON object")
    schema = document.get("schema")
    if schema != SCHEMA:
        later = isinstance(schema, int) and schema > SCHEMA
        raise StoreError(
            f"{path} has schema {schema!r}; this dtslurm reads schema {SCHEMA}",
            hint="a later version wrote it; install that version or a newer one" if later else "",
        )
    return document


def record_from(document: Mapping[str, Any], path: str) -> JobRecord:
    """Return the record inside a ``job.json`` document.

    Raises:
        StoreError: a field is missing.
    """
    known = {item.name for item in fields(JobRecord)}
    values = {key: value for key, value in document.items() if key in known}
    try:
        values["final"] = tuple(status_from(item) for item in values.get("final") or ())
        return JobRecord(**values)
    except (TypeError, AttributeError) as error:
        raise StoreError(f"{path} lacks what a run's record needs: {error}") from error


def status_from(document: Mapping[str, Any]) -> JobStatus:
    """Return a job status from its JSON form; words this version does not know are dropped."""
    values = {key: value for key, value in document.items() if key in _STATUS_FIELDS}
    values["state"] = JobState.__members__.get(str(values.get("state")), JobState.UNKNOWN)
    values["flags"] = frozenset(
        StateFlag[flag] for flag in values.get("flags", ()) if flag in StateFlag.__members__
    )
    return JobStatus(**values)
