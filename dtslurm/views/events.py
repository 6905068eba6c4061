"""Describe the events of a run as text, for the dashboard and for reports. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dtslurm.diagnose.ranks_apart import describe
from dtslurm.diagnose.supervisor_events import has_crashed
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.values import dataclass
from dtslurm.presentation.node_sets import fold_nodes
from dtslurm.presentation.quantities import duration, format_bytes_short
from dtslurm.worker.lib.json_records import finite_number

Event = Mapping[str, Any]
_MAX_VALUE_LENGTH = 300  # characters of a value that are shown
_SUCCESS_CODES = (0, WANTS_REQUEUE)


@dataclass(frozen=True)
class EventLine:
    """One line of a timeline.

    Attributes:
        time: seconds since the epoch, None if the event has no time.
        bad: whether the event reports a problem.
    """

    time: float | None
    text: str
    bad: bool = False


def drop_outdated_staging(events: Iterable[Event]) -> list[Event]:
    """Return the events, with only the newest staging event of each node and source."""
    events_by_key: dict[object, Event] = {}
    for number, event in enumerate(events):
        key: object = number
        if event.get("event") == "staging":
            key = ("staging", _to_text(event.get("node")), _to_text(event.get("source")))
            events_by_key.pop(key, None)
        events_by_key[key] = event
    return list(events_by_key.values())


def lines(events: Iterable[Event]) -> list[EventLine]:
    """Return the timeline, oldest first; equal events of several nodes are merged into one line."""
    timeline: list[EventLine] = []
    open_groups: dict[str, tuple[int, list[Event]]] = {}
    for event in drop_outdated_staging(events):
        group = _group_key(event)
        if group in open_groups:
            index, members = open_groups[group]
            members.append(event)
            timeline[index] = _merge_members(members)
            continue
        # Events of other kinds end a group of health events, but not the staging of a source.
        if not group.startswith("staging"):
            open_groups = {key: value for key, value in open_groups.items() if key.startswith("staging")}
        if group:
            open_groups[group] = len(timeline), [event]
        timeline.append(_merge_members([event]) if group else line(event))
    return timeline


def line(event: Event) -> EventLine:
    """Return one event as a line of the timeline."""
    name = _to_text(event.get("event"))
    describe_event = _DESCRIPTIONS.get(name)
    text = describe_event(event) if describe_event is not None else name
    return EventLine(finite_number(event.get("time")), text, _is_bad(name, event))


def _is_bad(name: str, event: Event) -> bool:
    if name in {"ended", "attempt_ended"}:
        return event.get("exit_code") not in _SUCCESS_CODES
    if name in {"health", "onward"}:
        return event.get("ok", event.get("done")) is False
    if name == "role_ended":
        return event.get("cause") is not None
    return name in {
        "hang",
        "role_failed",
        "supervisor_killed",
        "supervisor_stopped",
        "not_distributed",
        "node_excluded",
        "staging_failed",
        "checkpoint_corrupt",
        "checkpoint_failed",
        "stalled",
        "limit_expected",
        "message_failed",
        "messages_left",
    }


def _group_key(event: Event) -> str:
    """Return the key of the group into which an event is merged, empty for an event that is not merged."""
    if event.get("event") == "staging":
        return f"staging {_to_text(event.get('source'))}"
    return (
        "health" if event.get("event") == "health" and event.get("ok") and not event.get("findings") else ""
    )


def _merge_members(members: Sequence[Event]) -> EventLine:
    latest_time = max(
        (time for time in (finite_number(member.get("time")) for member in members) if time is not None),
        default=None,
    )
    if members[0].get("event") == "staging":
        return EventLine(latest_time, _describe_staging(members))
    nodes = f"{len(members)} nodes are" if len(members) > 1 else f"{_to_text(members[0].get('node'))} is"
    return EventLine(latest_time, f"health: {nodes} healthy")


def _describe_staging(members: Sequence[Event]) -> str:
    copied_bytes = sum(finite_number(member.get("bytes")) or 0.0 for member in members)
    totals = [finite_number(member.get("total")) or 0.0 for member in members]
    # Nodes without a staging event yet: they wait, or are slow.
    nodes_without_event = max(
        0, max(int(finite_number(member.get("nodes")) or 0) for member in members) - len(members)
    )
    nodes, total_bytes = len(members) + nodes_without_event, sum(totals) + nodes_without_event * max(totals)
    finished_count = sum(member.get("done") is True for member in members)
    source = _to_text(members[0].get("source"))
    target = f"{nodes} nodes" if nodes > 1 else _to_text(members[0].get("node"))
    if finished_count == nodes:
        return f"data {source} is on {target}: {format_bytes_short(copied_bytes)}"
    percent = f" ({min(1.0, copied_bytes / total_bytes):.0%})" if total_bytes > 0 else ""
    progress_note = f", {finished_count} of {nodes} nodes have finished" if nodes > 1 else ""
    copied_text = f"{format_bytes_short(copied_bytes)} of {format_bytes_short(total_bytes)}{percent}"
    return f"copying {source} to {target}: {copied_text}{progress_note}"


def _describe_staged(event: Event) -> str:
    size, duration_s = finite_number(event.get("bytes")), finite_number(event.get("seconds"))
    size_note = f", {format_bytes_short(size)} copied" if size else ""
    return f"staging finished{size_note}" + (f" in {duration(duration_s)}" if duration_s else "")


def _describe_attempt(event: Event) -> str:
    size = _to_text(event["world_size"]) if event.get("world_size") else ""
    ranks = f", {size} rank{'' if size == '1' else 's'}" if size else ""
    return f"attempt {_to_text(event.get('attempt'))} starts on {_node_set_text(event.get('nodes'))}{ranks}"


def _describe_attempt_end(event: Event) -> str:
    code = event.get("exit_code")
    end_text = "was lost" if code is None else f"ended with exit code {_to_text(code)}"
    node_text = f" on {_to_text(event['node'])}" if event.get("node") else ""
    rank_text = (
        f"rank {_to_text(event['rank'])}{node_text}" if event.get("rank") is not None else node_text.lstrip()
    )
    summary = _text_or_empty(event.get("summary") or ("" if code is None else event.get("cause")))
    cause_text = ": ".join(filter(None, (rank_text, summary)))
    return f"attempt {_to_text(event.get('attempt'))} {end_text}" + (f": {cause_text}" if cause_text else "")


_ACTION_TEXTS = {
    "restart": "restarts", "requeue": "is requeued", "chain": "continues in a new job",
    "stop": "stops", "shrink": "continues with fewer nodes", "go": "continues",
}  # fmt: skip


def _describe_decision(event: Event) -> str:
    action = _to_text(event.get("action"))
    wait_s = finite_number(event.get("wait_s"))
    parts = [_ACTION_TEXTS.get(action, action)]
    if wait_s:
        parts.append(f"in {duration(wait_s)}")
    if event.get("excluded"):
        parts.append(f"without {_node_set_text(event['excluded'])}")
    reason = _text_or_empty(event.get("reason"))
    text = " ".join(parts) + (f": {reason}" if reason else "")
    if event.get("counted") is not True or not event.get("budget"):
        return text
    used_restarts, allowed, budget = (_to_text(event.get(key)) for key in ("used", "of", "budget"))
    return f"{text} (restart {used_restarts} of {allowed} after {budget})"


def _describe_supervisor_kill(event: Event) -> str:
    end_text = "crashed" if has_crashed(event) else "was killed"
    process_text = f"the supervisor (process {_to_text(event.get('pid'))} on {_to_text(event.get('node'))})"
    return f"{process_text} {end_text}, exit code {_to_text(event.get('exit_code'))}"


def _describe_hang(event: Event) -> str:
    node_text = f" on {_to_text(event['node'])}" if event.get("node") else ""
    rank_text = f"rank {_to_text(event['rank'])}{node_text}" if event.get("rank") is not None else ""
    ranks = event.get("ranks")
    rank_text = rank_text or (
        f"{len(ranks)} ranks" if isinstance(ranks, list) and len(ranks) > 8 else f"ranks {_to_text(ranks)}"
    )
    summary = _text_or_empty(event.get("summary"))
    return f"hang detected, {rank_text}" + (f": {summary}" if summary else "")


def _describe_health(event: Event) -> str:
    findings = event.get("findings")
    finding_texts = []
    for finding in findings if isinstance(findings, list) else []:
        check, evidence = (
            (finding.get("check"), finding.get("evidence")) if isinstance(finding, dict) else ("", finding)
        )
        finding_texts.append(": ".join(filter(None, (_text_or_empty(check), _text_or_empty(evidence)))))
    state = (
        "is healthy"
        if event.get("ok") is True and not finding_texts
        else "is usable"
        if event.get("ok")
        else "is bad"
    )
    return f"health: {_to_text(event.get('node'))} {state}" + (
        f" ({'; '.join(finding_texts[:4])})" if finding_texts else ""
    )


def _describe_requeue(event: Event) -> str:
    texts_by_method = {"requeue": "the job is requeued", "afterany": "the next job is queued"}
    text = texts_by_method.get(_to_text(event.get("by")), "the next job is queued")
    detail = _text_or_empty(event.get("words"))
    if event.get("done") is False:
        text = "the job could not be requeued"
    return text + (f": {detail}" if detail else "")


def _describe_role_end(event: Event) -> str:
    code = event.get("exit_code")
    code_text = "" if code is None else f" with exit code {_to_text(code)}"
    summary = _text_or_empty(event.get("summary"))
    name = f"{_to_text(event.get('role'))}-{_to_text(event.get('instance'))}"
    return f"{name} on {_to_text(event.get('node'))} ended{code_text}" + (f": {summary}" if summary else "")


def _describe_role_failure(event: Event) -> str:
    reason = _text_or_empty(event.get("reason"))
    name = f"{_to_text(event.get('role'))}-{_to_text(event.get('instance'))}"
    text = f"{name} on {_to_text(event.get('node'))} cannot come back: {_to_text(event.get('summary'))}"
    return text + (f"; {reason}" if reason else "")


def _make_formatter(template: str) -> Callable[[Event], str]:
    """Return a function that inserts an event's values into a template: ``checkpoint at step {step}``."""
    return lambda event: template.format_map(_EventTexts(event))


_DESCRIPTIONS: Mapping[str, Callable[[Event], str]] = {
    "submitted": _make_formatter("queued as job {job_id}"),
    "started": lambda event: (
        f"job {_to_text(event.get('job_id'))} started on {_node_set_text(event.get('nodes'))}"
    ),
    "ended": _make_formatter("ended with exit code {exit_code}"),
    "signalled": _make_formatter("received {signal}"),
    "attempt": _describe_attempt,
    "attempt_ended": _describe_attempt_end,
    "decision": _describe_decision,
    "onward": _describe_requeue,
    "hang": _describe_hang,
    "stalled": _make_formatter("the ranks make no progress: {summary}"),
    "limit_expected": _make_formatter("{summary}"),
    "message_sent": _make_formatter("message sent to {to}: the job {about}"),
    "message_failed": _make_formatter("message not sent to {to} (the job {about}): {problem}"),
    "messages_left": _make_formatter("the job could not send messages: {problem}"),
    "not_distributed": describe,
    "ranks_apart": describe,
    "distributed": _make_formatter("the ranks train together: {evidence}"),
    "checkpoint": _make_formatter("checkpoint at step {step}"),
    "checkpoint_corrupt": _make_formatter("a checkpoint is damaged and was renamed to {path}: {problem}"),
    "checkpoint_failed": _make_formatter("the checkpoint of step {step} was not written: {problem}"),
    "restored": _make_formatter("resumed from step {step}"),
    "node_excluded": _make_formatter("node {node} excluded: {reason}"),
    "agent_restarted": _make_formatter("the node agent on {node} restarted; its ranks continue"),
    "health": _describe_health,
    "staging": lambda event: _describe_staging([event]),
    "staged": _describe_staged,
    "staging_failed": _make_formatter("the data could not be staged: {problems}"),
    "supervisor_killed": _describe_supervisor_kill,
    "supervisor_stopped": _make_formatter(
        "the supervisor (process {pid} on {node}) is stopped: the ranks are not monitored"
    ),
    "supervisor_continued": _make_formatter("the supervisor (process {pid} on {node}) continues"),
    "role_started": _make_formatter("{role}-{instance} starts on {node}"),
    "role_ready": _make_formatter("{role}-{instance} is ready after {seconds} s"),
    "role_ended": _describe_role_end,
    "role_failed": _describe_role_failure,
    "role_scaled": _make_formatter(
        "the role {role} has {instances} instances now, {requested} were requested"
    ),
    "restart": _make_formatter("restarted"),
    "cancel": _make_formatter("cancelled by you"),
    "requeue": _make_formatter("requeued by you"),
    "hold": _make_formatter("held by you"),
    "release": _make_formatter("released by you"),
}


class _EventTexts(dict[str, Any]):
    """An event's values as text for `str.format_map`, which fills missing keys with a question mark.

    The values are plain strings, so format fields cannot access attributes or items of them.
    """

    def __init__(self, event: Event) -> None:
        super().__init__({str(key): _to_text(value) for key, value in event.items()})

    def __missing__(self, key: str) -> str:
        return "?"


def _to_text(value: object) -> str:
    if value is None:
        return "?"
    if isinstance(value, list):
        return ",".join(str(element)[:_MAX_VALUE_LENGTH] for element in value[:20]) + (
            ",…" if len(value) > 20 else ""
        )
    return str(value)[:_MAX_VALUE_LENGTH]


def _node_set_text(value: object) -> str:
    return _to_text(fold_nodes(value) or value)


def _text_or_empty(value: object) -> str:
    return "" if value in (None, "") else _to_text(value)
