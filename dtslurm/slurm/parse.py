"""Parsers of the output of squeue, sacct and sbatch.

Any text is accepted: rows that cannot be parsed are skipped.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.state import JobState, JobStatus, read_state
from dtslurm.model.values import dataclass
from dtslurm.slurm.arrays import is_valid_job_id
from dtslurm.slurm.fields import FIELD_END, RECORD_END, SACCT, SQUEUE, Field, has_value

if TYPE_CHECKING:
    from dtslurm.model.nodes import ListedNode

_JOB_ID = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)(?:;([^\s;]+))?")
_SACCT_ROW_START = re.compile(rf"\d+{FIELD_END}\d[^{FIELD_END}]*{FIELD_END}")
_MAX_SHOWN_CHARS = 200
_NO_LIMIT_S = 365 * 86400


@dataclass
class Listing:
    """The jobs of one output of squeue, sacct or scontrol.

    Attributes:
        jobs: the parsed jobs.
        skipped: rows that could not be parsed, cut off after 200 characters.
    """

    jobs: list[JobStatus] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def squeue(output: str, *, uid: int | None = None, observed_at: float = 0.0) -> Listing:
    """Parse the output of ``commands.squeue``; with ``uid``, return only that user's jobs."""
    return _parse_rows(output.split(RECORD_END), SQUEUE, "squeue", uid, observed_at)


def sacct(
    output: str, fields: Sequence[Field] = SACCT, *, uid: int | None = None, observed_at: float = 0.0
) -> Listing:
    """Parse the output of ``commands.sacct``: one entry per execution of a job, in order of submission."""
    rows: list[str] = []
    for line in output.split("\n"):
        # sacct does not escape newlines: a line that does not start a record continues the name before it.
        if rows and not _SACCT_ROW_START.match(line):
            rows[-1] += "\n" + line
        else:
            rows.append(line)
    if rows:
        rows[-1] = rows[-1].removesuffix("\n")
    listing = _parse_rows(rows, fields, "sacct", uid, observed_at)
    listing.jobs.sort(key=lambda job: job.submit_time or 0)
    return listing


def keep_latest(jobs: Iterable[JobStatus]) -> list[JobStatus]:
    """Keep the last execution of each job.

    If Slurm reported no ``restarts``, set it to the number of earlier executions.

    Args:
        jobs: must be in order of submission.
    """
    attempts_by_id: dict[str, list[JobStatus]] = {}
    for job in jobs:
        attempts_by_id.setdefault(job.job_id, []).append(job)
    return [_count_restarts(attempts) for attempts in attempts_by_id.values()]


def _count_restarts(attempts: list[JobStatus]) -> JobStatus:
    last_attempt = attempts[-1]
    # Count only requeued executions: Slurm reuses job ids, so others may be of an older job.
    requeued = [job for job in attempts[:-1] if job.raw_state.split(" ")[0] in _REQUEUED_STATES]
    return (
        last_attempt
        if last_attempt.restarts is not None
        else _copy_with(last_attempt, restarts=len(requeued))
    )


_REQUEUED_STATES = {"REQUEUED", "PREEMPTED", "NODE_FAIL", "REQUEUE_HOLD", "SPECIAL_EXIT"}


def mpi_types(output: str) -> list[str]:
    """Parse the output of ``commands.mpi_types``; empty if it is not a list of MPI types."""
    heading, _, listing = output.partition("are...")
    if "MPI" not in heading:
        return []
    names = []
    for line in listing.split("\n"):
        # A line may be "specific pmix plugin versions available: pmix_v4,...".
        names_text = line.removeprefix("srun: ").strip().rpartition(":")[2]
        names += [word.strip() for word in names_text.split(",") if re.fullmatch(r"[\w.-]+", word.strip())]
    return sorted(set(names))


def _copy_with(job: JobStatus, **changes: Any) -> JobStatus:
    return JobStatus(**{**job.__dict__, **changes})


def _parse_rows(
    rows: Sequence[str], fields: Sequence[Field], source: str, uid: int | None, observed_at: float
) -> Listing:
    listing = Listing()
    for raw_row in rows:
        row = raw_row.lstrip("\n") if source == "squeue" else raw_row
        if not row.strip():
            continue
        parts = row.split(FIELD_END, len(fields) - 1)
        if len(parts) != len(fields):
            listing.skipped.append(row[:_MAX_SHOWN_CHARS])
            continue
        values = {column.name: column.read(part) for column, part in zip(fields, parts, strict=True)}
        if not is_valid_job_id(values["job_id"]) or not values["raw_id"].isdecimal():
            listing.skipped.append(row[:_MAX_SHOWN_CHARS])
        elif uid is None or values.get("uid") == uid:
            listing.jobs.append(status(values, source, observed_at))
    return listing


def _has_no_limit(values: Mapping[str, Any]) -> bool:
    """Return whether the time limit is Slurm's placeholder for none, 365 days.

    Slurm sets it if neither the job nor its partition has a limit.
    """
    return _time_between(values, "start_time", "end_time") == _NO_LIMIT_S


def _time_between(values: Mapping[str, Any], first: str, last: str) -> int | None:
    start, end = values.get(first), values.get(last)
    return end - start if start is not None and end is not None else None


def status(values: dict[str, Any], source: str, observed_at: float) -> JobStatus:
    """Build a JobStatus from values named as in ``fields.FIELDS``."""
    values = {**values, "source": source, "observed_at": observed_at}
    values.pop("uid", None)
    code, sig = values.pop("exit", (None, None))
    state, flags = read_state(values.get("raw_state", ""))
    if state is JobState.PENDING:
        values["estimated_start"] = values.get("start_time")
        values["start_time"] = None
    if state.ended:
        values["time_left"] = None
        # Slurm prints 0:0 for scripts that did not end by themselves; that is not the script's exit code.
        if code == 0 and state is not JobState.COMPLETED:
            code = None
        elif state is JobState.COMPLETED and sig is None:
            code = code or 0  # COMPLETED means exit code 0, which squeue does not print
    else:
        if _has_no_limit(values):
            values["time_left"] = None
        elif state is JobState.RUNNING and values.get("time_left") is not None:
            values["time_limit"] = _time_between(values, "start_time", "end_time")
        values["end_time"] = None  # squeue and scontrol print the end of the time limit here
        code = sig = None
    if not has_value(values.get("reason", "")):
        values["reason"] = ""
    return JobStatus(**values, state=state, flags=flags, exit_code=code, signal=sig)


def select_supported_fields(fields: Sequence[Field], helpformat: str) -> tuple[Field, ...]:
    """Return the fields that ``sacct --helpformat`` lists, and the two ids, which all versions have."""
    names = set(helpformat.split())
    return tuple(column for column in fields if column.sacct in names or column.name in {"raw_id", "job_id"})


def parse_submitted_id(output: str) -> str | None:
    """Return the job id from the output of ``sbatch --parsable``, or None if there is none.

    The command that starts a run in an allocation prints the id of a step.

    A site's plugin may print lines before the id, and ``;cluster`` may follow it.
    """
    for line in reversed(output.split("\n")):
        match = _JOB_ID.fullmatch(line.strip())
        if match and int(match[1].partition(".")[0]) > 0:
            return match[1]
    return None


# Node states of `sinfo -o %t` in which a node accepts no job. Flags may follow: ``*`` is "not responding".
_UNUSABLE_STATES = ("down", "drain", "drng", "fail", "maint", "inval", "unk", "futr", "err", "no_resp")


def node_list(output: str, partition: str | None = None) -> list[ListedNode]:
    """Parse the output of ``commands.sinfo``: each node once.

    Without ``partition``, return the nodes of the default partition.
    """
    from dtslurm.model.nodes import ListedNode  # few callers parse nodes

    rows = [line.split("|") for line in output.splitlines()]
    rows = [row for row in rows if len(row) == 4 and row[0]]
    if partition is None and any(row[1].endswith("*") for row in rows):
        rows = [row for row in rows if row[1].endswith("*")]
    nodes_by_name = {}
    for name, _, state, features in rows:
        is_usable = not state.startswith(_UNUSABLE_STATES) and "*" not in state
        nodes_by_name[name] = ListedNode(name=name, usable=is_usable, features=frozenset(features.split(",")))
    return list(nodes_by_name.values())


def describe_exit(code: int | None, sig: int | None) -> str:
    """Describe a job's exit code and signal in words; empty if there is nothing to describe."""
    if sig == 53:
        return (
            "Slurm could not open the job's output file (its folder is missing or not writable there), "
            "so the script never ran"
        )
    if sig:
        try:
            return f"ended by signal {sig} ({signal.Signals(sig).name})"
        except ValueError:
            return f"ended by signal {sig}"
    if code is None:
        return ""
    if 128 < code < 193:
        return f"exit code {code}: {describe_exit(None, code - 128)}"
    meanings = {
        0: "succeeded",
        WANTS_REQUEUE: f"exit code {WANTS_REQUEUE}: checkpointed, to be continued",
        93: "exit code 93: attempt after attempt came no further",
        126: "exit code 126: a command could not be executed",
        127: "exit code 127: a command was not found",
    }
    return meanings.get(code, f"exit code {code}")
