"""Writes the YAML text of a discovered profile.

Each value has its evidence in a comment. Comment lines at the end, the memory, have a checksum of each
written value, by which a later run of discover recognizes the user's edits.
"""

from __future__ import annotations

import json
import re
import textwrap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, get_args

from dtslurm.discover.facts import Confidence, DiscoveredCluster, Fact, Value, text_of

# The order of a profile's sections, the same as in the bundled profiles.
_ORDER = (
    "extends", "title", "recognise", "sources", "scheduler", "login", "slurm", "node_types",
    "default_node_type", "fabric", "environment", "container", "paths",
)  # fmt: skip
_EVIDENCE_COLUMN = 40
_WIDTH = 110
MEMORY = "#= "
_MEMORY_HEAD = (
    "# Checksums of the values that discover wrote. A later discovery uses them to recognize your edits:"
)
_UNQUOTED = re.compile(r"[A-Za-z0-9$/][\w./@+$~=:-]*(?: [\w./@+$~=()-]+)*")
_EVIDENCE_LINE = re.compile(rf" *# .*; (?:{'|'.join(get_args(Confidence))})")
_YAML_KEYWORDS = {"null", "true", "false", "yes", "no", "on", "off", "~", "none"}

Branch: TypeAlias = "dict[str, Branch | Fact]"


def text(cluster: DiscoveredCluster, *, head: Sequence[str], extends: str | None = None) -> str:
    """Return the text of the profile.

    Args:
        cluster: the discovered facts.
        head: comment lines for the start of the file.
        extends: the name of the profile that this profile extends.
    """
    lines = ["# yaml-language-server: $schema=./schema.json"]
    lines += [comment(line) for line in (*head, *cluster.remarks.get("", ()))]
    if extends:
        lines.append(f"extends: {scalar(extends)}")
    tree = branch(cluster.facts)
    for key in sorted(tree, key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER)):
        child = tree[key]
        if key not in {"title", "sources"}:
            lines.append("")
        lines += _format_section(key, child, 0, key, cluster.remarks)
    for section in sorted(set(cluster.remarks) - set(_section_paths(tree)) - {""}):
        lines += ["", *(comment(line) for line in cluster.remarks[section])]
    return "\n".join([*lines, "", *memory({fact.name: fact.text for fact in cluster.facts}), ""])


def branch(facts: Sequence[Fact]) -> Branch:
    """Return facts as a tree of keys."""
    root: Branch = {}
    for fact in facts:
        table = root
        for key in fact.key[:-1]:
            subtable = table.setdefault(key, {})
            if isinstance(subtable, Fact):
                break
            table = subtable
        else:
            table[fact.key[-1]] = fact
    return root


def _section_paths(tree: Branch, prefix: str = "") -> Iterator[str]:
    for key, child in tree.items():
        if not isinstance(child, Fact):
            yield f"{prefix}{key}"
            yield from _section_paths(child, f"{prefix}{key}.")


def _format_section(
    key: str, child: Branch | Fact, depth: int, path: str, remarks_by_section: Mapping[str, Sequence[str]]
) -> list[str]:
    if isinstance(child, Fact):
        return line_of(child, depth)
    lines = [f"{'  ' * depth}{scalar(key)}:"]
    lines += [f"{'  ' * (depth + 1)}{comment(line)}" for line in remarks_by_section.get(path, ())]
    for name, value in child.items():
        lines += _format_section(name, value, depth + 1, f"{path}.{name}", remarks_by_section)
    return lines


def line_of(fact: Fact, depth: int) -> list[str]:
    """Return the lines of a value: its evidence beside it, or above it if the line would be too long."""
    assignment = f"{'  ' * depth}{scalar(fact.key[-1])}: {written(fact.value)}"
    evidence_comment = comment(f"{fact.evidence}; {fact.sure}")
    if len(assignment) < _EVIDENCE_COLUMN:
        assignment = assignment.ljust(_EVIDENCE_COLUMN - 2)
    if len(assignment) + 2 + len(evidence_comment) <= _WIDTH:
        return [f"{assignment}  {evidence_comment}"]
    return [f"{'  ' * depth}{evidence_comment}", assignment.rstrip()]


def is_note(line: str) -> bool:
    """Return whether a line is only the evidence comment of the value on the next line."""
    return _EVIDENCE_LINE.fullmatch(line) is not None


def written(value: Value) -> str:
    """Return a value as YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(scalar(entry) for entry in value)}]"
    return scalar(value) if isinstance(value, str) else text_of(value)


def scalar(value: str) -> str:
    """Return a string as YAML, in quotes if it needs them."""
    if (
        _UNQUOTED.fullmatch(value)
        and value.lower() not in _YAML_KEYWORDS
        and not value.endswith(":")
        and ": " not in value
    ):
        return value if not re.fullmatch(r"[\d:._-]+", value) or value.isdecimal() else json.dumps(value)
    return json.dumps(_clean(value), ensure_ascii=False)


def comment(line: str) -> str:
    """Return a one-line comment."""
    return f"# {' '.join(_clean(line).split())}"


def _clean(value: str) -> str:
    """Replace unprintable characters: whitespace by a space, others by ?."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in value)


# ---- Memory of written values ----


def memory(values: Mapping[str, str]) -> list[str]:
    """Return the comment lines that record a checksum of each value."""
    entries_by_section: dict[str, list[str]] = {}
    for name, value in values.items():
        parts = encoded(name).split(".")
        section = ".".join(parts[: min(2, len(parts) - 1)])
        entries_by_section.setdefault(section, []).append(
            f"{'.'.join(parts[min(2, len(parts) - 1) :])}={mark(value)}"
        )
    lines = []
    for section, entries in entries_by_section.items():
        line_start = f"{MEMORY}{section}: "
        width = max(_WIDTH - len(line_start), 40)
        wrapped_rows = textwrap.wrap(" ".join(entries), width, break_long_words=False, break_on_hyphens=False)
        lines += [line_start + row for row in wrapped_rows]
    return [_MEMORY_HEAD, *lines] if lines else []


def mark(value: str) -> str:
    """Return a short checksum of a value, to recognize the value later."""
    return f"{zlib.crc32(value.encode('utf-8', 'replace')) & 0xFFFFF:05x}"


def encoded(name: str) -> str:
    """Return a key as one word, with spaces and special characters percent-encoded."""
    return re.sub(
        r"[\s=%:]|[^\x21-\x7e]",
        lambda match: "".join(f"%{byte:02x}" for byte in match[0].encode("utf-8", "replace")),
        name,
    )


def read_memory(text: str) -> dict[str, str]:
    """Return the recorded checksums by (encoded) key."""
    marks = {}
    for line in text.splitlines():
        if line.startswith(MEMORY):
            section, _, entries = line[len(MEMORY) :].partition(":")
            for entry in entries.split():
                name, _, value = entry.rpartition("=")
                marks[f"{section}.{name}" if section else name] = value
    return marks


def was_written(recorded_marks: Mapping[str, str], name: str, value: str) -> bool:
    """Return whether discover wrote exactly this value for the key."""
    return recorded_marks.get(encoded(name)) == mark(value)


def without_memory(text: str) -> str:
    """Return a profile's text without the memory's comment lines."""
    lines = [line for line in text.splitlines() if not line.startswith(MEMORY) and line != _MEMORY_HEAD]
    return "\n".join(lines).rstrip("\n") + "\n"
