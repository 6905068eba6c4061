"""Decode the answers of a login node: JSON objects of limited size and depth, with fields of checked types.

A login node may be compromised, so its answers are untrusted data. Every defect of an answer raises
`InvalidAnswer`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from dtslurm.errors import TransportError

LARGEST = 1 << 24  # bytes of JSON; the decoded values take up to thirty times as much memory
DEEPEST = 64  # levels of nested objects and lists
LARGEST_NUMBER = 1 << 62  # bytes in a file, or nanoseconds since the epoch
_LONGEST_PATH = 4096
_EVIDENCE_LENGTH = 200

_Result = TypeVar("_Result")


class InvalidAnswer(TransportError):
    """A login node's answer violates the protocol; a retry would not help."""

    transient = False


def parse_object(data: bytes | str, sender: str) -> dict[str, Any]:
    """Return the JSON object in ``data``.

    Args:
        sender: the program that sent the data, for the error message.

    Raises:
        InvalidAnswer: the data is too large, nested too deeply, or not a JSON object.
    """
    value = parse_json(data, sender)
    if not isinstance(value, dict):
        raise invalid(sender, "JSON that is not an object", repr(data[:_EVIDENCE_LENGTH]))
    return value


def parse_json(data: bytes | str, sender: str, *, limit: int = LARGEST) -> Any:
    """Return the JSON value in ``data``, of at most ``limit`` bytes; see `parse_object`."""
    if len(data) > limit:
        raise invalid(sender, f"an answer of more than {limit >> 20} MiB")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise invalid(sender, "text that is not JSON", repr(data[:_EVIDENCE_LENGTH])) from error
    if _is_nested_too_deeply(value):
        raise invalid(sender, f"JSON that is nested more than {DEEPEST} levels deep")
    return value


def unpack(data: bytes, sender: str, *, limit: int = LARGEST) -> bytes:
    """Return the decompressed content of ``data``, which zlib or gzip has made.

    Raises:
        InvalidAnswer: the data is damaged, or larger than ``limit`` bytes after decompression.
    """
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: either of the two
    try:
        content = unpacker.decompress(data, limit)
    except zlib.error as error:
        raise invalid(sender, f"damaged compressed data ({error})") from error
    if unpacker.unconsumed_tail:
        raise invalid(sender, "too much compressed data")
    if not unpacker.eof:
        raise invalid(sender, "truncated compressed data")
    return content


def read_whole(
    values: Mapping[str, Any], key: str, sender: str, *, minimum: int = 0, maximum: int = LARGEST_NUMBER
) -> int:
    """Return the integer at ``key``, from ``minimum`` to ``maximum``.

    Raises:
        InvalidAnswer: the value is missing, of another type (also a boolean), or out of range.
    """
    value = values.get(key)
    if type(value) is not int or not minimum <= value <= maximum:
        raise invalid(sender, f"{key} that is not a whole number in range", repr(value)[:_EVIDENCE_LENGTH])
    return value


def read_text(values: Mapping[str, Any], key: str, sender: str) -> str:
    """Return the string at ``key``.

    Raises:
        InvalidAnswer: the value is missing or of another type.
    """
    value = values.get(key)
    if not isinstance(value, str):
        raise invalid(sender, f"{key} that is not a text", repr(value)[:_EVIDENCE_LENGTH])
    return value


def read_path(values: Mapping[str, Any], key: str, sender: str) -> str:
    """Return the path at ``key``: a relative path of a file below a folder.

    Raises:
        InvalidAnswer: the path is absolute, contains ``..``, ``.``, an empty name or NUL, is longer than
            Linux allows, or cannot be encoded as a file name.
    """
    path = read_text(values, key, sender)
    if not is_plain_path(path):
        raise invalid(sender, "a file for another path", repr(path[:_EVIDENCE_LENGTH]))
    return path


def is_plain_path(path: str) -> bool:
    """Return whether a path is a normalized relative path of a file below a folder; see `read_path`."""
    try:
        names = os.fsencode(path).split(b"/")
    except UnicodeEncodeError:  # a surrogate that encodes no byte
        return False
    return (
        len(path) <= _LONGEST_PATH
        and "\0" not in path
        and all(name not in {b"", b".", b".."} and len(name) <= 255 for name in names)
    )


def interpret(answer: Any, decode: Callable[[Any], _Result], sender: str) -> _Result:
    """Return the value of ``decode(answer)``.

    Raises:
        InvalidAnswer: ``decode`` failed, because the answer lacks a value or has one of another type.
    """
    try:
        return decode(answer)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise invalid(
            sender, "an answer with missing or wrong values", repr(error)[:_EVIDENCE_LENGTH]
        ) from error


def invalid(sender: str, problem: str, evidence: str = "", *, hint: str = "") -> InvalidAnswer:
    """Return the error for a defective answer of ``sender``."""
    return InvalidAnswer(
        f"{sender} sent {problem}",
        evidence=[evidence] if evidence else [],
        hint=hint
        or (
            "check that your shell's start-up files on the login node print nothing; otherwise the login "
            "node is faulty or compromised"
        ),
    )


def _is_nested_too_deeply(value: Any) -> bool:
    containers = [value]
    for _ in range(DEEPEST):
        containers = [
            child
            for container in containers
            for child in _child_values(container)
            if isinstance(child, (dict, list))
        ]
        if not containers:
            return False
    return True


def _child_values(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
