"""The summary of an ended run: state, first failure, last metrics, paths."""

from __future__ import annotations

from pathlib import Path

from dtslurm.cli.printing import output
from dtslurm.diagnose.ranks_apart import FIX
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.state import JobStatus
from dtslurm.presentation.quantities import format_any_value
from dtslurm.services.runs.run_evidence import describe_failure, ended_by_slurm, ranks_apart
from dtslurm.services.runs.run_times import measure_view
from dtslurm.services.runs.runs import selector_arguments
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir

_TAIL_BYTES = 8192
_NOT_RESULTS = {"time", "step", "total_steps", "epoch"}


def show_end(context: Context, view: RunView) -> None:
    """Print the summary of an ended run to stderr."""
    record = view.record
    times = measure_view(view, view.statuses[0]) if len(view.statuses) == 1 else None
    state_names = {state.state.value for state in view.statuses}
    duration_text = f" after {times.describe(context.clock())}" if times is not None else ""
    output.note(f"job {record.job_id} ({record.name}): {', '.join(sorted(state_names))}{duration_text}")
    run_dirs = view.run.tasks() or {"": view.run}
    for task, run_dir in run_dirs.items():
        _show_failure(run_dir, task, view)
        _show_ranks_apart(run_dir, task, view)
        _show_metrics(run_dir, task)
    if not all(status.ok for status in view.statuses):
        output.note(f"  why            dtslurm diagnose {selector_arguments(context, record)}")
    _show_paths(context, view)


def _path_on_cluster(view: RunView, path: Path) -> Path:
    """Return the path of a run's file on the cluster; the local path may be of a copy."""
    return Path(view.record.run_dir) / path.relative_to(view.run.path)


def _show_failure(run_dir: RunDir, task: str, view: RunView) -> None:
    attempts = run_dir.attempts()
    failure = run_dir.first_failure(attempts[-1]) if attempts else None
    label = f"task {task}: " if task else ""
    status = _find_status(task, view)
    if (
        status is not None
        and status.terminal
        and not status.ok
        and (failure is None or failure[1] == WANTS_REQUEUE or ended_by_slurm(run_dir, status, failure[1]))
    ):
        reason = describe_failure(run_dir, status)
        if reason:
            output.note(f"  {label}{reason}")
        return
    if failure is None:
        return
    rank, code = failure
    host_text = next((f" on {item.host}" for item in run_dir.ranks(attempts[-1]) if item.rank == rank), "")
    output.note(f"  {label}rank {rank}{host_text} failed first, with exit code {code}")
    for line in _take_last_lines(run_dir.last_output(attempts[-1], rank, _TAIL_BYTES)):
        output.note(f"  | {line}")
    output.note(f"  its log        {_path_on_cluster(view, run_dir.rank_log(attempts[-1], rank))}")


def _show_ranks_apart(run_dir: RunDir, task: str, view: RunView) -> None:
    split = ranks_apart(view.record, run_dir)
    if split is None:
        return
    output.note(f"  {f'task {task}: ' if task else ''}{split.text}")
    if split.is_fault:
        output.note(f"  what to do     {FIX}")


def _find_status(task: str, view: RunView) -> JobStatus | None:
    """Return the status of an array task, or of the whole run."""
    if not task:
        return view.statuses[0]
    return next((status for status in view.statuses if status.job_id.endswith(f"_{task}")), None)


def _take_last_lines(data: bytes, count: int = 6) -> list[str]:
    """Return the last non-empty lines of a log's end."""
    return [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()][-count:]


def _show_metrics(run_dir: RunDir, task: str) -> None:
    for attempt in reversed(run_dir.attempts()):
        metrics = run_dir.metrics(attempt)
        if metrics:
            values = {key: value for key, value in metrics[-1].items() if key not in _NOT_RESULTS}
            text = ", ".join(
                f"{key.replace('_', ' ')} {format_any_value(value)}" for key, value in values.items()
            )
            label = f"task {task}: " if task else ""
            output.note(f"  {label}{text}")
            return


def _show_paths(context: Context, view: RunView) -> None:
    run = view.run
    attempts = run.attempts()
    results = run.path / "checkpoints"
    paths = [("results", results)] if _holds_files(results) else []
    paths += [
        ("script", run.script_path),
        ("rank logs", run.logs(attempts[-1]) if attempts else run.path / "logs"),
    ]
    for label, path in paths:
        output.note(f"  {label:<14} {_path_on_cluster(view, path)}")
    if view.record.mirror:
        output.note(f"  bring it here  dtslurm fetch {selector_arguments(context, view.record)}")


def _holds_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
