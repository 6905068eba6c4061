"""Brings a profile that is there up to date, line by line: what its user wrote stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dtslurm.config import strict_yaml
from dtslurm.config.tree import Items, Node, Scalar, Table
from dtslurm.discover import page
from dtslurm.discover.facts import DiscoveredCluster, Fact
from dtslurm.errors import ProfileInvalid
from dtslurm.model.values import dataclass


@dataclass(frozen=True)
class Amended:
    """What became of a profile.

    Attributes:
        text: the whole file.
        changed: (key, what was there, what is there now) of values that were discover's own.
        added: keys that were not there.
        yours: (key, what the user wrote, what was found) of values that stay as the user wrote them.
        missed: keys that could not be written, since the file is not laid out one value a line.
    """

    text: str
    changed: tuple[tuple[str, str, str], ...] = ()
    added: tuple[str, ...] = ()
    yours: tuple[tuple[str, str, str], ...] = ()
    missed: tuple[str, ...] = ()


def amend(old: str, found: DiscoveredCluster, source: str) -> Amended:
    """Return the file's text with what was found in place of what an earlier run wrote.

    A value that differs from what was written then is the user's and stays; so does one that the user took
    out. What is no longer found stays, too.

    Raises:
        ProfileInvalid: the file cannot be read.
    """
    known = page.remembered(old)
    body = page.without_memory(old)
    values = dict(leaves(_tree(body, source)))
    changed, added, yours, missed = [], [], [], []
    wrote: dict[str, str] = {}
    for fact in found.facts:
        there = values.get(fact.key)
        if there is not None and _same(there, fact.text):
            if page.was_written(known, fact.name, there):
                wrote[fact.name] = fact.text
            continue
        own = there is not None and page.was_written(known, fact.name, there)
        removed = there is None and page.encoded(fact.name) in known
        if (there is not None and not own) or removed:
            yours.append((fact.name, there if there is not None else "(taken out)", fact.text))
            continue
        new = _written(body, fact, source)
        if new is None:
            missed.append(fact.name)
            continue
        body = new
        wrote[fact.name] = fact.text
        if there is None:
            added.append(fact.name)
        else:
            changed.append((fact.name, there, fact.text))
    if not changed and not added:
        return Amended(old, yours=tuple(yours), missed=tuple(missed))
    kept = _still(known, dict(leaves(_tree(body, source))), wrote, {row[0] for row in yours})
    memory = page.memory(kept)
    text = body if not memory else f"{body}\n" + "\n".join([*memory, ""])
    return Amended(text, tuple(changed), tuple(added), tuple(yours), tuple(missed))


def leaves(node: Node, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every value by its key; a list is one value."""
    if isinstance(node, Table):
        for key, entry in node.entries.items():
            yield from leaves(entry.value, (*above, key))
    elif isinstance(node, Items):
        yield above, ", ".join(item.text or "" for item in node.items if isinstance(item, Scalar))
    elif node.written:
        yield above, node.text if node.text is not None else "null"


def _tree(text: str, source: str) -> Table:
    return strict_yaml.parse(text.encode("utf-8", "surrogateescape"), source)[0]


def _same(there: str, found: str) -> bool:
    return there == found or there.strip().lower() == found.strip().lower()


def _still(
    known: Mapping[str, str], values: Mapping[tuple[str, ...], str], wrote: dict[str, str], yours: set[str]
) -> dict[str, str]:
    """Return what the file holds of discover's own values, and which keys hold the user's."""
    kept = dict(wrote)
    for key, value in values.items():
        name = ".".join(key)
        if name not in kept and page.was_written(known, name, value):
            kept[name] = value
    # An edit must stay known as one: the key is remembered with a mark that fits no value of the user's.
    return {**kept, **{name: f"\0{name}" for name in sorted(yours) if page.encoded(name) in known}}


def _written(body: str, fact: Fact, source: str) -> str | None:
    """Return the text with one value put in, None where that cannot be done line by line."""
    root = _tree(body, source)
    lines = body.splitlines()
    table, depth = root, 0
    for key in fact.key[:-1]:
        entry = table.entries.get(key)
        if entry is None or not isinstance(entry.value, Table):
            break
        table, depth = entry.value, depth + 1
    entry = table.entries.get(fact.key[depth])
    if entry is not None and depth == len(fact.key) - 1:
        if entry.value.line != entry.line or _last(entry.value) != entry.line:
            return None
        first, indent = entry.line - 1, _indent(lines[entry.line - 1])
        if " #" not in lines[first] and first and page.is_note(lines[first - 1]):
            first -= 1  # the evidence of the old value
        lines[first : entry.line] = page.line_of(fact, indent // 2)
    elif entry is not None:
        return None  # a value stands where a mapping should
    else:
        at, indent = _end(table, lines), _child_indent(table, lines, depth)
        if indent % 2:
            return None
        new = []
        for number, key in enumerate(fact.key[depth:-1]):
            new.append(f"{' ' * (indent + 2 * number)}{page.scalar(key)}:")
        new += page.line_of(fact, indent // 2 + len(fact.key) - 1 - depth)
        lines[at:at] = [*([""] if depth == 0 and at else []), *new]
    text = "\n".join(lines) + "\n"
    try:
        before, after = dict(leaves(root)), dict(leaves(_tree(text, source)))
    except ProfileInvalid:
        return None
    return text if after == {**before, fact.key: fact.text} else None


def _last(node: Node) -> int:
    """Return the last line of a value, as far as its parts tell."""
    if isinstance(node, Table):
        return max([node.line, *(max(entry.line, _last(entry.value)) for entry in node.entries.values())])
    if isinstance(node, Items):
        return max([node.line, *(_last(item) for item in node.items)])
    return node.line


def _end(table: Table, lines: list[str]) -> int:
    """Return the line behind a mapping."""
    return min(_last(table), len(lines)) if table.entries else len(lines)


def _child_indent(table: Table, lines: list[str], depth: int) -> int:
    if not table.entries or depth == 0:
        return 2 * depth
    return _indent(lines[next(iter(table.entries.values())).line - 1])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
