"""What a run's events tell, in words, of a supervisor that was stopped or killed. Lists of runs use this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

BATCH_KILLED = "SIGKILL ended the batch script before any rank had failed; Slurm then ended the ranks"
SUPERVISOR_KILLED = "the supervisor was killed, and the batch script restarted it no more"
SUPERVISOR_CRASHED = "the supervisor crashed, and the batch script restarted it no more"
SUPERVISOR_STOPPED = "SUPERVISOR STOPPED"
_SIGKILL = 9
_LARGEST_OWN_CODE = 128  # exit codes above it are those of signals
_STEPS = {"started", "attempt", "attempt_ended", "supervisor_killed", "ended"}
_LATER = {"supervisor_continued", "supervisor_killed", "started", "ended", "cancel"}


def find_stopped_supervisor(events: Iterable[Mapping[str, Any]]) -> str:
    """Return in words that the supervisor is stopped, with a fix; empty where it is not known to be."""
    last: Mapping[str, Any] = {}
    for event in events:
        if event.get("event") == "supervisor_stopped":
            last = event
        elif event.get("event") in _LATER:
            last = {}
    if not last:
        return ""
    pid, node = str(last.get("pid"))[:20], str(last.get("node"))[:100]
    return (
        f"the supervisor (process {pid} on {node}) is stopped, as by SIGSTOP: until it continues, no fault "
        f"of a rank is noticed and the job does not end; run kill -CONT {pid} on {node}"
    )


def has_crashed(killed: Mapping[str, Any]) -> bool:
    """Tell whether a supervisor that ended too early did so by itself, not by a signal."""
    code = killed.get("exit_code")
    return isinstance(code, int) and code <= _LARGEST_OWN_CODE


def find_killed_script(events: Iterable[Mapping[str, Any]], signal: int | None) -> str:
    """Return in words that the batch script was killed, or its supervisor ended early; empty if neither did.

    Args:
        signal: by which the job ended, as Slurm shows it: it is the batch script's.
    """
    steps = [event for event in events if event.get("event") in _STEPS]
    told = [str(event["event"]) for event in steps]
    if told[-2:] == ["supervisor_killed", "ended"]:
        return SUPERVISOR_CRASHED if has_crashed(steps[-2]) else SUPERVISOR_KILLED
    return BATCH_KILLED if signal == _SIGKILL and told and told[-1] not in {"attempt_ended", "ended"} else ""
