"""Slurm as a scheduler: submissions that happen once, and states that are evidence."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dtslurm.errors import (
    CommandNotFound,
    DtslurmError,
    HostUnavailable,
    JobNotFound,
    SubmitRejected,
    SubmitUnknown,
    TransportError,
)
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.job import Submission
from dtslurm.model.state import JobState, JobStatus
from dtslurm.scheduler.base import Runner
from dtslurm.scheduler.slurm_checks import check
from dtslurm.scheduler.slurm_client import SlurmClient, failure
from dtslurm.scheduler.slurm_profile import complete
from dtslurm.slurm import commands, parse, parse_scontrol
from dtslurm.slurm.arrays import base_id, stands_for, valid
from dtslurm.slurm.parse_errors import Trouble, hint_for, trouble, words
from dtslurm.slurm.script import mpi_types
from dtslurm.transport.base import Completed, Transport

# sbatch itself retries for up to 120 s when the queue is full (22.05, sbatch.c).
SUBMIT_TIMEOUT_S = 150.0
_ARRAY_LOOK_S = 60.0

# Failures after which there is surely no job, and trying again may help.
_NOTHING_QUEUED = {Trouble.NOT_SENT, Trouble.AUTH, Trouble.SETUP, Trouble.BUSY}


class SlurmScheduler:
    """One user's jobs in one Slurm, reached over any transport."""

    def __init__(
        self,
        transport: Transport,
        *,
        min_poll_s: float = 0.0,
        clock: Callable[[], float] = time.time,
        uid: Callable[[], int | None] | None = None,
    ) -> None:
        """With ``min_poll_s``, a list of jobs younger than that many seconds is not asked for again.

        ``uid`` tells the user's number where the commands run, if that is known without asking there.
        """
        self._slurm = SlurmClient(transport, min_poll_s=min_poll_s, clock=clock, uid=uid)
        self._ended: dict[tuple[str, int | None], JobStatus] = {}
        self._looked: dict[str, float] = {}

    def profile(self, profile: ClusterProfile) -> ClusterProfile:
        """Complete a profile that lacks partitions or node types; see `Scheduler.profile`."""
        if profile.slurm.partitions and profile.node_types:
            return profile
        partitions = parse_scontrol.partitions(self._slurm.ask(commands.show_partitions()))
        nodes = parse_scontrol.nodes(self._slurm.ask(commands.show_nodes()))
        config = parse_scontrol.config(self._slurm.ask(commands.show_config()))
        return complete(profile, partitions, nodes, config)

    def validate(self, submission: Submission) -> list[str]:
        """Check against the partitions' limits: 1 request, 2 for arrays; see `Scheduler.validate`."""
        partitions = parse_scontrol.partitions(self._slurm.ask(commands.show_partitions()))
        config = {}
        if submission.spec.array:
            config = parse_scontrol.config(self._slurm.ask(commands.show_config()))
        return [*check(submission, partitions, config), *self._mpi_problems(submission)]

    def _mpi_problems(self, submission: Submission) -> list[str]:
        """Return which ``--mpi`` of the script's steps this machine's srun does not have."""
        wanted = mpi_types(submission.script)
        offered = parse.mpi_types(self._slurm.ask(commands.mpi_types())) if wanted else []
        return [
            f"srun --mpi={name}: this Slurm offers {', '.join(offered)} (srun --mpi=list); "
            "choose one of them by --launcher-option mpi=, or in the profile by slurm.mpi"
            for name in sorted(wanted.difference(offered))
            if offered
        ]

    def notices(self, submission: Submission) -> list[str]:
        """Return nothing: Slurm runs what is asked for; see `Scheduler.notices`."""
        del submission
        return []

    def submit(self, submission: Submission, script_path: str, run: Runner | None = None) -> str:
        """Queue a script once; see `Scheduler.submit`."""
        if run is None:
            self._slurm.require()
        self._slurm.forget()
        argv = commands.sbatch(script_path, comment=submission.comment, work_dir=submission.spec.work_dir)
        try:
            answer = (run or self._run)(argv, SUBMIT_TIMEOUT_S)
        except (CommandNotFound, HostUnavailable):
            raise
        except TransportError as error:
            return self._look_up(submission.comment, [error.message, *error.evidence])
        return self._submitted(submission.comment, answer)

    def _run(self, argv: Sequence[str], timeout: float) -> Completed:
        return self._slurm.transport.run(argv, timeout=timeout)

    def _submitted(self, comment: str, answer: Completed) -> str:
        if answer.ok:
            job_id = parse.submitted_id(answer.stdout)
            if job_id is not None:
                return job_id
            shown = [f"sbatch printed: {line}" for line in words(answer.stdout)] or ["sbatch printed nothing"]
            return self._look_up(comment, [*shown, *words(answer.stderr)])
        evidence = words(answer.stderr)
        kind = trouble(answer.stderr)
        if not evidence or kind is Trouble.LOST:
            return self._look_up(
                comment, evidence or [f"sbatch ended with code {answer.code} and no message"]
            )
        if kind in _NOTHING_QUEUED:
            raise failure(answer)
        raise SubmitRejected("sbatch refused the job", evidence=evidence, hint=hint_for(answer.stderr))

    def _look_up(self, comment: str, evidence: Sequence[str]) -> str:
        """Find the job whose answer was lost; that it is not there yet proves nothing."""
        try:
            found = self.find(comment)
            looked = "it is not in the queue now, but may still appear there"
        except DtslurmError as error:
            found, looked = None, f"looking it up failed: {error.message}"
        if found is not None:
            return found
        raise SubmitUnknown(
            "sbatch's answer was lost: there may be a job, or not",
            evidence=[*evidence, looked],
            hint="dtslurm status finds out; once it has, submitting again is safe",
        )

    def find(self, comment: str) -> str | None:
        """Find this user's job by its submission's comment; see `Scheduler.find`."""
        self._slurm.forget()
        mark = re.compile(rf"(?<![\w:-]){re.escape(comment)}(?![\w:-])")  # sites may add words of their own
        for jobs in (self._slurm.jobs, self._slurm.all_accounted):
            found = sorted({int(base_id(job.job_id)) for job in jobs() if mark.search(job.comment)})
            if found:
                return str(found[0])
        return None

    def query(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        """Tell what is known of jobs; see `Scheduler.query`.

        One squeue call; sacct (scontrol without accounting) only for what squeue no longer tells: jobs
        that left it, and exit codes.
        """
        wanted = list(dict.fromkeys(job_ids))
        if not wanted:
            return {}
        live = self._slurm.jobs()
        listed = {job_id: _belonging(live, job_id) for job_id in wanted}
        self._learn(listed)
        return {job_id: self._told(job_id, jobs) for job_id, jobs in listed.items()}

    def _learn(self, listed: Mapping[str, list[JobStatus]]) -> None:
        """Ask for the ends of jobs that squeue tells nothing, or no exit code, of."""
        without_end = [
            job for jobs in listed.values() for job in jobs if job.state.ended and not self._end(job)
        ]
        gone = [
            job_id for job_id, jobs in listed.items() if valid(job_id) and self._may_have_left(job_id, jobs)
        ]
        ids = list(dict.fromkeys([*gone, *(base_id(job.job_id) for job in without_end)]))
        if not ids:
            return
        if self._slurm.accounting:
            self._remember(parse.latest(self._slurm.accounted(ids)))
        still = list(dict.fromkeys(base_id(job.job_id) for job in without_end if self._lacks_end(job)))
        if still:
            self._remember(self._slurm.shown(still))

    def _may_have_left(self, job_id: str, jobs: Sequence[JobStatus]) -> bool:
        """Whether squeue may no longer list the job, or some tasks of it, that ended."""
        if not jobs:
            return not any(
                stands_for(known.job_id, job_id) for known in self._ended.values() if known.terminal
            )
        if not any("_" in job.job_id for job in jobs) or "_" in job_id:
            return False
        # An array's tasks leave squeue one by one (MinJobAge); what came out is looked for now and then.
        now = self._slurm.clock()
        if now - self._looked.get(job_id, 0.0) < _ARRAY_LOOK_S:
            return False
        self._looked[job_id] = now
        return True

    def _remember(self, jobs: Sequence[JobStatus]) -> None:
        # What had not ended when it was learned (an array's folded tasks) is replaced by the newer answer.
        told = {base_id(job.job_id) for job in jobs}
        old = [key for key, job in self._ended.items() if not job.state.ended and base_id(key[0]) in told]
        for key in old:
            del self._ended[key]
        for job in jobs:
            # Accounting lags: that it has a job running is no news of a job that left the queue.
            state = job.state if job.state.ended else JobState.UNKNOWN
            self._ended[job.job_id, job.submit_time] = replace(job, state=state)

    def _lacks_end(self, job: JobStatus) -> bool:
        return job.state.ended and job.exit_code is None and self._end(job) is None

    def _end(self, job: JobStatus) -> JobStatus | None:
        known = self._ended.get((job.job_id, job.submit_time))
        return known if known is not None and known.state.ended else None

    def _told(self, job_id: str, listed: Sequence[JobStatus]) -> list[JobStatus]:
        told = []
        for job in listed:
            end = self._end(job) if job.state.ended else None
            told.append(
                job
                if end is None
                else replace(
                    job,
                    exit_code=end.exit_code,
                    signal=end.signal,
                    restarts=end.restarts,
                    nodelist=end.nodelist or job.nodelist,
                    source=end.source,
                )
            )
        present = {job.job_id for job in listed}
        newest: dict[str, JobStatus] = {}
        for known in sorted(self._ended.values(), key=lambda one: one.submit_time or 0):
            if stands_for(known.job_id, job_id) and known.job_id not in present:
                newest[known.job_id] = known
        gone = list(newest.values())
        if listed:  # a job in the queue is told by the queue; only tasks of its own that left are added
            gone = [job for job in gone if "_" in job.job_id and job.state.ended]
            gone = [job for job in gone if not any(stands_for(one.job_id, job.job_id) for one in listed)]
        return _in_order([*told, *gone], job_id)

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End jobs that are the user's own; one that is over is left alone; see `Scheduler.cancel`."""
        if not job_ids:
            return
        self._slurm.forget()
        live = self._slurm.jobs()
        listed = {job_id: _belonging(live, job_id) for job_id in job_ids}
        running = [job_id for job_id, jobs in listed.items() if any(not job.terminal for job in jobs)]
        if running:
            self._slurm.change(commands.scancel(running))
        # scancel says nothing about ids it does not know, and exits with 0 (22.05).
        unknown = [job_id for job_id, jobs in listed.items() if not jobs]
        if unknown:
            raise JobNotFound(
                f"Slurm lists no job {', '.join(unknown)} of yours: it is over, or never was",
                evidence=[f"cancelled: {', '.join(running)}"] if running else (),
            )

    def requeue(self, job_ids: Sequence[str]) -> None:
        """Put jobs back into the queue; see `Scheduler.requeue`."""
        self._change(commands.requeue, job_ids)

    def hold(self, job_ids: Sequence[str]) -> None:
        """Keep pending jobs from starting; see `Scheduler.hold`."""
        self._change(commands.hold, job_ids)

    def release(self, job_ids: Sequence[str]) -> None:
        """Let held jobs start; see `Scheduler.release`."""
        self._change(commands.release, job_ids)

    def _change(self, build: Callable[[Sequence[str]], list[str]], job_ids: Sequence[str]) -> None:
        wrong = [job_id for job_id in job_ids if not valid(job_id)]
        if wrong:
            raise JobNotFound(f"not a job id: {', '.join(wrong)}")
        if job_ids:
            self._slurm.change(build(job_ids))


def _belonging(jobs: Sequence[JobStatus], job_id: str) -> list[JobStatus]:
    return _in_order([job for job in jobs if stands_for(job.job_id, job_id)], job_id)


def _in_order(jobs: Sequence[JobStatus], asked: str) -> list[JobStatus]:
    """Sort tasks by number; a folded task that was asked for by itself gets its own id."""
    ordered = sorted(jobs, key=lambda job: [int(number) for number in re.findall(r"\d+", job.job_id)][:2])
    if asked != base_id(asked):
        return [replace(job, job_id=asked) if "_[" in job.job_id else job for job in ordered]
    return ordered
