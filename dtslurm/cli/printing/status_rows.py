"""The status of runs as text: rows of a table, and all details of one run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dtslurm.cli.printing import output
from dtslurm.cli.printing.styles import FAILED, SECONDARY, style_exception, style_states
from dtslurm.diagnose.ranks_apart import FIX, find_ranks_apart
from dtslurm.diagnose.supervisor_events import find_stopped_supervisor
from dtslurm.model.runs.state import JobState, JobStatus, StateFlag
from dtslurm.presentation.node_sets import fold_nodes
from dtslurm.presentation.quantities import duration
from dtslurm.presentation.states import STALLED
from dtslurm.services.runs.changed_script import describe_changed_script
from dtslurm.services.runs.queued_jobs import UNREADABLE, cancel_command
from dtslurm.services.runs.run_evidence import UNNOTICED, attempt_number, describe_failure, list_warnings
from dtslurm.services.runs.run_times import measure_view
from dtslurm.services.runs.status import RunView
from dtslurm.slurm.arrays import task_ranges
from dtslurm.slurm.pending import explain
from dtslurm.views import events
from dtslurm.views.unsent_messages import describe_unsent

if TYPE_CHECKING:
    from dtslurm.services.runs.history import History
    from dtslurm.services.runs.run_times import Attempt, RunTimes

_LABEL = 11  # width of the labels
_MAX_EVENTS = 12
_MAX_TASKS = 10
_NO_REASON = {"", "None"}
_STATE_LABELS = {state.value.lower() for state in JobState}
_STYLES = {
    STALLED.lower(): FAILED,
    "warning": FAILED,
    "run": SECONDARY,
    "works in": SECONDARY,
    "parent run": SECONDARY,
    "queried": SECONDARY,
}
_MAX_COMPLETING_S = 300.0
_STUCK_HINT = (
    "the nodes of the job are not free yet: an epilog of the cluster or a process that cannot be "
    "killed is still running; contact the cluster's support"
)


def make_rows(view: RunView, now: float) -> list[list[str]]:
    """Return the table rows of a run: one row, or for an array or heterogeneous job one row per state.

    Pending tasks have one row per reason, because a held task never starts, unlike the others. The columns
    are job, name, cluster, state, ranks, age, time, nodes, about. The age counts from submission.
    """
    return [_make_row(view, view.words_of(items), items, now) for items in _group_by_state_and_reason(view)]


def group_by_state(view: RunView) -> dict[str, list[JobStatus]]:
    """Group a run's job statuses by the word for their state."""
    statuses_by_word: dict[str, list[JobStatus]] = {}
    for item in view.statuses:
        statuses_by_word.setdefault(view.word_of(item), []).append(item)
    return statuses_by_word


def _group_by_state_and_reason(view: RunView) -> list[list[JobStatus]]:
    """Group a run's job statuses by the word for their state and, if pending, by reason."""
    grouped: dict[tuple[str, str], list[JobStatus]] = {}
    for word, items in group_by_state(view).items():
        for item in items:
            is_pending = item.state is JobState.PENDING and item.reason not in _NO_REASON
            grouped.setdefault((word, item.reason if is_pending else ""), []).append(item)
    return list(grouped.values())


def _make_row(view: RunView, word: str, items: list[JobStatus], now: float) -> list[str]:
    record, first = view.record, items[0]
    times = measure_view(view, first) if len(items) == 1 or _is_heterogeneous(view) else None
    nodelists = [item.nodelist for item in (items if _is_heterogeneous(view) else items[:1])]
    return [
        _format_job(view, items),
        record.name,
        record.cluster,
        word,
        "?" if view.record_problem else "-" if record.holds_allocation else str(record.world_size),
        duration(now - record.created_at),
        duration(times.duration_s(now) if times is not None else None),
        fold_nodes(",".join(sorted(filter(None, nodelists)))) or "-",
        "; ".join(filter(None, (_describe_activity(view, first), describe_statuses(view, items, now)))),
    ]


def _describe_activity(view: RunView, status: JobStatus) -> str:
    """Describe unusual activity of the ranks; for a stalled job, add the command to examine it."""
    activity = view.activities.get(status.job_id)
    if activity is None or not activity.stalled:
        return activity.summary if activity is not None else ""
    return f"{activity.summary}: dtslurm diagnose --live {status.job_id}"


def _format_job(view: RunView, items: list[JobStatus]) -> str:
    record = view.record
    if record.job_id is None:
        return "?"
    if record.array is None and not _is_heterogeneous(view):
        return record.job_id
    if len(items) == 1:
        return items[0].job_id
    count = sum(count_tasks(item) for item in items)
    return f"{record.job_id} ({count} {'parts' if _is_heterogeneous(view) else 'tasks'})"


def _is_heterogeneous(view: RunView) -> bool:
    return len(view.statuses) > 1 and view.record.array is None


def count_tasks(status: JobStatus) -> int:
    """Return the number of array tasks that a status covers: 8 for ``17_[0-7%2]``."""
    _, bracket, folded = status.job_id.partition("_[")
    return max(1, sum(map(len, task_ranges(folded)))) if bracket else 1


def describe_statuses(view: RunView, items: Sequence[JobStatus], now: float) -> str:
    """Return the most important message about statuses in the same state."""
    description = _describe_group(view, items, now)
    if view.record_problem:
        description = "; ".join(filter(None, (description, UNREADABLE)))
    if not view.record.stages:
        return description
    number = list(view.record.stages).index(view.record.stage) + 1
    stage = f"stage {view.record.stage}, {number} of {len(view.record.stages)}"
    return f"{stage}; {description}" if description else stage


def _describe_group(view: RunView, items: Sequence[JobStatus], now: float) -> str:
    status = items[0]
    ended_s_ago = now - status.end_time if status.end_time is not None else 0.0
    if StateFlag.COMPLETING in status.flags and ended_s_ago > _MAX_COMPLETING_S:
        cause = f": {UNNOTICED}" if status.reason == UNNOTICED else f", and {_STUCK_HINT}"
        return f"ended {duration(ended_s_ago)} ago{cause}"
    if status.state is JobState.PENDING:
        return "; ".join(filter(None, (_describe_reason(status), _describe_estimate(status, now))))
    if status.unknown:
        return status.reason or "no evidence"
    if status.terminal and not status.ok:
        return describe_failure(view.run_of(status), status)
    number = attempt_number(view.run_of(status), status)
    messages = list_warnings(view.record, view.run_of(status))
    messages += [f"attempt {number}"] if number else []
    if status.state is JobState.RUNNING and status.time_left is not None:
        remaining_s = status.time_left - max(0.0, now - status.observed_at)
        messages.append(f"{duration(remaining_s)} left")
    if status.source == "record" and not status.terminal:
        messages.append(status.reason)
    return "; ".join(filter(None, messages))


def _describe_reason(status: JobStatus) -> str:
    if status.reason in _NO_REASON:
        return ""
    explanation = explain(status.reason, status.job_id, status.excluded)
    never_starts = ", and the job will never start as requested" if explanation.will_start is False else ""
    return (
        f"{status.reason}: {explanation.text}{never_starts}"
        if explanation.text not in status.reason
        else status.reason
    )


def _describe_estimate(status: JobStatus, now: float) -> str:
    """Describe the scheduler's estimate of the start; empty if it is in the past."""
    if status.estimated_start is None or status.estimated_start <= now:
        return ""
    return f"may start {format_moment(status.estimated_start, now)} (Slurm's estimate)"


def format_moment(timestamp: float, now: float) -> str:
    """Format a point in time, with the date only if it is not today."""
    local = time.localtime(timestamp)
    same_day = local[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M", local)


# ---- One run in full ----


def format_run(
    view: RunView,
    history: History,
    now: float,
    width: int | None,
    stages: Sequence[tuple[str, RunView | None]] = (),
    job: str | None = None,
) -> Iterator[str]:
    """Yield the lines of a run's details, wrapped to ``width`` columns between words.

    Args:
        stages: the stages of which the run is one, each with its view.
        job: the name of the run for commands, if its job id is not unique.
    """
    yield _format_heading(view)
    yield from _labelled_lines(
        "stages", " → ".join(_describe_stage(view, name, stage_view) for name, stage_view in stages), width
    )
    for label, text in _iterate_facts(view, history, now, job):
        yield from _labelled_lines(label, text, width)


def describe_queued_job(view: RunView, now: float, width: int | None) -> Iterator[str]:
    """Yield the lines about a job in the queue whose run has no readable record."""
    yield _format_heading(view)
    for items in _group_by_state_and_reason(view):
        for label, text in _iterate_state_facts(view, items, now):
            yield from _labelled_lines(label, text, width)
    yield from _labelled_lines(
        "warning", f"the record of the run cannot be read: {view.record_problem}", width
    )
    yield from _labelled_lines("queried", _describe_query(view, now), width)
    yield from _labelled_lines("next", cancel_command(view), width)


def _format_heading(view: RunView) -> str:
    states = ", ".join(
        view.words_of(items) if len(view.statuses) == 1 else f"{sum(map(count_tasks, items))} {word}"
        for word, items in group_by_state(view).items()
    )
    head = f"job {view.record.job_id or '?'}  {view.record.name}  on {view.record.cluster}: "
    return output.styled((head, ""), *style_states(states))


def _describe_stage(view: RunView, name: str, stage_view: RunView | None) -> str:
    if stage_view is None:
        return f"{name} (gone)"
    this_mark = " (this)" if stage_view.record.token == view.record.token else ""
    return f"{name} {stage_view.record.job_id or '?'} {'/'.join(group_by_state(stage_view))}{this_mark}"


def _iterate_facts(view: RunView, history: History, now: float, job: str | None) -> Iterator[tuple[str, str]]:
    record = view.record
    for items in _group_by_state_and_reason(view):
        yield from _iterate_state_facts(view, items, now)
    split = find_ranks_apart(history.events) if record.array is None else None
    if split is not None:
        yield "warning" if split.is_fault else "note", split.text
        yield "what to do", FIX if split.is_fault else ""
    if record.array is None and not view.terminal:
        yield "warning", find_stopped_supervisor(history.events)
    yield "messages", describe_unsent(history.events)
    changed_attempts = [attempt.number for attempt in history.attempts if attempt.script_changed]
    yield "note", describe_changed_script(record, changed_attempts)
    if record.holds_allocation:
        yield "ranks", f"none; dtslurm submit --in {record.job_id} SCRIPT starts a run in this allocation"
    else:
        by_launcher = f" by {record.launcher}" if record.launcher else ""
        yield "ranks", f"{record.world_size}{by_launcher}"
    yield from _describe_roles(view, history)
    limit = view.time_limit
    if limit is not None:
        yield "limit", duration(limit)
    label = "attempts"
    for attempt in history.attempts if record.array is None else ():
        yield label, _describe_attempt(attempt, now)
        label = ""
    label = "events"
    timeline = events.lines(history.events)
    omitted = len(timeline) - _MAX_EVENTS
    if omitted > 0:
        yield label, f"({omitted} before these)"
        label = ""
    for line in timeline[-_MAX_EVENTS:]:
        yield label, f"{format_moment(line.time, now) if line.time is not None else '?'}  {line.text}"
        label = ""
    yield "command", "" if record.holds_allocation else record.command or record.script
    yield "run", record.folder if not record.mirror else f"{record.cluster}:{record.run_dir}"
    yield "works in", output.work_dir_of(record)
    yield "parent run", record.parent
    yield "queried", _describe_query(view, now)
    yield "next", _suggest_commands(view, job or view.record.job_id or view.record.token)


def _describe_roles(view: RunView, history: History) -> Iterator[tuple[str, str]]:
    label = "roles"
    for role in history.roles:
        from dtslurm.presentation.roles import describe_role  # few runs have several roles

        yield label, f"{role.name}: {describe_role(role, has_ended=view.terminal)}"
        label = ""


def _iterate_state_facts(view: RunView, items: Sequence[JobStatus], now: float) -> Iterator[tuple[str, str]]:
    """Yield (label, text) pairs about the parts of a run that are in the same state."""
    status = items[0]
    label = status.word.lower()
    parts = f"{_format_job(view, list(items))}: " if len(view.statuses) > 1 else ""
    if status.state is JobState.PENDING:
        waits = duration(now - status.submit_time) if status.submit_time else ""
        yield (
            label,
            parts + "; ".join(filter(None, (waits and f"for {waits}", _describe_estimate(status, now)))),
        )
        if status.reason not in _NO_REASON:
            explanation = explain(status.reason, status.job_id.partition("_[")[0], status.excluded)
            yield "why", _describe_reason(status)
            yield "what to do", explanation.fix
        return
    if len(items) > 1:
        job_ids = ", ".join(item.job_id.rpartition("_")[2] for item in items[:_MAX_TASKS])
        omitted_text = f" and {len(items) - _MAX_TASKS} more" if len(items) > _MAX_TASKS else ""
        yield label, f"{parts}{job_ids}{omitted_text}"
    else:
        time_text = _describe_times(measure_view(view, status), now)
        node_text = f"on {fold_nodes(status.nodelist)}" if status.nodelist else ""
        description = describe_statuses(view, items, now)
        yield (
            label,
            parts
            + ", ".join(filter(None, (time_text, node_text, description if description != label else ""))),
        )
        activity = view.activities.get(status.job_id)
        if activity is not None:
            yield view.word_of(status).lower() if activity.stalled else "work", activity.summary


def _describe_times(times: RunTimes | None, now: float) -> str:
    if times is None:
        return ""
    if times.ended is not None:
        return f"at {format_moment(times.ended, now)}, after {times.describe(now)}"
    return f"since {format_moment(times.started, now)}, for {times.describe(now)}"


def _describe_attempt(attempt: Attempt, now: float) -> str:
    begin = format_moment(attempt.started, now) if attempt.started is not None else "?"
    end = format_moment(attempt.ended, now) if attempt.ended is not None else ""
    period = f"{begin} - {end}" if end else f"from {begin}"
    return "  ".join(filter(None, (str(attempt.number), period, attempt.nodes, attempt.how)))


def _describe_query(view: RunView, now: float) -> str:
    description = "the scheduler was not queried: the record is final"
    if view.record.job_id is None:
        description = (
            "the scheduler was not queried: the run has no job"
            if view.terminal
            else "searching for the run's job by its token"
        )
    if view.observed_at is not None:
        description = f"{duration(now - view.observed_at)} ago"
    return f"{description}; {view.trouble}" if view.trouble else description


def _suggest_commands(view: RunView, job: str) -> str:
    if view.record.job_id is None:  # without a job there is nothing to cancel and no output
        return f"dtslurm {'resubmit' if view.terminal else 'status'} {job}"
    if view.terminal:
        verbs = [f"dtslurm logs {job}"]
        if not all(status.ok for status in view.statuses):
            verbs.insert(0, f"dtslurm diagnose {job}")
        return "   ".join(verbs)
    if any(view.word_of(status) == STALLED for status in view.statuses):
        return f"dtslurm diagnose --live {job}   dtslurm logs {job}   dtslurm cancel {job}"
    return f"dtslurm logs -f {job}   dtslurm cancel {job}"


def _labelled_lines(label: str, text: str, width: int | None) -> Iterator[str]:
    """Yield the lines of a text with its label."""
    if not text:
        return
    head = f"  {label}".ljust(_LABEL + 2)
    lines = [text]
    if width is not None and label not in {"run", "works in", "command", "next"}:
        import textwrap

        limit = max(20, width - len(head))
        lines = textwrap.wrap(text, limit, break_long_words=False, break_on_hyphens=False)
    for number, parts in enumerate(_style_lines(label, lines)):
        yield output.styled((head if number == 0 else " " * len(head), SECONDARY), *parts)


def _style_lines(label: str, lines: Sequence[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield the parts of each line with their styles."""
    if label in _STATE_LABELS:
        yield from style_exception(lines)
        return
    style = _STYLES.get(label, "")
    for line in lines:
        yield ((line, style),)
