"""Resubmit a run with its original request: from the beginning, or from its last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dtslurm.errors import JobNotFound, ProfileNotFound, RequestInvalid, StoreError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.jobs.roles import Roles
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.runs.state import StateFlag
from dtslurm.services.request.request import INTERNAL, JobRequest
from dtslurm.services.runs.runs import every, find, selector_arguments
from dtslurm.services.runs.status import views
from dtslurm.services.runs.tasks import select_task_view, task_of
from dtslurm.services.submit.prepare import Prepared, prepare
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.arrays import task_ranges
from dtslurm.store.rundir import RunDir
from dtslurm.worker.lib.json_records import read_object

CHECKPOINTS = "DTSLURM_CHECKPOINT_DIR"


def prepare_resubmission(
    selector: str,
    *,
    from_checkpoint: bool,
    cluster: str | None = None,
    make: Callable[..., Context] = Context,
) -> tuple[Context, Prepared]:
    """Prepare a new submission of a run with the current code; return it with the context to submit it in.

    An array task is submitted as an array that has this task only.

    Args:
        from_checkpoint: let the new run read and write the checkpoints of the old run, to resume from them.
        cluster: submit to this cluster; by default the run's own cluster. If ``selector`` matches runs on
            several clusters, the run on this cluster is resubmitted.

    Raises:
        JobNotFound: no run matches ``selector``.
        RequestInvalid: the record has no request, or the request is no longer valid; or a run that writes
            the same checkpoints has not ended; or the checkpoints are on another cluster.
    """
    lookup_context = make()
    record = _find_preferably_on(lookup_context, selector, cluster)
    if record.sweep:
        raise RequestInvalid([f"{selector} is a sweep; dtslurm sweep resume runs its failed trials again"])
    task = task_of(selector, record)
    context, request = restore_request(record, make)
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
                ["each task of a job array has its own checkpoints"],
                hint=f"resubmit single tasks, such as {record.job_id}_{_first_task(record.array)}",
            )
        checkpoints = _checkpoint_folder(record, request.env, task)
        _refuse_active_writers(lookup_context, record, task, checkpoints)
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


def restore_request(record: JobRecord, make: Callable[..., Context] = Context) -> tuple[Context, JobRequest]:
    """Return the original request of a run, and a context in the folder in which it was submitted.

    The request names the run's own cluster, because the default cluster may have changed.

    Raises:
        RequestInvalid: the record has no request, or the folder no longer exists.
    """
    document = RunDir(Path(record.folder)).document()
    request_values, folder = document.get("request"), document.get("submitted_in")
    name = record.job_id or record.name
    if not isinstance(request_values, dict) or not isinstance(folder, str):
        raise RequestInvalid(
            [
                (
                    f"{name}: the record does not contain the request; the run is a Python function, or its "
                    "record is too old"
                )
            ],
            hint="submit the run again with dtslurm submit",
        )
    if not Path(folder).is_dir():
        raise RequestInvalid([f"{name} was submitted from {folder}, which no longer exists"])
    request = _build_request(request_values)
    if request_values.get("trials"):
        trials = request_values["trials"]
        request = replace(request, trials=Trials(**{**trials, "env": tuple(trials["env"])}))
    if request_values.get("roles"):
        from dtslurm.config.validator import validator

        request = replace(request, roles=validator(Roles).validate_python(request_values["roles"]))
    request = replace(request, notify=(*request.notify, *_read_addresses(record)))
    context = make(cwd=Path(folder))
    if request.cluster is None:
        request = replace(request, cluster=_find_own_cluster(context, record))
    return context, request


def _read_addresses(record: JobRecord) -> list[str]:
    """Return the URLs of a run's ``--notify``, which only its private file contains."""
    addresses = read_object(str(Path(record.folder) / RunDir.NOTIFY)).get("addresses")
    entries = [entry for entry in addresses if isinstance(entry, dict)] if isinstance(addresses, list) else []
    return [str(entry["url"]) for entry in entries if entry.get("url") and not entry.get("name")]


def _find_own_cluster(context: Context, record: JobRecord) -> str:
    """Return the name of a run's cluster, or the path of its profile if no profile has that name."""
    try:
        return context.cluster(record.cluster).name
    except ProfileNotFound:
        return record.profile or record.cluster


def _first_task(array: str) -> int:
    return next((tasks[0] for tasks in task_ranges(array)), 0)


def _checkpoint_folder(record: JobRecord, env: Sequence[str], task: str | None = None) -> str:
    """Return the checkpoint folder of a run: its own, or that of the run whose checkpoints it continues."""
    settings = [text for text in env if text.startswith(f"{CHECKPOINTS}=")]
    default_folder = record.run_dir if task is None else f"{record.run_dir}/tasks/{task}"
    return settings[-1].partition("=")[2] if settings else f"{default_folder}/checkpoints"


def _refuse_active_writers(context: Context, record: JobRecord, task: str | None, folder: str) -> None:
    """Refuse to train in a checkpoint folder that another run may still write to.

    Raises:
        RequestInvalid: the run, or a run that uses the same checkpoints, has not ended or has an unknown
            state.
    """
    other_records = [other for other in every(context, record.cluster) if other.token != record.token]
    writers = [record, *(other for other in other_records if _writes_to(other, folder))]
    run_view, *other_views = views(context, writers)
    for view in (select_task_view(run_view, task), *other_views):
        if view.terminal:
            continue
        job = view.record.job_id or view.record.name
        active = [status for status in view.statuses if not status.terminal]
        status = next((status for status in active if StateFlag.COMPLETING not in status.flags), active[0])
        if status.unknown:
            reason = view.trouble or status.reason or "there is no evidence"
            raise RequestInvalid(
                [
                    (
                        f"it is not known whether {job} has ended ({reason}), and this job writes its "
                        f"checkpoints to {folder}"
                    )
                ],
                hint="when you know that the job has ended, submit a new run with --env "
                f"{CHECKPOINTS}={folder}",
            )
        is_ending = StateFlag.COMPLETING in status.flags
        raise RequestInvalid(
            [f"{job} is {status.word}, and it writes its checkpoints to {folder}"],
            hint="wait some seconds until the job has ended, and run the command again"
            if is_ending
            else f"cancel the job first: dtslurm cancel {selector_arguments(context, view.record)}",
        )


def _writes_to(record: JobRecord, folder: str) -> bool:
    try:
        request = RunDir(Path(record.folder)).document().get("request")
    except StoreError:
        return False
    env = request.get("env") if isinstance(request, dict) else None
    return _checkpoint_folder(record, env or ()) == folder


def _build_request(values: dict[str, Any]) -> JobRequest:
    option_names = {option.name for option in fields(JobRequest)} - {*INTERNAL, "once"}
    options: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in values.items()
        if key in option_names
    }
    return JobRequest(**options)
