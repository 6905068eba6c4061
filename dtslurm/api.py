"""The Python interface: submit a script, wait for the job, read its logs, diagnose its failure.

    import dtslurm

    job = dtslurm.submit("train.py", "--lr", 3e-4, cluster="perlmutter", nodes=2, time="4:00:00")
    for line in job.logs(follow=True):
        print(line.rank, line.text)
    if job.wait() != 0:
        print(job.diagnose().summary)

Errors are those of `dtslurm.errors`; each has a message and a hint at what to do.
"""

from __future__ import annotations

import asyncio
import operator
import re
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtslurm.errors import JobFailed, RequestInvalid
from dtslurm.logs.lines import LogBlock
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.job import JobRecord, LogLine
from dtslurm.model.runs.diagnosis import Verdict
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.runs import control, runs, status
from dtslurm.services.runs.status import RunView
from dtslurm.services.submit.functions import request_of
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.submit.submit import submit as queue
from dtslurm.services.wiring.context import Context

if TYPE_CHECKING:
    from dtslurm.services.logs.logs import LogFilter

_POLL_S = 1.0


class Job:
    """A submitted run; created by `submit`, `Cluster.job` or `Job.find`."""

    def __init__(self, record: JobRecord, context: Context | None = None) -> None:
        self.record = record
        self._context = context or Context()

    @classmethod
    def find(cls, selector: str | int, cluster: str | None = None) -> Job:
        """Return the run with this job id, array task, token, name or run directory.

        Raises:
            JobNotFound: there is no such run.
            RequestInvalid: runs on several clusters match.
        """
        context = Context()
        return cls(runs.find(context, str(selector), cluster), context)

    @property
    def id(self) -> str | None:
        """The scheduler's job id; None if sbatch's answer was lost."""
        return self.record.job_id

    @property
    def name(self) -> str:
        """The job's name."""
        return self.record.name

    @property
    def cluster(self) -> str:
        """The name of the cluster profile."""
        return self.record.cluster

    @property
    def run_dir(self) -> str:
        """The run directory, on the cluster."""
        return self.record.run_dir

    def statuses(self) -> tuple[JobStatus, ...]:
        """Query the job and return its status: one observation, or one per task of an array."""
        return self._refresh_view().statuses

    @property
    def state(self) -> JobState:
        """The current state of the job; for an array, that of the first task not over, else not completed."""
        statuses = self.statuses()
        candidates = (
            [observation for observation in statuses if not observation.terminal]
            or [observation for observation in statuses if not observation.ok]
            or statuses
        )
        return candidates[0].state

    @property
    def done(self) -> bool:
        """Whether the job, with all tasks of an array, has ended and cannot start again."""
        return self._refresh_view().terminal

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the job is over, and return its exit code: 0, or the highest of an array's tasks.

        Args:
            timeout: seconds; None waits without a limit.

        Raises:
            TimeoutError: the job is not over in time; it continues to run.
        """
        if timeout is None:
            from dtslurm.services.logs.logs import wait

            return wait(self._context, self.record).exit_code
        deadline = time.monotonic() + timeout
        while not (view := self._refresh_view()).terminal:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"job {self.id} is {view.statuses[0].word} after {timeout:g} s")
            self._context.sleep(min(remaining, _POLL_S))
        return view.exit_code

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until the job is over, and return the last training metrics, empty if there are none.

        Raises:
            JobFailed: the exit code is not 0; the message names the rank that failed first, and the cause.
            TimeoutError: the job is not over in time; it continues to run.
        """
        code = self.wait(timeout)
        if code:
            verdict = self.diagnose()
            raise JobFailed(
                f"job {self.id} ({self.name}) failed with exit code {code}: {verdict.summary}", code=code
            )
        run = self._refresh_view().run
        metrics = [line for attempt in run.attempts() for line in run.metrics(attempt)]
        return metrics[-1] if metrics else {}

    def logs(
        self,
        ranks: Sequence[int] | None = None,
        *,
        grep: str | None = None,
        attempt: int | None = None,
        tail: int | None = None,
        follow: bool = False,
    ) -> Iterator[LogLine]:
        """Yield the log lines of all ranks, or of ``ranks``; with ``follow``, until the job is over.

        Raises:
            RequestInvalid: ``ranks`` are not whole numbers, or ``grep`` is not a regular expression.
            TransportError: the cluster cannot be reached.
        """
        from dtslurm.services.logs import logs

        log_filter = logs.LogFilter(
            ranks=None if ranks is None else _to_ranges(ranks),
            grep=None if grep is None else _compile_pattern(grep),
            attempt=attempt,
            tail=tail,
        )
        return self._iterate_lines(log_filter, follow)

    def _iterate_lines(self, log_filter: LogFilter, follow: bool) -> Iterator[LogLine]:
        from dtslurm.services.logs import logs

        read_blocks = logs.follow if follow else logs.read
        for blocks in read_blocks(self._context, self.record, log_filter):
            for block in blocks:
                if isinstance(block, LogBlock):
                    yield from block.lines()

    def diagnose(self, attempt: int | None = None) -> Verdict:
        """Find the first rank that failed, its cause, and a fix."""
        from dtslurm.services.observe.diagnose import diagnose

        return diagnose(self._context, self.record, attempt=attempt).verdict

    def fetch(self, *patterns: str, to: str | Path | None = None) -> list[Path]:
        """Copy files of the run to this machine, as ``dtslurm fetch`` does, and return the new ones."""
        from dtslurm.services.results.fetch import fetch

        return list(fetch(self._context, self.record, patterns, Path(to) if to else None).files)

    def cancel(self) -> None:
        """Cancel the job."""
        self._control("cancel")

    def requeue(self) -> None:
        """Requeue the job under the same job id."""
        self._control("requeue")

    def hold(self) -> None:
        """Hold the pending job, so that it does not start."""
        self._control("hold")

    def release(self) -> None:
        """Release the held job."""
        self._control("release")

    def _control(self, verb: str) -> None:
        control.change_jobs(self._context, verb, [self.record.job_id or self.record.token], self.cluster)

    def _refresh_view(self) -> RunView:
        view = status.views(self._context, [self.record])[0]
        self.record = view.record
        return view

    def __await__(self) -> Generator[Any, None, int]:
        """Wait until the job is over without blocking the event loop; the value is the exit code."""
        return asyncio.to_thread(self.wait).__await__()

    def __repr__(self) -> str:
        return f"<Job {self.id} ({self.name}) on {self.cluster}>"


def _to_ranges(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    try:
        numbers = sorted({operator.index(rank) for rank in ranks})
    except TypeError:
        numbers = [-1]
    if numbers and numbers[0] < 0:
        raise RequestInvalid([f"ranks should be a list of ranks, such as [0, 3], not {ranks!r}"])
    return tuple((number, number) for number in numbers)


def _compile_pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise RequestInvalid([f"grep {text!r} is not a regular expression: {error}"]) from None


class Cluster:
    """A cluster, by the name of its profile; without a name, the default that ``dtslurm doctor`` shows.

    The cluster is not contacted until a method or property needs it.
    """

    def __init__(self, name: str | None = None, *, transport: str | None = None) -> None:
        self.name = name or Context().default_cluster()[0]
        self.transport = transport
        self._context = Context()

    @cached_property
    def profile(self) -> ClusterProfile:
        """The cluster profile, completed with information from the scheduler."""
        return self._context.live_cluster(self.name, self.transport).profile

    def submit(self, script: str | Path, *args: object, **options: Any) -> Job:
        """Submit a script to this cluster; see `submit`."""
        defaults = {"cluster": self.name, "transport": self.transport}
        request = replace(
            request_of({**defaults, **options}),
            script=str(script),
            args=tuple(str(argument) for argument in args),
        )
        return Job(queue(self._context, prepare(self._context, request, standalone=False)), self._context)

    def job(self, selector: str | int) -> Job:
        """Return the run on this cluster with this job id, array task, token, name or run directory."""
        return Job(runs.find(self._context, str(selector), self.name), self._context)

    def jobs(self, limit: int = 20) -> list[Job]:
        """Return the latest runs on this cluster, newest first."""
        return [Job(record, self._context) for record in runs.recent(self._context, limit, self.name)]

    def __repr__(self) -> str:
        return f"<Cluster {self.name}>"


def submit(script: str | Path, *args: object, cluster: str | None = None, **options: Any) -> Job:
    """Check, render and submit a training script, as ``dtslurm submit`` does.

    Args:
        script: the script, an executable, or with ``module=True`` the name of a module.
        args: the script's arguments, each converted to text.
        cluster: the name of a cluster profile.
        options: options of ``dtslurm submit`` by their long names: ``nodes=2``, ``time="4:00:00"``,
            ``env={"A": 1}``, ``launcher="torchrun"``, ``setup=["module load cuda"]`` …

    Raises:
        RequestInvalid: the request cannot work; the error lists every problem.
        SubmitRejected: the scheduler refused the job; nothing was queued.
        SubmitUnknown: the scheduler's answer was lost; ``dtslurm status`` shows whether there is a job.
    """
    return Cluster(cluster, transport=options.pop("transport", None)).submit(script, *args, **options)
