"""Whoever submits under a key that was used before gets the first one's job."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtslurm.errors import RunExists, StoreError, SubmitUnknown, TransportError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.shell import join
from dtslurm.remote import answers
from dtslurm.render.script import training_command
from dtslurm.scheduler.base import SUBMIT_TIMEOUT_S
from dtslurm.services.request.request import INTERNAL
from dtslurm.services.runs.records import mirror_of, mirrors, planned_record, save, settle
from dtslurm.services.submit.prepare import Prepared
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store import codec
from dtslurm.store.rundir import RunDir
from dtslurm.transport.deletion import remove

_PATIENCE_S = SUBMIT_TIMEOUT_S + 70.0  # longer than it takes to settle what became of a client that died
_LOOK_S = 0.5
_LONGEST_TEXT = 1 << 17
_LATEST = 1 << 33  # seconds since the epoch
_JOB_ID = re.compile(r"[0-9]{1,19}")
# Of a request: what is about the asking, not the job.
_OF_THE_ASKING = {*INTERNAL, "once", "cluster", "transport", "no_check", "run_root"}

# Argument 1 is the run directory: print its record and its events.
_SHOW = (
    'cat "$1"/job.json; printf "\\0"; cat "$1"/events.jsonl 2>/dev/null; printf "\\0"; readlink "$1"/claim'
)


def find_existing_run(context: Context, prepared: Prepared) -> JobRecord | None:
    """Return the record of the run that was first, once it has a job.

    None: no job came of it and none can any more; it is gone, or was moved aside: there is room for another.

    Raises:
        SubmitUnknown: it has none in reasonable time; there may be one later.
        StoreError: its record cannot be read.
    """
    submission, cluster = prepared.submission, prepared.cluster
    give_up = context.clock() + _PATIENCE_S
    made = False  # whether its copy here is of our making
    while context.clock() < give_up:
        record = _known(context, prepared)
        if record is None and made:  # it was refused meanwhile
            _remove_mirror(context, mirror_of(context, cluster, submission))
            return None
        record = record or _mirrored(context, prepared)
        if record is None and not _there(context, prepared):  # it was refused
            return None
        if record is not None and record.job_id is None:
            record, new = _copied(context, prepared, record)
            made = made or new
            with RunDir(Path(record.folder)).abandoned() as abandoned:
                record = settle(context, cluster, record, abandoned=abandoned)
                if record.phase == "withdrawn":
                    _move_aside(context, cluster, record)
                    return None
        elif record is not None and record.phase == "withdrawn":
            _move_aside(context, cluster, record)
            return None
        if record is not None and record.job_id is not None:
            return _adopted(context, prepared, record)
        context.sleep(_LOOK_S)
    raise SubmitUnknown(
        "a submission under the same key is under way, and has no job yet",
        evidence=[f"its run directory is {submission.run_dir}"],
        hint="dtslurm status finds out what became of it",
    )


def differences(prepared: Prepared, record: JobRecord) -> list[str]:
    """Return the options by which what is asked for now differs from the job that has its key already."""
    try:
        before = RunDir(Path(record.folder)).document().get("request")
    except StoreError:
        before = None
    if prepared.request is not None and isinstance(before, dict):
        now = codec.plain(prepared.request)
    else:  # another machine was first, and only its record is known here
        spec, layout = prepared.submission.spec, prepared.submission.layout
        now = {"job_name": spec.name, "command": join(training_command(spec)), "ranks": layout.world_size}
        before = {"job_name": record.name, "command": record.command, "ranks": record.world_size}
    told = (name for name in now if name in before and name not in _OF_THE_ASKING)
    return [name.replace("_", "-") for name in told if now[name] != before[name]]


def _there(context: Context, prepared: Prepared) -> bool:
    """Whether there is anything of the run, here or on the cluster."""
    cluster, run_dir = prepared.cluster, prepared.submission.run_dir
    here = mirror_of(context, cluster, prepared.submission).exists()
    return here or cluster.transport.run(["sh", "-c", '[ -e "$1" ] || [ -L "$1" ]', "sh", run_dir]).ok


def _adopted(context: Context, prepared: Prepared, record: JobRecord) -> JobRecord:
    """Make the run known here, too: whoever was first may not have lived to do so."""
    record, _ = _copied(context, prepared, record)
    save(context, record)
    return record


def _copied(context: Context, prepared: Prepared, record: JobRecord) -> tuple[JobRecord, bool]:
    """Return the record with its place on this machine, and whether that had to be made."""
    cluster = prepared.cluster
    if not cluster.remote:
        return record, False
    mirror = mirror_of(context, cluster, prepared.submission)
    record = replace(record, mirror=str(mirror), transport=prepared.transport)
    document = codec.encode({"schema": codec.SCHEMA, **codec.plain(record)})
    try:
        RunDir(mirror).create(context.transport, {RunDir.RECORD: document})
    except RunExists:
        return record, False
    return record, True


def _mirrored(context: Context, prepared: Prepared) -> JobRecord | None:
    """Return what this machine knows of a submission that has not reached the cluster (yet)."""
    try:
        return RunDir(mirror_of(context, prepared.cluster, prepared.submission)).load()
    except StoreError:
        return None


def _known(context: Context, prepared: Prepared) -> JobRecord | None:
    """Return what the run directory tells: its record, and the job that its events or its claim name."""
    cluster, run_dir = prepared.cluster, prepared.submission.run_dir
    answer = cluster.transport.run(["sh", "-c", _SHOW, "sh", run_dir])
    document, _, rest = answer.stdout.partition("\0")
    if not document:
        return None
    if cluster.remote:
        record = _first_record(context, prepared, answers.parse_object(document, cluster.transport.host))
    else:
        record = replace(codec.record_from(codec.decode(document.encode(), run_dir), run_dir), mirror="")
    events, _, claim = rest.partition("\0")
    if claim.strip() == "withdrawn":
        return replace(record, phase="withdrawn")
    told = [event for event in map(_event, events.splitlines()) if event.get("event") == "submitted"]
    job_id = told[-1].get("job_id") if told else claim.strip().removeprefix("job-") or None
    if not job_id or record.job_id:
        return record
    if not _JOB_ID.fullmatch(str(job_id)):
        raise answers.invalid(cluster.transport.host, "a number of a job that is none", repr(job_id)[:100])
    return replace(record, phase="submitted", job_id=str(job_id))


def _first_record(context: Context, prepared: Prepared, values: Mapping[str, Any]) -> JobRecord:
    """Return the record of the run that was first; of that the login node tells what the job is, and no more.

    Where the run's files are here, and how its cluster is reached, only this machine decides.

    Raises:
        InvalidAnswer: a value has another type, or the token is that of another run that is known here.
    """
    host = prepared.cluster.transport.host
    own = planned_record(context, prepared)
    told = {key: values[key] for key in _TOLD if key in values}
    wrong = [key for key, value in told.items() if not _TOLD[key](value)]
    if wrong:
        raise answers.invalid(host, f"a record with a wrong {wrong[0]}", repr(told[wrong[0]])[:200])
    record = replace(own, phase="submitted" if told.get("job_id") else "planned", **told)
    if record.token != own.token and context.index.find(record.token):
        raise answers.invalid(host, "the record of another run", record.token)
    return record


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= answers.LARGEST_NUMBER


def _matches(pattern: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _or_none(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= _LATEST  # NaN is not


# What a login node tells of a job, and what a value of it must be.
_TOLD: Mapping[str, Callable[[object], bool]] = {
    "token": _matches(r"[0-9a-f]{12}"),
    "script_hash": _matches(r"[0-9a-f]{0,64}"),
    "job_id": _or_none(_matches(_JOB_ID.pattern)),
    "created_at": _is_time,
    "name": _is_text,
    "command": _is_text,
    "script": _is_text,
    "work_dir": _is_text,
    "launcher": _is_text,
    "array": _or_none(_matches(r"[0-9,:%-]{1,1000}")),
    "world_size": _is_count,
    "ranks_per_node": _is_count,
    "time_limit": _or_none(_is_count),
}


def _event(line: str) -> Mapping[str, Any]:
    with contextlib.suppress(TransportError):
        return answers.parse_object(line, "the run's journal")
    return {}


def _move_aside(context: Context, cluster: ActiveCluster, record: JobRecord) -> None:
    """Make room for another run in the same place."""
    script = '[ ! -e "$1" ] || mv -- "$1" "$1.withdrawn-$(date +%s)"'
    answer = cluster.transport.run(["sh", "-c", script, "sh", record.run_dir])
    if not answer.ok:
        raise StoreError(f"cannot move {record.run_dir} aside", evidence=answer.stderr.splitlines())
    if record.mirror:
        _remove_mirror(context, Path(record.mirror))


def _remove_mirror(context: Context, mirror: Path) -> None:
    with contextlib.suppress(OSError):
        remove(mirror, within=mirrors(context))
