"""Ask again for what a run was asked for: from the beginning, or from where it came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dtslurm.errors import RequestInvalid
from dtslurm.model.job import JobRecord
from dtslurm.model.trials import Trials
from dtslurm.services.context import Context
from dtslurm.services.prepare import Prepared, prepare
from dtslurm.services.request import INTERNAL, JobRequest
from dtslurm.services.runs import find
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

    Args:
        from_checkpoint: let it read and write the checkpoints of the old run, and so go on from them.

    Raises:
        JobNotFound: there is no such run.
        RequestInvalid: it does not tell what was asked for, or that can no longer be had.
    """
    record = find(make(), selector, cluster)
    if record.sweep:
        raise RequestInvalid([f"{selector} is a sweep; dtslurm sweep resume runs what failed of it"])
    folder, request = asked_for(record)
    if from_checkpoint:
        request = replace(request, env=(*request.env, f"{CHECKPOINTS}={_checkpoints(record, request)}"))
    context = make(cwd=folder)
    prepared = prepare(context, request, standalone=False)
    return context, replace(prepared, parent=record.run_dir)


def asked_for(record: JobRecord) -> tuple[Path, JobRequest]:
    """Return the folder in which a run was submitted, and what was asked for there.

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
    return Path(folder), request


def _checkpoints(record: JobRecord, request: JobRequest) -> str:
    """Return where the run kept its checkpoints: its own folder, or that of the run it continued itself."""
    if record.array is not None:
        raise RequestInvalid(["the tasks of an array have checkpoints of their own; resubmit one by hand"])
    given = [text for text in request.env if text.startswith(f"{CHECKPOINTS}=")]
    return given[-1].partition("=")[2] if given else f"{record.run_dir}/checkpoints"


def _request(values: dict[str, Any]) -> JobRequest:
    known = {item.name for item in fields(JobRequest)} - {*INTERNAL, "once"}
    kept: dict[str, Any] = {
        key: tuple(one) if isinstance(one, list) else one for key, one in values.items() if key in known
    }
    return JobRequest(**kept)
