"""What is remembered of nodes: who found one bad, when and why, and until when that holds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from dtslurm.model.values import dataclass

NODE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
LONGEST_S = 90 * 86400.0  # no note holds longer: nodes are repaired
_LONGEST_TEXT = 300
_AHEAD_S = 3600.0  # clocks differ


@dataclass(frozen=True, kw_only=True)
class NodeNote:
    """One note on a node.

    Attributes:
        evidence: what showed it, such as a line of a log.
        job: the job that it was seen in, if any.
        by: who noted it.
        when, expires: seconds since the epoch.
        removed: nothing that was noted before is said against the node any more.
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
    """A node as the scheduler lists it; ``usable`` unless it is down, drained or does not answer."""

    name: str
    usable: bool
    features: frozenset[str] = frozenset()


def line(note: NodeNote) -> str:
    """Return a note as a line of a file."""
    return json.dumps({"schema": 1, **asdict(note)})


def read(lines: Iterable[str], now: float) -> list[NodeNote]:
    """Return the notes in a file that others may write, too: what makes no sense is left out."""
    return [note for text in lines if (note := _note(text, now)) is not None]


def _note(text: str, now: float) -> NodeNote | None:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not NODE_NAME.fullmatch(str(values.get("node", ""))):
        return None
    when, expires = values.get("when"), values.get("expires")
    if not isinstance(when, int | float) or not isinstance(expires, int | float):
        return None
    if not math.isfinite(when) or not math.isfinite(expires) or when > now + _AHEAD_S:
        return None
    words = {key: plain(values.get(key)) for key in ("cluster", "reason", "evidence", "job", "by")}
    return NodeNote(
        node=values["node"],
        **words,
        when=float(when),
        expires=min(float(expires), when + LONGEST_S),
        removed=values.get("removed") is True,
    )


def plain(value: object) -> str:
    """Return text as one printable line of a bearable length."""
    text = "".join(one if one.isprintable() else " " for one in str(value or "")[: 2 * _LONGEST_TEXT])
    return " ".join(text.split())[:_LONGEST_TEXT]


def current(notes: Sequence[NodeNote], now: float) -> list[NodeNote]:
    """Return the newest note on each node that holds now, by node."""
    found: dict[str, NodeNote] = {}
    for note in sorted(notes, key=lambda one: one.when):
        if note.removed:
            found.pop(note.node, None)
        elif note.expires > now:
            found[note.node] = note
    return [found[name] for name in sorted(found)]


def fitting(
    notes: Sequence[NodeNote], listed: Sequence[ListedNode], needed: int
) -> tuple[list[NodeNote], list[NodeNote]]:
    """Return (notes on nodes to leave out, notes on nodes that a job of ``needed`` nodes cannot do without).

    The newest notes go first. Nodes that the scheduler does not list are no matter.
    """
    usable = {node.name for node in listed if node.usable}
    names = {node.name for node in listed}
    out: list[NodeNote] = []
    kept: list[NodeNote] = []
    left = len(usable)
    for note in sorted((one for one in notes if one.node in names), key=lambda one: -one.when):
        costs = 1 if note.node in usable else 0
        if (left - costs < needed and costs) or len(names) - len(out) <= needed:
            kept.append(note)
        else:
            out.append(note)
            left -= costs
    return sorted(out, key=lambda one: one.node), sorted(kept, key=lambda one: one.node)
