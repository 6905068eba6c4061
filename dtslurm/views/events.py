"""A run's events in words, as the dashboard and reports tell them. Pure functions of what was written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dtslurm.diagnose.ranks_apart import describe
from dtslurm.diagnose.supervisor_events import has_crashed
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.node_sets import fold_nodes
from dtslurm.model.units import duration
from dtslurm.model.values import dataclass

Event = Mapping[str, Any]
_LONGEST = 300  # characters of a value
_FINE = (0, WANTS_REQUEUE)


@dataclass(frozen=True)
class EventLine:
    """One line of a timeline.

    Attributes:
        time: seconds since the epoch, None where none was told.
        bad: whether it is one that a person looks for.
    """

    time: float | None
    text: str
    bad: bool = False


def condensed(events: Iterable[Event]) -> list[Event]:
    """Return the events without those on staging that a later one of the same node and source makes old."""
    kept: dict[object, Event] = {}
    for number, event in enumerate(events):
        key: object = number
        if event.get("event") == "staging":
            key = ("staging", _text(event.get("node")), _text(event.get("source")))
            kept.pop(key, None)
        kept[key] = event
    return list(kept.values())


def lines(events: Iterable[Event]) -> list[EventLine]:
    """Return the timeline, oldest first; what many nodes say of the same thing is one line."""
    found: list[EventLine] = []
    together: dict[str, tuple[int, list[Event]]] = {}
    for event in condensed(events):
        group = _group(event)
        if group in together:
            place, members = together[group]
            members.append(event)
            found[place] = _of_many(members)
            continue
        if not group.startswith("staging"):
            together = {key: value for key, value in together.items() if key.startswith("staging")}
        if group:
            together[group] = len(found), [event]
        found.append(_of_many([event]) if group else line(event))
    return found


def line(event: Event) -> EventLine:
    """Return one event in words."""
    name = _text(event.get("event"))
    told = _WORDS.get(name)
    text = told(event) if told is not None else name
    return EventLine(_number(event.get("time")), text, _is_bad(name, event))


def _is_bad(name: str, event: Event) -> bool:
    if name in {"ended", "attempt_ended"}:
        return event.get("exit_code") not in _FINE
    if name in {"health", "onward"}:
        return event.get("ok", event.get("done")) is False
    return name in {
        "hang",
        "supervisor_killed",
        "supervisor_stopped",
        "not_distributed",
        "node_excluded",
        "staging_failed",
        "checkpoint_corrupt",
        "checkpoint_failed",
    }


def _group(event: Event) -> str:
    """Return what an event is one of many of, empty for one that stands alone."""
    if event.get("event") == "staging":
        return f"staging {_text(event.get('source'))}"
    return (
        "health" if event.get("event") == "health" and event.get("ok") and not event.get("findings") else ""
    )


def _of_many(members: Sequence[Event]) -> EventLine:
    moment = max((at for at in (_number(one.get("time")) for one in members) if at is not None), default=None)
    if members[0].get("event") == "staging":
        return EventLine(moment, _staging(members))
    nodes = f"{len(members)} nodes are" if len(members) > 1 else f"{_text(members[0].get('node'))} is"
    return EventLine(moment, f"health: {nodes} fine")


def _staging(members: Sequence[Event]) -> str:
    here = sum(_number(one.get("bytes")) or 0.0 for one in members)
    totals = [_number(one.get("total")) or 0.0 for one in members]
    # Those that have not said a word yet: they wait, or are slow.
    silent = max(0, max(int(_number(one.get("nodes")) or 0) for one in members) - len(members))
    nodes, whole = len(members) + silent, sum(totals) + silent * max(totals)
    done = sum(one.get("done") is True for one in members)
    source = _text(members[0].get("source"))
    where = f"{nodes} nodes" if nodes > 1 else _text(members[0].get("node"))
    if done == nodes:
        return f"data {source} is on {where}: {amount(here)}"
    share = f" ({min(1.0, here / whole):.0%})" if whole > 0 else ""
    ready = f", {done} of {nodes} nodes have it" if nodes > 1 else ""
    return f"copies {source} to {where}: {amount(here)} of {amount(whole)}{share}{ready}"


def _staged(event: Event) -> str:
    size, took = _number(event.get("bytes")), _number(event.get("seconds"))
    copied = f", {amount(size)} copied" if size else ""
    return f"the data is where it is wanted{copied}" + (f" in {duration(took)}" if took else "")


def _attempt(event: Event) -> str:
    ranks = f", {_text(event['world_size'])} ranks" if event.get("world_size") else ""
    return f"attempt {_text(event.get('attempt'))} begins on {_nodes(event.get('nodes'))}{ranks}"


def _attempt_ended(event: Event) -> str:
    code = event.get("exit_code")
    ended = "was lost" if code is None else f"ended with exit code {_text(code)}"
    where = f" on {_text(event['node'])}" if event.get("node") else ""
    who = f"rank {_text(event['rank'])}{where}" if event.get("rank") is not None else where.lstrip()
    summary = _said(event.get("summary") or ("" if code is None else event.get("cause")))
    why = ": ".join(filter(None, (who, summary)))
    return f"attempt {_text(event.get('attempt'))} {ended}" + (f": {why}" if why else "")


_ACTIONS = {
    "restart": "starts again", "requeue": "goes back into the queue", "chain": "goes on in a job of its own",
    "stop": "stops", "shrink": "goes on with fewer nodes", "go": "goes on",
}  # fmt: skip


def _decision(event: Event) -> str:
    action = _text(event.get("action"))
    wait = _number(event.get("wait_s"))
    parts = [_ACTIONS.get(action, action)]
    if wait:
        parts.append(f"in {duration(wait)}")
    if event.get("excluded"):
        parts.append(f"without {_nodes(event['excluded'])}")
    reason = _said(event.get("reason"))
    text = " ".join(parts) + (f": {reason}" if reason else "")
    if event.get("counted") is not True or not event.get("budget"):
        return text
    used, allowed, budget = (_text(event.get(key)) for key in ("used", "of", "budget"))
    return f"{text} (restart {used} of {allowed} after {budget})"


def _supervisor_killed(event: Event) -> str:
    how = "crashed" if has_crashed(event) else "was killed"
    who = f"the supervisor (process {_text(event.get('pid'))} on {_text(event.get('node'))})"
    return f"{who} {how}, exit code {_text(event.get('exit_code'))}"


def _hang(event: Event) -> str:
    where = f" on {_text(event['node'])}" if event.get("node") else ""
    who = f"rank {_text(event['rank'])}{where}" if event.get("rank") is not None else ""
    ranks = event.get("ranks")
    who = who or (
        f"{len(ranks)} ranks" if isinstance(ranks, list) and len(ranks) > 8 else f"ranks {_text(ranks)}"
    )
    summary = _said(event.get("summary"))
    return f"it hangs, {who}" + (f": {summary}" if summary else "")


def _health(event: Event) -> str:
    findings = event.get("findings")
    told = []
    for one in findings if isinstance(findings, list) else []:
        check, evidence = (one.get("check"), one.get("evidence")) if isinstance(one, dict) else ("", one)
        told.append(": ".join(filter(None, (_said(check), _said(evidence)))))
    state = (
        "is fine"
        if event.get("ok") is True and not told
        else "is good enough"
        if event.get("ok")
        else "is bad"
    )
    return f"health: {_text(event.get('node'))} {state}" + (f" ({'; '.join(told[:4])})" if told else "")


def _onward(event: Event) -> str:
    by = {"requeue": "the job is queued again", "afterany": "its successor is queued"}
    what = by.get(_text(event.get("by")), "the next job is queued")
    words = _said(event.get("words"))
    if event.get("done") is False:
        what = "it could not be queued again"
    return what + (f": {words}" if words else "")


def _filled(text: str) -> Callable[[Event], str]:
    return lambda event: text.format_map(_Values(event))


_WORDS: Mapping[str, Callable[[Event], str]] = {
    "submitted": _filled("queued as job {job_id}"),
    "started": lambda event: f"job {_text(event.get('job_id'))} started on {_nodes(event.get('nodes'))}",
    "ended": _filled("ended with exit code {exit_code}"),
    "signalled": _filled("got {signal}"),
    "attempt": _attempt,
    "attempt_ended": _attempt_ended,
    "decision": _decision,
    "onward": _onward,
    "hang": _hang,
    "not_distributed": describe,
    "ranks_apart": describe,
    "distributed": _filled("the ranks train together: {evidence}"),
    "checkpoint": _filled("checkpoint at step {step}"),
    "checkpoint_corrupt": _filled("a checkpoint is not whole, put aside as {path}: {problem}"),
    "checkpoint_failed": _filled("the checkpoint of step {step} was not written: {problem}"),
    "restored": _filled("went on from step {step}"),
    "node_excluded": _filled("{node} left out: {reason}"),
    "agent_restarted": _filled("agent on {node} restarted; its ranks go on"),
    "health": _health,
    "staging": lambda event: _staging([event]),
    "staged": _staged,
    "staging_failed": _filled("the data could not be brought: {problems}"),
    "supervisor_killed": _supervisor_killed,
    "supervisor_stopped": _filled(
        "the supervisor (process {pid} on {node}) is stopped: nothing watches the ranks"
    ),
    "supervisor_continued": _filled("the supervisor (process {pid} on {node}) continues"),
    "restart": _filled("restarted"),
    "cancel": _filled("cancelled by you"),
    "requeue": _filled("requeued by you"),
    "hold": _filled("held by you"),
    "release": _filled("released by you"),
}


class _Values(dict[str, Any]):
    """Fills what an event does not tell with a question mark; nothing of it is looked into."""

    def __init__(self, event: Event) -> None:
        super().__init__({str(key): _text(value) for key, value in event.items()})

    def __missing__(self, key: str) -> str:
        return "?"


def _text(value: object) -> str:
    if value is None:
        return "?"
    if isinstance(value, list):
        return ",".join(str(one)[:_LONGEST] for one in value[:20]) + (",…" if len(value) > 20 else "")
    return str(value)[:_LONGEST]


def _nodes(value: object) -> str:
    return _text(fold_nodes(value) or value)


def _said(value: object) -> str:
    return "" if value in (None, "") else _text(value)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e100 and math.isfinite(value) else None


def amount(size: float) -> str:
    """Return an amount of bytes in a few characters: ``17M``."""
    for unit in "BKMGT":
        if size < 1000 or unit == "T":
            return f"{size:.0f}{unit}" if size >= 10 or unit == "B" else f"{size:.1f}{unit}"
        size /= 1024
    return ""
