"""Follows ``extends`` from file to file: one loop for profiles and job files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path

from dtslurm.config.tree import MappingEntry, Problem, Scalar, Table

Read = Callable[[Path], bytes]
Find = Callable[[str, Path], Path | str]
"""Finds what ``extends: NAME`` in a file means; a text says why there is no such file."""


def follow(
    path: Path, *, read: Read, label: Callable[[Path], str], find: Find, what: str
) -> tuple[list[Table], list[Problem], list[Path]]:
    """Return the tree of a file and of each that it extends in turn, the problems met, and the files read.

    Args:
        what: ``extends`` should be this, such as ``the name of one profile``.
    """
    from dtslurm.config import strict_yaml  # brings PyYAML, which most commands never need

    trees: list[Table] = []
    problems: list[Problem] = []
    visited: list[Path] = []
    current: Path | None = path
    while current is not None:
        visited.append(current)
        root, found = strict_yaml.parse(read(current), label(current))
        problems += found
        entry = root.entries.get("extends")
        trees.append(
            root._replace(entries={key: item for key, item in root.entries.items() if key != "extends"})
        )
        current = _parent(entry, visited, problems, label, find, what) if entry else None
    return trees, problems, visited


def _parent(
    entry: MappingEntry,
    visited: list[Path],
    problems: list[Problem],
    label: Callable[[Path], str],
    find: Find,
    what: str,
) -> Path | None:
    """Return the file that ``extends`` names, or None, with what is wrong noted."""
    if isinstance(entry.value, Scalar) and not entry.value.text:
        return None
    found = (
        find(entry.value.text or "", visited[-1]) if isinstance(entry.value, Scalar) else f"should be {what}"
    )
    if isinstance(found, Path) and found in visited:
        steps = [*visited[visited.index(found) :], found]
        found = f"goes in a circle: {' → '.join(map(label, steps))}"
    if isinstance(found, str):
        problems.append(Problem(entry.source, entry.line, "extends", found))
        return None
    return found


def merged(trees: Sequence[Table]) -> Table:
    """Return one tree of a file's and those of the files that it extends in turn.

    The farthest comes first: what one takes away is not there for those that extend it.
    """
    return reduce(merge, reversed(trees))


def merge(base: Table, over: Table) -> Table:
    """Return ``base`` with the values of ``over`` in their place; mappings are merged, lists replaced.

    A key of ``over`` with nothing after it leaves a mapping of ``base`` as it is; ``null`` takes it away.
    """
    entries = dict(base.entries)
    for key, entry in over.entries.items():
        below = entries.get(key)
        if below is not None and isinstance(below.value, Table):
            if isinstance(entry.value, Table):
                entries[key] = MappingEntry(entry.source, entry.line, merge(below.value, entry.value))
                continue
            if isinstance(entry.value, Scalar) and not entry.value.written:
                continue
        entries[key] = entry
    return Table(over.source, over.line, entries)
