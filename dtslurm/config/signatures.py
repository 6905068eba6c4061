"""Failure signatures: the packaged ones, then the user's, then the project's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from dtslurm.config import layered, rules
from dtslurm.config.layered import text_of, texts_of
from dtslurm.config.tree import MappingEntry, Problem, Table
from dtslurm.model.runs.diagnosis import BLAMES, ROLES, Signature

FILE_NAME = "signatures.yaml"
_KEYS = (
    "cause", "role", "strength", "lasting", "blame", "words", "match", "summary", "advice", "examples",
    "source",
)  # fmt: skip
_CAUSE_SLUG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def load(cwd: Path, env: Mapping[str, str] | None = None) -> tuple[Signature, ...]:
    """Return all signatures. Of equal names, the project's signature is used, then the user's.

    Raises:
        ProfileInvalid: a file is invalid; all problems are reported at once.
    """
    signatures: dict[str, Signature] = {}
    for layer in layered.load("diagnose", FILE_NAME, "signatures", _read_signature, cwd, env):
        other_signatures = {name: signature for name, signature in signatures.items() if name not in layer}
        signatures = {
            **other_signatures,
            **{name: signature for name, signature in layer.items() if signature is not None},
        }
    return tuple(signatures.values())


def _read_signature(name: str, table: Table, problems: list[Problem]) -> Signature | None:
    problems_before = len(problems)
    layered.check_keys(table, name, _KEYS, problems)
    texts = {
        key: text_of(table, name, key, problems) for key in ("cause", "role", "blame", "summary", "advice")
    }
    lists = {key: texts_of(table, name, key, problems) for key in ("words", "match", "examples")}
    for key, fault in _find_faults(texts, lists, text_of(table, name, "strength", problems)):
        entry = table.entries.get(key, MappingEntry(table.source, table.line, table))
        problems.append(Problem(entry.source, entry.line, f"{name}.{key}", fault))
    if len(problems) > problems_before:
        return None
    return Signature(
        name=name,
        cause=texts["cause"] or "unknown",
        role=texts["role"] or "cause",
        strength=int(text_of(table, name, "strength", problems) or "70"),
        lasting=text_of(table, name, "lasting", problems) in {"yes", "true"},
        blame=texts["blame"] or "unknown",
        summary=texts["summary"] or "",
        advice=texts["advice"] or "",
        words=lists["words"],
        match=lists["match"],
        examples=lists["examples"],
    )


def _find_faults(
    texts: Mapping[str, str | None], lists: Mapping[str, tuple[str, ...]], strength: str | None
) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong) for the values of a signature."""
    if not _CAUSE_SLUG.fullmatch(texts["cause"] or ""):
        yield "cause", "should be lower-case letters, digits and '-', as in disk-full"
    if texts["role"] and texts["role"] not in ROLES:
        yield "role", f"should be one of {', '.join(ROLES)}"
    if texts["blame"] and texts["blame"] not in BLAMES:
        yield "blame", f"should be one of {', '.join(BLAMES)}"
    if strength and not (strength.isdecimal() and int(strength) <= 100):
        yield "strength", f"should be a whole number from 0 to 100, not {rules.quoted(strength)}"
    for key in ("words", "match"):
        if not lists[key] or not all(lists[key]):
            yield key, "should be a list of at least one string"
    if any("\n" in word for word in lists["words"]):
        yield "words", "should each match within one line"
    for pattern in lists["match"]:
        try:
            re.compile(pattern)
        except re.error as error:
            yield "match", f"{rules.quoted(pattern)} is not a regular expression: {error}"
