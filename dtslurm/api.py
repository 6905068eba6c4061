"""Jobs from Python: submit a script, wait for it, read it, ask why it failed.

    import dtslurm

    job = dtslurm.submit("train.py", "--lr", 3e-4, cluster="perlmutter", nodes=2, time="4:00:00")
    for line in job.logs(follow=True):
        print(line.rank, line.text)
    if job.wait() != 0:
        print(job.diagnose().summary)

Errors are those of `dtslurm.errors`; each says what failed and what to do.
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

_LOOK_S = 1.0


class Job:
    """A run that was submitted; made by `submit`, `Cluster.job` or `Job.find`."""

    def __init__(self, record: JobRecord, context: Context | None = None) -> None:
        self.record = record
        self._context = context or Context()

    @classmethod
    def find(cls, selector: str | int, cluster: str | None = None) -> Job:
        """Return the run of a job id, array task, token, name or run directory.

        Raises:
            JobNotFound: there is none.
            RequestInvalid: runs on several clusters match.
        """
        context = Context()
        return cls(runs.find(context, str(selector), cluster), context)

    @property
    def id(self) -> str | None:
        """The scheduler's number; None where sbatch's answer was lost."""
        return self.record.job_id

    @property
    def name(self) -> str:
        """The job's name."""
        return self.record.name

    @property
    def cluster(self) -> str:
        """The name of the profile of the cluster it is on."""
        return self.record.cluster

    @property
    def run_dir(self) -> str:
        """The run's folder, on the cluster."""
        return self.record.run_dir

    def statuses(self) -> tuple[JobStatus, ...]:
        """Return what is known of the job now: one observation, or one for each task of an array."""
        return self._view().statuses

    @property
    def state(self) -> JobState:
        """The job's state now; of an array that of the first task that is not over, or did not complete."""
        found = self.statuses()
        first = [one for one in found if not one.terminal] or [one for one in found if not one.ok] or found
        return first[0].state

    @property
    def done(self) -> bool:
        """Whether the job, and every task of an array, is over for good."""
        return self._view().terminal

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code: 0, or the highest of the tasks'.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: the job is not over by then; it runs on.
        """
        if timeout is None:
            from dtslurm.services.logs.logs import wait

            return wait(self._context, self.record).exit_code
        end = time.monotonic() + timeout
        while not (view := self._view()).terminal:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"job {self.id} is {view.statuses[0].word} after {timeout:g} s")
            self._context.sleep(min(left, _LOOK_S))
        return view.exit_code

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the end and return the last training metrics, empty where none were written.

        Raises:
            JobFailed: it did not end with 0; the message says which rank failed first, and why.
            TimeoutError: it is not over in time.
        """
        code = self.wait(timeout)
        if code:
            verdict = self.diagnose()
            raise JobFailed(
                f"job {self.id} ({self.name}) failed with exit code {code}: {verdict.summary}", code=code
            )
        run = self._view().run
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
        """Yield lines of all ranks, or of some; with ``follow`` until the job is over.

        Raises:
            RequestInvalid: ``ranks`` are no whole numbers, or ``grep`` is no regular expression.
            TransportError: the cluster cannot be reached.
        """
        from dtslurm.services.logs import logs

        wanted = logs.LogFilter(
            ranks=None if ranks is None else _ranges(ranks),
            grep=None if grep is None else _pattern(grep),
            attempt=attempt,
            tail=tail,
        )
        return self._lines(wanted, follow)

    def _lines(self, wanted: LogFilter, follow: bool) -> Iterator[LogLine]:
        from dtslurm.services.logs import logs

        read = logs.follow if follow else logs.read
        for items in read(self._context, self.record, wanted):
            for item in items:
                if isinstance(item, LogBlock):
                    yield from item.lines()

    def diagnose(self, attempt: int | None = None) -> Verdict:
        """Return which rank failed first, why, and what to do."""
        from dtslurm.services.observe.diagnose import diagnose

        return diagnose(self._context, self.record, attempt=attempt).verdict

    def fetch(self, *patterns: str, to: str | Path | None = None) -> list[Path]:
        """Bring files of the run here, as ``dtslurm fetch`` does, and return those that are new."""
        from dtslurm.services.results.fetch import fetch

        return list(fetch(self._context, self.record, patterns, Path(to) if to else None).files)

    def cancel(self) -> None:
        """End the job."""
        self._act("cancel")

    def requeue(self) -> None:
        """Put the job back into the queue under the same id."""
        self._act("requeue")

    def hold(self) -> None:
        """Keep the pending job from starting."""
        self._act("hold")

    def release(self) -> None:
        """Let the held job start."""
        self._act("release")

    def _act(self, verb: str) -> None:
        control.act(self._context, verb, [self.record.job_id or self.record.token], self.cluster)

    def _view(self) -> RunView:
        view = status.views(self._context, [self.record])[0]
        self.record = view.record
        return view

    def __await__(self) -> Generator[Any, None, int]:
        """Wait for the end without blocking the event loop; the value is the exit code."""
        return asyncio.to_thread(self.wait).__await__()

    def __repr__(self) -> str:
        return f"<Job {self.id} ({self.name}) on {self.cluster}>"


def _ranges(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    try:
        numbers = sorted({operator.index(rank) for rank in ranks})
    except TypeError:
        numbers = [-1]
    if numbers and numbers[0] < 0:
        raise RequestInvalid([f"ranks should be a list of ranks, such as [0, 3], not {ranks!r}"])
    return tuple((number, number) for number in numbers)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise RequestInvalid([f"grep {text!r} is no regular expression: {error}"]) from None


class Cluster:
    """A cluster by its profile's name; without one the default, as ``dtslurm doctor`` shows it.

    Nothing is asked of the cluster until something is wanted of it.
    """

    def __init__(self, name: str | None = None, *, transport: str | None = None) -> None:
        self.name = name or Context().default_cluster()[0]
        self.transport = transport
        self._context = Context()

    @cached_property
    def profile(self) -> ClusterProfile:
        """The profile, completed by what the scheduler says."""
        return self._context.live_cluster(self.name, self.transport).profile

    def submit(self, script: str | Path, *args: object, **options: Any) -> Job:
        """Queue a script here; see `submit`."""
        chosen = {"cluster": self.name, "transport": self.transport}
        request = replace(
            request_of({**chosen, **options}), script=str(script), args=tuple(str(word) for word in args)
        )
        return Job(queue(self._context, prepare(self._context, request, standalone=False)), self._context)

    def job(self, selector: str | int) -> Job:
        """Return the run of a job id, array task, token, name or run directory on this cluster."""
        return Job(runs.find(self._context, str(selector), self.name), self._context)

    def jobs(self, limit: int = 20) -> list[Job]:
        """Return the newest runs here, newest first."""
        return [Job(record, self._context) for record in runs.recent(self._context, limit, self.name)]

    def __repr__(self) -> str:
        return f"<Cluster {self.name}>"


def submit(script: str | Path, *args: object, cluster: str | None = None, **options: Any) -> Job:
    """Check, render and queue a training script, as ``dtslurm submit`` does.

    Args:
        script: the script, an executable, or with ``module=True`` a module's name.
        args: its arguments; each is passed as its text.
        cluster: a profile's name.
        options: the options of ``dtslurm submit`` by their long names: ``nodes=2``, ``time="4:00:00"``,
            ``env={"A": 1}``, ``launcher="torchrun"``, ``setup=["module load cuda"]`` …

    Raises:
        RequestInvalid: the request cannot work; every problem found is in it.
        SubmitRejected: the scheduler refused; nothing was queued.
        SubmitUnknown: the scheduler's answer was lost; ``dtslurm status`` finds out.
    """
    return Cluster(cluster, transport=options.pop("transport", None)).submit(script, *args, **options)
