"""An embedded cluster for one test: its own state folder, deadlines for all, nothing left behind."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from dtslurm.model.jobs.job import JobSpec, Submission, TaskLayout
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.scheduler.local import LocalScheduler
from dtslurm.worker.localslurm import process
from dtslurm.worker.localslurm.state import State
from tests.waiting import wait_until

DEADLINE = 120.0
MACHINE: Mapping[str, Any] = {"cpus": 8, "memory_mib": 8000, "gpus": []}


def submission(script: str, work_dir: Path, token: str = "t0k3n") -> Submission:
    layout = TaskLayout(nodes=1, ranks_per_node=1, gpus_per_node=0, cpus_per_rank=None, mem=None, time=None)
    spec = JobSpec(name="job", script="train.py", work_dir=str(work_dir), launcher="srun")
    return Submission(
        token=token, cluster="local", spec=spec, layout=layout, run_dir=str(work_dir), script=script
    )


class LocalCluster:
    """A ``LocalScheduler`` over a machine of known size, and words to drive it."""

    def __init__(self, tmp_path: Path, kill_wait: float = 1.0, **machine: Any) -> None:
        self.folder = tmp_path
        self.machine = {**MACHINE, **machine}
        self.scheduler = LocalScheduler(
            tmp_path / "state", kill_wait=kill_wait, requeue_delay=0.2, machine=self.machine
        )
        self.state = State(str(tmp_path / "state"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        active = [record["id"] for record in self.state.active()]
        for job in active:
            self.scheduler.cancel([str(job)])
        wait_until(lambda: not self.state.active(), "the end of all jobs")
        wait_until(
            lambda: not any(map(self.state.keeper_alive, self.state.all_ids())), "the end of all keepers"
        )
        for job in self.state.all_ids():
            assert process.kill_strays(self.state.root, job) == 0, f"job {job} left processes behind"

    def text(self, body: str, *directives: str, shebang: str = "#!/bin/bash") -> str:
        lines = [shebang, *(f"#SBATCH {line}" for line in ("--output=%x-%j.out", "-J job", *directives))]
        return "\n".join([*lines, textwrap.dedent(body).strip(), ""])

    def submit(self, body: str, *directives: str, shebang: str = "#!/bin/bash", token: str = "t0k3n") -> str:
        text = self.text(body, *directives, shebang=shebang)
        path = self.folder / f"script-{time.monotonic_ns()}.sbatch"
        path.write_text(text)
        return self.scheduler.submit(submission(text, self.folder, token), str(path))

    def status(self, job: str) -> JobStatus:
        (status,) = self.scheduler.query([job])[job]
        return status

    def wait(self, job: str, *states: JobState) -> JobStatus:
        """Wait until the job is over, or in one of the states if any are given."""

        def there() -> bool:
            status = self.status(job)
            return status.state in states if states else status.terminal

        wait_until(there, f"job {job}: {states or 'end'} (now {self.status(job)}")
        return self.status(job)

    def run(self, body: str, *directives: str, shebang: str = "#!/bin/bash") -> JobStatus:
        return self.wait(self.submit(body, *directives, shebang=shebang))

    def output(self, job: str, name: str = "job") -> str:
        return (self.folder / f"{name}-{job}.out").read_text()

    def saw(self, job: str, word: str) -> None:
        """Wait until the job has printed the word."""
        path = self.folder / f"job-{job}.out"
        wait_until(lambda: path.exists() and word in path.read_text(), f"{word!r} of job {job}")

    def keeper(self, job: str) -> int:
        wait_until(lambda: (self.state.load(int(job)) or {}).get("keeper"), "the keeper's start")
        record = self.state.load(int(job))
        assert record is not None
        return int(record["keeper"])
