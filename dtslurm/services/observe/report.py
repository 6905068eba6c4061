"""A run on one page for a browser: what it was, how it went, what it made of its GPUs, and its script."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dtslurm.errors import DtslurmError, RequestInvalid
from dtslurm.logs.clean import safe
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.state import JobStatus
from dtslurm.model.runs.telemetry import RunTelemetry, TrainPoint
from dtslurm.model.units import duration
from dtslurm.render.page import page
from dtslurm.services.observe.activity import is_running
from dtslurm.services.observe.curves import join_attempts, points_of_attempts, restart_steps
from dtslurm.services.observe.diagnose import diagnose
from dtslurm.services.observe.gpu_hours import count_gpu_hours, count_gpus, price_gpu_hours
from dtslurm.services.observe.report_header import (
    Tile,
    cost_tiles,
    describe_attempts,
    run_headline,
    size_tiles,
    time_tile,
    training_tiles,
)
from dtslurm.services.observe.telemetry import pulse
from dtslurm.services.observe.utilization_history import read_utilization, summarize_utilization
from dtslurm.services.request.secrets import hide_secrets
from dtslurm.services.runs.history import History, history
from dtslurm.services.runs.run_times import Attempt, RunTimes, measure_run, measure_view
from dtslurm.services.runs.status import RunView, describe_state, views
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir
from dtslurm.views import events
from dtslurm.views.run_page import cells, failure_words
from dtslurm.views.telemetry import activity_of

_POINTS = 4000
_MOST_EVENTS = 200
_CURVES = {
    "loss": "loss",
    "tokens_per_s": "tokens/s",
    "step_time_s": "step time, s",
    "tflops_per_gpu": "TFLOP/s per GPU",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "memory_gib": "memory of a GPU, GiB",
}


def report(
    context: Context, record: JobRecord, *, attempt: int | None = None, task: str | None = None
) -> str:
    """Return the page of one attempt (the newest by default) of a run, or of one task of an array.

    Of an array without a given task, the page is that of the first task that failed, or else of the first.

    Raises:
        RequestInvalid: there is no such attempt or task.
        TransportError: the run's files could not be read where they are.
    """
    [view] = views(context, [record])
    task = first_failed_task(view) if task is None else task
    seen = pulse(context, view.record, attempt=attempt, task=task, points=_POINTS)
    if seen.attempt is None:
        raise RequestInvalid([f"{record.name} has not started: there is nothing to report yet"])
    utilization = read_utilization(context, view.record, attempt=seen.attempt, task=seen.task)
    told = history(context, view)
    times = _times(view, seen.task, told)
    ranks = cells(seen, seen.world_size or view.record.world_size, (), over=view.terminal)
    runs = all(is_running(one) for one in _statuses(view, seen.task))
    activity = activity_of(seen, view.record.world_size) if runs else None
    points = _attempts_shown(context, view.record, seen, attempt)
    curves, now, state = _curves(points), context.clock(), _state(view, seen.task, activity)
    verdict = _verdict(context, view, seen)
    note = (activity.summary if activity is not None else "") or describe_attempts(len(told.attempts))
    values = {
        "record": view.record,
        "headline": run_headline(state, verdict, note, seen.first_failure),
        "tiles": _tiles(context, view, seen, points, times),
        "about": _about(view.record, seen, told.attempts),
        "task": seen.task,
        "made_at": clock_text(now),
        "failures": (),
        "trials": (),
        "curves_note": "dashed lines mark restarts" if any(one["restarts"] for one in curves) else "",
        "summary": _summary(view, seen, told.attempts),
        "verdict": verdict,
        "attempts": [_attempt(one) for one in told.attempts],
        "events": [
            {"time": clock_text(one.time), "text": safe(one.text), "bad": one.bad}
            for one in events.lines(seen.events or told.events)
        ][-_MOST_EVENTS:],
        "curves": curves,
        "utilization": utilization,
        "utilization_begin": clock_text(utilization.begin),
        "utilization_end": clock_text(utilization.end),
        "efficiency": summarize_utilization(utilization),
        "first_failure": safe(failure_words(seen.first_failure, ranks)) if seen.first_failure else "",
        "ranks": ranks,
        "rank_counts": Counter(cell.state for cell in ranks).most_common(),
        "script": script_of(view.record),
        "spec": request_of(view.record),
    }
    return page("report.html.j2", values)


def first_failed_task(view: RunView) -> str | None:
    """Return the first task of an array that started and failed, None where there is none."""
    if view.record.array is None:
        return None
    failed = (status for status in view.statuses if status.terminal and not status.ok)
    tasks = (status.job_id.rpartition("_")[2] for status in failed)
    return next((task for task in tasks if view.run.task(task) is not None), None)


def _state(view: RunView, task: str | None, activity: Activity | None = None) -> str:
    return ", ".join(sorted({describe_state(one, activity) for one in _statuses(view, task)}))


def _about(record: JobRecord, seen: RunTelemetry, attempts: Sequence[Attempt]) -> list[str]:
    """Return what identifies the page below its title: job, cluster and attempt."""
    job = f"job {record.job_id}" if record.job_id else "no job"
    total = [f"{len(attempts)} attempts in total"] if len(attempts) > 1 else []
    return [f"{job} on {record.cluster}", f"attempt {seen.attempt}", *total]


def _tiles(
    context: Context,
    view: RunView,
    seen: RunTelemetry,
    points: Mapping[int, Sequence[TrainPoint]],
    times: RunTimes | None,
) -> list[Tile]:
    """Return the key figures that are known."""
    record, now = view.record, context.clock()
    document = document_of(record)
    gpus = count_gpus(document)
    hours = count_gpu_hours(gpus, times, now)
    nodes = int((document.get("layout") or {}).get("nodes") or 0)
    return [
        *time_tile(times, view.time_limit, now),
        *training_tiles(points),
        *size_tiles(seen.world_size or record.world_size, nodes, gpus),
        *cost_tiles(hours, *price_gpu_hours(context, record, hours)),
    ]


def _statuses(view: RunView, task: str | None) -> Sequence[JobStatus]:
    """Return the observations of the run, or of one task of it."""
    return [one for one in view.statuses if task is None or one.job_id.endswith(f"_{task}")] or view.statuses


def _times(view: RunView, task: str | None, told: History) -> RunTimes | None:
    """Return the times of the run, or of one task of an array, which has records of its own."""
    status = _statuses(view, task)[0]
    return measure_run(status, told.events, told.attempts) if task is None else measure_view(view, status)


def _summary(view: RunView, seen: RunTelemetry, attempts: Sequence[Attempt]) -> list[tuple[str, str]]:
    record = view.record
    size = seen.world_size or record.world_size
    found = [
        ("job", f"{record.job_id or 'unknown'} on {record.cluster}"),
        ("ranks", f"{size} by {record.launcher}"),
        ("nodes", next((one.nodes for one in reversed(attempts) if one.nodes), "")),
        ("submitted", clock_text(record.created_at)),
        ("time limit", duration(view.time_limit) if view.time_limit else ""),
        ("command", record.command),
        ("run directory", record.run_dir),
        ("working directory", record.work_dir),
    ]
    git = document_of(record).get("git")
    if isinstance(git, dict) and git.get("commit"):
        dirty = ", with changes (code.diff)" if git.get("dirty") else ""
        found.append(("code", f"commit {git['commit']} of {git.get('branch') or 'no branch'}{dirty}"))
    return [(label, text) for label, text in found if text]


def _verdict(context: Context, view: RunView, seen: RunTelemetry) -> Mapping[str, Any] | None:
    """Return what diagnose says of an attempt that ended badly."""
    if not view.terminal or not view.exit_code:
        return None
    try:
        found = diagnose(context, view.record, attempt=seen.attempt, task=seen.task).verdict
    except DtslurmError as error:
        return {"cause": "unknown", "summary": error.message, "advice": "", "evidence": (), "rank": None}
    return {
        "cause": found.cause,
        "summary": found.summary,
        "advice": found.advice,
        "rank": found.rank,
        "node": found.node,
        "sure": f"{found.confidence:.0%}",
        "evidence": found.evidence,
    }


def _attempt(one: Attempt) -> dict[str, str]:
    return {
        "number": str(one.number),
        "nodes": one.nodes,
        "started": clock_text(one.started),
        "took": duration(one.ended - one.started) if one.started and one.ended else "",
        "how": one.how,
    }


def _attempts_shown(
    context: Context, record: JobRecord, seen: RunTelemetry, asked: int | None
) -> Mapping[int, Sequence[TrainPoint]]:
    """Return the points of the attempt that was asked for, or of all."""
    if asked is not None:
        return {asked: seen.train}
    return points_of_attempts(context, record, seen, most=_POINTS)


def _curves(attempts: Mapping[int, Sequence[TrainPoint]]) -> list[dict[str, Any]]:
    """Return what can be drawn: for each metric its steps and values, and where later attempts began."""
    found = []
    restarts = [{"attempt": number, "step": step} for number, step in restart_steps(attempts).items()]
    for key, label in _CURVES.items():
        points = join_attempts(attempts.values(), key)
        if len(points) > 1:
            steps, values = zip(*points, strict=True)
            lines = [{"label": label, "values": values}]
            found.append({"label": label, "steps": steps, "lines": lines, "restarts": restarts})
    return found


def script_of(record: JobRecord) -> str:
    """Return the script of a run as a page shows it, empty where it cannot be read."""
    try:
        text = _run(record).script_path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
    return hide_secrets(text, document_of(record))


def request_of(record: JobRecord) -> str:
    """Return a run's ``job.json`` as a page shows it."""
    document = document_of(record)
    return hide_secrets(json.dumps(document, indent=2, ensure_ascii=False), document)


def document_of(record: JobRecord) -> dict[str, Any]:
    """Return all of a run's ``job.json``, empty where it cannot be read."""
    try:
        return _run(record).document()
    except DtslurmError:
        return {}


def _run(record: JobRecord) -> RunDir:
    return RunDir(Path(record.folder))


def clock_text(time: float | None) -> str:
    """Return a moment as date and time in UTC, empty for none."""
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC") if time else ""
