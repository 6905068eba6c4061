"""The states of jobs, and the causes of their failures, as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from dtslurm.presentation.quantities import duration

if TYPE_CHECKING:  # a status query imports no telemetry
    from dtslurm.model.runs.activity import Activity
    from dtslurm.model.runs.state import JobStatus
    from dtslurm.model.runs.telemetry import FirstFailure, RankCell

STALLED = "STALLED"


def describe_state(status: JobStatus, activity: Activity | None) -> str:
    """Return the name of a state; for a stalled job, STALLED and the time since its last activity."""
    if activity is None or not activity.stalled:
        return status.word
    return f"{STALLED} {duration(activity.quiet_s)}"


def describe_first_failure(failure: FirstFailure, ranks: Sequence[RankCell]) -> str:
    """Describe the first failed rank, its error and location, and the number of ranks terminated after it."""
    location = f"{PurePosixPath(failure.file).name}:{failure.line}" if failure.file else ""
    cause = failure.error or next(
        (f"signal {cell.signal}" for cell in ranks if cell.failed_first and cell.signal),
        f"exit code {failure.exit_code}",
    )
    sentence = f"failed first: rank {failure.rank} ({', '.join(filter(None, (cause, location)))})"
    terminated = sum(cell.state == "terminated" for cell in ranks)
    return f"{sentence}; {terminated:,} terminated after it" if terminated else sentence
