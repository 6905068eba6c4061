"""A profile's text: every value with its evidence beside it, and a memory of what was written."""

from __future__ import annotations

import json
import re
import textwrap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, get_args

from dtslurm.discover.facts import DiscoveredCluster, Fact, Sure, Value, text_of

# Order of a profile's sections, as in those that come along.
_ORDER = (
    "extends", "title", "recognise", "sources", "scheduler", "login", "slurm", "node_types",
    "default_node_type", "fabric", "environment", "container", "paths",
)  # fmt: skip
_COLUMN = 40
_WIDTH = 110
MEMORY = "#= "
_MEMORY_HEAD = "# What discover wrote, so that when it looks again it knows your edits from its own values:"
_PLAIN = re.compile(r"[A-Za-z0-9$/][\w./@+$~=:-]*(?: [\w./@+$~=()-]+)*")
_NOTE = re.compile(rf" *# .*; (?:{'|'.join(get_args(Sure))})")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "~", "none"}

Branch: TypeAlias = "dict[str, Branch | Fact]"


def text(found: DiscoveredCluster, *, head: Sequence[str], extends: str | None = None) -> str:
    """Return the profile.

    Args:
        head: comment lines for its beginning.
        extends: the profile that it completes.
    """
    lines = ["# yaml-language-server: $schema=./schema.json"]
    lines += [comment(line) for line in (*head, *found.remarks.get("", ()))]
    if extends:
        lines.append(f"extends: {scalar(extends)}")
    tree = branch(found.facts)
    for key in sorted(tree, key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER)):
        below = tree[key]
        if key not in {"title", "sources"}:
            lines.append("")
        lines += _lines(key, below, 0, key, found.remarks)
    for where in sorted(set(found.remarks) - set(_paths(tree)) - {""}):
        lines += ["", *(comment(line) for line in found.remarks[where])]
    return "\n".join([*lines, "", *memory({fact.name: fact.text for fact in found.facts}), ""])


def branch(facts: Sequence[Fact]) -> Branch:
    """Return facts as a tree of keys."""
    root: Branch = {}
    for fact in facts:
        place = root
        for key in fact.key[:-1]:
            inner = place.setdefault(key, {})
            if isinstance(inner, Fact):
                break
            place = inner
        else:
            place[fact.key[-1]] = fact
    return root


def _paths(tree: Branch, above: str = "") -> Iterator[str]:
    for key, below in tree.items():
        if not isinstance(below, Fact):
            yield f"{above}{key}"
            yield from _paths(below, f"{above}{key}.")


def _lines(
    key: str, below: Branch | Fact, depth: int, path: str, remarks: Mapping[str, Sequence[str]]
) -> list[str]:
    if isinstance(below, Fact):
        return line_of(below, depth)
    lines = [f"{'  ' * depth}{scalar(key)}:"]
    lines += [f"{'  ' * (depth + 1)}{comment(line)}" for line in remarks.get(path, ())]
    for name, value in below.items():
        lines += _lines(name, value, depth + 1, f"{path}.{name}", remarks)
    return lines


def line_of(fact: Fact, depth: int) -> list[str]:
    """Return a value's line with its evidence beside it, or above it where that would be too long."""
    words = f"{'  ' * depth}{scalar(fact.key[-1])}: {written(fact.value)}"
    note = comment(f"{fact.evidence}; {fact.sure}")
    if len(words) < _COLUMN:
        words = words.ljust(_COLUMN - 2)
    if len(words) + 2 + len(note) <= _WIDTH:
        return [f"{words}  {note}"]
    return [f"{'  ' * depth}{note}", words.rstrip()]


def is_note(line: str) -> bool:
    """Whether a line is nothing but a value's evidence, which stands above the value that it is of."""
    return _NOTE.fullmatch(line) is not None


def written(value: Value) -> str:
    """Return a value in YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(scalar(one) for one in value)}]"
    return scalar(value) if isinstance(value, str) else text_of(value)


def scalar(value: str) -> str:
    """Return text in YAML, in quotes where it needs them."""
    if (
        _PLAIN.fullmatch(value)
        and value.lower() not in _WORDS
        and not value.endswith(":")
        and ": " not in value
    ):
        return value if not re.fullmatch(r"[\d:._-]+", value) or value.isdecimal() else json.dumps(value)
    return json.dumps(_clean(value), ensure_ascii=False)


def comment(line: str) -> str:
    """Return a comment of one line."""
    return f"# {' '.join(_clean(line).split())}"


def _clean(value: str) -> str:
    """Return text that can stand in a YAML file: of other characters a ? remains."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in value)


# ---- What was written ----


def memory(values: Mapping[str, str]) -> list[str]:
    """Return comment lines that remember which values these were."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        parts = encoded(name).split(".")
        above = ".".join(parts[: min(2, len(parts) - 1)])
        groups.setdefault(above, []).append(f"{'.'.join(parts[min(2, len(parts) - 1) :])}={mark(value)}")
    lines = []
    for above, words in groups.items():
        head = f"{MEMORY}{above}: "
        width = max(_WIDTH - len(head), 40)
        rows = textwrap.wrap(" ".join(words), width, break_long_words=False, break_on_hyphens=False)
        lines += [head + row for row in rows]
    return [_MEMORY_HEAD, *lines] if lines else []


def mark(value: str) -> str:
    """Return what tells one value from another."""
    return f"{zlib.crc32(value.encode('utf-8', 'replace')) & 0xFFFFF:05x}"


def encoded(name: str) -> str:
    """Return a key as one word without spaces."""
    return re.sub(
        r"[\s=%:]|[^\x21-\x7e]",
        lambda found: "".join(f"%{byte:02x}" for byte in found[0].encode("utf-8", "replace")),
        name,
    )


def remembered(text: str) -> dict[str, str]:
    """Return the marks of the values that were written, by their (encoded) keys."""
    found = {}
    for line in text.splitlines():
        if line.startswith(MEMORY):
            above, _, words = line[len(MEMORY) :].partition(":")
            for word in words.split():
                name, _, value = word.rpartition("=")
                found[f"{above}.{name}" if above else name] = value
    return found


def was_written(known: Mapping[str, str], name: str, value: str) -> bool:
    """Whether this very value was written by discover."""
    return known.get(encoded(name)) == mark(value)


def without_memory(text: str) -> str:
    """Return a profile's text without its memory."""
    lines = [line for line in text.splitlines() if not line.startswith(MEMORY) and line != _MEMORY_HEAD]
    return "\n".join(lines).rstrip("\n") + "\n"
