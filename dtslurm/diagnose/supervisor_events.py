"""Describes from a run's events a stopped or killed supervisor, and a role that failed; also for lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

BATCH_KILLED = "SIGKILL ended the batch script before any rank had failed; Slurm then ended the ranks"
SUPERVISOR_KILLED = "the supervisor was killed, and the batch script did not restart it again"
SUPERVISOR_CRASHED = "the supervisor crashed, and the batch script did not restart it again"
SUPERVISOR_STOPPED = "SUPERVISOR STOPPED"
_SIGKILL = 9
ROLE_FAILURE = "role-failure"  # the cause of an attempt that ended because of a role
_MAX_TEXT = 300
_LARGEST_EXIT_CODE = 128  # larger exit codes mean a signal
_MILESTONES = {"started", "attempt", "attempt_ended", "supervisor_killed", "ended"}
_RESUMING_EVENTS = {"supervisor_continued", "supervisor_killed", "started", "ended", "cancel"}


def find_stopped_supervisor(events: Iterable[Mapping[str, Any]]) -> str:
    """Return a message, with a fix, that the supervisor is stopped; empty if no event reports it."""
    stop_event: Mapping[str, Any] = {}
    for event in events:
        if event.get("event") == "supervisor_stopped":
            stop_event = event
        elif event.get("event") in _RESUMING_EVENTS:
            stop_event = {}
    if not stop_event:
        return ""
    pid, node = str(stop_event.get("pid"))[:20], str(stop_event.get("node"))[:100]
    return (
        f"the supervisor (process {pid} on {node}) is stopped, for example by SIGSTOP: until it "
        "continues, failures of ranks are not noticed and the job does not end; run kill -CONT "
        f"{pid} on {node}"
    )


def has_crashed(event: Mapping[str, Any]) -> bool:
    """Return whether a supervisor that ended too early exited by itself, not by a signal."""
    exit_code = event.get("exit_code")
    return isinstance(exit_code, int) and exit_code <= _LARGEST_EXIT_CODE


def find_killed_script(events: Iterable[Mapping[str, Any]], signal: int | None) -> str:
    """Return a message that the batch script was killed or its supervisor ended early; empty if neither.

    Args:
        events: the events of the run.
        signal: the signal that ended the job according to Slurm, which is the batch script's.
    """
    milestones = [event for event in events if event.get("event") in _MILESTONES]
    names = [str(event["event"]) for event in milestones]
    if names[-2:] == ["supervisor_killed", "ended"]:
        return SUPERVISOR_CRASHED if has_crashed(milestones[-2]) else SUPERVISOR_KILLED
    return (
        BATCH_KILLED if signal == _SIGKILL and names and names[-1] not in {"attempt_ended", "ended"} else ""
    )


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
            found = (failure or event) if event.get("cause") == ROLE_FAILURE else None
    return found


def describe_role_failure(event: Mapping[str, Any]) -> str:
    """Describe the failure with role, instance, node and cause."""
    if event.get("event") != "role_failed":
        return read_text(event.get("summary"))
    node = read_text(event.get("node"))
    name = f"instance {read_text(event.get('instance'))} of role {read_text(event.get('role'))}"
    return (
        f"{name}{f' on {node}' if node else ''} could not be kept running: {read_text(event.get('summary'))}"
    )


def read_text(value: object) -> str:
    """Return a value of an event as text, cut off if it is long."""
    return "" if value is None else str(value)[:_MAX_TEXT]
