"""Patterns that find training metrics in log lines: packaged ones, the user's and the project's."""

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
    """Return all patterns. For equal names, the user's pattern replaces the packaged one, the project's both.

    The user's and the project's own patterns come first, so that they are tried before the packaged ones.

    Raises:
        ProfileInvalid: a file is invalid; all problems are reported at once.
    """
    patterns: dict[str, LinePattern] = {}
    for layer in layered.load("metrics", FILE_NAME, "patterns", _read_pattern, cwd, env):
        other_patterns = {name: pattern for name, pattern in patterns.items() if name not in layer}
        patterns = {
            **{name: pattern for name, pattern in layer.items() if pattern is not None},
            **other_patterns,
        }
    return tuple(patterns.values())


def _read_pattern(name: str, table: Table, problems: list[Problem]) -> LinePattern | None:
    problem_count = len(problems)
    layered.check_keys(table, name, _KEYS, problems)
    words = texts_of(table, name, "words", problems)
    empty_entry = MappingEntry(table.source, table.line, Scalar(table.source, table.line, None))
    values = table.entries.get("values", empty_entry)
    if not words or not all(words):
        problems.append(Problem(table.source, table.line, f"{name}.words", "should be a list of strings"))
    if not isinstance(values.value, Table):
        problems.append(Problem(values.source, values.line, f"{name}.values", "should be a mapping"))
        return None
    expressions: dict[str, str] = {}
    for key, entry in values.value.entries.items():
        text = text_of(values.value, f"{name}.values", key, problems) or ""
        fault = _find_fault(key, text)
        if fault:
            problems.append(Problem(entry.source, entry.line, f"{name}.values.{key}", fault))
        expressions[key] = text
    return LinePattern(name=name, words=words, values=expressions) if len(problems) == problem_count else None


def _find_fault(key: str, text: str) -> str:
    """Return what is wrong with one value, an empty text if nothing is."""
    if key not in VALUES:
        return "unknown key" + (suggest_name(key, list(VALUES)) or f" ({', '.join(VALUES)})")
    if text.count(_NUMBER) != 1:
        return f"should contain {_NUMBER} exactly once, at the position of the number"
    try:
        pattern = re.compile(text.replace(_NUMBER, "([0-9]+)"))
    except re.error as error:
        return f"{rules.quoted(text)} is not a regular expression: {error}"
    return (
        "should have no group except <number>; (?:…) groups without capturing" if pattern.groups != 1 else ""
    )
