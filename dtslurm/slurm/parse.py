"""Reads what squeue, sacct and sbatch print. Any text is taken: a row that makes no sense is set aside."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.state import JobState, JobStatus, read_state
from dtslurm.model.values import dataclass
from dtslurm.slurm.arrays import valid
from dtslurm.slurm.fields import FIELD_END, RECORD_END, SACCT, SQUEUE, Field, known

if TYPE_CHECKING:
    from dtslurm.model.nodes import ListedNode

_JOB_ID = re.compile(r"(\d{1,15})(?:;([^\s;]+))?")
_SACCT_START = re.compile(rf"\d+{FIELD_END}\d[^{FIELD_END}]*{FIELD_END}")
_SHOWN = 200
_NO_LIMIT_S = 365 * 86400


@dataclass
class Listing:
    """Jobs read from one answer, and the rows that could not be read (for people to see)."""

    jobs: list[JobStatus] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def squeue(output: str, *, uid: int | None = None, observed_at: float = 0.0) -> Listing:
    """Read ``commands.squeue``'s output; with ``uid``, only that user's jobs."""
    return _listing(output.split(RECORD_END), SQUEUE, "squeue", uid, observed_at)


def sacct(
    output: str, fields: Sequence[Field] = SACCT, *, uid: int | None = None, observed_at: float = 0.0
) -> Listing:
    """Read ``commands.sacct``'s output: one entry per run of each job, in order of submission."""
    rows: list[str] = []
    for line in output.split("\n"):
        # sacct escapes nothing: what does not begin like a record belongs to the name before it.
        if rows and not _SACCT_START.match(line):
            rows[-1] += "\n" + line
        else:
            rows.append(line)
    if rows:
        rows[-1] = rows[-1].removesuffix("\n")
    listing = _listing(rows, fields, "sacct", uid, observed_at)
    listing.jobs.sort(key=lambda job: job.submit_time or 0)
    return listing


def latest(jobs: Iterable[JobStatus]) -> list[JobStatus]:
    """Keep the last run of each job, with the number of runs before it as ``restarts`` if Slurm told none.

    Jobs must be in order of submission.
    """
    runs: dict[str, list[JobStatus]] = {}
    for job in jobs:
        runs.setdefault(job.job_id, []).append(job)
    return [_counted(attempts) for attempts in runs.values()]


def _counted(attempts: list[JobStatus]) -> JobStatus:
    last = attempts[-1]
    # Only runs that Slurm put back belong to this job: job ids are used again after a while.
    put_back = [job for job in attempts[:-1] if job.raw_state.split(" ")[0] in _PUT_BACK]
    return last if last.restarts is not None else _replace(last, restarts=len(put_back))


_PUT_BACK = {"REQUEUED", "PREEMPTED", "NODE_FAIL", "REQUEUE_HOLD", "SPECIAL_EXIT"}


def mpi_types(output: str) -> list[str]:
    """Read ``commands.mpi_types``'s output; empty if it is no such list."""
    heading, _, rest = output.partition("are...")
    if "MPI" not in heading:
        return []
    found = []
    for line in rest.split("\n"):
        words = (
            line.removeprefix("srun: ").strip().rpartition(":")[2]
        )  # "specific ... available: pmix_v4,..."
        found += [word.strip() for word in words.split(",") if re.fullmatch(r"[\w.-]+", word.strip())]
    return sorted(set(found))


def _replace(job: JobStatus, **changes: Any) -> JobStatus:
    return JobStatus(**{**job.__dict__, **changes})


def _listing(
    rows: Sequence[str], fields: Sequence[Field], source: str, uid: int | None, observed_at: float
) -> Listing:
    listing = Listing()
    for raw_row in rows:
        row = raw_row.lstrip("\n") if source == "squeue" else raw_row
        if not row.strip():
            continue
        parts = row.split(FIELD_END, len(fields) - 1)
        if len(parts) != len(fields):
            listing.skipped.append(row[:_SHOWN])
            continue
        values = {one.name: one.read(part) for one, part in zip(fields, parts, strict=True)}
        if not valid(values["job_id"]) or not values["raw_id"].isdecimal():
            listing.skipped.append(row[:_SHOWN])
        elif uid is None or values.get("uid") == uid:
            listing.jobs.append(status(values, source, observed_at))
    return listing


def _has_no_limit(values: Mapping[str, Any]) -> bool:
    """Whether Slurm has set the 365 days of a job that has no limit, in a partition without one."""
    return _time_between(values, "start_time", "end_time") == _NO_LIMIT_S


def _time_between(values: Mapping[str, Any], first: str, last: str) -> int | None:
    start, end = values.get(first), values.get(last)
    return end - start if start is not None and end is not None else None


def status(values: dict[str, Any], source: str, observed_at: float) -> JobStatus:
    """Build an observation from values named as in ``fields.FIELDS``."""
    values = {**values, "source": source, "observed_at": observed_at}
    values.pop("uid", None)
    code, sig = values.pop("exit", (None, None))
    state, flags = read_state(values.get("raw_state", ""))
    if state is JobState.PENDING:
        values["estimated_start"] = values.get("start_time")
        values["start_time"] = None
    if state.ended:
        values["time_left"] = None
        # Slurm prints 0:0 for scripts that were ended from outside; that is not the script's own code.
        if code == 0 and state is not JobState.COMPLETED:
            code = None
        elif state is JobState.COMPLETED and sig is None:
            code = code or 0  # that is what COMPLETED means; squeue does not print it
    else:
        if _has_no_limit(values):
            values["time_left"] = None
        elif state is JobState.RUNNING and values.get("time_left") is not None:
            values["time_limit"] = _time_between(values, "start_time", "end_time")
        values["end_time"] = None  # squeue and scontrol print the time limit's moment there
        code = sig = None
    if not known(values.get("reason", "")):
        values["reason"] = ""
    return JobStatus(**values, state=state, flags=flags, exit_code=code, signal=sig)


def supported(fields: Sequence[Field], helpformat: str) -> tuple[Field, ...]:
    """Keep the columns that ``sacct --helpformat`` lists; the first two are in every version."""
    names = set(helpformat.split())
    return tuple(one for one in fields if one.sacct in names or one.name in {"raw_id", "job_id"})


def submitted_id(output: str) -> str | None:
    """Return the job id from ``sbatch --parsable``'s output, None if there is none.

    Plugins of the site may print lines of their own before it; ``;cluster`` may follow it.
    """
    for line in reversed(output.split("\n")):
        found = _JOB_ID.fullmatch(line.strip())
        if found and int(found[1]) > 0:
            return found[1]
    return None


# Of `sinfo -o %t`: states in which a node takes no job; flags follow, of which ``*`` means that it is silent.
_UNUSABLE = ("down", "drain", "drng", "fail", "maint", "inval", "unk", "futr", "err", "no_resp")


def node_list(output: str, partition: str | None = None) -> list[ListedNode]:
    """Read ``commands.sinfo``'s output: each node once; without ``partition``, those of the default one."""
    from dtslurm.model.nodes import ListedNode  # not every reader reads nodes

    rows = [line.split("|") for line in output.splitlines()]
    rows = [row for row in rows if len(row) == 4 and row[0]]
    if partition is None and any(row[1].endswith("*") for row in rows):
        rows = [row for row in rows if row[1].endswith("*")]
    found = {}
    for name, _, state, features in rows:
        usable = not state.startswith(_UNUSABLE) and "*" not in state
        found[name] = ListedNode(name=name, usable=usable, features=frozenset(features.split(",")))
    return list(found.values())


def exit_words(code: int | None, sig: int | None) -> str:
    """Say in words what a job's exit code and signal mean; empty if there is nothing to say."""
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
        return f"exit code {code}: {exit_words(None, code - 128)}"
    words = {
        0: "succeeded",
        WANTS_REQUEUE: f"exit code {WANTS_REQUEUE}: checkpointed, wants to go on",
        93: "exit code 93: attempt after attempt came no further",
        126: "exit code 126: a command could not be executed",
        127: "exit code 127: a command was not found",
    }
    return words.get(code, f"exit code {code}")
