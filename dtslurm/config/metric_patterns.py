"""Reads where log lines tell of training: the packaged patterns, then the user's, then the project's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dtslurm.config import layered, rules
from dtslurm.config.layered import text_of, texts_of
from dtslurm.config.tree import MappingEntry, Problem, Scalar, Table
from dtslurm.model.runs.telemetry import VALUES, LinePattern
from dtslurm.suggestions import suggest_name

FILE_NAME = "patterns.yaml"
_KEYS = ("words", "values", "source")
_NUMBER = "<number>"


def load(cwd: Path, env: Mapping[str, str] | None = None) -> tuple[LinePattern, ...]:
    """Return all patterns; of two with one name the user's replaces the packaged, the project's both.

    A user's own come first, so that they are tried before the packaged ones.

    Raises:
        ProfileInvalid: a file is wrong; all problems are told at once.
    """
    found: dict[str, LinePattern] = {}
    for layer in layered.load("metrics", FILE_NAME, "patterns", _pattern, cwd, env):
        below = {name: one for name, one in found.items() if name not in layer}
        found = {**{name: one for name, one in layer.items() if one is not None}, **below}
    return tuple(found.values())


def _pattern(name: str, table: Table, problems: list[Problem]) -> LinePattern | None:
    before = len(problems)
    layered.check_keys(table, name, _KEYS, problems)
    words = texts_of(table, name, "words", problems)
    nothing = MappingEntry(table.source, table.line, Scalar(table.source, table.line, None))
    values = table.entries.get("values", nothing)
    if not words or not all(words):
        problems.append(Problem(table.source, table.line, f"{name}.words", "should be a list of texts"))
    if not isinstance(values.value, Table):
        problems.append(Problem(values.source, values.line, f"{name}.values", "should be a mapping"))
        return None
    told: dict[str, str] = {}
    for key, entry in values.value.entries.items():
        text = text_of(values.value, f"{name}.values", key, problems) or ""
        fault = _fault(key, text)
        if fault:
            problems.append(Problem(entry.source, entry.line, f"{name}.values.{key}", fault))
        told[key] = text
    return LinePattern(name=name, words=words, values=told) if len(problems) == before else None


def _fault(key: str, text: str) -> str:
    """Return what is wrong with one value, empty if nothing is."""
    if key not in VALUES:
        return f"unknown key{suggest_name(key, list(VALUES)) or f' ({chr(44).join(VALUES)})'}"
    if text.count(_NUMBER) != 1:
        return f"should have {_NUMBER} where the number stands, once"
    try:
        pattern = re.compile(text.replace(_NUMBER, "([0-9]+)"))
    except re.error as error:
        return f"{rules.quoted(text)} is no regular expression: {error}"
    return "should have no group but <number>; (?:…) groups without one" if pattern.groups != 1 else ""
