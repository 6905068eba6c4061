"""Slurm as a scheduler: submissions that happen once, and states that are evidence."""

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
from dtslurm.scheduler.base import SUBMIT_TIMEOUT_S, Look, PartialResult, Runner
from dtslurm.scheduler.job_table import JobTable, in_order, unlisted
from dtslurm.scheduler.partial_results import partly
from dtslurm.scheduler.site_answers import AnswerCache, SiteAnswers
from dtslurm.scheduler.slurm_client import SlurmClient, failure
from dtslurm.slurm import commands, parse
from dtslurm.slurm.arrays import base_id, valid
from dtslurm.slurm.parse_errors import Trouble, hint_for, trouble, words
from dtslurm.transport.base import Completed, Transport

if TYPE_CHECKING:
    from dtslurm.model.cluster import ClusterProfile
    from dtslurm.model.jobs.job import Submission
    from dtslurm.model.nodes import ListedNode

_LOOK_AGAIN_S, _LONGEST_LOOK_S = 60.0, 600.0  # accounting lags, and is shared by all
_KEPT_S = 86400.0

# Failures after which there is surely no job, and trying again may help.
_NOTHING_QUEUED = {Trouble.NOT_SENT, Trouble.AUTH, Trouble.SETUP, Trouble.BUSY}


class SlurmScheduler:
    """One user's jobs in one Slurm, reached over any transport."""

    def __init__(
        self,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.time,
        uid: Callable[[], int | None] | None = None,
        keeper: AnswerCache | None = None,
        place: str = "",
    ) -> None:
        """``uid`` tells the user's number where the commands run, if that is known without asking there.

        ``keeper`` and ``place`` share what the cluster tells of itself with other processes: `SiteAnswers`.
        """
        self._slurm = SlurmClient(transport, clock=clock, uid=uid)
        self._asked_at = self._took_s = 0.0
        self._live: list[JobStatus] = []
        self._ended: dict[tuple[str, int | None], JobStatus] = {}
        self._looked: dict[str, tuple[float, int]] = {}
        self._site = SiteAnswers(clock, keeper, place)
        self._completed: tuple[float, ClusterProfile, ClusterProfile] | None = None

    @property
    def requests(self) -> int:
        """How many requests were made to the controller."""
        return self._slurm.requests

    @property
    def memory(self) -> QueueMemory:
        """What was heard so far."""
        return QueueMemory(
            asked_at=self._asked_at,
            took_s=self._took_s,
            jobs=tuple(self._live),
            ended=tuple(self._ended.values()),
            looked=dict(self._looked),
            accounting=self._slurm.accounting,
            columns=self._slurm.columns,
        )

    @memory.setter
    def memory(self, heard: QueueMemory) -> None:
        self._asked_at, self._took_s, self._live = heard.asked_at, heard.took_s, list(heard.jobs)
        self._ended = {(job.job_id, job.submit_time): job for job in heard.ended}
        self._looked = dict(heard.looked)
        self._slurm.accounting, self._slurm.columns = heard.accounting, heard.columns

    def profile(self, profile: ClusterProfile) -> ClusterProfile:
        """Complete a profile that lacks partitions or node types; see `Scheduler.profile`."""
        if profile.slurm.partitions and profile.node_types:
            return profile
        if self._completed and self._completed[1] == profile and self._site.recent(self._completed[0]):
            return self._completed[2]
        from dtslurm.scheduler.slurm_profile import complete
        from dtslurm.slurm import parse_scontrol

        partitions = parse_scontrol.partitions(self._of_site(commands.show_partitions(), private_ok=True))
        nodes = parse_scontrol.nodes(self._of_site(commands.show_nodes(), private_ok=True))
        config = parse_scontrol.config(self._of_site(commands.show_config()))
        self._completed = self._slurm.clock(), profile, complete(profile, partitions, nodes, config)
        return self._completed[2]

    def _of_site(self, argv: Sequence[str], *, private_ok: bool = False) -> str:
        """Return what a command tells of the cluster itself; an answer of the last minute is as good."""
        told = self._site.get(argv)
        if told is None:
            asked_at, told = self._slurm.clock(), self._slurm.ask(argv, private_ok=private_ok)
            self._site.put(argv, asked_at, told)
        return told

    def validate(self, submission: Submission) -> list[str]:
        """Check against the partitions' limits: 1 request at most, 2 for arrays; see `Scheduler.validate`."""
        before = self.requests
        problems = self._problems(submission)
        if problems and self.requests == before:  # a site may have changed within the minute
            self._site.forget()
            problems = self._problems(submission)
        return problems

    def _problems(self, submission: Submission) -> list[str]:
        from dtslurm.scheduler.slurm_checks import check
        from dtslurm.slurm import parse_scontrol

        partitions = parse_scontrol.partitions(self._of_site(commands.show_partitions(), private_ok=True))
        config = {}
        if submission.spec.array:
            config = parse_scontrol.config(self._of_site(commands.show_config()))
        return [*check(submission, partitions, config), *self._mpi_problems(submission)]

    def _mpi_problems(self, submission: Submission) -> list[str]:
        """Return which ``--mpi`` of the script's steps this machine's srun does not have."""
        from dtslurm.slurm.script import mpi_types

        wanted = mpi_types(submission.script)
        offered = parse.mpi_types(self._of_site(commands.mpi_types())) if wanted else []
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
        argv = commands.sbatch(
            script_path, comment=submission.full_comment, work_dir=submission.spec.work_dir
        )
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
        begin = self._slurm.clock()
        self._live = self._slurm.jobs()
        self._asked_at, self._took_s = begin, self._slurm.clock() - begin
        live = JobTable(self._live)
        self._learn({job_id: live.belonging(job_id) for job_id in job_ids})
        return self.recall(job_ids)

    def recall(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        """Tell what is remembered of jobs; see `SharedScheduler.recall`."""
        live = JobTable(self._live)
        ended = JobTable(sorted(self._ended.values(), key=lambda one: one.submit_time or 0))
        return {
            job_id: self._told(job_id, live.belonging(job_id), ended.covering(job_id)) for job_id in job_ids
        }

    def own_jobs(self) -> list[JobStatus]:
        """Return the jobs of ours that `query` listed last; see `QueueLister.own_jobs`."""
        return [job for job in self._live if OUR_MARK in job.comment]

    def runs(self, job_id: str) -> list[JobStatus]:
        """Return every run of a job; see `SharedScheduler.runs`."""
        return self._slurm.accounted([job_id]) if valid(job_id) else []

    def _learn(self, listed: Mapping[str, list[JobStatus]]) -> None:
        """Ask for the ends of jobs that squeue tells nothing, or no exit code, of.

        All runs of ours that ended are asked for at once, for other processes want to know of them too.
        """
        self._forget_revived()
        ours = [job for job in self._live if OUR_MARK in job.comment]
        asked = [job for jobs in listed.values() for job in jobs]
        without_end = [job for job in (*asked, *ours) if job.state.ended and not self._end(job)]
        ended = JobTable(self._ended.values())
        wanted = {
            job_id: job_id
            for job_id, jobs in listed.items()
            if valid(job_id) and _may_have_left(job_id, jobs, ended)
        }
        wanted |= {f"{job.job_id} {job.submit_time}": base_id(job.job_id) for job in without_end}
        due = {key: job_id for key, job_id in wanted.items() if self._may_look(key)}
        if not due:
            return
        self._note_looks(due)
        if self._slurm.accounting:
            self._remember(parse.latest(self._slurm.accounted(list(dict.fromkeys(due.values())))))
        still = [base_id(job.job_id) for job in without_end if self._lacks_end(job)]
        asked_for = set(due.values())
        still = [job_id for job_id in dict.fromkeys(still) if job_id in asked_for]
        if still:
            self._remember(self._slurm.shown(still))

    def _forget_revived(self) -> None:
        """Drop what is remembered of jobs that have not ended (any more), and what is a day old."""
        alive = {base_id(job.job_id) for job in self._live if not job.state.ended and "_" not in job.job_id}
        oldest = self._slurm.clock() - _KEPT_S
        self._ended = {
            key: job
            for key, job in self._ended.items()
            if job.job_id not in alive and job.observed_at > oldest
        }
        self._looked = {
            key: (at, times) for key, (at, times) in self._looked.items() if key not in alive and at > oldest
        }

    def _may_look(self, key: str) -> bool:
        """Whether it is time to ask accounting for an end: at once, then less and less often."""
        at, times = self._looked.get(key, (0.0, 0))
        pause = min(_LOOK_AGAIN_S * 2.0 ** (times - 1), _LONGEST_LOOK_S) if times else 0.0
        return not 0 <= self._slurm.clock() - at < pause

    def _note_looks(self, keys: Iterable[str]) -> None:
        now = self._slurm.clock()
        for key in keys:
            self._looked[key] = now, self._looked.get(key, (0.0, 0))[1] + 1

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

    def _told(
        self, job_id: str, listed: Sequence[JobStatus], remembered: Sequence[JobStatus]
    ) -> list[JobStatus]:
        """Return the jobs of the queue, with their ends, and those remembered that it lists no more."""
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
        for known in remembered:
            if known.job_id not in present:
                newest[known.job_id] = known
        gone = list(newest.values())
        if listed:  # a job in the queue is told by the queue; only tasks of its own that left are added
            gone = unlisted([job for job in gone if "_" in job.job_id and job.state.ended], listed)
        return in_order([*told, *gone], job_id)

    def nodes(self, partition: str | None) -> list[ListedNode]:
        """List a partition's nodes: 1 request; see `NodeLister.nodes`."""
        return parse.node_list(self._slurm.ask(commands.sinfo(partition)), partition)

    def cancel(self, job_ids: Sequence[str], look: Look | None = None) -> None:
        """End jobs that are the user's own; one that is over is left alone; see `Scheduler.cancel`."""
        if not job_ids:
            return
        listed = self._listed(job_ids)
        if look is not None:
            look(listed)
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

    def requeue(self, job_ids: Sequence[str], look: Look | None = None) -> PartialResult | None:
        """Put jobs back into the queue; see `Scheduler.requeue`."""
        answer = self._change(commands.requeue, job_ids, look, take_refusals=True)
        return None if answer is None or answer.ok else partly(job_ids, answer)

    def signal(self, job_ids: Sequence[str], name: str) -> None:
        """Send a signal to the tasks of running jobs; see `Scheduler.signal`."""
        self._slurm.change(commands.signal(job_ids, name))

    def hold(self, job_ids: Sequence[str], look: Look | None = None) -> None:
        """Keep pending jobs from starting; see `Scheduler.hold`."""
        self._change(commands.hold, job_ids, look)

    def release(self, job_ids: Sequence[str], look: Look | None = None) -> None:
        """Let held jobs start; see `Scheduler.release`."""
        self._change(commands.release, job_ids, look)

    def _listed(self, job_ids: Sequence[str]) -> dict[str, list[JobStatus]]:
        live = JobTable(self._slurm.jobs())
        return {job_id: live.belonging(job_id) for job_id in job_ids}

    def _change(
        self,
        build: Callable[[Sequence[str]], list[str]],
        job_ids: Sequence[str],
        look: Look | None,
        *,
        take_refusals: bool = False,
    ) -> Completed | None:
        wrong = [job_id for job_id in job_ids if not valid(job_id)]
        if wrong:
            raise JobNotFound(f"not a job id: {', '.join(wrong)}")
        if not job_ids:
            return None
        if look is not None:
            look(self._listed(job_ids))
        return self._slurm.change(build(job_ids), take_refusals=take_refusals)


def _may_have_left(job_id: str, jobs: Sequence[JobStatus], ended: JobTable) -> bool:
    """Whether squeue may no longer list the job, or some tasks of it, that ended."""
    if not jobs:
        return not any(known.terminal for known in ended.covering(job_id))
    # An array's tasks leave squeue one by one (MinJobAge); what came out is looked for now and then.
    return any("_" in job.job_id for job in jobs) and "_" not in job_id
