"""The record of a run, which is all that most commands need of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import PurePosixPath

from dtslurm.model.runs.state import JobStatus
from dtslurm.model.values import dataclass

SESSION_PROGRAM = "dtslurm_session.py"  # the script of the job of a notebook or an editor
OUR_MARK = "dtslurm:"  # prefix of the --comment of every job of dtslurm


def mark(token: str, script_hash: str) -> str:
    """Return the ``--comment`` that identifies the job of a submission."""
    return f"{OUR_MARK}{token}:{script_hash}"


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """The stored record of one run (``job.json``).

    Attributes:
        profile: path of the cluster profile, which may belong to a project other than the current one.
        phase: ``planned`` (written, sbatch not called yet), ``submitted``, ``unknown`` (sbatch's answer was
            lost), ``withdrawn`` (there is no job, and none can appear later) or ``unrecorded`` (the record
            is unreadable: this one contains what the queue and the index know).
        job_id: the scheduler's job id, None until it is known.
        transport: the transport to the cluster, if the profile leaves it open or the user chose another one.
        mirror: this machine's folder with copies of the run's files, if the run directory is on another
            machine.
        parent: run directory of the run that this one repeats or continues.
        script_hash: as in `Submission`; a job found by its token must also have this hash.
        stage: the run's name among the stages of a job file.
        stages: the tokens of all these stages' runs by name, in dependency order.
        sweep: run directory of the first run of the sweep that this run belongs to.
        holds_allocation: whether the job only holds an allocation, in which other runs are started.
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
    holds_allocation: bool = False
    final: tuple[JobStatus, ...] = ()

    @property
    def has_session(self) -> bool:
        """Whether the job runs the server of a notebook or an editor, for its user alone."""
        return PurePosixPath(self.script).name == SESSION_PROGRAM

    @property
    def folder(self) -> str:
        """The folder on this machine with the run's files, or with copies of them."""
        return self.mirror or self.run_dir

    @property
    def route(self) -> tuple[str, str, str, bool]:
        """The scheduler that has the run's job, and the way to reach it; equal routes share one query."""
        return self.cluster, self.profile, self.transport, bool(self.mirror)

    @property
    def comment(self) -> str:
        """The text in Slurm's comment that identifies the run's job."""
        return mark(self.token, self.script_hash)
