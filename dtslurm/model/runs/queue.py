"""What a scheduler told of one user's jobs, as values that processes can hand to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dtslurm.model.runs.state import JobStatus
from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class QueueMemory:
    """What was heard from one Slurm about one user's jobs.

    Attributes:
        asked_at: when the list of jobs was asked for, seconds since the epoch here; 0 for never.
        took_s: how long the answer took.
        jobs: the list: every job of the user that the controller still knew.
        ended: ends that were learned elsewhere (accounting, ``scontrol``), with exit codes.
        looked: job id to when accounting was last asked for its end, and how often that was.
        accounting: whether there is accounting, as far as is known.
        columns: the columns that this sacct has, empty while that is not known.
    """

    asked_at: float = 0.0
    took_s: float = 0.0
    jobs: tuple[JobStatus, ...] = ()
    ended: tuple[JobStatus, ...] = ()
    looked: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    accounting: bool = True
    columns: tuple[str, ...] = ()
