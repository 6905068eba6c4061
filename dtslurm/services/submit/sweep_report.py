"""A sweep on one page for a browser: its trials, their curves together, and why trials failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtslurm.logs.clean import safe
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.units import duration, pluralize
from dtslurm.render.page import page
from dtslurm.services.observe.report import clock_text, request_of, script_of
from dtslurm.services.observe.report_header import Headline, Tile, time_tile
from dtslurm.services.runs.run_times import RunTimes, join_parts, measure_view
from dtslurm.services.runs.status import views
from dtslurm.services.submit.trials import DONE, FAILED, NEVER, STOPPED, SweepView, TrialView, look
from dtslurm.services.wiring.context import Context

_POINTS = 500  # of each trial
_MOST_CURVES = 24  # more lines cannot be told apart
_PARTS_OF_A_RUN = ("attempts", "events", "utilization", "efficiency", "ranks", "rank_counts")


def report_sweep(context: Context, record: JobRecord) -> str:
    """Return the page of the sweep that a run belongs to.

    Raises:
        TransportError: the trials' files could not be read where they are.
    """
    found = look(context, record.token, record.cluster, points=_POINTS)
    ranked = found.ranked()
    drawn = [trial for trial in ranked if len(trial.points) > 1]
    names = list(dict.fromkeys(name for trial in found.trials for name in trial.values))
    values = {
        "record": found.head,
        "headline": _headline(found),
        "tiles": _tiles(found, _measure_sweep(context, found), context.clock()),
        "about": [f"sweep on {found.head.cluster}", f"compared by the {found.mode} of {found.metric}"],
        "task": None,
        "made_at": clock_text(context.clock()),
        "summary": _summary(found),
        "verdict": None,
        "failures": [_failure(trial) for trial in found.trials if trial.state == FAILED],
        "trials": [_trial(trial, names) for trial in ranked],
        "trial_values": names,
        "metric": found.metric,
        "curves": _curves(found.metric, drawn[:_MOST_CURVES]),
        "curves_note": f"the best {_MOST_CURVES} of {len(drawn)} trials" if len(drawn) > _MOST_CURVES else "",
        "script": script_of(found.head),
        "spec": request_of(found.head),
    }
    return page("report.html.j2", {**dict.fromkeys(_PARTS_OF_A_RUN, ()), **values})


def _summary(found: SweepView) -> list[tuple[str, str]]:
    head = found.head
    lines = [
        ("jobs", ", ".join(record.job_id or "unknown" for record in found.runs) + f" on {head.cluster}"),
        (
            "trials",
            f"{pluralize(len(found.trials), 'trial')}, compared by the {found.mode} of {found.metric}",
        ),
        ("submitted", clock_text(head.created_at)),
        ("time limit", duration(head.time_limit) if head.time_limit else ""),
        ("command", head.command),
        ("run directory", head.run_dir),
        ("working directory", head.work_dir),
    ]
    return [(label, text) for label, text in lines if text]


def _failure(trial: TrialView) -> dict[str, str]:
    return {"name": safe(trial.name), "cause": safe(trial.cause) or "no record of its end", "job": trial.job}


def _trial(trial: TrialView, names: Sequence[str]) -> dict[str, object]:
    took = trial.ended - trial.started if trial.started and trial.ended else None
    return {
        "name": safe(trial.name),
        "values": [safe(trial.values.get(name, "")) for name in names],
        "state": trial.state,
        "best": _number(trial.best),
        "last": _number(trial.last),
        "step": _number(trial.step),
        "took": duration(took) if took is not None else "",
        "job": "" if trial.state == NEVER else trial.job,
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _curves(metric: str, trials: Sequence[TrialView]) -> list[Mapping[str, Any]]:
    """Return the metric of several trials over all of their steps, None where a trial has no value."""
    if not trials:
        return []
    steps = sorted({step for trial in trials for step, _ in trial.points})
    lines = []
    for trial in trials:
        known = dict(trial.points)
        lines.append({"label": trial.name, "values": [known.get(step) for step in steps]})
    return [{"label": metric, "steps": steps, "lines": lines}]


def _headline(found: SweepView) -> Headline:
    """Return the verdict on a sweep: how many trials are in each state, the first cause, the best trial."""
    counts = found.counts()
    state = ", ".join(f"{count} {state}" for state, count in counts.items())
    causes = [safe(trial.cause) for trial in found.trials if trial.state == FAILED and trial.cause]
    cause = f"first failure: {causes[0]}" if causes else ""
    best = next((trial for trial in found.ranked() if trial.best is not None and trial.state != FAILED), None)
    text = f"best {found.metric} {_number(best.best)}: {safe(best.name)}" if best is not None else ""
    kind = "bad" if FAILED in counts else "good" if set(counts) <= {DONE, STOPPED} else "plain"
    return Headline(state, kind, " · ".join(filter(None, (text, cause))))


def _tiles(found: SweepView, times: RunTimes | None, now: float) -> list[Tile]:
    """Return the key figures of a sweep that are known."""
    ended = [trial for trial in found.trials if trial.state in {DONE, STOPPED, FAILED}]
    tiles = [Tile("trials", f"{len(ended)} of {len(found.trials)}", "have ended")]
    best = next((trial for trial in found.ranked() if trial.best is not None and trial.state != FAILED), None)
    if best is not None:
        tiles.append(Tile(f"best {found.metric}", _number(best.best), safe(best.name)))
    tiles += time_tile(times, None, now)
    steps = [trial.step for trial in found.trials if trial.step is not None]
    return [*tiles, Tile("steps", f"{max(steps):,.0f}", "of the longest trial")] if steps else tiles


def _measure_sweep(context: Context, found: SweepView) -> RunTimes | None:
    """Return the times of a sweep over all of its jobs."""
    seen = views(context, found.runs)
    parts = [measure_view(view, status) for view in seen for status in view.statuses]
    return join_parts(parts, over=all(view.terminal for view in seen))
