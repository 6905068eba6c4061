"""A role that could not come back, as the cause of a run's end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dtslurm.model.runs.diagnosis import EvidenceLine, JobFacts, Verdict

CAUSE = "role-failure"
_MAX_TEXT = 300
_BLAME_BY_CAUSE = {
    "bad-arguments": "user",
    "command-not-found": "user",
    "gpu-out-of-memory": "code",
    "host-out-of-memory": "code",
    "python-exception": "code",
    "import-error": "user",
    "node-failure": "node",
    "gpu-fault": "node",
}
_ADVICE_BY_CAUSE = {
    "bad-arguments": "correct the arguments of the role's command in the job file",
    "command-not-found": "install the program, or name its path or its environment in the role",
    "gpu-out-of-memory": "reduce the memory that the server reserves, or give it more GPUs",
    "not-ready": "raise ready.within if the server needs more time, or check its readiness path and port",
    "unresponsive": "raise ready.silence if the server may be busy for longer",
    "node-failure": "give the run a spare node with --spare-nodes 1",
}


def find_role_failure(events: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the event of the instance that ended the run; None if the last attempt had another end."""
    failure: Mapping[str, Any] | None = None
    found: Mapping[str, Any] | None = None
    for event in events:
        if event.get("event") == "role_failed" and failure is None:
            failure = event
        elif event.get("event") == "attempt":
            failure = found = None
        elif event.get("event") == "attempt_ended":
            found = (failure or event) if event.get("cause") == CAUSE else None
    return found


def describe_role_failure(event: Mapping[str, Any]) -> str:
    """Describe the failure with role, instance, node and cause."""
    if event.get("event") != "role_failed":
        return _text(event.get("summary"))
    node = _text(event.get("node"))
    name = f"instance {_text(event.get('instance'))} of role {_text(event.get('role'))}"
    return f"{name}{f' on {node}' if node else ''} could not be kept running: {_text(event.get('summary'))}"


def judge_role_failure(events: Iterable[Mapping[str, Any]], facts: JobFacts) -> Verdict | None:
    """Return the verdict on a run that ended because a role could not come back; None for another end."""
    own_events = [event for event in events if event.get("attempt") in {None, facts.attempt}]
    event = find_role_failure(own_events)
    if event is None:
        return None
    role, cause, reason = (_text(event.get(key)) for key in ("role", "cause", "reason"))
    file = _text(event.get("log"))
    lines = event.get("lines")
    advice = _ADVICE_BY_CAUSE.get(cause, "read the log of the instance")
    log_advice = f"; dtslurm logs JOB --role {role} shows its output" if role else ""
    return Verdict(
        cause=CAUSE,
        summary=describe_role_failure(event) + (f" ({reason})" if reason else ""),
        node=_text(event.get("node")) or None,
        time=int(time) if isinstance(time := event.get("time"), int | float) else None,
        confidence=0.95,
        blame=_BLAME_BY_CAUSE.get(cause, "unknown"),
        evidence=tuple(
            EvidenceLine(rank=None, file=file, line=None, text=_text(line))
            for line in (lines if isinstance(lines, list) else [])[-5:]
        ),
        advice=advice + log_advice,
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)[:_MAX_TEXT]
