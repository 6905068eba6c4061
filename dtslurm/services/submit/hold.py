"""Hold an allocation: a job that runs no script, in which ``submit --in`` starts runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dtslurm.errors import JobFailed, RequestInvalid
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState
from dtslurm.model.units import Walltime
from dtslurm.services.logs.logs import wait
from dtslurm.services.request.request import JobRequest
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.submit.allocation import HOLDS
from dtslurm.services.submit.prepare import Prepared, prepare
from dtslurm.services.wiring.context import Context

NO_IDLE_LIMIT = "off"
_FIRST_REASON_S = 4.0  # Slurm gives the reason of a pending job some seconds after its submission


def prepare_allocation(context: Context, idle_time: str, options: Mapping[str, Any]) -> Prepared:
    """Check and render a job that holds an allocation.

    Args:
        idle_time: the time without a step after which the job ends, or ``off``.
        options: the resource options of ``submit``, by name.

    Raises:
        RequestInvalid: a value is invalid, or the cluster has no Slurm.
        ProfileNotFound, ProfileInvalid: as `prepare`.
    """
    try:
        idle_limit = 0 if idle_time == NO_IDLE_LIMIT else Walltime.parse(idle_time).seconds
    except ValueError as error:
        raise RequestInvalid([f"--idle: {error}, nor {NO_IDLE_LIMIT}"]) from None
    sbatch = tuple(options.get("sbatch") or ())
    comments = [text.partition("=")[2] for text in sbatch if text.startswith("--comment=")]
    values = {
        **options,
        "job_name": "allocation",
        "sbatch": (*sbatch, f"--comment={' '.join([HOLDS, *comments[-1:]])}"),
    }
    request = JobRequest(
        script="allocation", module=True, launcher="srun", python="/bin/sh", chdir="/", sample=False,
        requeue=False, idle_limit=idle_limit, **values,
    )  # fmt: skip
    cluster = context.cluster(request.with_defaults(context.project).cluster, request.transport)
    if cluster.profile.scheduler == "local":
        raise RequestInvalid(
            [f"cluster {cluster.name} has no Slurm: its jobs start at once, without an allocation"],
            hint="choose a cluster with --cluster",
        )
    return prepare(context, request, standalone=False)


def wait_for_start(context: Context, record: JobRecord, watch: Callable[[RunView], None]) -> RunView:
    """Wait until an allocation has started; ``watch`` gets each view of it before.

    Raises:
        JobFailed: the allocation has ended.
    """
    ask_again_at = context.clock() + _FIRST_REASON_S
    view = wait(
        context,
        record,
        watch,
        condition=lambda view: view.terminal or _has_started(view) or context.clock() > ask_again_at,
    )
    if not view.terminal and not _has_started(view):
        watch(views(context, [record])[0])
        view = wait(context, record, watch, condition=lambda view: view.terminal or _has_started(view))
    if view.terminal:
        status = view.statuses[0]
        raise JobFailed(f"allocation {record.job_id} has ended: its state is {status.word}", code=1)
    return view


def _has_started(view: RunView) -> bool:
    status = view.statuses[0]
    return status.state is JobState.RUNNING and not status.flags
