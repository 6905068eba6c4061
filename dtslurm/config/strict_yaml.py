"""Strict YAML: every scalar stays text, in a tree with the line number of every key and value.

PyYAML's own loaders turn ``2:30:00`` into 9000, ``012345`` into 5349 and ``no`` into False, and silently let
the last of two equal keys win. Here every scalar stays the text that was written; types are applied later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from dtslurm.config.tree import Items, MappingEntry, Node, Problem, Scalar, Table
from dtslurm.errors import ProfileInvalid

MAX_BYTES = 1_000_000
MAX_DEPTH = 16
_NULLS = {"", "~", "null", "Null", "NULL"}
_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PLAIN_MESSAGES = (
    ("exceeded maximum nesting depth", f"nested more than {MAX_DEPTH} deep"),  # libyaml 0.2.6
    (
        "did not find expected key",
        "the indentation does not match the lines above, or a quote ends too early",
    ),
    (
        "did not find expected '-' indicator",
        "the indentation does not match the list above, or a '- ' is missing",
    ),
    ("expected <block end>", "the indentation does not match the lines above, or a quote ends too early"),
    ("mapping values are not allowed", "a second ': ' in one line; put quotes around the text, or indent it"),
    ("could not find expected ':'", "a ':' is missing after the key"),
    ("did not find expected ',' or", "a ',' or the closing bracket is missing"),
    ("expected ',' or", "a ',' or the closing bracket is missing"),
    ("found unexpected end of stream", "the quote that opens here is never closed"),
    ("unexpected document separator", "the quote that opens here is never closed"),
    ("expected the node content", "a value is missing, or there is an extra ',' or ':'"),
    ("did not find expected node content", "a value is missing, or there is an extra ',' or ':'"),
    ("found a tab character", "a tab; YAML needs spaces"),
    ("unknown escape", "an unknown \\ escape; use single quotes around text with backslashes"),
)


def parse(data: bytes, source: str) -> tuple[Table, list[Problem]]:
    """Return the tree of a YAML document that is a mapping; an empty document is an empty mapping.

    Args:
        data: the file's bytes, UTF-8, at most 1 MB.
        source: the file's name in messages.

    Returns:
        The tree, and the problems that do not prevent reading on (duplicate keys, aliases, anchors, tags).

    Raises:
        ProfileInvalid: the data is not valid YAML; one line gives the location and the reason.
    """
    text = _decode_text(data, source)
    builder = _TreeBuilder(source, text)
    try:
        root = builder.document()
    except yaml.YAMLError as error:
        raise _make_error(_describe_syntax_error(error, source, text)) from None
    if isinstance(root, Scalar) and root.text is None:
        root = Table(source, root.line)
    if not isinstance(root, Table):
        message = "the file should contain keys and values, as in 'key: value'"
        raise _make_error(Problem(source, root.line, "", message))
    return root, builder.problems


def _make_error(problem: Problem) -> ProfileInvalid:
    return ProfileInvalid([str(problem)])


def _decode_text(data: bytes, source: str) -> str:
    if len(data) > MAX_BYTES:
        raise _make_error(
            Problem(source, 1, "", "larger than 1 MB, which is too large for a configuration file")
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _make_error(Problem(source, line, "", "not UTF-8 text")) from None
    match = _UNPRINTABLE.search(text)
    if match:
        line = text.count("\n", 0, match.start()) + 1
        message = f"a character that YAML does not allow: {match[0]!r}"
        raise _make_error(Problem(source, line, "", message))
    return text


def _describe_syntax_error(error: yaml.YAMLError, source: str, text: str) -> Problem:
    """Return PyYAML's error as a problem in plain words; libyaml's messages differ from PyYAML's own."""
    parser_message = f"{getattr(error, 'context', None) or ''}, {getattr(error, 'problem', None) or error}"
    position = getattr(error, "problem_mark", None)
    start = getattr(error, "context_mark", None)
    message = next(
        (plain_message for pattern, plain_message in _PLAIN_MESSAGES if pattern in parser_message),
        parser_message.strip(", "),
    )
    if "never closed" in message and start is not None:
        position = start
    line = position.line if position is not None else 0
    lines = text.splitlines() or [""]
    line = min(line, len(lines) - 1)
    if "cannot start any token" in parser_message:
        line_rest = lines[line][position.column :] if position is not None else ""
        if "\t" in line_rest[:1] or lines[line].lstrip(" ").startswith("\t"):
            message = "a tab; YAML needs spaces"
        else:
            message = f"text that starts with {line_rest[:1] or 'this character'!r} needs quotes"
    return Problem(source, line + 1, "", " ".join(message.split()))


class _TreeBuilder:
    """Builds the tree from parser events, and checks depth, aliases and tags before they use memory."""

    def __init__(self, source: str, text: str) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self._events: Iterator[Any] = iter(yaml.parse(text, Loader=_LOADER))

    def document(self) -> Node:
        """Return the root of the only document, a null scalar if there is none."""
        next(self._events)  # start of stream
        event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            return Scalar(self.source, 1, None, written=False)
        root = self._build_node(next(self._events), 0, "")
        next(self._events)  # end of document
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            line = event.start_mark.line + 1
            raise _make_error(
                Problem(self.source, line, "", "a second document; a file may contain only one document")
            )
        return root

    def _build_node(self, event: Any, depth: int, path: str) -> Node:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            self._report(
                line, path, f"aliases are not allowed; if this is text, put '*{event.anchor}' in quotes"
            )
            return Scalar(self.source, line, "*")
        if event.anchor is not None:
            self._report(
                line, path, f"anchors are not allowed; if this is text, put '&{event.anchor}' in quotes"
            )
        if event.tag is not None:
            self._report(
                line,
                path,
                "tags are not allowed; if this is text, put the text that starts with '!' in quotes",
            )
        if isinstance(event, yaml.ScalarEvent):
            # A scalar without quotes; libyaml's styles may contain a NUL character.
            is_plain = event.style is None or not event.style.strip("\0")
            if is_plain and event.value in _NULLS:
                return Scalar(self.source, line, None, written=event.value != "")
            return Scalar(self.source, line, event.value)
        if depth >= MAX_DEPTH:
            raise _make_error(Problem(self.source, line, path, f"nested more than {MAX_DEPTH} deep"))
        if isinstance(event, yaml.SequenceStartEvent):
            return Items(self.source, line, tuple(self._build_items(depth, path)))
        return Table(self.source, line, self._build_entries(depth, path))

    def _build_items(self, depth: int, path: str) -> Iterator[Node]:
        for number, event in enumerate(self._events):
            if isinstance(event, yaml.SequenceEndEvent):
                return
            yield self._build_node(event, depth + 1, f"{path}[{number}]")

    def _build_entries(self, depth: int, path: str) -> dict[str, MappingEntry]:
        entries: dict[str, MappingEntry] = {}
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            line = event.start_mark.line + 1
            key = self._build_node(event, depth + 1, path)
            name = event.value if isinstance(event, yaml.ScalarEvent) else ""
            key_path = f"{path}.{name}" if path else name
            value = self._build_node(next(self._events), depth + 1, key_path)
            if not isinstance(key, Scalar) or not name:
                self._report(line, path, "a key should be a word before ':'")
            elif name in entries:
                self._report(line, key_path, f"given twice; the first is on line {entries[name].line}")
            else:
                entries[name] = MappingEntry(self.source, line, value)
        return entries

    def _report(self, line: int, path: str, message: str) -> None:
        self.problems.append(Problem(self.source, line, path, message))
