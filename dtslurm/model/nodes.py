"""The bad-node list: notes on who found a node bad, when and why, and until when the note is valid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from dtslurm.model.values import dataclass
from dtslurm.worker.lib.json_records import finite_number, parse_object

NODE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
LONGEST_S = 90 * 86400.0  # the longest validity of a note, since nodes get repaired
_MAX_TEXT_LENGTH = 300
_MAX_CLOCK_SKEW_S = 3600.0  # clocks of machines differ


@dataclass(frozen=True, kw_only=True)
class NodeNote:
    """A note on a node.

    Attributes:
        evidence: the evidence for the reason, such as a line of a log.
        job: the job that showed it, if any.
        by: who wrote the note.
        when, expires: seconds since the epoch.
        removed: whether this note revokes all earlier notes on the node.
    """

    node: str
    cluster: str
    reason: str = ""
    evidence: str = ""
    job: str = ""
    by: str = ""
    when: float
    expires: float
    removed: bool = False


@dataclass(frozen=True, kw_only=True)
class ListedNode:
    """A node in the scheduler's list; ``usable`` unless it is down, drained or not responding."""

    name: str
    usable: bool
    features: frozenset[str] = frozenset()


def format_note(note: NodeNote) -> str:
    """Return a note as a line of the bad-node file."""
    return json.dumps({"schema": 1, **asdict(note)})


def parse_notes(lines: Iterable[str], now: float) -> list[NodeNote]:
    """Return the valid notes in the lines of a file that others may also write, ignoring other lines."""
    return [note for text in lines if (note := _parse_note(text, now)) is not None]


def _parse_note(text: str, now: float) -> NodeNote | None:
    values = parse_object(text)
    if not NODE_NAME.fullmatch(str(values.get("node", ""))):
        return None
    noted_at, expires = finite_number(values.get("when")), finite_number(values.get("expires"))
    if noted_at is None or expires is None or noted_at > now + _MAX_CLOCK_SKEW_S:
        return None
    texts = {key: make_printable(values.get(key)) for key in ("cluster", "reason", "evidence", "job", "by")}
    return NodeNote(
        node=values["node"],
        **texts,
        when=noted_at,
        expires=min(expires, noted_at + LONGEST_S),
        removed=values.get("removed") is True,
    )


def make_printable(value: object) -> str:
    """Return a value as one line of printable text, at most 300 characters long."""
    text = "".join(
        character if character.isprintable() else " "
        for character in str(value or "")[: 2 * _MAX_TEXT_LENGTH]
    )
    return " ".join(text.split())[:_MAX_TEXT_LENGTH]


def select_newest_notes(notes: Sequence[NodeNote], now: float) -> list[NodeNote]:
    """Return the newest valid note on each node, sorted by node."""
    newest_by_node: dict[str, NodeNote] = {}
    for note in sorted(notes, key=lambda note_: note_.when):
        if note.removed:
            newest_by_node.pop(note.node, None)
        elif note.expires > now:
            newest_by_node[note.node] = note
    return [newest_by_node[name] for name in sorted(newest_by_node)]


def choose_exclusions(
    notes: Sequence[NodeNote], listed_nodes: Sequence[ListedNode], node_count: int
) -> tuple[list[NodeNote], list[NodeNote]]:
    """Return (notes on nodes to exclude, notes on nodes that a job of ``node_count`` nodes needs).

    The newest notes take precedence. Nodes that the scheduler does not list are ignored.
    """
    usable_names = {node.name for node in listed_nodes if node.usable}
    names = {node.name for node in listed_nodes}
    excluded_notes: list[NodeNote] = []
    needed_notes: list[NodeNote] = []
    usable_left = len(usable_names)
    for note in sorted((note for note in notes if note.node in names), key=lambda note: -note.when):
        cost = 1 if note.node in usable_names else 0
        if (usable_left - cost < node_count and cost) or len(names) - len(excluded_notes) <= node_count:
            needed_notes.append(note)
        else:
            excluded_notes.append(note)
            usable_left -= cost
    return sorted(excluded_notes, key=lambda note: note.node), sorted(
        needed_notes, key=lambda note: note.node
    )
