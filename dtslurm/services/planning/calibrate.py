"""Calibrates the planner with a run's measurements, in a file beside the cluster's profile."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtslurm import assets
from dtslurm.errors import RequestInvalid, StoreError
from dtslurm.launch import registry
from dtslurm.planner import constants as shipped
from dtslurm.planner.calibrate import BOUNDS, Measurement, ratios
from dtslurm.planner.layout import Layout
from dtslurm.planner.search import TrainingTask
from dtslurm.planner.step import PARTS
from dtslurm.presentation.quantities import pluralize
from dtslurm.transport.deletion import remove

if TYPE_CHECKING:
    from dtslurm.services.planning.plan import Plan
    from dtslurm.services.wiring.context import Context

SCHEMA = 1
WARM_UP = 3
SCALED = {
    "compute_scale": "computation",
    "communication_scale": "communication",
    "host_scale": "host time",
    "activation_scale": "activations",
}
STEP_KEY, MEMORY_KEY = "step_time_s", "memory_gib"  # in the lines of a run's metrics
_STEP = (STEP_KEY, "step_time", "step_s", "seconds_per_step")
_MEMORY = (MEMORY_KEY, "peak_memory_gib", "max_memory_gib")
_STATE_TERMS = ("weights", "gradients", "master_weights", "optimizer", "gathered_weights")


def file_of(profile: Path, cwd: Path, env: Mapping[str, str]) -> Path:
    """Return the path of a profile's calibration file.

    It is beside the profile; for a packaged profile it is among the project's profiles if there are any, else
    the user's.
    """
    name = f"{profile.stem}.plan.json"
    if profile.parent.resolve() != assets.cluster_profiles().resolve():
        return profile.with_name(name)
    if (cwd / "cluster_profiles").is_dir():
        return cwd / "cluster_profiles" / name
    config = Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return config / "dtslurm" / "cluster_profiles" / name


def read(path: Path) -> list[Measurement]:
    """Return the measurements of a calibration file; empty if there is no file.

    Raises:
        RequestInvalid: the file cannot be read or is no calibration.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
        return [_parse_measurement(item) for item in document["measurements"]]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RequestInvalid([f"{path}: {(error.strerror or 'cannot be read').lower()}"]) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"{path}: is not a calibration file: {error}"
        raise RequestInvalid([problem], hint="delete it, and calibrate again with plan --calibrate") from None


def _parse_measurement(item: Any) -> Measurement:
    measurement = Measurement(**item)
    for name in ("predicted_step_s", "predicted_memory_gib", "memory_states_gib"):
        value = getattr(measurement, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name} should be a positive number, not {value!r}")
    for name in ("measured_step_s", "measured_memory_gib"):
        value = getattr(measurement, name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not value > 0
        ):
            raise ValueError(f"{name} should be a positive number, not {value!r}")
    parts = measurement.predicted_parts_s
    if parts is not None and not _are_seconds_by_part(parts):
        raise ValueError(f"predicted_parts_s should be seconds of {', '.join(PARTS)}, not {parts!r}")
    if not isinstance(measurement.failure, str) or not isinstance(measurement.nodes, int | None):
        raise TypeError("failure should be a text, and nodes a whole number")
    if not isinstance(measurement.framework, str) or measurement.framework not in _known_frameworks():
        raise ValueError(f"unknown framework {measurement.framework!r}")
    return measurement


def _are_seconds_by_part(parts: object) -> bool:
    return (
        isinstance(parts, dict)
        and set(parts) == set(PARTS)
        and all(isinstance(value, int | float) and value >= 0 for value in parts.values())
        and sum(parts.values()) > 0
    )


def _known_frameworks() -> Iterable[str]:
    from dtslurm.planner.frameworks import FRAMEWORKS

    return FRAMEWORKS


def measured(run: Path) -> tuple[float | None, float | None]:
    """Return the median step time in seconds and the peak memory in GiB from a run's metrics.

    The newest attempt with values counts. Its first steps do not, because they compile kernels and fill
    caches.
    """
    from dtslurm.store.rundir import RunDir

    folder = RunDir(run)
    for attempt in reversed(folder.attempts()):
        lines = folder.metrics(attempt)
        step_times = _read_values(lines, _STEP)
        memory_peaks = _read_values(lines, _MEMORY)
        if step_times or memory_peaks:
            return typical_step(step_times), max(memory_peaks, default=None)
    return None, None


def typical_step(step_times: Sequence[float]) -> float | None:
    """Return the median time of a step after the warm-up, None if there are no times."""
    return statistics.median(step_times[WARM_UP:] or step_times) if step_times else None


def _read_values(lines: Iterable[Mapping[str, Any]], names: Iterable[str]) -> list[float]:
    values = []
    for line in lines:
        value = next((line[name] for name in names if name in line), None)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9:
            values.append(float(value))
    return values


def calibrate(plan: Plan, job: str, cwd: Path) -> tuple[Path, Measurement]:
    """Compare a run's measurements with its plan, and write them to the cluster's calibration file.

    Args:
        plan: a plan of the run's layout.
        job: the run.
        cwd: the working directory.

    Raises:
        RequestInvalid: the plan names no cluster, or the run had another size or no metrics.
        StoreError: the file cannot be written.
    """
    from dtslurm.services.runs.runs import find
    from dtslurm.services.wiring.context import Context

    if plan.cluster is None:
        raise RequestInvalid(["--calibrate needs the run's cluster: give --cluster instead of --gpu"])
    context = Context(cwd=cwd)
    record = find(context, job)
    if record.cluster != plan.cluster:
        raise RequestInvalid([f"run {record.name} was on {record.cluster}, not on {plan.cluster}"])
    layout = plan.chosen[0].layout
    gpus = layout.tp * layout.pp * layout.cp * layout.dp
    if record.world_size != gpus and not _starts_one_process(record.launcher):
        raise RequestInvalid(
            [
                (
                    f"run {record.name} had {pluralize(record.world_size, 'rank')}, but --layout is for "
                    f"{gpus} GPUs"
                )
            ],
            hint="give the --nodes and the --layout of the run",
        )
    step_s, memory_gib = measured(Path(record.run_dir))
    if step_s is None and memory_gib is None:
        raise RequestInvalid(
            [f"run {record.name} has no {_STEP[0]} and no {_MEMORY[0]} in its metrics/<attempt>/train.jsonl"],
            hint='training code appends {"step_time_s": 1.9, "memory_gib": 61} to $DTSLURM_METRICS each step',
        )
    measurement = make_measurement(plan.task, layout, record.token, (step_s, memory_gib))
    return save(context, plan, [measurement]), measurement


def save(context: Context, plan: Plan, measurements: Sequence[Measurement]) -> Path:
    """Write measurements to the calibration file of a plan's cluster, replacing those of the same jobs.

    Raises:
        StoreError: the file cannot be written.
    """
    path = file_of(context.cluster(plan.cluster).path, context.cwd, os.environ)
    jobs = {item.job for item in measurements}
    _write_file(path, [*(item for item in read(path) if item.job not in jobs), *measurements])
    return path


def _starts_one_process(launcher: str) -> bool:
    """Return whether a launcher starts one process for any number of GPUs."""
    return launcher in registry.names() and registry.load(launcher).one_process


def capped(measurement: Measurement) -> Iterator[tuple[str, float, float]]:
    """Yield (quantity, factor, limited factor) for each factor of a measurement that exceeds its bounds."""
    low, high = BOUNDS
    for quantity, ratio in ratios(measurement).items():
        if not low <= ratio <= high:
            yield quantity, ratio, min(high, max(low, ratio))


def make_measurement(
    task: TrainingTask,
    layout: Layout,
    job: str,
    measured: tuple[float | None, float | None],
    failure: str = "",
) -> Measurement:
    """Return a run's measurement with its predictions.

    Args:
        job: an identifier of the run.
        measured: the seconds of a step and the peak memory in GiB, as `measured` returns them.
        failure: why the layout failed, empty if it did not.
    """
    estimate = task.estimator(shipped.default()).estimate(layout)
    return Measurement(
        job=job,
        model=task.model.name,
        gpu=task.machine.gpu.name,
        framework=task.framework,
        precision=task.precision,
        layout=str(layout),
        seq_len=task.seq_len,
        predicted_step_s=estimate.time.total,
        measured_step_s=measured[0],
        predicted_memory_gib=estimate.memory.allocated,
        memory_states_gib=sum(estimate.memory.terms[name] for name in _STATE_TERMS),
        measured_memory_gib=measured[1],
        predicted_parts_s=estimate.time.parts,
        nodes=task.machine.nodes,
        failure=failure,
    )


def _write_file(path: Path, measurements: list[Measurement]) -> None:
    text = json.dumps({"schema": SCHEMA, "measurements": [asdict(item) for item in measurements]}, indent=2)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text + "\n", "utf-8")
        part.replace(path)
    except OSError as error:
        remove(part, within=path.parent)
        raise StoreError(f"{path}: {(error.strerror or 'cannot be written').lower()}") from None
