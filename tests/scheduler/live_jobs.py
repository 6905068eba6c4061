"""What tests of the scheduler against a real Slurm share: small jobs, and waiting for them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dtslurm.model.jobs.job import JobSpec, Submission, TaskLayout
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.units import Walltime
from dtslurm.scheduler.slurm import SlurmScheduler
from dtslurm.transport.base import Completed
from dtslurm.transport.local import LocalTransport


class Counting(LocalTransport):
    """Keeps what was run, to tell what a question costs."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def run(self, argv: Sequence[str], **options: Any) -> Completed:
        self.ran.append(" ".join(argv[:1]))
        return super().run(argv, **options)


def submission(folder: Path, body: str, *options: str) -> tuple[Submission, str]:
    token = secrets.token_hex(6)
    lines = [
        "#!/bin/sh",
        "#SBATCH --output=/dev/null",
        *(f"#SBATCH {option}" for option in options),
        body,
        "",
    ]
    path = folder / f"{token}.sbatch"
    path.write_text("\n".join(lines))
    made = Submission(
        token=token, cluster="lab", run_dir=str(folder), script="\n".join(lines),
        spec=JobSpec(name="j", script="s", work_dir=str(folder), launcher="single"),
        layout=TaskLayout(
            nodes=1, ranks_per_node=1, gpus_per_node=0, cpus_per_rank=None, mem=None, time=Walltime(60)
        ),
    )  # fmt: skip
    return made, str(path)


def submit_job(scheduler: SlurmScheduler, folder: Path, body: str, *options: str) -> str:
    return scheduler.submit(*submission(folder, body, *options))


def wait(
    scheduler: SlurmScheduler, job_id: str, done: Callable[[list[JobStatus]], bool], patience: float = 120
) -> list[JobStatus]:
    deadline = time.monotonic() + patience
    while True:
        jobs = scheduler.query([job_id])[job_id]
        if done(jobs):
            return jobs
        assert time.monotonic() < deadline, jobs
        time.sleep(0.2)


def are_terminal(jobs: list[JobStatus]) -> bool:
    return bool(jobs) and all(job.terminal for job in jobs)


def are_running(jobs: list[JobStatus]) -> bool:
    return bool(jobs) and all(job.state is JobState.RUNNING for job in jobs)
