"""How a run ended, in a few lines: state, first failure, last metrics, where everything is."""

from __future__ import annotations

from pathlib import Path

from dtslurm.cli.printing import output
from dtslurm.diagnose.ranks_apart import FIX
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.state import JobStatus
from dtslurm.services.runs.run_evidence import ended_by_slurm, failure_in_words, ranks_apart
from dtslurm.services.runs.run_times import measure_view
from dtslurm.services.runs.runs import words_for
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir

_TAIL_BYTES = 8192
_NOT_RESULTS = {"time", "step", "total_steps", "epoch"}


def show_end(context: Context, view: RunView) -> None:
    """Print the summary of an ended run to stderr."""
    record = view.record
    times = measure_view(view, view.statuses[0]) if len(view.statuses) == 1 else None
    words = {state.state.value for state in view.statuses}
    took = f" after {times.describe(context.clock())}" if times is not None else ""
    output.note(f"job {record.job_id} ({record.name}): {', '.join(sorted(words))}{took}")
    places = view.run.tasks() or {"": view.run}
    for task, place in places.items():
        _show_failure(place, task, view)
        _show_ranks_apart(place, task, view)
        _show_metrics(place, task)
    if not all(status.ok for status in view.statuses):
        output.note(f"  why            dtslurm diagnose {words_for(context, record)}")
    _show_places(context, view)


def _there(view: RunView, path: Path) -> Path:
    """Return where a file of the run is on the cluster; here may be a copy of it."""
    return Path(view.record.run_dir) / path.relative_to(view.run.path)


def _show_failure(place: RunDir, task: str, view: RunView) -> None:
    attempts = place.attempts()
    failure = place.first_failure(attempts[-1]) if attempts else None
    label = f"task {task}: " if task else ""
    status = _status_of(task, view)
    if (
        status is not None
        and status.terminal
        and not status.ok
        and (failure is None or failure[1] == WANTS_REQUEUE or ended_by_slurm(place, status, failure[1]))
    ):
        why = failure_in_words(place, status)
        if why:
            output.note(f"  {label}{why}")
        return
    if failure is None:
        return
    rank, code = failure
    where = next((f" on {item.host}" for item in place.ranks(attempts[-1]) if item.rank == rank), "")
    output.note(f"  {label}rank {rank}{where} failed first, with exit code {code}")
    log = place.logs(attempts[-1]) / f"rank-{rank}.log"
    for line in _last_lines(log):
        output.note(f"  | {line}")
    output.note(f"  its log        {_there(view, log)}")


def _show_ranks_apart(place: RunDir, task: str, view: RunView) -> None:
    apart = ranks_apart(view.record, place)
    if apart is None:
        return
    output.note(f"  {f'task {task}: ' if task else ''}{apart.text}")
    if apart.is_fault:
        output.note(f"  what to do     {FIX}")


def _status_of(task: str, view: RunView) -> JobStatus | None:
    """Return what was seen of an array task, or of the whole run."""
    if not task:
        return view.statuses[0]
    return next((status for status in view.statuses if status.job_id.endswith(f"_{task}")), None)


def _last_lines(path: Path, count: int = 6) -> list[str]:
    """Return the last lines of a log that say anything."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


def _show_metrics(place: RunDir, task: str) -> None:
    for attempt in reversed(place.attempts()):
        metrics = place.metrics(attempt)
        if metrics:
            values = {key: value for key, value in metrics[-1].items() if key not in _NOT_RESULTS}
            text = ", ".join(f"{key.replace('_', ' ')} {_number(value)}" for key, value in values.items())
            label = f"task {task}: " if task else ""
            output.note(f"  {label}{text}")
            return


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _show_places(context: Context, view: RunView) -> None:
    run = view.run
    attempts = run.attempts()
    results = run.path / "checkpoints"
    lines = [("results", results)] if _holds_files(results) else []
    lines += [
        ("script", run.script_path),
        ("rank logs", run.logs(attempts[-1]) if attempts else run.path / "logs"),
    ]
    for label, path in lines:
        output.note(f"  {label:<14} {_there(view, path)}")
    if view.record.mirror:
        output.note(f"  bring it here  dtslurm fetch {words_for(context, view.record)}")


def _holds_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
