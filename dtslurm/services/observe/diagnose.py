"""Diagnose a failed run: a worker program reads the logs on the cluster and returns only its findings."""

from __future__ import annotations

import pwd
import re
from dataclasses import replace
from pathlib import Path

from dtslurm.config import signatures as known
from dtslurm.diagnose import findings
from dtslurm.diagnose.external_causes import may_be_preempted
from dtslurm.diagnose.verdict import judge
from dtslurm.errors import DtslurmError, RequestInvalid, StoreError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.diagnosis import JobFacts, Signature, Verdict
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.values import dataclass
from dtslurm.presentation.node_sets import fold_nodes
from dtslurm.remote.answers import interpret
from dtslurm.scheduler.base import JobRecordReader
from dtslurm.services.observe.activity import add_activity
from dtslurm.services.preflight.bad_nodes import store_run_notes
from dtslurm.services.request.ignored_files import explain_missing_file
from dtslurm.services.runs.changed_script import is_changed, submitted_hash
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.runs.sync import refresh
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.remote_query import WorkerHost, find_worker_host, query_worker
from dtslurm.store.rundir import RunDir

_LIMIT_S = 120.0
EVIDENCE = (
    "lib.rank_files", "evidence.lines", "evidence.log_stacks", "evidence.flight", "evidence.search",
    "evidence.hits",
)  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on one attempt of a run or of an array task.

    Attributes:
        activity: activity of a stalled job; else None.
        script_changed: as in `Attempt`.
    """

    record: JobRecord
    status: JobStatus
    verdict: Verdict
    attempt: int
    attempts: tuple[int, ...]
    task: str | None
    logs: str
    activity: Activity | None = None
    script_changed: bool | None = None


def diagnose(
    context: Context, record: JobRecord, *, attempt: int | None = None, task: str | None = None
) -> Diagnosis:
    """Find the first rank that failed, its cause, and a fix.

    Args:
        attempt: number of the attempt; the latest by default.
        task: index of the array task; by default the first that failed.

    Raises:
        RequestInvalid: the attempt or task does not exist.
        TransportError: the run's files could not be read on their machine.
        ProfileInvalid: a file of signatures is invalid.
    """
    signatures = known.load(context.cwd, context.env)
    refresh(context, [record])
    [view] = add_activity(views(context, [record]), context.clock())
    status, folder, task = _choose_task(view, task)
    attempts = tuple(folder.attempts())
    if attempt is not None and attempt not in attempts:
        available = f", only {', '.join(map(str, attempts))}" if attempts else ": the run has not started"
        raise RequestInvalid([f"job {record.job_id or record.name} has no attempt {attempt}{available}"])
    attempt_number = max(attempts, default=0) if attempt is None else attempt
    accounting = context.cluster_of(record).access.scheduler != "local"
    facts = _collect_facts(view, status, attempt_number, attempts, accounting)
    if not attempts and not status.terminal:  # the run has not started
        evidence = findings.read({}, [], record.world_size)
    else:
        remote_dir = Path(record.run_dir)
        batch = remote_dir / "logs" / ("batch.log" if task is None else f"batch-{task}.log")
        host = find_worker_host(context, record)
        run_dir = remote_dir / folder.path.relative_to(view.run.path)
        evidence = gather(host, run_dir, attempt_number, batch, signatures, record.world_size)
    verdict = judge(facts, evidence, signatures)
    if may_be_preempted(verdict, facts, evidence):
        preempted_at = _query_preemption(context, record, status)
        if preempted_at is not None:
            facts = replace(facts, preempted_at=preempted_at)
            verdict = judge(facts, evidence, signatures)
    verdict = explain_missing_file(record, verdict)
    store_run_notes(context, view.record, verdict)
    return Diagnosis(
        record=view.record,
        status=status,
        verdict=verdict,
        attempt=facts.attempt,
        attempts=attempts,
        task=task,
        logs=_path_on_cluster(view, folder.logs(facts.attempt)),
        activity=view.activities.get(status.job_id) if facts.stall else None,
        script_changed=is_changed(submitted_hash(record), folder, facts.attempt),
    )


def _query_preemption(context: Context, record: JobRecord, status: JobStatus) -> int | None:
    """Return when Slurm preempted an ended job, in one request; None if it did not or has forgotten the job.

    Neither squeue nor accounting shows that time. Slurm reuses job ids: a time outside of the job belongs to
    another job.
    """
    scheduler = context.cluster_of(record).scheduler
    if status.source == "scontrol" or not isinstance(scheduler, JobRecordReader):
        return None
    try:
        job_record = scheduler.read_job_record(status.raw_id or status.whole_id)
    except DtslurmError:
        return None
    return _preemption_during(status, job_record.preempted_at if job_record is not None else None)


def _preemption_during(status: JobStatus, time: int | None) -> int | None:
    """Return a time of preemption, None if it is unknown or outside of the last start of the job."""
    start, end = status.start_time, status.end_time
    is_outside = time is None or (start is not None and time < start) or (end is not None and time > end)
    return None if is_outside else time


def _path_on_cluster(view: RunView, path: Path) -> str:
    """Return where a folder of the run is on the cluster, because local copies of a run contain no logs."""
    remote_path = str(Path(view.record.run_dir) / path.relative_to(view.run.path))
    return f"{view.record.cluster}:{remote_path}" if view.record.mirror else remote_path


def gather(
    host: WorkerHost,
    run_dir: Path,
    attempt: int,
    batch: Path,
    signatures: tuple[Signature, ...],
    world_size: int,
) -> findings.Findings:
    """Run the evidence worker program on the files of one attempt, and return its findings.

    Raises:
        TransportError: the worker program failed; its error output is the evidence.
    """
    request = {
        "schema": 1,
        "run_dir": str(run_dir),
        "attempt": attempt,
        "extra": [str(batch)],
        "signatures": [{"words": signature.words, "match": signature.match} for signature in signatures],
    }
    answer = query_worker(host, "evidence.evidence", request, timeout=_LIMIT_S, parts=EVIDENCE)
    names = [signature.name for signature in signatures]
    return interpret(answer, lambda document: findings.read(document, names, world_size), "evidence.py")


def _choose_task(view: RunView, task: str | None) -> tuple[JobStatus, RunDir, str | None]:
    """Return the status, the folder and the index of the array task to diagnose, or those of the run."""
    if view.record.array is None:
        return view.statuses[0], view.run, None
    by_task = {status.job_id.rpartition("_")[2]: status for status in view.statuses}
    tasks = view.run.tasks()
    if task is None:
        failed_tasks = [
            name for name in tasks if name in by_task and by_task[name].terminal and not by_task[name].ok
        ]
        task = next(iter(failed_tasks or tasks), None)
    if task is None:
        return view.statuses[0], view.run, None
    if task not in tasks:
        raise RequestInvalid([f"task {task} of {view.record.job_id} has not started"])
    return by_task.get(task, view.statuses[0]), tasks[task], task


def _collect_facts(
    view: RunView, status: JobStatus, attempt: int, attempts: tuple[int, ...], accounting: bool
) -> JobFacts:
    """Return the facts from Slurm about an attempt; for an attempt before the last, only that it is over."""
    is_latest = not attempts or attempt == attempts[-1]
    is_requeued = is_latest and attempts and status.state is JobState.PENDING  # the attempt has ended
    gpus_per_node = _gpus_per_node(view.run)
    if not is_latest or is_requeued:
        return JobFacts(
            job_id=status.whole_id,
            over=True,
            world_size=view.record.world_size,
            gpus_per_node=gpus_per_node,
            attempt=attempt,
            accounting=accounting,
            time_limit=view.record.time_limit,
        )
    activity = view.activities.get(status.job_id)
    return JobFacts(
        job_id=status.whole_id,
        state=status.state.value,
        over=status.terminal,
        reason=status.reason,
        exit_code=status.exit_code,
        signal=status.signal,
        start=status.start_time,
        end=status.end_time,
        preempted_at=_preemption_during(status, status.preempted_at),
        time_limit=view.record.time_limit,
        cancelled_by=_canceller(status.raw_state),
        nodelist=fold_nodes(status.nodelist),
        world_size=view.record.world_size,
        gpus_per_node=gpus_per_node,
        attempt=attempt,
        stall=activity.summary if activity is not None and activity.stalled else "",
        accounting=accounting,
    )


def _gpus_per_node(run: RunDir) -> int | None:
    """Return the requested number of GPUs per node; None if the record does not contain it."""
    try:
        layout = run.document().get("layout")
    except StoreError:
        return None
    count = layout.get("gpus_per_node") if isinstance(layout, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) else None


def _canceller(raw_state: str) -> str:
    match = re.search(r"CANCELLED by (\d+)", raw_state)
    if match is None:
        return ""
    try:
        return pwd.getpwuid(int(match[1])).pw_name
    except (KeyError, OverflowError):
        return f"uid {match[1]}"
