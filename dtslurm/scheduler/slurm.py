"""The Slurm scheduler: submits each run exactly once and reports states only with evidence."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dtslurm.errors import (
    CommandNotFound,
    DtslurmError,
    HostUnavailable,
    JobNotFound,
    SubmitRejected,
    SubmitUnknown,
    TransportError,
)
from dtslurm.model.runs.queue import QueueMemory
from dtslurm.model.runs.record import OUR_MARK
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.scheduler.base import SUBMIT_TIMEOUT_S, Look, PartialResult
from dtslurm.scheduler.job_table import JobTable, select_unlisted_tasks, sort_tasks
from dtslurm.scheduler.partial_results import parse_partial_result
from dtslurm.scheduler.site_answers import AnswerCache, SiteAnswers
from dtslurm.scheduler.slurm_client import SlurmClient, failure
from dtslurm.slurm import commands, parse
from dtslurm.slurm.arrays import base_id, is_step_id, is_valid_job_id
from dtslurm.slurm.parse_errors import Trouble, classify_error, distinct_lines, hint_for
from dtslurm.transport.base import Completed, Transport

if TYPE_CHECKING:
    from dtslurm.model.cluster import ClusterProfile
    from dtslurm.model.jobs.job import Submission
    from dtslurm.model.nodes import ListedNode
    from dtslurm.model.runs.allocation import HeldAllocation

# Pauses between accounting queries for one job: accounting lags, and all users share its database.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 600.0
_FIRST_PAUSE_OF_STEP_S = 1.0  # squeue never shows how a step ended
_ENDED_MAX_AGE_S = 86400.0

# Failures of sbatch that certainly queued no job, and after which a new attempt may succeed.
_NOTHING_QUEUED = {Trouble.NOT_SENT, Trouble.AUTH, Trouble.SETUP, Trouble.BUSY}


class SlurmScheduler:
    """One user's jobs in one Slurm installation, reached over any transport."""

    def __init__(
        self,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.time,
        uid: Callable[[], int | None] | None = None,
        shared_cache: AnswerCache | None = None,
        scope: str = "",
    ) -> None:
        """Create the scheduler; this runs no command.

        Args:
            clock: returns the current time in seconds since the epoch.
            uid: returns the user id on the host where the commands run, if it is known without a query there.
            shared_cache: the cache that shares the cluster's answers with other processes; see `SiteAnswers`.
            scope: identifies this Slurm installation and user in ``shared_cache``.
        """
        self._slurm = SlurmClient(transport, clock=clock, uid=uid)
        self._queried_at = self._query_duration_s = 0.0
        self._live: list[JobStatus] = []
        self._ended: dict[tuple[str, int | None], JobStatus] = {}
        self._accounting_queries: dict[str, tuple[float, int]] = {}
        self._has_steps = False
        self._site_answers = SiteAnswers(clock, shared_cache, scope)
        self._completed_profile: tuple[float, ClusterProfile, ClusterProfile] | None = None

    @property
    def requests(self) -> int:
        """The number of requests made to the controller."""
        return self._slurm.requests

    @property
    def memory(self) -> QueueMemory:
        """The queue snapshot: the last answer of squeue, and the ended jobs known from accounting."""
        return QueueMemory(
            asked_at=self._queried_at,
            took_s=self._query_duration_s,
            jobs=tuple(self._live),
            ended=tuple(self._ended.values()),
            looked=dict(self._accounting_queries),
            accounting=self._slurm.accounting,
            columns=self._slurm.columns,
            has_steps=self._has_steps,
        )

    @memory.setter
    def memory(self, queue_memory: QueueMemory) -> None:
        self._queried_at, self._query_duration_s, self._live = (
            queue_memory.asked_at,
            queue_memory.took_s,
            list(queue_memory.jobs),
        )
        self._ended = {(job.job_id, job.submit_time): job for job in queue_memory.ended}
        self._accounting_queries = dict(queue_memory.looked)
        self._slurm.accounting, self._slurm.columns = queue_memory.accounting, queue_memory.columns
        self._has_steps = queue_memory.has_steps

    def profile(self, profile: ClusterProfile) -> ClusterProfile:
        """Add partitions and node types to a profile that lacks them; see `Scheduler.profile`."""
        if profile.slurm.partitions and profile.node_types:
            return profile
        if (
            self._completed_profile
            and self._completed_profile[1] == profile
            and self._site_answers.recent(self._completed_profile[0])
        ):
            return self._completed_profile[2]
        from dtslurm.scheduler.slurm_profile import complete
        from dtslurm.slurm import parse_scontrol

        partitions = parse_scontrol.partitions(
            self._query_cluster(commands.show_partitions(), private_ok=True)
        )
        nodes = parse_scontrol.nodes(self._query_cluster(commands.show_nodes(), private_ok=True))
        config = parse_scontrol.config(self._query_cluster(commands.show_config()))
        self._completed_profile = self._slurm.clock(), profile, complete(profile, partitions, nodes, config)
        return self._completed_profile[2]

    def _query_cluster(self, argv: Sequence[str], *, private_ok: bool = False) -> str:
        """Return the output of a command about the cluster, cached for one minute."""
        output = self._site_answers.get(argv)
        if output is None:
            asked_at, output = self._slurm.clock(), self._slurm.ask(argv, private_ok=private_ok)
            self._site_answers.put(argv, asked_at, output)
        return output

    def validate(self, submission: Submission) -> list[str]:
        """Check the submission against the partitions' limits; see `Scheduler.validate`.

        This makes at most 1 request to the controller, 2 for arrays.
        """
        requests_before = self.requests
        problems = self._find_problems(submission)
        if problems and self.requests == requests_before:
            # The cached answers may be outdated: query again before refusing.
            self._site_answers.forget()
            problems = self._find_problems(submission)
        return problems

    def _find_problems(self, submission: Submission) -> list[str]:
        from dtslurm.scheduler.slurm_checks import check
        from dtslurm.slurm import parse_scontrol

        partitions = parse_scontrol.partitions(
            self._query_cluster(commands.show_partitions(), private_ok=True)
        )
        config = {}
        if submission.spec.array:
            config = parse_scontrol.config(self._query_cluster(commands.show_config()))
        return [*check(submission, partitions, config), *self._find_mpi_problems(submission)]

    def _find_mpi_problems(self, submission: Submission) -> list[str]:
        """Return an error for each ``srun --mpi`` type in the script that srun here does not offer."""
        from dtslurm.slurm.script import mpi_types

        requested_types = mpi_types(submission.script)
        offered_types = parse.mpi_types(self._query_cluster(commands.mpi_types())) if requested_types else []
        return [
            f"srun --mpi={name}: this Slurm offers {', '.join(offered_types)} (srun --mpi=list); choose "
            "one of them with --launcher-option mpi=, or with slurm.mpi in the profile"
            for name in sorted(requested_types.difference(offered_types))
            if offered_types
        ]

    def notices(self, submission: Submission) -> list[str]:
        """Return no notes: Slurm runs the job as submitted; see `Scheduler.notices`."""
        del submission
        return []

    def submit(self, submission: Submission, script_path: str) -> str:
        """Queue a script exactly once; see `Scheduler.submit`."""
        self._slurm.require()
        argv = self.submit_command(submission, script_path)
        if submission.spec.secrets:  # some clusters pass sbatch's environment to the job
            argv = ["env", *(f"--unset={name}" for name in submission.spec.secrets), *argv]
        answer: Completed | TransportError
        try:
            answer = self._slurm.transport.run(argv, timeout=SUBMIT_TIMEOUT_S)
        except TransportError as error:
            answer = error
        return self.read_submit_answer(submission, answer)

    def submit_command(self, submission: Submission, script_path: str) -> list[str]:
        """Return the command line of sbatch, or of srun in an allocation; see `CommandScheduler`."""
        if submission.allocation is not None:
            return commands.start_in_allocation(
                submission.allocation.job_id,
                submission.allocation.nodes[0],
                submission.run_dir,
                name=submission.comment,
                exports_environment="#SBATCH --export=NONE" not in submission.script,
            )
        return commands.sbatch(
            script_path, comment=submission.full_comment, work_dir=submission.spec.work_dir
        )

    def read_submit_answer(self, submission: Submission, answer: Completed | TransportError) -> str:
        """Return the job id from sbatch's answer; see `CommandScheduler.read_submit_answer`."""
        comment = submission.comment
        if isinstance(answer, (CommandNotFound, HostUnavailable)):
            raise answer
        if isinstance(answer, TransportError):
            return self._find_after_lost_answer(comment, [answer.message, *answer.evidence])
        if answer.ok:
            job_id = parse.parse_submitted_id(answer.stdout)
            if job_id is not None:
                return job_id
            printed_lines = [f"sbatch printed: {line}" for line in distinct_lines(answer.stdout)] or [
                "sbatch printed nothing"
            ]
            return self._find_after_lost_answer(comment, [*printed_lines, *distinct_lines(answer.stderr)])
        evidence = distinct_lines(answer.stderr)
        kind = classify_error(answer.stderr)
        if not evidence or kind is Trouble.LOST:
            return self._find_after_lost_answer(
                comment, evidence or [f"sbatch ended with code {answer.code} and no message"]
            )
        if kind in _NOTHING_QUEUED:
            raise failure(answer)
        if submission.allocation is not None:
            raise SubmitRejected(
                f"the run did not start in allocation {submission.allocation.job_id}", evidence=evidence
            )
        raise SubmitRejected("sbatch refused the job", evidence=evidence, hint=hint_for(answer.stderr))

    def _find_after_lost_answer(self, comment: str, evidence: Sequence[str]) -> str:
        """Return the id of the job for which sbatch's answer was lost.

        Raises:
            SubmitUnknown: the queue does not show the job, which does not prove that there is none.
        """
        try:
            job_id = self.find(comment)
            lookup_result = "the job is not in the queue now, but it may still appear"
        except DtslurmError as error:
            job_id, lookup_result = None, f"the search for the job failed: {error.message}"
        if job_id is not None:
            return job_id
        raise SubmitUnknown(
            "the answer of sbatch was lost, and it is not known whether Slurm created a job",
            evidence=[*evidence, lookup_result],
            hint="dtslurm status searches for the job; when it has found out, you can submit again",
        )

    def find(self, comment: str) -> str | None:
        """Find this user's job by the comment of its submission; see `Scheduler.find`."""
        # A site's plugin may add text to the comment.
        pattern = re.compile(rf"(?<![\w:-]){re.escape(comment)}(?![\w:-])")
        for list_jobs in (self._slurm.jobs, self._slurm.steps, self._slurm.all_accounted):
            matches = [job for job in list_jobs() if pattern.search(job.comment)]
            if matches and is_step_id(matches[0].job_id):
                return matches[0].job_id
            base_ids = sorted({int(base_id(job.job_id)) for job in matches})
            if base_ids:
                return str(base_ids[0])
        return None

    def query(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        """Return the status records of jobs; see `Scheduler.query`.

        This runs one squeue. It runs sacct (scontrol without accounting) only for what squeue does not
        report: jobs that have left the queue, and exit codes.
        """
        started_at = self._slurm.clock()
        self._live = self._list_jobs(with_steps=self._needs_steps(job_ids))
        self._queried_at, self._query_duration_s = started_at, self._slurm.clock() - started_at
        live = JobTable(self._live)
        self._update_ended_steps([job_id for job_id in job_ids if is_step_id(job_id)], live)
        self._update_ended({job_id: live.belonging(job_id) for job_id in job_ids})
        return self.recall(job_ids)

    def _needs_steps(self, job_ids: Sequence[str]) -> bool:
        """Return whether the steps of jobs must be listed too: for runs in allocations.

        Other processes read the answer, so steps are listed as long as a run in an allocation is.
        """
        has_runs = self._has_steps and any(
            is_step_id(job.job_id) and OUR_MARK in job.comment for job in self._live
        )
        return has_runs or any(is_step_id(job_id) for job_id in job_ids)

    def _list_jobs(self, *, with_steps: bool) -> list[JobStatus]:
        jobs = self._slurm.jobs()
        self._has_steps = with_steps
        if not with_steps:
            return jobs
        allocations = {job.job_id: job for job in jobs}
        # A step has no time limit of its own: it ends with its allocation.
        return jobs + [
            replace(step, time_left=job.time_left, partition=job.partition)
            if (job := allocations.get(step.raw_id)) is not None
            else step
            for step in self._slurm.steps()
        ]

    def _update_ended_steps(self, step_ids: Sequence[str], live: JobTable) -> None:
        """Query accounting for steps that squeue no longer lists."""
        known = {job.job_id for job in self._ended.values() if job.state.ended}
        due_ids = [
            step_id
            for step_id in step_ids
            if step_id not in known and not live.belonging(step_id) and self._is_accounting_query_due(step_id)
        ]
        if due_ids:
            self._record_accounting_queries(due_ids)
            ended_steps = [step for step in self._slurm.accounted_steps(due_ids) if step.state.ended]
            self._store_ended(ended_steps)

    def recall(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        """Return the status records of jobs from ``memory`` alone; see `SharedScheduler.recall`."""
        live = JobTable(self._live)
        ended_jobs = JobTable(sorted(self._ended.values(), key=lambda job: job.submit_time or 0))
        return {
            job_id: self._merge_statuses(job_id, live.belonging(job_id), ended_jobs.covering(job_id))
            for job_id in job_ids
        }

    def own_jobs(self) -> list[JobStatus]:
        """Return dtslurm's jobs in the last answer of `query`; see `QueueLister.own_jobs`."""
        return [job for job in self._live if OUR_MARK in job.comment and not is_step_id(job.job_id)]

    def read_allocation(self, job_id: str) -> HeldAllocation | None:
        """Return a job with its nodes and runs, in 2 requests; see `AllocationReader.read_allocation`."""
        from dtslurm.slurm import parse_scontrol

        uid = self._slurm.require().uid
        output = self._slurm.ask(commands.show_allocation(job_id), absent_ok=True)
        held = parse_scontrol.allocation(output, uid=uid, observed_at=self._slurm.clock())
        if held is None or held.job.state is not JobState.RUNNING:
            return held
        steps = [step for step in self._slurm.steps() if step.raw_id == held.job.job_id]
        config = parse_scontrol.config(self._query_cluster(commands.show_config()))
        return replace(
            held,
            runs=tuple(step.job_id for step in steps if OUR_MARK in step.comment),
            version=config.get("SLURM_VERSION", ""),
        )

    def read_job_record(self, job_id: str) -> JobStatus | None:
        """Return scontrol's record of a job, in 1 request; see `JobRecordReader.read_job_record`."""
        return next(iter(self._slurm.fetch_job_records([job_id])), None)

    def runs(self, job_id: str) -> list[JobStatus]:
        """Return all accounting records of a job; see `SharedScheduler.runs`."""
        return self._slurm.accounted([job_id]) if is_valid_job_id(job_id) else []

    def _update_ended(self, jobs_by_id: Mapping[str, list[JobStatus]]) -> None:
        """Query accounting for jobs that squeue no longer lists or that ended without a known exit code.

        One query covers all ended jobs of dtslurm, since other processes need their exit codes too.
        """
        self._drop_outdated()
        own_jobs = [job for job in self._live if OUR_MARK in job.comment]
        requested_jobs = [job for jobs in jobs_by_id.values() for job in jobs]
        lacking_end = [
            job for job in (*requested_jobs, *own_jobs) if job.state.ended and not self._find_end(job)
        ]
        ended_jobs = JobTable(self._ended.values())
        job_ids_by_key = {
            job_id: job_id
            for job_id, jobs in jobs_by_id.items()
            if is_valid_job_id(job_id) and _may_have_left(job_id, jobs, ended_jobs)
        }
        job_ids_by_key |= {f"{job.job_id} {job.submit_time}": base_id(job.job_id) for job in lacking_end}
        due_by_key = {
            key: job_id for key, job_id in job_ids_by_key.items() if self._is_accounting_query_due(key)
        }
        if not due_by_key:
            return
        self._record_accounting_queries(due_by_key)
        if self._slurm.accounting:
            self._store_ended(
                parse.keep_latest(self._slurm.accounted(list(dict.fromkeys(due_by_key.values()))))
            )
        lacking_exit_code = [base_id(job.job_id) for job in lacking_end if self._lacks_exit_code(job)]
        due_ids = set(due_by_key.values())
        lacking_exit_code = [job_id for job_id in dict.fromkeys(lacking_exit_code) if job_id in due_ids]
        if lacking_exit_code:
            self._store_ended(self._slurm.fetch_job_records(lacking_exit_code))

    def _drop_outdated(self) -> None:
        """Drop ended records that are a day old, or whose job is in the queue again.

        A job id returns to the queue after a requeue, or when Slurm reuses it.
        """
        live_ids = {
            base_id(job.job_id) for job in self._live if not job.state.ended and "_" not in job.job_id
        }
        oldest_time = self._slurm.clock() - _ENDED_MAX_AGE_S
        self._ended = {
            key: job
            for key, job in self._ended.items()
            if job.job_id not in live_ids and job.observed_at > oldest_time
        }
        self._accounting_queries = {
            key: (queried_at, count)
            for key, (queried_at, count) in self._accounting_queries.items()
            if key not in live_ids and queried_at > oldest_time
        }

    def _is_accounting_query_due(self, key: str) -> bool:
        """Return whether accounting may be queried for an ended job now.

        The first query is due at once; the pause before each further one doubles, from 60 s (1 s for a step)
        to at most 600 s.
        """
        queried_at, count = self._accounting_queries.get(key, (0.0, 0))
        first_pause = _FIRST_PAUSE_OF_STEP_S if is_step_id(key) else _FIRST_PAUSE_S
        pause = min(first_pause * 2.0 ** (count - 1), _LONGEST_PAUSE_S) if count else 0.0
        return not 0 <= self._slurm.clock() - queried_at < pause

    def _record_accounting_queries(self, keys: Iterable[str]) -> None:
        now = self._slurm.clock()
        for key in keys:
            self._accounting_queries[key] = now, self._accounting_queries.get(key, (0.0, 0))[1] + 1

    def _store_ended(self, jobs: Sequence[JobStatus]) -> None:
        # The newer answer replaces records of jobs that had not ended then, such as folded array tasks.
        answered_ids = {base_id(job.job_id) for job in jobs}
        outdated_keys = [
            key for key, job in self._ended.items() if not job.state.ended and base_id(key[0]) in answered_ids
        ]
        for key in outdated_keys:
            del self._ended[key]
        for job in jobs:
            # Accounting lags: it may still list a job as running that has already left the queue.
            state = job.state if job.state.ended else JobState.UNKNOWN
            self._ended[job.job_id, job.submit_time] = replace(job, state=state)

    def _lacks_exit_code(self, job: JobStatus) -> bool:
        return job.state.ended and job.exit_code is None and self._find_end(job) is None

    def _find_end(self, job: JobStatus) -> JobStatus | None:
        record = self._ended.get((job.job_id, job.submit_time))
        return record if record is not None and record.state.ended else None

    def _merge_statuses(
        self, job_id: str, listed_jobs: Sequence[JobStatus], ended_jobs: Sequence[JobStatus]
    ) -> list[JobStatus]:
        """Return the jobs in the queue, with exit codes from accounting, and jobs that left it."""
        current = []
        for job in listed_jobs:
            end = self._find_end(job) if job.state.ended else None
            current.append(
                job
                if end is None
                else replace(
                    job,
                    exit_code=end.exit_code,
                    signal=end.signal,
                    restarts=end.restarts,
                    preempted_at=end.preempted_at,
                    nodelist=end.nodelist or job.nodelist,
                    source=end.source,
                )
            )
        listed_ids = {job.job_id for job in listed_jobs}
        newest_by_id: dict[str, JobStatus] = {}
        for ended_job in ended_jobs:
            if ended_job.job_id not in listed_ids:
                newest_by_id[ended_job.job_id] = ended_job
        left_queue = list(newest_by_id.values())
        # The queue's record is newer than accounting's: add only array tasks that left the queue.
        if listed_jobs:
            left_queue = select_unlisted_tasks(
                [job for job in left_queue if "_" in job.job_id and job.state.ended], listed_jobs
            )
        return sort_tasks([*current, *left_queue], job_id)

    def nodes(self, partition: str | None) -> list[ListedNode]:
        """List the nodes of a partition, in 1 request; see `NodeLister.nodes`."""
        return parse.node_list(self._slurm.ask(commands.sinfo(partition)), partition)

    def cancel(self, job_ids: Sequence[str], inspect_jobs: Look | None = None) -> None:
        """Cancel the user's own jobs and ignore those that have already ended; see `Scheduler.cancel`."""
        if not job_ids:
            return
        jobs_by_id = self._query_live(job_ids)
        if inspect_jobs is not None:
            inspect_jobs(jobs_by_id)
        running_ids = [job_id for job_id, jobs in jobs_by_id.items() if any(not job.terminal for job in jobs)]
        if step_ids := [job_id for job_id in running_ids if is_step_id(job_id)]:
            self._slurm.change(commands.end_step(step_ids))
        if whole_jobs := [job_id for job_id in running_ids if not is_step_id(job_id)]:
            self._slurm.change(commands.scancel(whole_jobs))
        # scancel reports no error for ids it does not know, and exits with 0 (22.05).
        unknown_ids = [job_id for job_id, jobs in jobs_by_id.items() if not jobs]
        if unknown_ids:
            raise JobNotFound(
                f"Slurm lists no job {', '.join(unknown_ids)} of yours: it has ended, or never existed",
                evidence=[f"cancelled: {', '.join(running_ids)}"] if running_ids else (),
            )

    def requeue(self, job_ids: Sequence[str], inspect_jobs: Look | None = None) -> PartialResult | None:
        """Requeue jobs; see `Scheduler.requeue`."""
        answer = self._change(commands.requeue, job_ids, inspect_jobs, take_refusals=True)
        return None if answer is None or answer.ok else parse_partial_result(job_ids, answer)

    def signal(self, job_ids: Sequence[str], name: str) -> None:
        """Send a signal to the tasks of running jobs; see `Scheduler.signal`."""
        self._slurm.change(commands.signal(job_ids, name))

    def hold(self, job_ids: Sequence[str], inspect_jobs: Look | None = None) -> None:
        """Keep pending jobs from starting; see `Scheduler.hold`."""
        self._change(commands.hold, job_ids, inspect_jobs)

    def release(self, job_ids: Sequence[str], inspect_jobs: Look | None = None) -> None:
        """Let held jobs start; see `Scheduler.release`."""
        self._change(commands.release, job_ids, inspect_jobs)

    def _query_live(self, job_ids: Sequence[str]) -> dict[str, list[JobStatus]]:
        live = JobTable(self._list_jobs(with_steps=any(map(is_step_id, job_ids))))
        return {job_id: live.belonging(job_id) for job_id in job_ids}

    def _change(
        self,
        build: Callable[[Sequence[str]], list[str]],
        job_ids: Sequence[str],
        inspect_jobs: Look | None,
        *,
        take_refusals: bool = False,
    ) -> Completed | None:
        invalid_ids = [job_id for job_id in job_ids if not is_valid_job_id(job_id)]
        if invalid_ids:
            raise JobNotFound(f"not a job id: {', '.join(invalid_ids)}")
        if not job_ids:
            return None
        if inspect_jobs is not None:
            inspect_jobs(self._query_live(job_ids))
        return self._slurm.change(build(job_ids), take_refusals=take_refusals)


def _may_have_left(job_id: str, jobs: Sequence[JobStatus], ended_jobs: JobTable) -> bool:
    """Return whether the job, or some tasks of it, may have ended and left squeue's output."""
    if not jobs:
        return not any(job.terminal for job in ended_jobs.covering(job_id))
    # An array's tasks leave squeue one by one (MinJobAge), so accounting is queried for them repeatedly.
    return any("_" in job.job_id for job in jobs) and "_" not in job_id
