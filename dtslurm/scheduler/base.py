"""Interfaces that schedulers implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from dtslurm.model.runs.queue import QueueMemory
from dtslurm.model.runs.state import JobStatus

if TYPE_CHECKING:  # these imports would double the import time of a status query
    from dtslurm.errors import TransportError
    from dtslurm.model.cluster import ClusterProfile
    from dtslurm.model.jobs.job import Submission
    from dtslurm.model.nodes import ListedNode
    from dtslurm.model.runs.allocation import HeldAllocation
    from dtslurm.transport.base import Completed

Look = Callable[[Mapping[str, Sequence[JobStatus]]], None]
"""Receives jobs by their ids, as the queue shows them, before a change; raises to prevent the change."""


class PartialResult(NamedTuple):
    """The result of a change that the scheduler made for some of the jobs only.

    Attributes:
        done: the requested ids for which the scheduler made the change.
        waiting: the jobs and tasks that were already pending, as the scheduler names them.
        refused: the scheduler's messages on the other jobs, one line each.
    """

    done: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


# Timeout of a submission: sbatch itself retries for up to 120 s when the queue is full (22.05, sbatch.c).
SUBMIT_TIMEOUT_S = 150.0


class Scheduler(Protocol):
    """A queue that accepts rendered submissions and reports the status of jobs.

    Job ids are strings as the scheduler prints them: ``"17"``, or ``"17_3"`` for one task of an array.
    """

    def profile(self, profile: ClusterProfile) -> ClusterProfile:
        """Return ``profile`` with the live scheduler's partitions, node types and limits added."""
        ...

    def validate(self, submission: Submission) -> list[str]:
        """Return all reasons, one line each, why the scheduler cannot accept this submission."""
        ...

    def notices(self, submission: Submission) -> list[str]:
        """Return notes, one line each, on how this scheduler will run the job."""
        ...

    def submit(self, submission: Submission, script_path: str) -> str:
        """Queue the script at ``script_path`` and return the job id.

        Raises:
            SubmitRejected: the scheduler refused the submission; there is no job.
            SubmitUnknown: the scheduler's answer was lost; there may be a job.
            SlurmUnavailable: the submission could not be sent.
        """
        ...

    def find(self, comment: str) -> str | None:
        """Return the id of this user's job whose comment is ``comment``, or None if no such job is known."""
        ...

    def query(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        """Return the status records of each job; a job without any record maps to an empty list.

        The id of an array maps to one status per task (Slurm may fold pending tasks into one record). The
        number of requests to the scheduler is bounded, however many ids are queried.

        Raises:
            SlurmUnavailable: the scheduler did not answer. This is no evidence about the state of any job.
        """
        ...

    def cancel(self, job_ids: Sequence[str], inspect_jobs: Look | None = None) -> None:
        """Cancel jobs. Raise ``SlurmError`` with the scheduler's message if the scheduler refuses.

        Args:
            inspect_jobs: a function that this method calls before it changes any job. Its exceptions
                propagate to the caller, here and in the methods below.
        """
        ...

    def requeue(self, job_ids: Sequence[str], inspect_jobs: Look | None = None) -> PartialResult | None:
        """Requeue running or ended jobs under the same job id.

        Returns:
            The jobs that were and were not requeued, if only some were; None if all were. If none was
            requeued, the method raises ``SlurmError``.
        """
        ...

    def signal(self, job_ids: Sequence[str], name: str) -> None:
        """Send a signal (``SIGUSR2``) to the tasks of running jobs."""
        ...

    def hold(self, job_ids: Sequence[str], inspect_jobs: Look | None = None) -> None:
        """Keep pending jobs from starting."""
        ...

    def release(self, job_ids: Sequence[str], inspect_jobs: Look | None = None) -> None:
        """Let held jobs start again."""
        ...


@runtime_checkable
class SharedScheduler(Protocol):
    """A scheduler used by many processes, which share the scheduler's answers through a queue snapshot.

    Attributes:
        memory: the queue snapshot; may be replaced by the snapshot of another process.
        requests: the number of requests that this object has made to the controller.
    """

    memory: QueueMemory
    requests: int

    def query(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        """Query the scheduler, update ``memory`` and return the jobs' statuses; see `Scheduler.query`."""
        ...

    def recall(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        """Return the statuses that ``query`` would return, from ``memory`` alone."""
        ...

    def runs(self, job_id: str) -> Sequence[JobStatus]:
        """Return all accounting records of a job, oldest first; empty if accounting is unavailable.

        Each record is one execution of the job.
        """
        ...


@runtime_checkable
class CommandScheduler(Protocol):
    """A scheduler that queues by a command, so that one request can deliver a script and queue it."""

    def submit_command(self, submission: Submission, script_path: str) -> list[str]:
        """Return the command that queues the script at ``script_path``."""
        ...

    def read_submit_answer(self, submission: Submission, answer: Completed | TransportError) -> str:
        """Return the job id from the result of the submission's command, or from the queue if it was lost.

        Args:
            answer: the command's result, or the error that prevented it from arriving.

        Raises:
            SubmitRejected, SubmitUnknown, SlurmUnavailable: as `Scheduler.submit`.
            CommandNotFound, HostUnavailable: ``answer`` itself, if it proves that there is no job.
        """
        ...


@runtime_checkable
class AllocationReader(Protocol):
    """A scheduler whose running jobs can run further steps."""

    def read_allocation(self, job_id: str) -> HeldAllocation | None:
        """Return a job with its nodes and the runs in it, None if the scheduler knows no such job.

        Raises:
            SlurmUnavailable: the scheduler did not answer.
        """
        ...


@runtime_checkable
class JobRecordReader(Protocol):
    """A scheduler that reports more about a job than the queue and accounting do."""

    def read_job_record(self, job_id: str) -> JobStatus | None:
        """Return the controller's record of a job, None if the controller has none.

        Raises:
            SlurmUnavailable: the scheduler did not answer.
        """
        ...


@runtime_checkable
class QueueLister(Protocol):
    """A scheduler that can list the queued jobs that dtslurm submitted, which it finds by their comments."""

    def own_jobs(self) -> Sequence[JobStatus]:
        """Return the user's jobs that have dtslurm's comment, as of the last query of the queue."""
        ...


@runtime_checkable
class NodeLister(Protocol):
    """A scheduler of several nodes, from which a submission can exclude some."""

    def nodes(self, partition: str | None) -> list[ListedNode]:
        """Return the nodes of a partition, or of several partitions written as ``a,b``.

        Without a name, return the nodes of the default partition.

        Raises:
            SlurmUnavailable: the scheduler did not answer.
        """
        ...
