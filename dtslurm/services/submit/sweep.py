"""A sweep as job arrays: as few as the site's MaxArraySize allows, each with a file of its trials."""

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
from dtslurm.services.submit.dependencies import behind
from dtslurm.services.submit.prepare import Prepared, prepare
from dtslurm.services.submit.submit import Progress, submit
from dtslurm.services.wiring.context import Context
from dtslurm.store import codec
from dtslurm.worker.trial_text import substitute

_PROGRAMS = ("trial.py", "trial_text.py", "trial_asha.py", "trial_optuna.py")
_ASK_ABOVE = 10_000  # trials
_ARRAY = 1001  # tasks of an array: Slurm's default MaxArraySize, where the site's is not known
_NAME = 120  # characters of a trial's name


@dataclass(frozen=True)
class Trial:
    """One point of a sweep.

    Attributes:
        number: counts through the whole sweep.
        checkpoints: where an earlier try of it saved, empty for the first.
    """

    number: int
    name: str
    values: Mapping[str, str]
    checkpoints: str = ""


@dataclass(frozen=True)
class Sweeping:
    """A sweep whose first array is checked and rendered.

    Attributes:
        settings: what its jobs must know of it, the content of ``sweep.json``.
        rest: the trials of the arrays after it, worked out one at a time.
        size: trials of an array.
    """

    first: Prepared
    request: JobRequest
    settings: Mapping[str, Any]
    rest: Iterator[Trial]
    size: int


def trials_of(sweep: Sweep) -> Iterator[Trial]:
    """Yield the trials of a sweep, one at a time.

    Raises:
        RequestInvalid: two have the same name, or a condition cannot be worked out.
    """
    names: dict[str, int] = {}
    try:
        for number, values in enumerate(sweep):
            name = _name(sweep, number, values)
            if name in names:
                raise RequestInvalid(
                    [f"trials {names[name]} and {number} of the sweep have the same name: {name}"],
                    hint="sweep.name must mention what tells them apart; a value is in a list only once",
                )
            names[name] = number
            yield Trial(number, name, values)
    except ValueError as error:
        raise RequestInvalid([f"sweep: {error}"]) from None


def _name(sweep: Sweep, number: int, values: Mapping[str, str]) -> str:
    if sweep.name is not None:
        return substitute(sweep.name, {**values, "number": str(number)})
    told = ",".join(f"{name}={value}" for name, value in values.items())
    if sweep.optuna is not None or len(told) > _NAME:  # values to come, or too many to read
        told = f"{told[:_NAME]}#{number}"
    return told


def plan_sweep(
    context: Context, request: JobRequest, sweep: Sweep, *, confirm: Callable[[str], bool]
) -> Sweeping:
    """Check a sweep and render its first array; nothing is queued.

    Args:
        confirm: asked before very many trials are queued.

    Raises:
        RequestInvalid: it cannot work, or nobody confirmed it.
    """
    count = sweep.size()
    if count > _ASK_ABOVE and not confirm(f"The sweep has {count:,} points. Queue them all?"):
        raise RequestInvalid(
            [f"the sweep has {count:,} points; nothing was queued"],
            hint="--yes queues them all; random: with samples: draws some of them",
        )
    per_task, problems = _per_task(request, sweep)
    if problems:
        raise RequestInvalid(problems)
    trials = _checked(sweep)
    assert request.trials is not None  # noqa: S101 - a sweep's request
    request = replace(request, trials=replace(request.trials, per_task=per_task))
    if per_task > 1:
        request = replace(request, nodes=1, ntasks_per_node=per_task, launcher="srun")
    return arrays(context, request, _settings(sweep, per_task), trials)


def _checked(sweep: Sweep) -> Iterator[Trial]:
    """Return the trials, after names and conditions were seen to be right for all of them."""
    if sweep.size() <= _ASK_ABOVE:
        return iter(list(trials_of(sweep)))
    for _ in trials_of(sweep):  # too many to keep
        pass
    return trials_of(sweep)


def arrays(
    context: Context, request: JobRequest, settings: Mapping[str, Any], trials: Iterator[Trial]
) -> Sweeping:
    """Return trials as arrays of the size that the site takes, the first of them checked and rendered.

    Raises:
        RequestInvalid: it cannot work, or there is no trial.
    """
    cluster = context.live_cluster(request.cluster, request.transport)
    size = (cluster.profile.slurm.max_array_size or _ARRAY) * settings["per_task"]
    part = list(islice(trials, size))
    if not part:
        raise RequestInvalid(["when and unless of the sweep leave no point"])
    return Sweeping(_prepared(context, request, settings, part), request, settings, trials, size)


def _per_task(request: JobRequest, sweep: Sweep) -> tuple[int, list[str]]:
    """Return how many trials share an array task, and what is wrong with that."""
    if not sweep.packed:
        return 1, []
    problems = []
    if request.nodes not in {None, 1}:
        problems.append("trials that share a node have one node: nodes must be 1")
    if request.ntasks_per_node is not None:
        problems.append("trials that share a node are one process each: leave ntasks_per_node out")
    if request.launcher not in {None, "srun", "single"}:
        problems.append(f"trials that share a node are started by srun, not by {request.launcher}")
    if sweep.trials_per_gpu is not None and not request.gpus_per_node:
        problems.append("trials_per_gpu: say by gpus_per_node how many GPUs an array task has")
    count = sweep.trials_per_node or (sweep.trials_per_gpu or 1) * (request.gpus_per_node or 1)
    return count, problems


def _settings(sweep: Sweep, per_task: int) -> dict[str, Any]:
    """Return what the jobs of a sweep must know of it."""
    return {
        "schema": 1,
        "sweep": "",  # the run directory of its first array, once that is known
        "per_task": per_task,
        "max_parallel": sweep.max_parallel,
        "metric": sweep.metric,
        "mode": sweep.mode,
        "asha": asdict(sweep.asha) if sweep.asha else None,
        "optuna": _optuna(sweep),
    }


def _optuna(sweep: Sweep) -> dict[str, Any] | None:
    if sweep.optuna is None:
        return None
    random = {name: [one.kind, *one.arguments] for name, one in sweep.random.items()}
    return {**asdict(sweep.optuna), "seed": sweep.seed, "random": random}


def _prepared(
    context: Context, request: JobRequest, settings: Mapping[str, Any], trials: Sequence[Trial]
) -> Prepared:
    """Return the array of some trials; the first array of a sweep is the one that the others belong to."""
    tasks, most = -(-len(trials) // settings["per_task"]), settings["max_parallel"]
    array = f"0-{tasks - 1}{f'%{most}' if most and most < tasks else ''}" if tasks > 1 else "0"
    if settings["sweep"] and request.trials is not None:
        token = Path(settings["sweep"]).name.rpartition("-")[2]
        request = replace(request, trials=replace(request.trials, token=token))
    prepared = prepare(context, replace(request, array=array), standalone=False)
    head = settings["sweep"] or prepared.submission.run_dir
    gpus = prepared.submission.layout.gpus_per_node
    lines = "".join(json.dumps(vars(trial)) + "\n" for trial in trials)
    payload = {name: assets.worker(name).read_bytes() for name in _PROGRAMS}
    payload[SETTINGS] = codec.encode({**settings, "sweep": head, "gpus": gpus})
    payload[TRIALS] = lines.encode("utf-8", "surrogateescape")
    return replace(prepared, payload=payload, sweep=head)


def submit_sweep(
    context: Context,
    sweeping: Sweeping,
    after: str,
    queued: list[JobRecord],
    progress: Progress = lambda *_: None,
) -> list[JobRecord]:
    """Queue all arrays of a sweep and return their records; each is added to ``queued`` at once.

    Where ``max_parallel`` is given, an array waits for the end of the one before it.
    """
    first, settings = sweeping.first, {**sweeping.settings, "sweep": sweeping.first.sweep}
    prepared: Prepared | None = first
    records: list[JobRecord] = []
    while prepared is not None:
        waits = after
        if records and settings["max_parallel"]:
            waits = f"{after},afterany:{records[-1].job_id}".lstrip(",")
        record = submit(context, behind(prepared, waits), progress)
        records.append(record)
        queued.append(record)
        part = list(islice(sweeping.rest, sweeping.size))
        request = replace(sweeping.request, no_check=True)  # the first one was checked
        following = _prepared(context, request, settings, part) if part else None
        prepared = following and replace(following, stage=first.stage, stages=first.stages)
    return records


def save_members(context: Context, head: JobRecord, records: Sequence[JobRecord]) -> None:
    """Note which runs belong to a sweep, beside the copy of its first one on this machine."""
    folders = [record.folder for record in records]
    context.transport.put(codec.encode({"schema": 1, "runs": folders}), str(Path(head.folder) / MEMBERS))
