"""Resolution of ``extends`` from file to file, for cluster profiles and job files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path

from dtslurm.config.tree import MappingEntry, Problem, Scalar, Table

Read = Callable[[Path], bytes]
Find = Callable[[str, Path], Path | str]
"""Finds what ``extends: NAME`` in a file means; a text is the reason why there is no such file."""


def load_chain(
    path: Path, *, read_file: Read, label: Callable[[Path], str], find: Find, value_description: str
) -> tuple[list[Table], list[Problem], list[Path]]:
    """Return the trees of a file and of the files that it extends in turn, the problems, and the files read.

    Args:
        value_description: the expected value of ``extends`` for messages: ``the name of one profile``.
    """
    from dtslurm.config import strict_yaml  # imports PyYAML, which most commands never need

    trees: list[Table] = []
    problems: list[Problem] = []
    visited_paths: list[Path] = []
    current_path: Path | None = path
    while current_path is not None:
        visited_paths.append(current_path)
        table, file_problems = strict_yaml.parse(read_file(current_path), label(current_path))
        problems += file_problems
        entry = table.entries.get("extends")
        trees.append(
            table._replace(entries={key: child for key, child in table.entries.items() if key != "extends"})
        )
        current_path = (
            _resolve_extends(entry, visited_paths, problems, label, find, value_description)
            if entry
            else None
        )
    return trees, problems, visited_paths


def _resolve_extends(
    entry: MappingEntry,
    visited_paths: list[Path],
    problems: list[Problem],
    label: Callable[[Path], str],
    find: Find,
    value_description: str,
) -> Path | None:
    """Return the file that ``extends`` names, or None after recording the problem."""
    if isinstance(entry.value, Scalar) and not entry.value.text:
        return None
    target = (
        find(entry.value.text or "", visited_paths[-1])
        if isinstance(entry.value, Scalar)
        else f"should be {value_description}"
    )
    if isinstance(target, Path) and target in visited_paths:
        cycle = [*visited_paths[visited_paths.index(target) :], target]
        target = f"is circular: {' → '.join(map(label, cycle))}"
    if isinstance(target, str):
        problems.append(Problem(entry.source, entry.line, "extends", target))
        return None
    return target


def merge_all(trees: Sequence[Table]) -> Table:
    """Return one tree from a file's tree and those of the files that it extends in turn.

    The last file is merged first, so that a value which one file removes stays absent for the files that
    extend it.
    """
    return reduce(merge, reversed(trees))


def merge(base: Table, overrides: Table) -> Table:
    """Return ``base`` overridden by the values of ``overrides``; mappings are merged, lists replaced.

    A key of ``overrides`` without a value leaves a mapping of ``base`` unchanged; ``null`` removes it.
    """
    entries = dict(base.entries)
    for key, entry in overrides.entries.items():
        base_entry = entries.get(key)
        if base_entry is not None and isinstance(base_entry.value, Table):
            if isinstance(entry.value, Table):
                entries[key] = MappingEntry(entry.source, entry.line, merge(base_entry.value, entry.value))
                continue
            if isinstance(entry.value, Scalar) and not entry.value.written:
                continue
        entries[key] = entry
    return Table(overrides.source, overrides.line, entries)
