"""Updates an existing profile line by line and keeps everything that its user wrote."""

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
    """The result of an update of a profile.

    Attributes:
        text: the text of the whole file.
        changed: (key, old value, new value) of values that an earlier run of discover had written.
        added: keys that the profile did not have.
        yours: (key, user's value, discovered value) of values that the user wrote; they are not changed.
        missed: keys that could not be written because the file does not have one value per line.
    """

    text: str
    changed: tuple[tuple[str, str, str], ...] = ()
    added: tuple[str, ...] = ()
    yours: tuple[tuple[str, str, str], ...] = ()
    missed: tuple[str, ...] = ()


def amend(old_text: str, cluster: DiscoveredCluster, source: str) -> Amended:
    """Return the file's text with discovered values in place of those that an earlier run wrote.

    A value that differs from what discover wrote is the user's and is kept; a value that the user removed
    stays removed. Values that are no longer discovered are also kept.

    Args:
        old_text: the text of the profile.
        cluster: the discovered facts.
        source: the name of the file, for error messages.

    Raises:
        ProfileInvalid: the file cannot be parsed.
    """
    recorded_marks = page.read_memory(old_text)
    body = page.without_memory(old_text)
    values = dict(iterate_leaves(_parse_profile(body, source)))
    changed_values, added_values, user_values, missed_facts = [], [], [], []
    written_values: dict[str, str] = {}
    for fact in cluster.facts:
        current = values.get(fact.key)
        if current is not None and _is_equal(current, fact.text):
            if page.was_written(recorded_marks, fact.name, current):
                written_values[fact.name] = fact.text
            continue
        is_ours = current is not None and page.was_written(recorded_marks, fact.name, current)
        was_removed = current is None and page.encoded(fact.name) in recorded_marks
        if (current is not None and not is_ours) or was_removed:
            user_values.append((fact.name, current if current is not None else "(taken out)", fact.text))
            continue
        new_body = _insert_value(body, fact, source)
        if new_body is None:
            missed_facts.append(fact.name)
            continue
        body = new_body
        written_values[fact.name] = fact.text
        if current is None:
            added_values.append(fact.name)
        else:
            changed_values.append((fact.name, current, fact.text))
    if not changed_values and not added_values:
        return Amended(old_text, yours=tuple(user_values), missed=tuple(missed_facts))
    values_to_record = _values_to_record(
        recorded_marks,
        dict(iterate_leaves(_parse_profile(body, source))),
        written_values,
        {row[0] for row in user_values},
    )
    memory = page.memory(values_to_record)
    text = body if not memory else f"{body}\n" + "\n".join([*memory, ""])
    return Amended(text, tuple(changed_values), tuple(added_values), tuple(user_values), tuple(missed_facts))


def iterate_leaves(node: Node, parent_keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (key, text) of every value of a tree; a list is one value."""
    if isinstance(node, Table):
        for key, entry in node.entries.items():
            yield from iterate_leaves(entry.value, (*parent_keys, key))
    elif isinstance(node, Items):
        yield parent_keys, ", ".join(item.text or "" for item in node.items if isinstance(item, Scalar))
    elif node.written:
        yield parent_keys, node.text if node.text is not None else "null"


def _parse_profile(text: str, source: str) -> Table:
    return strict_yaml.parse(text.encode("utf-8", "surrogateescape"), source)[0]


def _is_equal(written_value: str, discovered_value: str) -> bool:
    return (
        written_value == discovered_value or written_value.strip().lower() == discovered_value.strip().lower()
    )


def _values_to_record(
    recorded_marks: Mapping[str, str],
    values: Mapping[tuple[str, ...], str],
    written_values: dict[str, str],
    user_keys: set[str],
) -> dict[str, str]:
    """Return discover's own values in the file, and a mark for each key that the user edited."""
    own_values = dict(written_values)
    for key, value in values.items():
        name = ".".join(key)
        if name not in own_values and page.was_written(recorded_marks, name, value):
            own_values[name] = value
    # A later run must still recognize the edit: record the key with a text that no value can have.
    return {
        **own_values,
        **{name: f"\0{name}" for name in sorted(user_keys) if page.encoded(name) in recorded_marks},
    }


def _insert_value(body: str, fact: Fact, source: str) -> str | None:
    """Return the text with one value inserted, or None if the value cannot be inserted line by line."""
    root = _parse_profile(body, source)
    lines = body.splitlines()
    table, depth = root, 0
    for key in fact.key[:-1]:
        entry = table.entries.get(key)
        if entry is None or not isinstance(entry.value, Table):
            break
        table, depth = entry.value, depth + 1
    entry = table.entries.get(fact.key[depth])
    if entry is not None and depth == len(fact.key) - 1:
        if entry.value.line != entry.line or _last_line(entry.value) != entry.line:
            return None
        first_line, indent = entry.line - 1, _indent(lines[entry.line - 1])
        if " #" not in lines[first_line] and first_line and page.is_note(lines[first_line - 1]):
            first_line -= 1  # also replace the evidence comment of the old value
        lines[first_line : entry.line] = page.line_of(fact, indent // 2)
    elif entry is not None:
        return None  # the profile has a value where a mapping is needed
    else:
        position, indent = _line_after(table, lines), _find_child_indent(table, lines, depth)
        if indent % 2:
            return None
        new_lines = []
        for level, key in enumerate(fact.key[depth:-1]):
            new_lines.append(f"{' ' * (indent + 2 * level)}{page.scalar(key)}:")
        new_lines += page.line_of(fact, indent // 2 + len(fact.key) - 1 - depth)
        lines[position:position] = [*([""] if depth == 0 and position else []), *new_lines]
    text = "\n".join(lines) + "\n"
    try:
        old_leaves, new_leaves = (
            dict(iterate_leaves(root)),
            dict(iterate_leaves(_parse_profile(text, source))),
        )
    except ProfileInvalid:
        return None
    return text if new_leaves == {**old_leaves, fact.key: fact.text} else None


def _last_line(node: Node) -> int:
    """Return the last line of a value, as far as the lines of its parts show it."""
    if isinstance(node, Table):
        return max(
            [node.line, *(max(entry.line, _last_line(entry.value)) for entry in node.entries.values())]
        )
    if isinstance(node, Items):
        return max([node.line, *(_last_line(item) for item in node.items)])
    return node.line


def _line_after(table: Table, lines: list[str]) -> int:
    """Return the line after a mapping."""
    return min(_last_line(table), len(lines)) if table.entries else len(lines)


def _find_child_indent(table: Table, lines: list[str], depth: int) -> int:
    if not table.entries or depth == 0:
        return 2 * depth
    return _indent(lines[next(iter(table.entries.values())).line - 1])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
