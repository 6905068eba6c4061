"""What every scheduler offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from dtslurm.model.runs.queue import QueueMemory
from dtslurm.model.runs.state import JobStatus
from dtslurm.transport.base import Completed

if TYPE_CHECKING:  # half of what a look at one's jobs would import
    from dtslurm.model.cluster import ClusterProfile
    from dtslurm.model.jobs.job import Submission
    from dtslurm.model.nodes import ListedNode

Runner = Callable[[Sequence[str], float], Completed]
"""Runs (argv, time-out in seconds) and returns the answer, as `Transport.run` does."""

Look = Callable[[Mapping[str, Sequence[JobStatus]]], None]
"""Is told what the queue shows of jobs before they are changed, by their ids; may refuse by raising."""


class PartialResult(NamedTuple):
    """What was done where not all could be.

    Attributes:
        done: those of the ids for which something was done.
        waiting: the jobs and tasks that waited already, as the scheduler names them.
        refused: what it said of the others, one line each.
    """

    done: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


# Of a submission: sbatch itself retries for up to 120 s when the queue is full (22.05, sbatch.c).
SUBMIT_TIMEOUT_S = 150.0


class Scheduler(Protocol):
    """A queue that takes rendered submissions and tells of jobs.

    Job ids are strings as the scheduler shows them: ``"17"``, or ``"17_3"`` for one task of an array.
    """

    def profile(self, profile: ClusterProfile) -> ClusterProfile:
        """Return ``profile`` completed with what the live scheduler says (partitions, node types, limits)."""
        ...

    def validate(self, submission: Submission) -> list[str]:
        """Return every reason, one line each, why the scheduler could not take this submission."""
        ...

    def notices(self, submission: Submission) -> list[str]:
        """Return what the user should know of how this scheduler will run the job, each one line."""
        ...

    def submit(self, submission: Submission, script_path: str, run: Runner | None = None) -> str:
        """Queue the script at ``script_path`` and return the job id.

        Args:
            run: runs the submitting command where the cluster is another machine, after what the job needs
                was put in place there.

        Raises:
            SubmitRejected: refused; there is no job.
            SubmitUnknown: the answer was lost; there may be a job.
            SlurmUnavailable: nothing could be sent.
        """
        ...

    def find(self, comment: str) -> str | None:
        """Return the id of this user's job that carries a submission's comment, or None if none is known."""
        ...

    def query(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        """Return what is known of each job; an id without evidence maps to an empty list.

        An array's id maps to one status per task (pending tasks may be folded into one). The call costs
        the scheduler a bounded number of requests however many ids are asked.

        Raises:
            SlurmUnavailable: no answer; says nothing about any job.
        """
        ...

    def cancel(self, job_ids: Sequence[str], look: Look | None = None) -> None:
        """End jobs. Raises ``SlurmError`` with the scheduler's words if it refuses.

        Args:
            look: called before anything is changed; here and below what it raises is passed on.
        """
        ...

    def requeue(self, job_ids: Sequence[str], look: Look | None = None) -> PartialResult | None:
        """Put running or ended jobs back into the queue under the same id.

        Returns:
            What was done where that was a part of it; None where it was all. Raises if it was nothing.
        """
        ...

    def signal(self, job_ids: Sequence[str], name: str) -> None:
        """Send a signal (``SIGUSR2``) to the tasks of running jobs."""
        ...

    def hold(self, job_ids: Sequence[str], look: Look | None = None) -> None:
        """Keep pending jobs from starting."""
        ...

    def release(self, job_ids: Sequence[str], look: Look | None = None) -> None:
        """Let held jobs start again."""
        ...


@runtime_checkable
class SharedScheduler(Protocol):
    """A scheduler that many people ask, so that what one process heard should serve the others too.

    Attributes:
        memory: what was heard so far; may be replaced by what another process heard.
        requests: how many requests this object has made to the controller.
    """

    memory: QueueMemory
    requests: int

    def query(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        """Ask, remember and tell; see `Scheduler.query`."""
        ...

    def recall(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        """Tell what ``query`` would, out of the memory alone."""
        ...

    def runs(self, job_id: str) -> Sequence[JobStatus]:
        """Return every run of a job that accounting knows, oldest first; nothing if it cannot be asked."""
        ...


@runtime_checkable
class QueueLister(Protocol):
    """A scheduler that lists the jobs in its queue by their comments."""

    def own_jobs(self) -> Sequence[JobStatus]:
        """Return the user's jobs that carry dtslurm's comment, as the queue listed them last."""
        ...


@runtime_checkable
class NodeLister(Protocol):
    """A scheduler of several nodes, from which some can be left out."""

    def nodes(self, partition: str | None) -> list[ListedNode]:
        """Return the nodes of a partition, or of several as ``a,b``; without a name, of the default one.

        Raises:
            SlurmUnavailable: no answer.
        """
        ...
