"""Submit a sweep as the fewest job arrays that MaxArraySize allows, each with a file of its trials."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from dtslurm import assets
from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.jobs.sweep import MEMBERS, SETTINGS, TRIALS, Sweep
from dtslurm.model.values import dataclass
from dtslurm.services.request.request import JobRequest
from dtslurm.services.submit.prepare import Prepared, add_dependency, prepare
from dtslurm.services.submit.submit import Progress, submit
from dtslurm.services.wiring.context import Context
from dtslurm.store import codec
from dtslurm.worker.trial_text import substitute

_PROGRAMS = ("lib/json_records.py", "trial.py", "trial_text.py", "trial_asha.py", "trial_optuna.py")
_CONFIRM_ABOVE = 10_000  # trials
_DEFAULT_ARRAY_SIZE = 1001  # tasks per array if the cluster's MaxArraySize is unknown: Slurm's default
_MAX_NAME_LENGTH = 120  # characters of a trial's name


@dataclass(frozen=True)
class Trial:
    """One trial of a sweep.

    Attributes:
        number: index in the whole sweep.
        checkpoints: checkpoint folder of an earlier attempt of this trial, empty for the first attempt.
        args: further arguments of the training script.
    """

    number: int
    name: str
    values: Mapping[str, str]
    checkpoints: str = ""
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedSweep:
    """A planned sweep, whose first array is checked and rendered.

    Attributes:
        settings: the content of ``sweep.json``, which the jobs of the sweep read.
        rest: the trials of the later arrays, generated lazily.
        size: trials per array.
    """

    first: Prepared
    request: JobRequest
    settings: Mapping[str, Any]
    rest: Iterator[Trial]
    size: int


def trials_of(sweep: Sweep) -> Iterator[Trial]:
    """Generate the trials of a sweep.

    Raises:
        RequestInvalid: two trials have the same name, or a condition cannot be evaluated.
    """
    names: dict[str, int] = {}
    try:
        for number, values in enumerate(sweep):
            name = _trial_name(sweep, number, values)
            if name in names:
                raise RequestInvalid(
                    [f"trials {names[name]} and {number} of the sweep have the same name: {name}"],
                    hint="use in sweep.name a variable that differs between these trials, and list each "
                    "value only once",
                )
            names[name] = number
            yield Trial(number, name, values)
    except ValueError as error:
        raise RequestInvalid([f"sweep: {error}"]) from None


def _trial_name(sweep: Sweep, number: int, values: Mapping[str, str]) -> str:
    if sweep.name is not None:
        return substitute(sweep.name, {**values, "number": str(number)})
    assignments = ",".join(f"{name}={value}" for name, value in values.items())
    # With Optuna the values are chosen later.
    if sweep.optuna is not None or len(assignments) > _MAX_NAME_LENGTH:
        assignments = f"{assignments[:_MAX_NAME_LENGTH]}#{number}"
    return assignments


def plan_sweep(
    context: Context, request: JobRequest, sweep: Sweep, *, confirm: Callable[[str], bool]
) -> PlannedSweep:
    """Check a sweep and render its first array without queuing it.

    Args:
        confirm: called with a question before very many trials are queued.

    Raises:
        RequestInvalid: the request is invalid, or the user did not confirm.
    """
    count = sweep.size()
    if count > _CONFIRM_ABOVE and not confirm(f"The sweep has {count:,} points. Queue them all?"):
        raise RequestInvalid(
            [f"the sweep has {count:,} points, and no job was queued"],
            hint="--yes queues all points; random: with samples: draws a part of them",
        )
    per_task, problems = _trials_per_task(request, sweep)
    if problems:
        raise RequestInvalid(problems)
    trials = _check_trials(sweep)
    assert request.trials is not None  # noqa: S101 - a sweep's request
    request = replace(request, trials=replace(request.trials, per_task=per_task))
    if per_task > 1:
        request = replace(request, nodes=1, ntasks_per_node=per_task, launcher="srun")
    return arrays(context, request, sweep_settings(sweep, per_task), trials)


def _check_trials(sweep: Sweep) -> Iterator[Trial]:
    """Return the trials, after checking the names and conditions of all of them."""
    if sweep.size() <= _CONFIRM_ABOVE:
        return iter(list(trials_of(sweep)))
    for _ in trials_of(sweep):  # too many to hold in memory
        pass
    return trials_of(sweep)


def arrays(
    context: Context, request: JobRequest, settings: Mapping[str, Any], trials: Iterator[Trial]
) -> PlannedSweep:
    """Divide trials into arrays of the size that the cluster accepts; check and render the first array.

    Raises:
        RequestInvalid: the request is invalid, or there are no trials.
    """
    cluster = context.live_cluster(request.cluster, request.transport)
    size = (cluster.profile.slurm.max_array_size or _DEFAULT_ARRAY_SIZE) * settings["per_task"]
    first_trials = list(islice(trials, size))
    if not first_trials:
        raise RequestInvalid(["when and unless of the sweep exclude every point"])
    return PlannedSweep(
        _prepare_array(context, request, settings, first_trials), request, settings, trials, size
    )


def _trials_per_task(request: JobRequest, sweep: Sweep) -> tuple[int, list[str]]:
    """Return the number of trials per array task, and the problems of packing them."""
    if not sweep.packed:
        return 1, []
    problems = []
    if request.nodes not in {None, 1}:
        problems.append("trials that share a node run on one node: set nodes to 1")
    if request.ntasks_per_node is not None:
        problems.append("trials that share a node run one process each: remove ntasks_per_node")
    if request.launcher not in {None, "srun", "single"}:
        problems.append(f"trials that share a node are started by srun, not by {request.launcher}")
    if sweep.trials_per_gpu is not None and not request.gpus_per_node:
        problems.append("trials_per_gpu needs gpus_per_node, the number of GPUs of an array task")
    count = sweep.trials_per_node or (sweep.trials_per_gpu or 1) * (request.gpus_per_node or 1)
    return count, problems


def sweep_settings(sweep: Sweep, per_task: int, steps: int | None = None) -> dict[str, Any]:
    """Return the settings that the jobs of a sweep read.

    Args:
        steps: stop each trial after this many values of the metric.
    """
    return {
        "schema": 1,
        "sweep": "",  # the run directory of the first array, set when it is known
        "per_task": per_task,
        "max_parallel": sweep.max_parallel,
        "metric": sweep.metric,
        "mode": sweep.mode,
        "asha": asdict(sweep.asha) if sweep.asha else None,
        "optuna": _optuna_settings(sweep),
        "steps": steps,
    }


def _optuna_settings(sweep: Sweep) -> dict[str, Any] | None:
    if sweep.optuna is None:
        return None
    random = {
        name: [distribution.kind, *distribution.arguments] for name, distribution in sweep.random.items()
    }
    return {**asdict(sweep.optuna), "seed": sweep.seed, "random": random}


def _prepare_array(
    context: Context, request: JobRequest, settings: Mapping[str, Any], trials: Sequence[Trial]
) -> Prepared:
    """Prepare the array of some trials; the run directory of the first array identifies the sweep."""
    tasks, max_parallel = -(-len(trials) // settings["per_task"]), settings["max_parallel"]
    array = (
        f"0-{tasks - 1}{f'%{max_parallel}' if max_parallel and max_parallel < tasks else ''}"
        if tasks > 1
        else "0"
    )
    if settings["sweep"] and request.trials is not None:
        token = Path(settings["sweep"]).name.rpartition("-")[2]
        request = replace(request, trials=replace(request.trials, token=token))
    prepared = prepare(context, replace(request, array=array), standalone=False)
    head = settings["sweep"] or prepared.submission.run_dir
    gpus = prepared.submission.layout.gpus_per_node
    lines = "".join(json.dumps(vars(trial)) + "\n" for trial in trials)
    payload = {Path(name).name: assets.worker(name).read_bytes() for name in _PROGRAMS}
    payload[SETTINGS] = codec.encode({**settings, "sweep": head, "gpus": gpus})
    payload[TRIALS] = lines.encode("utf-8", "surrogateescape")
    return replace(prepared, payload=payload, sweep=head)


def submit_sweep(
    context: Context,
    sweeping: PlannedSweep,
    dependency: str,
    queued: list[JobRecord],
    progress: Progress = lambda *_: None,
) -> list[JobRecord]:
    """Queue all arrays of a sweep and return their records; add each record to ``queued`` at once.

    With ``max_parallel``, each array waits for the previous array to end.
    """
    first, settings = sweeping.first, {**sweeping.settings, "sweep": sweeping.first.sweep}
    prepared: Prepared | None = first
    records: list[JobRecord] = []
    while prepared is not None:
        own_dependency = dependency
        if records and settings["max_parallel"]:
            own_dependency = f"{dependency},afterany:{records[-1].job_id}".lstrip(",")
        record = submit(context, add_dependency(prepared, own_dependency), progress)
        records.append(record)
        queued.append(record)
        next_trials = list(islice(sweeping.rest, sweeping.size))
        request = replace(sweeping.request, no_check=True)  # the first array was checked
        next_array = _prepare_array(context, request, settings, next_trials) if next_trials else None
        prepared = next_array and replace(next_array, stage=first.stage, stages=first.stages)
    return records


def save_members(context: Context, head: JobRecord, records: Sequence[JobRecord]) -> None:
    """Save the list of runs that belong to a sweep, in the local folder of its first run."""
    folders = [record.folder for record in records]
    context.transport.put(codec.encode({"schema": 1, "runs": folders}), str(Path(head.folder) / MEMBERS))
