"""What is remembered of a run. Most commands need no more of a job than that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dtslurm.model.runs.state import JobStatus
from dtslurm.model.values import dataclass

OUR_MARK = "dtslurm:"  # begins the --comment of every job of ours


def mark(token: str, script_hash: str) -> str:
    """Return the ``--comment`` by which the job of a submission is known again."""
    return f"{OUR_MARK}{token}:{script_hash}"


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What the store remembers of one run (``job.json``).

    Attributes:
        profile: path of the cluster's profile, which may lie in a project that is not the current one.
        phase: ``planned`` (written, sbatch not yet called), ``submitted``, ``unknown`` (sbatch's answer was
            lost), ``withdrawn`` (no job came of it, and none can any more) or ``unrecorded`` (its record
            cannot be read: this one holds what the queue and the index know).
        job_id: the scheduler's number, None until it is known.
        transport: how the cluster was reached, if its profile left that open or something else was asked.
        mirror: where this machine keeps copies of the run's files, if the run directory is on another.
        parent: run directory of the run that this one repeats or continues.
        script_hash: as in `Submission`; a job found by its token must carry it too.
        stage: its name among the stages of a job file.
        stages: the tokens of all these stages' runs by name, each after those that it needs.
        sweep: run directory of the first run of the sweep that this one belongs to.
        final: the last observations (one, or one per array task) once the job is over.
    """

    token: str
    cluster: str
    name: str
    run_dir: str
    phase: str
    created_at: float
    profile: str = ""
    transport: str = ""
    mirror: str = ""
    job_id: str | None = None
    script_hash: str = ""
    array: str | None = None
    world_size: int = 1
    ranks_per_node: int = 1
    launcher: str = ""
    script: str = ""
    command: str = ""
    work_dir: str = ""
    time_limit: int | None = None
    restarts: int = 0
    parent: str = ""
    stage: str = ""
    stages: Mapping[str, str] = field(default_factory=dict)
    sweep: str = ""
    final: tuple[JobStatus, ...] = ()

    @property
    def folder(self) -> str:
        """Where the run's files, or copies of them, are on this machine."""
        return self.mirror or self.run_dir

    @property
    def route(self) -> tuple[str, str, str, bool]:
        """Which scheduler has its job, and the way there: runs with one route are asked about at once."""
        return self.cluster, self.profile, self.transport, bool(self.mirror)

    @property
    def comment(self) -> str:
        """What marks the run's job in Slurm."""
        return mark(self.token, self.script_hash)
