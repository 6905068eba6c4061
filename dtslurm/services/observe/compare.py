"""Compare runs: differences of their configuration, their training metrics, duration and cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from dtslurm.checks.secrets import hide_secrets
from dtslurm.errors import DtslurmError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.telemetry import TrainPoint
from dtslurm.model.values import dataclass
from dtslurm.services.observe.curves import Curve, join_attempts, points_of_attempts
from dtslurm.services.observe.telemetry import read_telemetry
from dtslurm.services.observe.usage import count_gpu_hours, count_gpus, price_gpu_hours
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
# Values that differ between any two runs without meaning, or that have a line of their own.
_IGNORED_FIELDS = {
    "request.job_name",
    "request.run_root",
    "request.once",
    "request.origins",
    "request.payload",
}
_SECTIONS = {"request": "configuration", "layout": "layout", "spec": "environment", "versions": "environment",
             "git": "code"}  # fmt: skip
_ENVIRONMENT_FIELDS = {
    "spec.python",
    "spec.activate",
    "spec.env",
    "spec.container",
    "spec.setup",
    "spec.launcher",
}


@dataclass(frozen=True)
class ComparedRun:
    """The figures of one compared run.

    Attributes:
        state: Slurm's name of its state; several if array tasks differ.
        took_s: the duration in seconds, see `dtslurm.services.runs.run_times`; None if it has not started.
        gpus: number of GPUs that the run holds; 0 for a job without GPUs.
        gpu_hours: GPU-hours of all attempts, without the time between them; None if the run has not started
            or has no GPUs.
        cost, currency: cost by the profile's price of a GPU-hour; None and empty if the profile has no price.
        last_step, last_loss, best_loss: over all attempts; None if no metrics were found.
        tokens_per_s, step_time_s: medians over the run.
        curves: (step, value) by metric, in the order of the steps; a step that was trained again has its last
            value.
        problem: why the metrics could not be read, else empty.
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
    """A setting that is not the same in all compared runs.

    Attributes:
        section: ``configuration``, ``layout``, ``environment`` or ``code``.
        values: one text for each run; ``-`` if it is not set.
    """

    section: str
    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """The compared runs in the order of the request, and their differences by section."""

    runs: tuple[ComparedRun, ...]
    differences: tuple[Difference, ...]


def compare(context: Context, records: Sequence[JobRecord]) -> Comparison:
    """Compare runs; a run whose files cannot be read is included without metrics."""
    run_views = views(context, list(records))
    runs = tuple(_summarize_run(context, view) for view in run_views)
    documents = [_read_document(view.record) for view in run_views]
    return Comparison(runs, tuple(differences(documents, [_read_diff(view.record) for view in run_views])))


def differences(documents: Sequence[Mapping[str, Any]], diffs: Sequence[bytes]) -> Iterator[Difference]:
    """Yield the differences between the runs' records, and between their uncommitted code changes."""
    flat_documents = [dict(_flatten(document)) for document in documents]
    names = dict.fromkeys(name for document in flat_documents for name in document)
    unsorted = []
    for name in names:
        values = tuple(_format_value(document.get(name)) for document in flat_documents)
        if len(set(values)) > 1:
            section, _, key = name.partition(".")
            safe_values = (
                hide_secrets(value, document) for value, document in zip(values, documents, strict=True)
            )
            unsorted.append(Difference(_SECTIONS[section], key, tuple(safe_values)))
    if len(set(diffs)) > 1:
        sizes = tuple(f"{len(diff.splitlines())} lines" if diff else _ABSENT for diff in diffs)
        unsorted.append(Difference("code", "uncommitted changes (code.diff)", sizes))
    order = list(dict.fromkeys(_SECTIONS.values()))
    yield from sorted(unsorted, key=lambda difference: order.index(difference.section))


def _flatten(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section in _SECTIONS:
        values = document.get(section)
        for name, value in values.items() if isinstance(values, dict) else ():
            full_name = f"{section}.{name}"
            if full_name not in _IGNORED_FIELDS and (section != "spec" or full_name in _ENVIRONMENT_FIELDS):
                yield full_name, value


def _format_value(value: object) -> str:
    if value is None or value in ("", [], {}):
        return _ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return " ".join(f"{name}={_format_value(item)}" for name, item in value.items())
    if isinstance(value, list):
        are_pairs = all(isinstance(item, list) and len(item) == 2 for item in value)
        return " ".join("=".join(map(str, item)) if are_pairs else _format_value(item) for item in value)
    return str(value)


def _summarize_run(context: Context, view: RunView) -> ComparedRun:
    record = view.record
    document = _read_document(record)
    layout = document.get("layout") or {}
    run_history = history(context, view)
    times, now = measure_run(view.statuses[0], run_history.events, run_history.attempts), context.clock()
    gpus = count_gpus(document)
    gpu_hours = count_gpu_hours(gpus, times, now)
    points, problem = _read_points(context, record)
    curves = {metric: curve for metric in METRICS if (curve := join_attempts(points, metric))}
    cost, currency = price_gpu_hours(context, record, gpu_hours)
    losses = [value for _, value in curves.get("loss", ())]
    steps = [step for curve in curves.values() for step, _ in curve]
    return ComparedRun(
        record=record,
        state=", ".join(sorted({status.word for status in view.statuses})),
        took_s=times.duration_s(now) if times is not None else None,
        attempts=len(run_history.attempts),
        nodes=int(layout.get("nodes") or 0),
        ranks=record.world_size,
        gpus=gpus,
        gpu_hours=gpu_hours,
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


def _read_points(context: Context, record: JobRecord) -> tuple[Sequence[Sequence[TrainPoint]], str]:
    """Return the training records of all attempts of a run, and the error if they could not be read."""
    try:
        telemetry = read_telemetry(context, record, points=_POINTS)
        return list(points_of_attempts(context, record, telemetry, max_points=_POINTS).values()), ""
    except DtslurmError as error:
        return [], error.message


def _median(curve: Curve) -> float | None:
    return statistics.median(value for _, value in curve) if curve else None


def _read_document(record: JobRecord) -> dict[str, Any]:
    try:
        return RunDir(Path(record.folder)).document()
    except DtslurmError:
        return {}


def _read_diff(record: JobRecord) -> bytes:
    try:
        return (Path(record.folder) / "code.diff").read_bytes()
    except OSError:
        return b""
