"""Render the HTML report of a sweep: its trials, their metric curves, and the causes of failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtslurm.logs.clean import safe
from dtslurm.model.runs.record import JobRecord
from dtslurm.presentation.quantities import duration, format_precise_number, format_utc, pluralize
from dtslurm.render.page import page
from dtslurm.services.observe.report import request_of, script_of
from dtslurm.services.observe.report_header import Headline, Tile, time_tile
from dtslurm.services.runs.run_times import RunTimes, join_parts, measure_view
from dtslurm.services.runs.status import views
from dtslurm.services.submit.trials import DONE, FAILED, NEVER, STOPPED, SweepView, TrialView, load_sweep
from dtslurm.services.wiring.context import Context

_POINTS = 500  # points of the metric per trial
_MOST_CURVES = 24  # more curves cannot be distinguished
_RUN_ONLY_VALUES = ("attempts", "events", "utilization", "efficiency", "ranks", "rank_counts")


def report_sweep(context: Context, record: JobRecord) -> str:
    """Return the HTML report of the sweep that a run belongs to.

    Raises:
        TransportError: the trials' files could not be read on the cluster.
    """
    sweep = load_sweep(context, record.token, record.cluster, points=_POINTS)
    ranked = sweep.ranked()
    trials_with_curves = [trial for trial in ranked if len(trial.points) > 1]
    names = list(dict.fromkeys(name for trial in sweep.trials for name in trial.values))
    values = {
        "record": sweep.head,
        "headline": _build_headline(sweep),
        "tiles": _build_tiles(sweep, _measure_sweep(context, sweep), context.clock()),
        "about": [f"sweep on {sweep.head.cluster}", f"compared by the {sweep.mode} of {sweep.metric}"],
        "task": None,
        "made_at": format_utc(context.clock()),
        "summary": _build_summary(sweep),
        "verdict": None,
        "failures": [_failure_row(trial) for trial in sweep.trials if trial.state == FAILED],
        "trials": [_trial_row(trial, names) for trial in ranked],
        "trial_values": names,
        "metric": sweep.metric,
        "curves": _build_curves(sweep.metric, trials_with_curves[:_MOST_CURVES]),
        "curves_note": f"the best {_MOST_CURVES} of {len(trials_with_curves)} trials"
        if len(trials_with_curves) > _MOST_CURVES
        else "",
        "script": script_of(sweep.head),
        "spec": request_of(sweep.head),
    }
    return page("report.html.j2", {**dict.fromkeys(_RUN_ONLY_VALUES, ()), **values})


def _build_summary(sweep: SweepView) -> list[tuple[str, str]]:
    head = sweep.head
    lines = [
        ("jobs", ", ".join(record.job_id or "unknown" for record in sweep.runs) + f" on {head.cluster}"),
        (
            "trials",
            f"{pluralize(len(sweep.trials), 'trial')}, compared by the {sweep.mode} of {sweep.metric}",
        ),
        ("submitted", format_utc(head.created_at)),
        ("time limit", duration(head.time_limit) if head.time_limit else ""),
        ("command", head.command),
        ("run directory", head.run_dir),
        ("working directory", head.work_dir),
    ]
    return [(label, text) for label, text in lines if text]


def _failure_row(trial: TrialView) -> dict[str, str]:
    return {"name": safe(trial.name), "cause": safe(trial.cause) or "end not recorded", "job": trial.job}


def _trial_row(trial: TrialView, names: Sequence[str]) -> dict[str, object]:
    duration_s = trial.ended - trial.started if trial.started and trial.ended else None
    return {
        "name": safe(trial.name),
        "values": [safe(trial.values.get(name, "")) for name in names],
        "state": trial.state,
        "best": format_precise_number(trial.best, ""),
        "last": format_precise_number(trial.last, ""),
        "step": format_precise_number(trial.step, ""),
        "took": duration(duration_s) if duration_s is not None else "",
        "job": "" if trial.state == NEVER else trial.job,
    }


def _build_curves(metric: str, trials: Sequence[TrialView]) -> list[Mapping[str, Any]]:
    """Return the metric of several trials at all of their steps, None at steps without a value."""
    if not trials:
        return []
    steps = sorted({step for trial in trials for step, _ in trial.points})
    lines = []
    for trial in trials:
        values_by_step = dict(trial.points)
        lines.append({"label": trial.name, "values": [values_by_step.get(step) for step in steps]})
    return [{"label": metric, "steps": steps, "lines": lines}]


def _build_headline(sweep: SweepView) -> Headline:
    """Return the headline of a sweep: trials per state, the best trial, and the first cause of failure."""
    counts = sweep.counts()
    state = ", ".join(f"{count} {state}" for state, count in counts.items())
    causes = [safe(trial.cause) for trial in sweep.trials if trial.state == FAILED and trial.cause]
    cause_text = f"first failure: {causes[0]}" if causes else ""
    best = next((trial for trial in sweep.ranked() if trial.best is not None and trial.state != FAILED), None)
    best_text = (
        f"best {sweep.metric} {format_precise_number(best.best, '')}: {safe(best.name)}"
        if best is not None
        else ""
    )
    kind = "bad" if FAILED in counts else "good" if set(counts) <= {DONE, STOPPED} else "plain"
    return Headline(state, kind, " · ".join(filter(None, (best_text, cause_text))))


def _build_tiles(sweep: SweepView, times: RunTimes | None, now: float) -> list[Tile]:
    """Return the key figures of a sweep, as far as they are known."""
    ended = [trial for trial in sweep.trials if trial.state in {DONE, STOPPED, FAILED}]
    tiles = [Tile("trials", f"{len(ended)} of {len(sweep.trials)}", "have ended")]
    best = next((trial for trial in sweep.ranked() if trial.best is not None and trial.state != FAILED), None)
    if best is not None:
        tiles.append(Tile(f"best {sweep.metric}", format_precise_number(best.best, ""), safe(best.name)))
    tiles += time_tile(times, None, now)
    steps = [trial.step for trial in sweep.trials if trial.step is not None]
    return [*tiles, Tile("steps", f"{max(steps):,.0f}", "of the longest trial")] if steps else tiles


def _measure_sweep(context: Context, sweep: SweepView) -> RunTimes | None:
    """Return the summed times of all jobs of a sweep."""
    run_views = views(context, sweep.runs)
    job_times = [measure_view(view, status) for view in run_views for status in view.statuses]
    return join_parts(job_times, has_ended=all(view.terminal for view in run_views))
