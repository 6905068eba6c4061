"""A scheduler's answers about one user's jobs, in a form that processes can exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dtslurm.model.runs.state import JobStatus
from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class QueueMemory:
    """The answers of one Slurm installation about one user's jobs.

    Attributes:
        asked_at: when the job list was queried, seconds since the epoch on this machine; 0 for never.
        took_s: the duration of the query in seconds.
        jobs: the job list: every job of the user that the controller still knew.
        ended: final states from other sources (accounting, ``scontrol``), with exit codes.
        looked: job id to (time of the last accounting query for its end, number of such queries).
        accounting: whether accounting is available, as far as is known.
        has_steps: whether ``jobs`` also has the running steps of the user's jobs.
        columns: the columns that this sacct supports, empty while unknown.
    """

    asked_at: float = 0.0
    took_s: float = 0.0
    jobs: tuple[JobStatus, ...] = ()
    ended: tuple[JobStatus, ...] = ()
    looked: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    accounting: bool = True
    columns: tuple[str, ...] = ()
    has_steps: bool = False
