"""Which rank of a run failed first, and why: the far side reads, only its findings travel."""

from __future__ import annotations

import pwd
import re
from pathlib import Path

from dtslurm.config import signatures as known
from dtslurm.diagnose import findings
from dtslurm.diagnose.verdict import judge
from dtslurm.errors import RequestInvalid, StoreError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.node_sets import fold_nodes
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.diagnosis import JobFacts, Signature, Verdict
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.values import dataclass
from dtslurm.remote.answers import interpret
from dtslurm.services.observe.activity import add_activity
from dtslurm.services.preflight.bad_nodes import learn
from dtslurm.services.request.ignored_files import explain_missing_file
from dtslurm.services.runs.changed_script import is_changed, submitted_hash
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.runs.sync import refresh
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.remote_query import ask, far_side
from dtslurm.store.rundir import RunDir
from dtslurm.transport.base import Transport

_LIMIT_S = 120.0
EVIDENCE = ("evidence.lines", "evidence.log_stacks", "evidence.flight", "evidence.search", "evidence.hits")


@dataclass(frozen=True)
class Diagnosis:
    """A verdict on one attempt of a run, or of one of its array tasks.

    Attributes:
        activity: of a job that runs.
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
    """Return the verdict on a run.

    Args:
        attempt: which start of the job; the latest by default.
        task: which task of an array; by default the first that failed.

    Raises:
        RequestInvalid: there is no such attempt or task.
        TransportError: the files could not be read where they are.
        ProfileInvalid: a file of signatures is wrong.
    """
    signatures = known.load(context.cwd, context.env)
    refresh(context, [record])
    [view] = add_activity(views(context, [record]), context.clock())
    status, place, task = _choose(view, task)
    attempts = tuple(place.attempts())
    if attempt is not None and attempt not in attempts:
        there = f", only {', '.join(map(str, attempts))}" if attempts else ": it has not started yet"
        raise RequestInvalid([f"job {record.job_id or record.name} has no attempt {attempt}{there}"])
    chosen = max(attempts, default=0) if attempt is None else attempt
    accounting = context.cluster_of(record).access.scheduler != "local"
    facts = _facts(view, status, chosen, attempts, accounting)
    if not attempts and not status.terminal:  # it has not started
        found = findings.read({}, [], record.world_size)
    else:
        top = Path(record.run_dir)
        batch = top / "logs" / ("batch.log" if task is None else f"batch-{task}.log")
        transport, python = far_side(context, record)
        run_dir = top / place.path.relative_to(view.run.path)
        found = gather(transport, python, run_dir, chosen, batch, signatures, record.world_size)
    verdict = explain_missing_file(record, judge(facts, found, signatures))
    learn(context, view.record, verdict)
    return Diagnosis(
        record=view.record,
        status=status,
        verdict=verdict,
        attempt=facts.attempt,
        attempts=attempts,
        task=task,
        logs=_on_the_cluster(view, place.logs(facts.attempt)),
        activity=view.activities.get(status.job_id) if facts.stall else None,
        script_changed=is_changed(submitted_hash(record), place, facts.attempt),
    )


def _on_the_cluster(view: RunView, path: Path) -> str:
    """Return where a folder of the run is; what is here of a far one holds no logs."""
    there = str(Path(view.record.run_dir) / path.relative_to(view.run.path))
    return f"{view.record.cluster}:{there}" if view.record.mirror else there


def gather(
    transport: Transport,
    python: str,
    run_dir: Path,
    attempt: int,
    batch: Path,
    signatures: tuple[Signature, ...],
    world_size: int,
) -> findings.Findings:
    """Return what the far side finds of one attempt.

    Raises:
        TransportError: nothing could be read there; what Python said is the evidence.
    """
    request = {
        "schema": 1,
        "run_dir": str(run_dir),
        "attempt": attempt,
        "extra": [str(batch)],
        "signatures": [{"words": one.words, "match": one.match} for one in signatures],
    }
    found = ask(transport, python, "evidence.evidence", request, timeout=_LIMIT_S, parts=EVIDENCE)
    names = [one.name for one in signatures]
    return interpret(found, lambda found: findings.read(found, names, world_size), "evidence.py")


def _choose(view: RunView, task: str | None) -> tuple[JobStatus, RunDir, str | None]:
    """Return the observation and the place of what is to be judged: the run, or one task of it."""
    if view.record.array is None:
        return view.statuses[0], view.run, None
    by_task = {status.job_id.rpartition("_")[2]: status for status in view.statuses}
    tasks = view.run.tasks()
    if task is None:
        failed = [
            name for name in tasks if name in by_task and by_task[name].terminal and not by_task[name].ok
        ]
        task = next(iter(failed or tasks), None)
    if task is None:
        return view.statuses[0], view.run, None
    if task not in tasks:
        raise RequestInvalid([f"task {task} of {view.record.job_id} has not started"])
    return by_task.get(task, view.statuses[0]), tasks[task], task


def _facts(
    view: RunView, status: JobStatus, attempt: int, attempts: tuple[int, ...], accounting: bool
) -> JobFacts:
    """Return what Slurm says; of an attempt that was requeued only that it is over."""
    latest = not attempts or attempt == attempts[-1]
    back = latest and attempts and status.state is JobState.PENDING  # requeued: the attempt has ended
    gpus_per_node = _gpus_per_node(view.run)
    if not latest or back:
        return JobFacts(
            job_id=status.job_id,
            over=True,
            world_size=view.record.world_size,
            gpus_per_node=gpus_per_node,
            attempt=attempt,
            accounting=accounting,
            time_limit=view.record.time_limit,
        )
    activity = view.activities.get(status.job_id)
    return JobFacts(
        job_id=status.job_id,
        state=status.state.value,
        over=status.terminal,
        reason=status.reason,
        exit_code=status.exit_code,
        signal=status.signal,
        start=status.start_time,
        end=status.end_time,
        time_limit=view.record.time_limit,
        cancelled_by=_who(status.raw_state),
        nodelist=fold_nodes(status.nodelist),
        world_size=view.record.world_size,
        gpus_per_node=gpus_per_node,
        attempt=attempt,
        stall=activity.summary if activity is not None and activity.stalled else "",
        accounting=accounting,
    )


def _gpus_per_node(run: RunDir) -> int | None:
    """Return how many GPUs a run asked for on each node, None where its record does not say."""
    try:
        layout = run.document().get("layout")
    except StoreError:
        return None
    count = layout.get("gpus_per_node") if isinstance(layout, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) else None


def _who(raw_state: str) -> str:
    found = re.search(r"CANCELLED by (\d+)", raw_state)
    if found is None:
        return ""
    try:
        return pwd.getpwuid(int(found[1])).pw_name
    except (KeyError, OverflowError):
        return f"uid {found[1]}"
