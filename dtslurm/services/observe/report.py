"""Render an HTML report of a run: its request, attempts, metrics, utilization, verdict and script."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtslurm.checks.secrets import hide_secrets
from dtslurm.errors import DtslurmError, RequestInvalid
from dtslurm.logs.clean import safe
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.state import JobStatus
from dtslurm.model.runs.telemetry import RunTelemetry, TrainPoint
from dtslurm.presentation.quantities import METRIC_LABELS, duration, format_utc
from dtslurm.presentation.roles import describe_role
from dtslurm.presentation.states import describe_first_failure, describe_state
from dtslurm.render.page import page
from dtslurm.services.observe.activity import is_running
from dtslurm.services.observe.curves import join_attempts, points_of_attempts, restart_steps
from dtslurm.services.observe.diagnose import diagnose
from dtslurm.services.observe.report_header import (
    Tile,
    cost_tiles,
    describe_attempts,
    run_headline,
    size_tiles,
    time_tile,
    training_tiles,
)
from dtslurm.services.observe.telemetry import RunPart, read_telemetry
from dtslurm.services.observe.usage import count_gpu_hours, count_gpus, price_gpu_hours
from dtslurm.services.observe.utilization_history import read_utilization, summarize_utilization
from dtslurm.services.runs.history import History, history
from dtslurm.services.runs.run_times import Attempt, RunTimes, measure_run, measure_view
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir
from dtslurm.views import events
from dtslurm.views.run_page import build_rank_cells
from dtslurm.views.telemetry import activity_of

_POINTS = 4000
_MOST_EVENTS = 200


def report(
    context: Context, record: JobRecord, *, attempt: int | None = None, task: str | None = None
) -> str:
    """Return the HTML report of one attempt of a run or of an array task; by default of the newest attempt.

    For an array without a given task, the report covers the first failed task, else the first task.

    Raises:
        RequestInvalid: the attempt or task does not exist.
        TransportError: the run's files could not be read on their machine.
    """
    [view] = views(context, [record])
    task = first_failed_task(view) if task is None else task
    telemetry = read_telemetry(context, view.record, RunPart(attempt=attempt, task=task), points=_POINTS)
    if telemetry.attempt is None:
        raise RequestInvalid([f"run {record.name} has not started, so it has nothing to report"])
    utilization = read_utilization(context, view.record, attempt=telemetry.attempt, task=telemetry.task)
    run_history = history(context, view)
    times = _measure_times(view, telemetry.task, run_history)
    ranks = build_rank_cells(
        telemetry, telemetry.world_size or view.record.world_size, (), has_ended=view.terminal
    )
    is_active = all(is_running(status) for status in _select_statuses(view, telemetry.task))
    activity = activity_of(telemetry, view.record.world_size) if is_active else None
    points = _points_to_plot(context, view.record, telemetry, attempt)
    curves, now, state = _curves(points), context.clock(), _state(view, telemetry.task, activity)
    verdict = _find_verdict(context, view, telemetry)
    note = (activity.summary if activity is not None else "") or describe_attempts(len(run_history.attempts))
    values = {
        "record": view.record,
        "headline": run_headline(state, verdict, note, telemetry.first_failure),
        "tiles": _make_tiles(context, view, telemetry, points, times),
        "about": _subtitle(view.record, telemetry, run_history.attempts),
        "task": telemetry.task,
        "made_at": format_utc(now),
        "failures": (),
        "trials": (),
        "curves_note": "dashed lines mark restarts" if any(curve["restarts"] for curve in curves) else "",
        "summary": [
            *_summary_rows(view, telemetry, run_history.attempts),
            *(
                (f"role {role.name}", safe(describe_role(role, has_ended=view.terminal)))
                for role in run_history.roles
            ),
        ],
        "verdict": verdict,
        "attempts": [_attempt_row(past_attempt) for past_attempt in run_history.attempts],
        "events": [
            {"time": format_utc(event.time), "text": safe(event.text), "bad": event.bad}
            for event in events.lines(telemetry.events or run_history.events)
        ][-_MOST_EVENTS:],
        "curves": curves,
        "utilization": utilization,
        "utilization_begin": format_utc(utilization.begin),
        "utilization_end": format_utc(utilization.end),
        "efficiency": summarize_utilization(utilization),
        "first_failure": safe(describe_first_failure(telemetry.first_failure, ranks))
        if telemetry.first_failure
        else "",
        "ranks": ranks,
        "rank_counts": Counter(cell.state for cell in ranks).most_common(),
        "script": script_of(view.record),
        "spec": request_of(view.record),
    }
    return page("report.html.j2", values)


def first_failed_task(view: RunView) -> str | None:
    """Return the first task of an array that started and failed; None if there is none."""
    if view.record.array is None:
        return None
    failed_statuses = (status for status in view.statuses if status.terminal and not status.ok)
    tasks = (status.job_id.rpartition("_")[2] for status in failed_statuses)
    return next((task for task in tasks if view.run.task(task) is not None), None)


def _state(view: RunView, task: str | None, activity: Activity | None = None) -> str:
    return ", ".join(sorted({describe_state(status, activity) for status in _select_statuses(view, task)}))


def _subtitle(record: JobRecord, telemetry: RunTelemetry, attempts: Sequence[Attempt]) -> list[str]:
    """Return the lines below the title: job, cluster and attempt."""
    job = f"job {record.job_id}" if record.job_id else "no job"
    total = [f"{len(attempts)} attempts in total"] if len(attempts) > 1 else []
    return [f"{job} on {record.cluster}", f"attempt {telemetry.attempt}", *total]


def _make_tiles(
    context: Context,
    view: RunView,
    telemetry: RunTelemetry,
    points: Mapping[int, Sequence[TrainPoint]],
    times: RunTimes | None,
) -> list[Tile]:
    """Return the tiles of all known key figures."""
    record, now = view.record, context.clock()
    document = document_of(record)
    gpus = count_gpus(document)
    hours = count_gpu_hours(gpus, times, now)
    nodes = int((document.get("layout") or {}).get("nodes") or 0)
    return [
        *time_tile(times, view.time_limit, now),
        *training_tiles(points),
        *size_tiles(telemetry.world_size or record.world_size, nodes, gpus),
        *cost_tiles(hours, *price_gpu_hours(context, record, hours)),
    ]


def _select_statuses(view: RunView, task: str | None) -> Sequence[JobStatus]:
    """Return the statuses of the run, or of one array task."""
    return [
        status for status in view.statuses if task is None or status.job_id.endswith(f"_{task}")
    ] or view.statuses


def _measure_times(view: RunView, task: str | None, history: History) -> RunTimes | None:
    """Return the times of the run, or of one array task, which has its own event file."""
    status = _select_statuses(view, task)[0]
    return (
        measure_run(status, history.events, history.attempts) if task is None else measure_view(view, status)
    )


def _summary_rows(
    view: RunView, telemetry: RunTelemetry, attempts: Sequence[Attempt]
) -> list[tuple[str, str]]:
    record = view.record
    size = telemetry.world_size or record.world_size
    rows = [
        ("job", f"{record.job_id or 'unknown'} on {record.cluster}"),
        ("ranks", f"{size} by {record.launcher}"),
        ("nodes", next((attempt.nodes for attempt in reversed(attempts) if attempt.nodes), "")),
        ("submitted", format_utc(record.created_at)),
        ("time limit", duration(view.time_limit) if view.time_limit else ""),
        ("command", record.command),
        ("run directory", record.run_dir),
        ("working directory", record.work_dir),
    ]
    git = document_of(record).get("git")
    if isinstance(git, dict) and git.get("commit"):
        dirty_note = ", with changes (code.diff)" if git.get("dirty") else ""
        rows.append(("code", f"commit {git['commit']} of {git.get('branch') or 'no branch'}{dirty_note}"))
    return [(label, text) for label, text in rows if text]


def _find_verdict(context: Context, view: RunView, telemetry: RunTelemetry) -> Mapping[str, Any] | None:
    """Return the diagnosis of a failed attempt as values for the template; None if it did not fail."""
    if not view.terminal or not view.exit_code:
        return None
    try:
        verdict = diagnose(context, view.record, attempt=telemetry.attempt, task=telemetry.task).verdict
    except DtslurmError as error:
        return {"cause": "unknown", "summary": error.message, "advice": "", "evidence": (), "rank": None}
    return {
        "cause": verdict.cause,
        "summary": verdict.summary,
        "advice": verdict.advice,
        "rank": verdict.rank,
        "node": verdict.node,
        "sure": f"{verdict.confidence:.0%}",
        "evidence": verdict.evidence,
    }


def _attempt_row(attempt: Attempt) -> dict[str, str]:
    return {
        "number": str(attempt.number),
        "nodes": attempt.nodes,
        "started": format_utc(attempt.started),
        "took": duration(attempt.ended - attempt.started) if attempt.started and attempt.ended else "",
        "how": attempt.how,
    }


def _points_to_plot(
    context: Context, record: JobRecord, telemetry: RunTelemetry, attempt: int | None
) -> Mapping[int, Sequence[TrainPoint]]:
    """Return the training points of the requested attempt, else of all attempts."""
    if attempt is not None:
        return {attempt: telemetry.train}
    return points_of_attempts(context, record, telemetry, max_points=_POINTS)


def _curves(attempts: Mapping[int, Sequence[TrainPoint]]) -> list[dict[str, Any]]:
    """Return the curve of each metric with at least two points, and the steps at which attempts began."""
    curves = []
    restarts = [{"attempt": number, "step": step} for number, step in restart_steps(attempts).items()]
    for key, label in METRIC_LABELS.items():
        points = join_attempts(attempts.values(), key)
        if len(points) > 1:
            steps, values = zip(*points, strict=True)
            lines = [{"label": label, "values": values}]
            curves.append({"label": label, "steps": steps, "lines": lines, "restarts": restarts})
    return curves


def script_of(record: JobRecord) -> str:
    """Return the job script of a run with secrets hidden; empty if it cannot be read."""
    try:
        text = _run_dir(record).script_path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
    return hide_secrets(text, document_of(record))


def request_of(record: JobRecord) -> str:
    """Return a run's ``job.json`` as text with secrets hidden."""
    document = document_of(record)
    return hide_secrets(json.dumps(document, indent=2, ensure_ascii=False), document)


def document_of(record: JobRecord) -> dict[str, Any]:
    """Return the content of a run's ``job.json``; empty if it cannot be read."""
    try:
        return _run_dir(record).document()
    except DtslurmError:
        return {}


def _run_dir(record: JobRecord) -> RunDir:
    return RunDir(Path(record.folder))
