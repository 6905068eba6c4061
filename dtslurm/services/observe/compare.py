"""Runs beside each other: what was asked differently, how they trained, and what they took."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from dtslurm.errors import DtslurmError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.telemetry import TrainPoint
from dtslurm.model.values import dataclass
from dtslurm.services.observe.curves import Curve, join_attempts, points_of_attempts
from dtslurm.services.observe.gpu_hours import count_gpu_hours, count_gpus, price_gpu_hours
from dtslurm.services.observe.telemetry import pulse
from dtslurm.services.request.secrets import hide_secrets
from dtslurm.services.runs.history import history
from dtslurm.services.runs.run_times import measure_run
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir

MOST_RUNS = 8
METRICS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_s",
    "step_time_s",
    "tflops_per_gpu",
    "memory_gib",
)

_POINTS = 2000
_ABSENT = "-"
# What differs between any two runs and says nothing, or is told by a line of its own.
_OF_THE_RUN = {"request.job_name", "request.run_root", "request.once", "request.origins", "request.payload"}
_SECTIONS = {"request": "configuration", "layout": "layout", "spec": "environment", "versions": "environment",
             "git": "code"}  # fmt: skip
_ENVIRONMENT = {"spec.python", "spec.activate", "spec.env", "spec.container", "spec.setup", "spec.launcher"}


@dataclass(frozen=True)
class ComparedRun:
    """One run.

    Attributes:
        state: Slurm's words for its state, several where tasks differ.
        took_s: its duration, see `dtslurm.services.runs.run_times`; None where it has not started.
        gpus: that it held; 0 for a job without.
        gpu_hours: of all attempts, without the time between them; None where it has not started or held none.
        cost, currency: by the profile's price of a GPU-hour, None and empty where the profile has none.
        last_step, last_loss, best_loss: of all attempts, None where no metrics were found.
        tokens_per_s, step_time_s: medians over the run.
        curves: by metric, (step, value) in the order of the steps; a step that was trained again has its last
            value.
        problem: why the metrics could not be read; empty where they could.
    """

    record: JobRecord
    state: str
    took_s: float | None = None
    attempts: int = 0
    nodes: int = 0
    ranks: int = 0
    gpus: int = 0
    gpu_hours: float | None = None
    cost: float | None = None
    currency: str = ""
    last_step: int | None = None
    last_loss: float | None = None
    best_loss: float | None = None
    tokens_per_s: float | None = None
    step_time_s: float | None = None
    curves: Mapping[str, Curve] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same in all runs.

    Attributes:
        section: ``configuration``, ``layout``, ``environment`` or ``code``.
        values: one for each run, in words; ``-`` where it is not set.
    """

    section: str
    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Runs in the order they were named, and their differences by section."""

    runs: tuple[ComparedRun, ...]
    differences: tuple[Difference, ...]


def compare(context: Context, records: Sequence[JobRecord]) -> Comparison:
    """Return some runs beside each other; a run whose files cannot be read is there without metrics."""
    seen = views(context, list(records))
    runs = tuple(_run(context, view) for view in seen)
    documents = [_document(view.record) for view in seen]
    return Comparison(runs, tuple(differences(documents, [_diff(view.record) for view in seen])))


def differences(documents: Sequence[Mapping[str, Any]], diffs: Sequence[bytes]) -> Iterator[Difference]:
    """Yield what differs between the records of runs, and between the changes that their code had."""
    flat = [dict(_flat(document)) for document in documents]
    names = dict.fromkeys(name for one in flat for name in one)
    found = []
    for name in names:
        values = tuple(_words(one.get(name)) for one in flat)
        if len(set(values)) > 1:
            section, _, rest = name.partition(".")
            shown = (hide_secrets(value, one) for value, one in zip(values, documents, strict=True))
            found.append(Difference(_SECTIONS[section], rest, tuple(shown)))
    if len(set(diffs)) > 1:
        sizes = tuple(f"{len(diff.splitlines())} lines" if diff else _ABSENT for diff in diffs)
        found.append(Difference("code", "uncommitted changes (code.diff)", sizes))
    order = list(dict.fromkeys(_SECTIONS.values()))
    yield from sorted(found, key=lambda one: order.index(one.section))


def _flat(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section in _SECTIONS:
        values = document.get(section)
        for name, value in values.items() if isinstance(values, dict) else ():
            full = f"{section}.{name}"
            if full not in _OF_THE_RUN and (section != "spec" or full in _ENVIRONMENT):
                yield full, value


def _words(value: object) -> str:
    if value is None or value in ("", [], {}):
        return _ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return " ".join(f"{name}={_words(one)}" for name, one in value.items())
    if isinstance(value, list):
        pairs = all(isinstance(one, list) and len(one) == 2 for one in value)
        return " ".join("=".join(map(str, one)) if pairs else _words(one) for one in value)
    return str(value)


def _run(context: Context, view: RunView) -> ComparedRun:
    record = view.record
    document = _document(record)
    layout = document.get("layout") or {}
    told = history(context, view)
    times, now = measure_run(view.statuses[0], told.events, told.attempts), context.clock()
    gpus = count_gpus(document)
    hours = count_gpu_hours(gpus, times, now)
    points, problem = _points(context, record)
    curves = {metric: curve for metric in METRICS if (curve := join_attempts(points, metric))}
    cost, currency = price_gpu_hours(context, record, hours)
    losses = [value for _, value in curves.get("loss", ())]
    steps = [step for curve in curves.values() for step, _ in curve]
    return ComparedRun(
        record=record,
        state=", ".join(sorted({one.word for one in view.statuses})),
        took_s=times.duration_s(now) if times is not None else None,
        attempts=len(told.attempts),
        nodes=int(layout.get("nodes") or 0),
        ranks=record.world_size,
        gpus=gpus,
        gpu_hours=hours,
        cost=cost,
        currency=currency,
        last_step=max(steps, default=None),
        last_loss=losses[-1] if losses else None,
        best_loss=min(losses, default=None),
        tokens_per_s=_median(curves.get("tokens_per_s", ())),
        step_time_s=_median(curves.get("step_time_s", ())),
        curves=curves,
        problem=problem,
    )


def _points(context: Context, record: JobRecord) -> tuple[Sequence[Sequence[TrainPoint]], str]:
    """Return what all attempts of a run said of their training, and why that could not be read."""
    try:
        newest = pulse(context, record, points=_POINTS)
        return list(points_of_attempts(context, record, newest, most=_POINTS).values()), ""
    except DtslurmError as error:
        return [], error.message


def _median(curve: Curve) -> float | None:
    return statistics.median(value for _, value in curve) if curve else None


def _document(record: JobRecord) -> dict[str, Any]:
    try:
        return RunDir(Path(record.folder)).document()
    except DtslurmError:
        return {}


def _diff(record: JobRecord) -> bytes:
    try:
        return (Path(record.folder) / "code.diff").read_bytes()
    except OSError:
        return b""
