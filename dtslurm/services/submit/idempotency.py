"""Idempotency keys (``--once``): a submission with a used key returns the job of the first submission."""

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

_WAIT_LIMIT_S = SUBMIT_TIMEOUT_S + 70.0  # longer than the search for the job of a client that died
_POLL_INTERVAL_S = 0.5
_LONGEST_TEXT = 1 << 17
_LATEST_TIME = 1 << 33  # seconds since the epoch
_JOB_ID = re.compile(r"[0-9]{1,19}")
# Fields of a request that affect the submission only, not the job.
_SUBMISSION_FIELDS = {*INTERNAL, "once", "cluster", "transport", "no_check", "run_root"}

# A shell command: print the record, the events and the claim of the run directory in argument 1.
_PRINT_RUN = (
    'cat "$1"/job.json; printf "\\0"; cat "$1"/events.jsonl 2>/dev/null; printf "\\0"; readlink "$1"/claim'
)


def find_existing_run(context: Context, prepared: Prepared) -> JobRecord | None:
    """Wait until the first run with this idempotency key has a job, and return its record.

    None means that the first submission has no job and can no longer get one. Its run directory was removed
    or renamed, so the caller can submit again.

    Raises:
        SubmitUnknown: the first run has no job within the wait limit; it may get one later.
        StoreError: the record of the first run cannot be read.
    """
    submission, cluster = prepared.submission, prepared.cluster
    deadline = context.clock() + _WAIT_LIMIT_S
    created_mirror = False  # whether this call created the local copy of the run
    while context.clock() < deadline:
        record = _known(context, prepared)
        if record is None and created_mirror:  # the first submission was rejected meanwhile
            _remove_mirror(context, mirror_of(context, cluster, submission))
            return None
        record = record or _load_mirror(context, prepared)
        if record is None and not _run_exists(context, prepared):  # the first submission was rejected
            return None
        if record is not None and record.job_id is None:
            record, created = _copied(context, prepared, record)
            created_mirror = created_mirror or created
            with RunDir(Path(record.folder)).abandoned() as abandoned:
                record = settle(context, cluster, record, abandoned=abandoned)
                if record.phase == "withdrawn":
                    _move_aside(context, cluster, record)
                    return None
        elif record is not None and record.phase == "withdrawn":
            _move_aside(context, cluster, record)
            return None
        if record is not None and record.job_id is not None:
            return _adopt(context, prepared, record)
        context.sleep(_POLL_INTERVAL_S)
    raise SubmitUnknown(
        "another submission with the same idempotency key is in progress, and it has no job yet",
        evidence=[f"its run directory is {submission.run_dir}"],
        hint="see the result with dtslurm status",
    )


def differences(prepared: Prepared, record: JobRecord) -> list[str]:
    """Return the names of the options in which a request differs from the job with the same key."""
    try:
        first_request = RunDir(Path(record.folder)).document().get("request")
    except StoreError:
        first_request = None
    if prepared.request is not None and isinstance(first_request, dict):
        request = codec.plain(prepared.request)
    else:  # another machine submitted the job, and only its record is available here
        spec, layout = prepared.submission.spec, prepared.submission.layout
        request = {"job_name": spec.name, "command": join(training_command(spec)), "ranks": layout.world_size}
        first_request = {"job_name": record.name, "command": record.command, "ranks": record.world_size}
    compared = (name for name in request if name in first_request and name not in _SUBMISSION_FIELDS)
    return [name.replace("_", "-") for name in compared if request[name] != first_request[name]]


def _run_exists(context: Context, prepared: Prepared) -> bool:
    """Return whether a file of the run exists on this machine or on the cluster."""
    cluster, run_dir = prepared.cluster, prepared.submission.run_dir
    is_local = mirror_of(context, cluster, prepared.submission).exists()
    return is_local or cluster.transport.run(["sh", "-c", '[ -e "$1" ] || [ -L "$1" ]', "sh", run_dir]).ok


def _adopt(context: Context, prepared: Prepared, record: JobRecord) -> JobRecord:
    """Save the run on this machine too: the first client may have died before it did so."""
    record, _ = _copied(context, prepared, record)
    save(context, record)
    return record


def _copied(context: Context, prepared: Prepared, record: JobRecord) -> tuple[JobRecord, bool]:
    """Return the record with its local mirror, and whether this call created the mirror."""
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


def _load_mirror(context: Context, prepared: Prepared) -> JobRecord | None:
    """Load the local record of a submission that has not reached the cluster (yet)."""
    try:
        return RunDir(mirror_of(context, prepared.cluster, prepared.submission)).load()
    except StoreError:
        return None


def _known(context: Context, prepared: Prepared) -> JobRecord | None:
    """Read the record from the run directory, with the job id from its events or its claim."""
    cluster, run_dir = prepared.cluster, prepared.submission.run_dir
    output = cluster.transport.run(["sh", "-c", _PRINT_RUN, "sh", run_dir])
    document, _, rest = output.stdout.partition("\0")
    if not document:
        return None
    if cluster.remote:
        record = _build_first_record(
            context, prepared, answers.parse_object(document, cluster.transport.host)
        )
    else:
        record = replace(codec.record_from(codec.decode(document.encode(), run_dir), run_dir), mirror="")
    events, _, claim = rest.partition("\0")
    if claim.strip() == "withdrawn":
        return replace(record, phase="withdrawn")
    submitted = [
        event for event in map(_parse_event, events.splitlines()) if event.get("event") == "submitted"
    ]
    job_id = submitted[-1].get("job_id") if submitted else claim.strip().removeprefix("job-") or None
    if not job_id or record.job_id:
        return record
    if not _JOB_ID.fullmatch(str(job_id)):
        raise answers.invalid(cluster.transport.host, "a job id that is not valid", repr(job_id)[:100])
    return replace(record, phase="submitted", job_id=str(job_id))


def _build_first_record(context: Context, prepared: Prepared, values: Mapping[str, Any]) -> JobRecord:
    """Return the record of the first run, with the job's description from the login node.

    The local paths and the transport come from this machine only.

    Raises:
        InvalidAnswer: a value has the wrong type, or the token belongs to another run known on this machine.
    """
    host = prepared.cluster.transport.host
    planned = planned_record(context, prepared)
    fields = {key: values[key] for key in _FIELD_CHECKS if key in values}
    invalid_keys = [key for key, value in fields.items() if not _FIELD_CHECKS[key](value)]
    if invalid_keys:
        raise answers.invalid(
            host, f"a record with an invalid value of {invalid_keys[0]}", repr(fields[invalid_keys[0]])[:200]
        )
    record = replace(planned, phase="submitted" if fields.get("job_id") else "planned", **fields)
    if record.token != planned.token and context.index.find(record.token):
        raise answers.invalid(host, "the record of another run", record.token)
    return record


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= answers.LARGEST_NUMBER


def _matches(pattern: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _allow_none(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= _LATEST_TIME  # False for NaN


# The fields of a record that are read from a login node, each with the check of its value.
_FIELD_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "token": _matches(r"[0-9a-f]{12}"),
    "script_hash": _matches(r"[0-9a-f]{0,64}"),
    "job_id": _allow_none(_matches(_JOB_ID.pattern)),
    "created_at": _is_time,
    "name": _is_text,
    "command": _is_text,
    "script": _is_text,
    "work_dir": _is_text,
    "launcher": _is_text,
    "array": _allow_none(_matches(r"[0-9,:%-]{1,1000}")),
    "world_size": _is_count,
    "ranks_per_node": _is_count,
    "time_limit": _allow_none(_is_count),
}


def _parse_event(line: str) -> Mapping[str, Any]:
    with contextlib.suppress(TransportError):
        return answers.parse_object(line, "the run's journal")
    return {}


def _move_aside(context: Context, cluster: ActiveCluster, record: JobRecord) -> None:
    """Rename a withdrawn run directory, so that another run can use its path."""
    script = '[ ! -e "$1" ] || mv -- "$1" "$1.withdrawn-$(date +%s)"'
    output = cluster.transport.run(["sh", "-c", script, "sh", record.run_dir])
    if not output.ok:
        raise StoreError(f"cannot rename {record.run_dir}", evidence=output.stderr.splitlines())
    if record.mirror:
        _remove_mirror(context, Path(record.mirror))


def _remove_mirror(context: Context, mirror: Path) -> None:
    with contextlib.suppress(OSError):
        remove(mirror, within=mirrors(context))
