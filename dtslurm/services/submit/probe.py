"""Probe the best layouts of a plan: run a few steps of each as one job array, and calibrate with them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from dtslurm.errors import JobNotFound, RequestInvalid
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.jobs.sweep import SETTINGS, Sweep
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.values import dataclass
from dtslurm.planner.emit import job as job_emitter
from dtslurm.planner.estimate import Estimate
from dtslurm.planner.explain import TRIAL_STEPS
from dtslurm.planner.layout import Layout, parse_layout
from dtslurm.planner.search import TrainingTask
from dtslurm.presentation.quantities import pluralize
from dtslurm.services.logs.logs import wait
from dtslurm.services.observe.diagnose import diagnose
from dtslurm.services.planning.calibrate import (
    MEMORY_KEY,
    STEP_KEY,
    WARM_UP,
    make_measurement,
    save,
    typical_step,
)
from dtslurm.services.planning.plan import Plan, PlanRequest
from dtslurm.services.request.request import JobRequest
from dtslurm.services.runs.runs import find
from dtslurm.services.submit.job_file import load_jobs
from dtslurm.services.submit.submit import Progress
from dtslurm.services.submit.sweep import (
    PlannedSweep,
    Trial,
    arrays,
    save_members,
    submit_sweep,
    sweep_settings,
)
from dtslurm.services.submit.trials import FAILED, NEVER, TrialView, load_sweep
from dtslurm.services.wiring.context import Context
from dtslurm.worker.trial_text import MENTION

LAYOUT_KEYS = (
    *("tp", "pp", "cp", "ep", "etp", "dp", "vp", "mbs", "gbs", "zero", "recompute", "schedule"),
    *("sp", "offload"),
)
PLACEHOLDERS = (*LAYOUT_KEYS, "shard", "accumulation", "seq_len", "steps", "layout")
_SETTING = "probe"  # the key of the plan's options in the settings of the array
_START_MIN = 15  # of the time limit: to start the job, load the data and compile kernels
_SLOWER = 3  # times as slow as predicted, a layout still ends within the time limit
_MEMORY_CAUSES = {"gpu-out-of-memory", "host-out-of-memory"}
_MAX_POINTS = 10_000
_DISPLAY_OPTIONS = ("top", "tokens", "price", "currency", "watts", "scaling", "emit")


@dataclass(frozen=True)
class PlannedProbe:
    """A checked and rendered probe.

    Attributes:
        layouts: the estimates of the layouts to run.
        minutes: the time limit of each layout.
        gpu_hours, most_gpu_hours: of the predicted steps, and of all layouts up to the time limit.
    """

    sweeping: PlannedSweep
    layouts: tuple[Estimate, ...]
    minutes: int
    gpu_hours: float
    most_gpu_hours: float


@dataclass(frozen=True)
class ProbedLayout:
    """The result of one layout of a probe.

    Attributes:
        job: the array task, such as ``17_3``.
        step_s, memory_gib: None if not measured.
        problem: why the step time was not measured, empty if it was.
        cause: the slug of the diagnosis of a job that failed, else empty.
        failed: whether the layout itself cannot run, so that it leaves the ranking.
    """

    layout: Layout
    job: str
    step_s: float | None = None
    memory_gib: float | None = None
    problem: str = ""
    cause: str = ""
    failed: bool = False


def plan_probe(context: Context, plan: Plan, script: str, args: Sequence[str]) -> PlannedProbe:
    """Check and render a probe of the layouts that a plan shows and that were not measured yet.

    Args:
        script: the training script, or a job file.
        args: its arguments; ``${tp}`` and the other names of `PLACEHOLDERS` stand for a layout's values.

    Raises:
        RequestInvalid: the plan has nothing to compare, or the job is invalid.
    """
    if plan.cluster is None:
        raise RequestInvalid(
            ["--probe runs jobs on a cluster, and --gpu names only a GPU"],
            hint="give --cluster instead of --gpu; dtslurm cluster list shows the clusters",
        )
    layouts = _layouts_to_run(plan)
    request = _job_request(context, plan, script, args)
    trials = [
        Trial(number, str(item.layout), _trial_values(plan.task, item.layout, request))
        for number, item in enumerate(layouts)
    ]
    if not _mentioned(request):
        trials = [
            replace(trial, args=tuple(_emitted_arguments(plan.task, item.layout, script)))
            for trial, item in zip(trials, layouts, strict=True)
        ]
    step_s = [item.time.total for item in layouts]
    minutes = math.ceil(_START_MIN + _SLOWER * TRIAL_STEPS * max(step_s) / 60)
    request = replace(request, time=str(minutes))
    parallel = 1 if _shares_nodes(context, plan) else None
    settings = {
        **sweep_settings(Sweep(metric=STEP_KEY, max_parallel=parallel), 1, TRIAL_STEPS),
        _SETTING: asdict(plan.request),
    }
    gpus = plan.task.machine.gpus
    return PlannedProbe(
        arrays(context, request, settings, iter(trials)),
        tuple(layouts),
        minutes,
        gpu_hours=gpus * TRIAL_STEPS * sum(step_s) / 3600,
        most_gpu_hours=gpus * minutes * len(layouts) / 60,
    )


def _layouts_to_run(plan: Plan) -> list[Estimate]:
    if not plan.chosen or not plan.chosen[0].fits:
        raise RequestInvalid(
            ["no layout fits, so there is nothing to run", *plan.unfit],
            hint="plan for more nodes with -N, or for another model",
        )
    if len(plan.chosen) == 1:
        raise RequestInvalid(
            ["--probe compares layouts, and this plan shows only one", f"1 is {plan.chosen[0].layout}"],
            hint="leave out --layout and set --top to 2 or more; or submit this layout, and give its job to "
            "--calibrate",
        )
    layouts = [item for item in plan.chosen if item.predicted_s is None]
    if not layouts:
        raise RequestInvalid(
            [
                "all layouts that the plan shows were measured on this cluster",
                f"1 is {plan.chosen[0].layout}",
            ],
            hint=f"use 1, or measure more layouts with --top {len(plan.chosen) + 3}",
        )
    return layouts


def _job_request(context: Context, plan: Plan, script: str, args: Sequence[str]) -> JobRequest:
    """Return the request of the array: the user's job, with the cluster and the size of the plan."""
    machine = plan.task.machine
    jobs = load_jobs(context, JobRequest(script=script, args=tuple(args)), per_trial=PLACEHOLDERS)
    request = jobs[0].request
    if not all(step.plain for step in jobs) or request.array is not None:
        raise RequestInvalid(
            [f"{script} has stages, a sweep or an array, and --probe needs one training job"],
            hint="name the training script, or a job file with the training job alone",
        )
    sizes = {"nodes": machine.nodes, "gpus_per_node": machine.gpus_per_node}
    if differing := [
        f"{name} is {getattr(request, name)} in the file, and {size} in the plan"
        for name, size in sizes.items()
        if getattr(request, name) not in {None, size}
    ]:
        raise RequestInvalid(
            [f"{script} is a job of another size than the plan", *differing],
            hint="give plan the size of the job with --nodes and --gpus-per-node",
        )
    names = [name for name, _, text in (entry.partition("=") for entry in request.env) if _names_in(text)]
    return replace(
        request,
        cluster=plan.cluster,
        node_type=plan.node_type or request.node_type,
        nodes=machine.nodes,
        gpus_per_node=machine.gpus_per_node,
        # a layout that fails is a result, so that nothing is restarted
        total_time=None,
        max_restarts=None,
        hang_timeout=None,
        spare_nodes=None,
        requeue=False,
        once=None,
        trials=Trials(env=tuple(names)),
    )


def _names_in(*texts: str) -> set[str]:
    """Return the placeholders in some texts."""
    return {match[2] for text in texts for match in MENTION.finditer(text) if not match[1]} & {*PLACEHOLDERS}


def _mentioned(request: JobRequest) -> set[str]:
    return _names_in(*request.args, *request.env)


def _trial_values(task: TrainingTask, layout: Layout, request: JobRequest) -> dict[str, str]:
    """Return the values of the placeholders that a job uses, and the whole layout."""
    values: dict[str, object] = {key: getattr(layout, key) for key in LAYOUT_KEYS}
    values |= {
        "sp": int(layout.sp and layout.tp > 1),
        "offload": int(layout.offload),
        "shard": layout.shards if layout.zero else 1,
        "accumulation": layout.micro_batches,
        "seq_len": task.seq_len,
        "steps": TRIAL_STEPS,
        "layout": layout,
    }
    return {name: str(values[name]) for name in PLACEHOLDERS if name in {*_mentioned(request), "layout"}}


def _emitted_arguments(task: TrainingTask, layout: Layout, script: str) -> list[str]:
    words = job_emitter.script_arguments(task, layout, TRIAL_STEPS)
    if words is None:
        raise RequestInvalid(
            [
                f"{script} does not receive the layout to run: it has no placeholder among its arguments",
                f"dtslurm knows no arguments for the layouts of {task.framework}",
            ],
            hint=f"use placeholders, as in --probe {script} -- --tp '${{tp}}' --mbs '${{mbs}}'; known "
            f"are {', '.join(PLACEHOLDERS)}",
        )
    if problems := job_emitter.check(task, layout):
        raise RequestInvalid(
            [f"{task.framework} cannot run the layout {layout}", *problems],
            hint="plan with another --framework, or show fewer layouts with --top",
        )
    return words


def _shares_nodes(context: Context, plan: Plan) -> bool:
    """Return whether several layouts may run on one node at a time, and so disturb each other."""
    profile = context.live_cluster(plan.cluster).profile
    node = profile.node_type(plan.node_type)
    return bool(node and node.gpus and plan.task.machine.gpus_per_node < node.gpus.count)


def submit_probe(
    context: Context, probe: PlannedProbe, queued: list[JobRecord], progress: Progress = lambda *_: None
) -> JobRecord:
    """Queue a probe and return its run; add the run to ``queued`` at once."""
    records = submit_sweep(context, probe.sweeping, "", queued, progress)
    save_members(context, records[0], records)
    return records[0]


def find_probe(
    context: Context, selector: str, cluster: str | None = None
) -> tuple[JobRecord, PlanRequest] | None:
    """Return a probe's run and the options of its plan; None if the run is no probe.

    Raises:
        JobNotFound: no run matches.
    """
    record = find(context, selector, cluster)
    if not record.sweep:
        return None
    head = (
        record if record.run_dir == record.sweep else find(context, Path(record.sweep).name, record.cluster)
    )
    try:
        options = json.loads((Path(head.folder) / SETTINGS).read_bytes()).get(_SETTING)
        return None if options is None else (head, PlanRequest(**options))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise JobNotFound(
            f"the options of the probe {head.job_id or head.name} cannot be read: {error}",
            hint="probe again with the same version of dtslurm",
        ) from None


def probed_request(request: PlanRequest, probe_request: PlanRequest, name: str) -> PlanRequest:
    """Return the options of a probe's plan, with the display options of the command line.

    Raises:
        RequestInvalid: an option of the command line differs from the probe's.
    """
    unset = PlanRequest()
    names = [item.name for item in fields(PlanRequest) if item.name not in _DISPLAY_OPTIONS]
    if differing := [
        f"{option} is {getattr(request, option)!r}, and was {getattr(probe_request, option)!r} in the probe"
        for option in names
        if getattr(request, option) not in {getattr(unset, option), getattr(probe_request, option)}
    ]:
        raise RequestInvalid(
            [f"run {name} probed the layouts of another plan", *differing],
            hint=f"dtslurm plan --calibrate {name} takes all options from the probe",
        )
    return replace(probe_request, **{option: getattr(request, option) for option in _DISPLAY_OPTIONS})


def finish_probe(context: Context, plan: Plan, record: JobRecord) -> tuple[list[ProbedLayout], Path]:
    """Wait until a probe has ended, and write its measurements to the cluster's calibration file.

    Args:
        plan: a plan with the options of the probe.

    Returns:
        The results, and the calibration file.

    Raises:
        RequestInvalid: the probe measured nothing.
    """
    for member in load_sweep(context, record.token, record.cluster).runs:
        wait(context, member)
    points = load_sweep(
        context, record.token, record.cluster, points=_MAX_POINTS, metric=(STEP_KEY, "min")
    ).trials
    peaks = load_sweep(context, record.token, record.cluster, metric=(MEMORY_KEY, "max")).trials
    results = [
        _read_result(context, record, trial, other.best) for trial, other in zip(points, peaks, strict=True)
    ]
    if not any(result.step_s for result in results):  # a failure of every layout is not due to the layouts
        results = [replace(item, failed=item.cause in _MEMORY_CAUSES) for item in results]
    measurements = [
        make_measurement(
            plan.task,
            item.layout,
            f"{record.token}_{number}",
            (item.step_s, item.memory_gib),
            item.problem if item.failed else "",
        )
        for number, item in enumerate(results)
        if item.step_s or item.failed
    ]
    if not measurements:
        raise _nothing_measured(record, results)
    return results, save(context, plan, measurements)


def _read_result(
    context: Context, record: JobRecord, trial: TrialView, memory_gib: float | None
) -> ProbedLayout:
    layout = parse_layout(trial.values["layout"])
    result = ProbedLayout(replace(layout, sp=layout.sp and layout.tp > 1), trial.job)
    times = [value for _, value in trial.points if value > 0]
    was_ended = trial.exit_code is None  # by the time limit, or by a user
    if len(times) > WARM_UP and (trial.state != FAILED or was_ended):
        return replace(result, step_s=typical_step(times), memory_gib=memory_gib)
    if trial.state != FAILED:
        values = pluralize(len(times), "value")
        wrote = f"it wrote {values} of {STEP_KEY}, of which the first {WARM_UP} do not count"
        return replace(result, problem="it never ran" if trial.state == NEVER else wrote)
    run = find(context, trial.job, record.cluster)
    verdict = diagnose(context, run, task=trial.job.rpartition("_")[2]).verdict
    failed = verdict.cause in _MEMORY_CAUSES or (not was_ended and verdict.blame not in {"node", "site"})
    return replace(result, problem=verdict.summary or trial.cause, cause=verdict.cause, failed=failed)


def _nothing_measured(record: JobRecord, results: Sequence[ProbedLayout]) -> RequestInvalid:
    job = record.job_id or record.name
    failed_job = next((item.job for item in results if item.cause), None)
    return RequestInvalid(
        [f"{item.layout}: {item.problem}" for item in results],
        message=f"the probe {job} measured no layout",
        hint=f"dtslurm diagnose {failed_job} shows the evidence"
        if failed_job
        else f'training code appends {{"{STEP_KEY}": 1.9, "{MEMORY_KEY}": 61}} to $DTSLURM_METRICS each step',
    )
