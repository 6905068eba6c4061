"""How a run's state is put in words: rows of a table, and one run in full."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dtslurm.cli.printing import output
from dtslurm.cli.printing.styles import FAILED, SECONDARY, style_exception, style_states
from dtslurm.diagnose.ranks_apart import FIX, find_ranks_apart
from dtslurm.diagnose.supervisor_events import find_stopped_supervisor
from dtslurm.model.node_sets import fold_nodes
from dtslurm.model.runs.state import JobState, JobStatus, StateFlag
from dtslurm.services.runs.changed_script import describe_changed_script
from dtslurm.services.runs.queued_jobs import UNREADABLE, cancel_command
from dtslurm.services.runs.run_evidence import UNNOTICED, attempt_number, failure_in_words, marks_of
from dtslurm.services.runs.run_times import measure_view
from dtslurm.services.runs.status import STALLED, RunView
from dtslurm.slurm.pending import explain
from dtslurm.views import events

if TYPE_CHECKING:
    from dtslurm.services.runs.history import History
    from dtslurm.services.runs.run_times import Attempt, RunTimes

_LABEL = 11  # columns before the values of one run
_MOST_EVENTS = 12
_MOST_TASKS = 10
_NO_REASON = {"", "None"}
_STATE_LABELS = {state.value.lower() for state in JobState}
_STYLES = {
    STALLED.lower(): FAILED,
    "warning": FAILED,
    "run": SECONDARY,
    "works in": SECONDARY,
    "parent run": SECONDARY,
    "asked": SECONDARY,
}
_COMPLETING_TOO_LONG_S = 300.0
_STUCK = (
    "its nodes are not free yet: an epilog of the site's, or a process that cannot be killed; "
    "the site's support can end that"
)


def rows(view: RunView, now: float) -> list[list[str]]:
    """Return one row for a run; for an array or a heterogeneous job, one for each state its parts are in.

    What waits has one for each reason: a task that is held never starts, whatever the others wait for.
    The columns are job, name, cluster, state, ranks, age, time, nodes, about. The age counts from submission.
    """
    return [_row(view, view.words_of(items), items, now) for items in _alike(view)]


def groups(view: RunView) -> dict[str, list[JobStatus]]:
    """Return a run's observations by the word for their state."""
    found: dict[str, list[JobStatus]] = {}
    for item in view.statuses:
        found.setdefault(view.word_of(item), []).append(item)
    return found


def _alike(view: RunView) -> list[list[JobStatus]]:
    """Return a run's observations by the word for their state and, for those that wait, the reason."""
    found: dict[tuple[str, str], list[JobStatus]] = {}
    for word, items in groups(view).items():
        for item in items:
            waits = item.state is JobState.PENDING and item.reason not in _NO_REASON
            found.setdefault((word, item.reason if waits else ""), []).append(item)
    return list(found.values())


def _row(view: RunView, word: str, items: list[JobStatus], now: float) -> list[str]:
    record, first = view.record, items[0]
    times = measure_view(view, first) if len(items) == 1 else None
    return [
        _job(view, items),
        record.name,
        record.cluster,
        word,
        "?" if view.record_problem else str(record.world_size),
        output.duration(now - record.created_at),
        output.duration(times.duration_s(now) if times is not None else None),
        fold_nodes(first.nodelist) or "-",
        "; ".join(filter(None, (_activity(view, first), about(view, items, now)))),
    ]


def _activity(view: RunView, status: JobStatus) -> str:
    """Return what the ranks do where that is unusual, and of a stalled job the command that tells more."""
    activity = view.activities.get(status.job_id)
    if activity is None or not activity.stalled:
        return activity.summary if activity is not None else ""
    return f"{activity.summary}: dtslurm diagnose --live {status.job_id}"


def _job(view: RunView, items: list[JobStatus]) -> str:
    record = view.record
    if record.job_id is None:
        return "?"
    parts = len(view.statuses) > 1 and record.array is None
    if record.array is None and not parts:
        return record.job_id
    if len(items) == 1:
        return items[0].job_id
    count = sum(tasks(item) for item in items)
    return f"{record.job_id} ({count} {'parts' if parts else 'tasks'})"


def tasks(status: JobStatus) -> int:
    """Return how many array tasks an observation stands for: ``17_[0-7%2]`` is eight."""
    from dtslurm.slurm.arrays import task_ranges

    _, bracket, folded = status.job_id.partition("_[")
    return max(1, sum(map(len, task_ranges(folded)))) if bracket else 1


def about(view: RunView, items: Sequence[JobStatus], now: float) -> str:
    """Say the one thing to know of observations that are in the same state."""
    told = _about(view, items, now)
    if view.record_problem:
        told = "; ".join(filter(None, (told, UNREADABLE)))
    if not view.record.stages:
        return told
    number = list(view.record.stages).index(view.record.stage) + 1
    stage = f"stage {view.record.stage}, {number} of {len(view.record.stages)}"
    return f"{stage}; {told}" if told else stage


def _about(view: RunView, items: Sequence[JobStatus], now: float) -> str:
    status = items[0]
    since = now - status.end_time if status.end_time is not None else 0.0
    if StateFlag.COMPLETING in status.flags and since > _COMPLETING_TOO_LONG_S:
        stuck = f": {UNNOTICED}" if status.reason == UNNOTICED else f", and {_STUCK}"
        return f"ended {output.duration(since)} ago{stuck}"
    if status.state is JobState.PENDING:
        return "; ".join(filter(None, (_reason(status), _estimate(status, now))))
    if status.state is JobState.UNKNOWN:
        return status.reason or "no evidence"
    if status.terminal and not status.ok:
        return failure_in_words(view.run_of(status), status)
    number = attempt_number(view.run_of(status), status)
    told = marks_of(view.record, view.run_of(status))
    told += [f"attempt {number}"] if number else []
    if status.state is JobState.RUNNING and status.time_left is not None:
        left = status.time_left - max(0.0, now - status.observed_at)
        told.append(f"{output.duration(left)} left")
    if status.source == "record" and not status.terminal:
        told.append(status.reason)
    return "; ".join(filter(None, told))


def _reason(status: JobStatus) -> str:
    if status.reason in _NO_REASON:
        return ""
    said = explain(status.reason, status.job_id, status.excluded)
    never = ", and will never start as it is" if said.will_start is False else ""
    return f"{status.reason}: {said.text}{never}" if said.text not in status.reason else status.reason


def _estimate(status: JobStatus, now: float) -> str:
    """Return the scheduler's guess of the start; one in the past says nothing."""
    if status.estimated_start is None or status.estimated_start <= now:
        return ""
    return f"may start {moment(status.estimated_start, now)} (Slurm's estimate)"


def moment(when: float, now: float) -> str:
    """Return a point in time as people say it: with the day only if it is not today."""
    local = time.localtime(when)
    same_day = local[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M", local)


# ---- One run in full ----


def full(
    view: RunView,
    told: History,
    now: float,
    width: int | None,
    chain: Sequence[tuple[str, RunView | None]] = (),
    job: str | None = None,
) -> Iterator[str]:
    """Yield the lines that tell all of a run, no wider than ``width`` as far as words can be cut.

    Args:
        chain: the stages that it is one of, with what each is doing.
        job: what names it in a command, where that is not its id alone.
    """
    yield _heading(view)
    yield from _entry("stages", " → ".join(_stage(view, name, other) for name, other in chain), width)
    for label, text in _facts(view, told, now, job):
        yield from _entry(label, text, width)


def describe_queued_job(view: RunView, now: float, width: int | None) -> Iterator[str]:
    """Yield the lines that tell what the queue knows of a job whose run has no record that can be read."""
    yield _heading(view)
    for items in _alike(view):
        for label, text in _state(view, items, now):
            yield from _entry(label, text, width)
    yield from _entry("warning", f"the record of the run cannot be read: {view.record_problem}", width)
    yield from _entry("asked", _asked(view, now), width)
    yield from _entry("next", cancel_command(view), width)


def _heading(view: RunView) -> str:
    words = ", ".join(
        view.words_of(items) if len(view.statuses) == 1 else f"{sum(map(tasks, items))} {word}"
        for word, items in groups(view).items()
    )
    head = f"job {view.record.job_id or '?'}  {view.record.name}  on {view.record.cluster}: "
    return output.styled((head, ""), *style_states(words))


def _stage(view: RunView, name: str, other: RunView | None) -> str:
    if other is None:
        return f"{name} (gone)"
    mine = " (this)" if other.record.token == view.record.token else ""
    return f"{name} {other.record.job_id or '?'} {'/'.join(groups(other))}{mine}"


def _facts(view: RunView, told: History, now: float, job: str | None) -> Iterator[tuple[str, str]]:
    record = view.record
    for items in _alike(view):
        yield from _state(view, items, now)
    apart = find_ranks_apart(told.events) if record.array is None else None
    if apart is not None:
        yield "warning" if apart.is_fault else "note", apart.text
        yield "what to do", FIX if apart.is_fault else ""
    if record.array is None and not view.terminal:
        yield "warning", find_stopped_supervisor(told.events)
    changed = [attempt.number for attempt in told.attempts if attempt.script_changed]
    yield "note", describe_changed_script(record, changed)
    yield "ranks", f"{record.world_size} by {record.launcher}" if record.launcher else str(record.world_size)
    limit = view.time_limit
    if limit is not None:
        yield "limit", output.duration(limit)
    label = "attempts"
    for attempt in told.attempts if record.array is None else ():
        yield label, _attempt(attempt, now)
        label = ""
    label = "events"
    timeline = events.lines(told.events)
    left_out = len(timeline) - _MOST_EVENTS
    if left_out > 0:
        yield label, f"({left_out} before these)"
        label = ""
    for line in timeline[-_MOST_EVENTS:]:
        yield label, f"{moment(line.time, now) if line.time is not None else '?'}  {line.text}"
        label = ""
    yield "command", record.command or record.script
    yield "run", record.folder if not record.mirror else f"{record.cluster}:{record.run_dir}"
    yield "works in", output.work_dir_of(record)
    yield "parent run", record.parent
    yield "asked", _asked(view, now)
    yield "next", _next(view, job or view.record.job_id or view.record.token)


def _state(view: RunView, items: Sequence[JobStatus], now: float) -> Iterator[tuple[str, str]]:
    """Yield what is known of the parts of a run that are in one state."""
    status = items[0]
    label = status.word.lower()
    parts = f"{_job(view, list(items))}: " if len(view.statuses) > 1 else ""
    if status.state is JobState.PENDING:
        waits = output.duration(now - status.submit_time) if status.submit_time else ""
        yield label, parts + "; ".join(filter(None, (waits and f"for {waits}", _estimate(status, now))))
        if status.reason not in _NO_REASON:
            said = explain(status.reason, status.job_id.partition("_[")[0], status.excluded)
            yield "why", _reason(status)
            yield "what to do", said.fix
        return
    if len(items) > 1:
        shown = ", ".join(item.job_id.rpartition("_")[2] for item in items[:_MOST_TASKS])
        more = f" and {len(items) - _MOST_TASKS} more" if len(items) > _MOST_TASKS else ""
        yield label, f"{parts}{shown}{more}"
    else:
        time_told = _when(measure_view(view, status), now)
        on = f"on {fold_nodes(status.nodelist)}" if status.nodelist else ""
        told = about(view, items, now)
        yield label, parts + ", ".join(filter(None, (time_told, on, told if told != label else "")))
        activity = view.activities.get(status.job_id)
        if activity is not None:
            yield view.word_of(status).lower() if activity.stalled else "work", activity.summary


def _when(times: RunTimes | None, now: float) -> str:
    if times is None:
        return ""
    if times.ended is not None:
        return f"at {moment(times.ended, now)}, after {times.describe(now)}"
    return f"since {moment(times.started, now)}, for {times.describe(now)}"


def _attempt(attempt: Attempt, now: float) -> str:
    begin = moment(attempt.started, now) if attempt.started is not None else "?"
    end = moment(attempt.ended, now) if attempt.ended is not None else ""
    when = f"{begin} - {end}" if end else f"from {begin}"
    return "  ".join(filter(None, (str(attempt.number), when, attempt.nodes, attempt.how)))


def _asked(view: RunView, now: float) -> str:
    told = "the scheduler was not asked: its record is final"
    if view.record.job_id is None:
        told = (
            "the scheduler was not asked: there is no job"
            if view.terminal
            else "for the run's job, by its token"
        )
    if view.observed_at is not None:
        told = f"{output.duration(now - view.observed_at)} ago"
    return f"{told}; {view.trouble}" if view.trouble else told


def _next(view: RunView, job: str) -> str:
    if view.record.job_id is None:  # there is nothing to cancel, and no output
        return f"dtslurm {'resubmit' if view.terminal else 'status'} {job}"
    if view.terminal:
        verbs = [f"dtslurm logs {job}"]
        if not all(status.ok for status in view.statuses):
            verbs.insert(0, f"dtslurm diagnose {job}")
        return "   ".join(verbs)
    if any(view.word_of(status) == STALLED for status in view.statuses):
        return f"dtslurm diagnose --live {job}   dtslurm logs {job}   dtslurm cancel {job}"
    return f"dtslurm logs -f {job}   dtslurm cancel {job}"


def _entry(label: str, text: str, width: int | None) -> Iterator[str]:
    """Yield the lines of one labelled text."""
    if not text:
        return
    head = f"  {label}".ljust(_LABEL + 2)
    lines = [text]
    if width is not None and label not in {"run", "works in", "command", "next"}:
        import textwrap

        limit = max(20, width - len(head))
        lines = textwrap.wrap(text, limit, break_long_words=False, break_on_hyphens=False)
    for number, parts in enumerate(_styled(label, lines)):
        yield output.styled((head if number == 0 else " " * len(head), SECONDARY), *parts)


def _styled(label: str, lines: Sequence[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield the parts of each line with their styles."""
    if label in _STATE_LABELS:
        yield from style_exception(lines)
        return
    style = _STYLES.get(label, "")
    for line in lines:
        yield ((line, style),)
