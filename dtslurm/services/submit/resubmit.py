"""Ask again for what a run was asked for: from the beginning, or from where it came to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dtslurm.errors import JobNotFound, ProfileNotFound, RequestInvalid, StoreError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.runs.state import JobState
from dtslurm.services.request.request import INTERNAL, JobRequest
from dtslurm.services.runs.runs import every, find, words_for
from dtslurm.services.runs.status import views
from dtslurm.services.runs.tasks import only, task_of
from dtslurm.services.submit.prepare import Prepared, prepare
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.arrays import task_ranges
from dtslurm.store.rundir import RunDir

CHECKPOINTS = "DTSLURM_CHECKPOINT_DIR"


def again(
    selector: str,
    *,
    from_checkpoint: bool,
    cluster: str | None = None,
    make: Callable[..., Context] = Context,
) -> tuple[Context, Prepared]:
    """Return a new submission like a run's, with the code as it is now, and the context to submit it in.

    Of an array's task it is of an array of this one task.

    Args:
        from_checkpoint: let it read and write the checkpoints of the old run, and so go on from them.
        cluster: submit to this cluster; the run's own by default. Where runs on several clusters are meant by
            ``selector``, the run on this cluster is repeated.

    Raises:
        JobNotFound: there is no such run.
        RequestInvalid: it does not tell what was asked for, or that can no longer be had; or a run that
            writes those checkpoints is not over; or they are on another cluster.
    """
    here = make()
    record = _find_preferably_on(here, selector, cluster)
    if record.sweep:
        raise RequestInvalid([f"{selector} is a sweep; dtslurm sweep resume runs what failed of it"])
    task = task_of(selector, record)
    context, request = asked_for(record, make)
    if cluster is not None and cluster != record.cluster:
        if from_checkpoint:
            raise RequestInvalid(
                [f"{selector}: its checkpoints are on {record.cluster}, not on {cluster}"],
                hint=f"leave out --cluster {cluster}, or leave out --from-checkpoint",
            )
        request = replace(request, cluster=cluster, transport=None)
    if task is not None:
        request = replace(request, array=task)
    if from_checkpoint:
        if record.array is not None and task is None:
            raise RequestInvalid(
                ["the tasks of an array have checkpoints of their own"],
                hint=f"resubmit them one by one, such as {record.job_id}_{_first_task(record.array)}",
            )
        checkpoints = _checkpoints(record, request.env, task)
        _refuse_writers(here, record, task, checkpoints)
        request = replace(request, env=(*request.env, f"{CHECKPOINTS}={checkpoints}"))
    prepared = prepare(context, request, standalone=False)
    return context, replace(prepared, parent=record.run_dir)


def _find_preferably_on(context: Context, selector: str, cluster: str | None) -> JobRecord:
    try:
        return find(context, selector, cluster)
    except JobNotFound:
        if cluster is None:
            raise
        return find(context, selector)


def asked_for(record: JobRecord, make: Callable[..., Context] = Context) -> tuple[Context, JobRequest]:
    """Return a context in the folder in which a run was submitted, and what was asked for there.

    The request names the run's own cluster: the default may be another by now.

    Raises:
        RequestInvalid: its record does not tell, or the folder is gone.
    """
    document = RunDir(Path(record.folder)).document()
    values, folder = document.get("request"), document.get("submitted_in")
    name = record.job_id or record.name
    if not isinstance(values, dict) or not isinstance(folder, str):
        raise RequestInvalid(
            [f"{name}: its record does not tell what was asked for; it is of a function, or too old"],
            hint="submit it once more by hand",
        )
    if not Path(folder).is_dir():
        raise RequestInvalid([f"{name} was submitted in {folder}, which is gone"])
    request = _request(values)
    if values.get("trials"):
        trials = values["trials"]
        request = replace(request, trials=Trials(**{**trials, "env": tuple(trials["env"])}))
    context = make(cwd=Path(folder))
    if request.cluster is None:
        request = replace(request, cluster=_own_cluster(context, record))
    return context, request


def _own_cluster(context: Context, record: JobRecord) -> str:
    """Return a run's cluster by name, or by its profile's path where no search finds that name."""
    try:
        return context.cluster(record.cluster).name
    except ProfileNotFound:
        return record.profile or record.cluster


def _first_task(array: str) -> int:
    return next((tasks[0] for tasks in task_ranges(array)), 0)


def _checkpoints(record: JobRecord, env: Sequence[str], task: str | None = None) -> str:
    """Return where a run keeps its checkpoints: its own folder, or that of the run it continues itself."""
    given = [text for text in env if text.startswith(f"{CHECKPOINTS}=")]
    own = record.run_dir if task is None else f"{record.run_dir}/tasks/{task}"
    return given[-1].partition("=")[2] if given else f"{own}/checkpoints"


def _refuse_writers(context: Context, record: JobRecord, task: str | None, folder: str) -> None:
    """Refuse to train on a folder of checkpoints that another run may still write.

    Raises:
        RequestInvalid: the run, or one that goes on from the same checkpoints, is not over for sure.
    """
    others = [one for one in every(context, record.cluster) if one.token != record.token]
    writers = [record, *(one for one in others if _writes_to(one, folder))]
    own, *more = views(context, writers)
    for view in (only(own, task), *more):
        if view.terminal:
            continue
        job = view.record.job_id or view.record.name
        state = next(status for status in view.statuses if not status.terminal)
        if state.state is JobState.UNKNOWN:
            why = view.trouble or state.reason or "there is no evidence"
            raise RequestInvalid(
                [f"whether {job} is over is not known ({why}), and it writes its checkpoints to {folder}"],
                hint=f"once you know that it is over, submit anew with --env {CHECKPOINTS}={folder}",
            )
        raise RequestInvalid(
            [f"{job} is {state.word}, and writes its checkpoints to {folder}"],
            hint=f"cancel it first: dtslurm cancel {words_for(context, view.record)}",
        )


def _writes_to(record: JobRecord, folder: str) -> bool:
    try:
        request = RunDir(Path(record.folder)).document().get("request")
    except StoreError:
        return False
    env = request.get("env") if isinstance(request, dict) else None
    return _checkpoints(record, env or ()) == folder


def _request(values: dict[str, Any]) -> JobRequest:
    known = {item.name for item in fields(JobRequest)} - {*INTERNAL, "once"}
    kept: dict[str, Any] = {
        key: tuple(one) if isinstance(one, list) else one for key, one in values.items() if key in known
    }
    return JobRequest(**kept)
