"""The embedded scheduler: the cluster ``local`` runs the same batch scripts on this machine.

There is no daemon. A process that submits, queries or cancels jobs takes the lock of the state folder and
starts the jobs that can run. Each running job has one detached keeper process, which does the same when the
job ends. The code that jobs need is in ``dtslurm/worker/localslurm/``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtslurm.errors import JobNotFound, SlurmError, SlurmUnavailable, SubmitRejected
from dtslurm.model.cluster import ClusterProfile, Gpus, NodeType
from dtslurm.model.jobs.job import Submission
from dtslurm.model.runs.record import OUR_MARK
from dtslurm.model.runs.state import JobState, JobStatus, StateFlag
from dtslurm.model.units import Memory
from dtslurm.scheduler.base import Look
from dtslurm.worker.localslurm import environment, hostlist, queue
from dtslurm.worker.localslurm import machine as local_machine
from dtslurm.worker.localslurm import request as local_request
from dtslurm.worker.localslurm.options import Refused
from dtslurm.worker.localslurm.state import State, read_file
from dtslurm.worker.localslurm.values import job_id

NODE_TYPE = "this-machine"
KILL_WAIT = 30.0
REQUEUE_DELAY = 1.0
ELSEWHERE = "this job runs on host {}; its state is known only on that host"

Record = dict[str, Any]


def default_state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the state folder: ``$DTSLURM_LOCAL_STATE``, or else a folder in ``$XDG_STATE_HOME``."""
    environ = os.environ if environ is None else environ
    if environ.get("DTSLURM_LOCAL_STATE"):
        return Path(environ["DTSLURM_LOCAL_STATE"])
    home = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "dtslurm" / "local"


class LocalScheduler:
    """This user's job queue on this machine. The constructor creates no files.

    Args:
        state_dir: the folder of the job records; ``default_state_dir()`` if None.
        kill_wait: seconds from SIGTERM to SIGKILL when a job is ended; if None, ``$DTSLURM_LOCAL_KILL_WAIT``,
            or else 30.
        requeue_delay: seconds before a requeued job may start again.
        machine: the ``cpus``, ``memory_mib`` and ``gpus`` (names) of this machine; detected if None.
    """

    def __init__(
        self,
        state_dir: Path | None = None,
        kill_wait: float | None = None,
        requeue_delay: float = REQUEUE_DELAY,
        machine: Mapping[str, Any] | None = None,
    ) -> None:
        self._state_dir = state_dir
        self._kill_wait = kill_wait
        self._requeue_delay = requeue_delay
        self._given_machine = None if machine is None else dict(machine)

    # ---- Resources ----

    @property
    def state_dir(self) -> Path:
        """The folder of the job records."""
        return self._state_dir if self._state_dir is not None else default_state_dir()

    @property
    def _state(self) -> State:
        return State(str(self.state_dir))

    def _get_machine(self) -> Record:
        return dict(self._given_machine) if self._given_machine is not None else local_machine.detect()

    @property
    def _effective_kill_wait(self) -> float:
        if self._kill_wait is not None:
            return self._kill_wait
        try:
            return float(os.environ.get("DTSLURM_LOCAL_KILL_WAIT", KILL_WAIT))
        except ValueError:
            return KILL_WAIT

    def profile(self, profile: ClusterProfile) -> ClusterProfile:
        """Return ``profile`` with this machine as its only node type and localhost as the head address."""
        machine = self._get_machine()
        memory = machine["memory_mib"]
        gpus = None
        if machine["gpus"]:
            gpu_model = local_machine.gpu_model()
            gpu_memory = gpu_model.get("memory_mib")
            gpus = Gpus(
                model=gpu_model.get("name", "NVIDIA GPU"),
                count=len(machine["gpus"]),
                memory=None if gpu_memory is None else Memory(gpu_memory),
            )
        own_type = profile.node_type(None)
        node_type = NodeType(
            rank_cpus=own_type.rank_cpus if own_type else (),
            gpus=gpus,
            cpus=machine["cpus"],
            memory=None if memory is None else Memory(memory),
        )
        settings = replace(
            profile.slurm,
            head_address=profile.slurm.head_address or "127.0.0.1",
            max_nodes=min(profile.slurm.max_nodes or local_request.MAX_NODES, local_request.MAX_NODES),
        )
        return replace(
            profile, slurm=settings, node_types={NODE_TYPE: node_type}, default_node_type=NODE_TYPE
        )

    # ---- Submission ----

    def validate(self, submission: Submission) -> list[str]:
        """Return all reasons why this machine cannot run the submission."""
        machine = self._get_machine()
        try:
            request = local_request.read_request(submission.script, machine)
        except Refused as error:
            return list(error.problems)
        problems = local_request.find_excess_requests(request, machine)
        return problems + queue.find_unknown_dependencies(self._state, request["dependency"])

    def notices(self, submission: Submission) -> list[str]:
        """Return notes, one line each, on how this machine's queue differs from a cluster."""
        machine = self._get_machine()
        try:
            return local_request.notices(local_request.read_request(submission.script, machine), machine)
        except Refused:
            return []

    def submit(self, submission: Submission, script_path: str) -> str:
        """Queue the script and return the job id; the job starts at once if resources are free.

        Raises:
            SubmitRejected: this machine cannot run the job; there is no job.
            SlurmUnavailable: the state folder cannot be used; there is no job.
        """
        machine = self._get_machine()
        try:
            script = read_file(script_path)
        except OSError as error:
            raise SubmitRejected(
                f"cannot read the batch script {script_path}", evidence=[str(error)]
            ) from error
        try:
            request = local_request.read_request(script, machine)
            problems = local_request.find_excess_requests(request, machine)
            if problems:
                raise Refused(problems)  # noqa: TRY301
            request["comment"] = submission.comment
            request["name"] = request["name"] or Path(script_path).name
            common = self._build_base_record(submission.spec.work_dir, request, machine)
            with self._locked_state() as state:
                job = queue.add(state, request, script, common)
        except Refused as error:
            raise SubmitRejected("the embedded scheduler refused the job", evidence=error.problems) from error
        with suppress(SlurmUnavailable):  # the job is queued: the next process that uses the queue starts it
            self._start_ready_jobs()
        return str(job)

    def _build_base_record(self, folder: str, request: Record, machine: Record) -> Record:
        """Return the part of a job's record that does not come from its script."""
        chdir = request["chdir"]
        folder = folder if Path(folder).is_dir() else str(Path.cwd())
        return {
            "schema": 1,
            "host": local_machine.host(),
            "machine": machine,
            "login": environment.login_environment(os.environ),
            "exported": environment.exported(request["export"], os.environ),
            "submit_dir": folder,
            "submit_host": local_machine.host(),
            "chdir": None if chdir is None else str(Path(folder) / chdir),
            "kill_wait": self._effective_kill_wait,
            "requeue_delay": self._requeue_delay,
        }

    def find(self, comment: str) -> str | None:
        """Return the id of the job that has the submission's comment, or None."""
        state = self._state
        for job in reversed(state.all_ids()):
            record = state.load(job)
            if record is not None and record["comment"] == comment:
                return str(record["id"] if record["array_id"] is None else record["array_id"])
        return None

    # ---- Queries ----

    def query(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        """Return the status records of each job; an unknown id maps to an empty list.

        Raises:
            SlurmUnavailable: the state folder cannot be used.
        """
        self._start_ready_jobs()
        now = time.time()
        return {job: [self._to_status(record, now) for record in self._find_records(job)] for job in job_ids}

    def own_jobs(self) -> list[JobStatus]:
        """Return dtslurm's jobs that have not ended; see `QueueLister.own_jobs`."""
        now = time.time()
        return [
            self._to_status(record, now) for record in self._state.active() if OUR_MARK in record["comment"]
        ]

    def _find_records(self, text: str) -> list[Record]:
        try:
            job, task = job_id(text)
        except ValueError:
            return []
        state = self._state
        records = queue.find_records(state, job, task)
        if not records and task is None:
            record = state.load(job)
            records = [record] if record else []
        return records

    def _to_status(self, record: Record, now: float) -> JobStatus:
        is_running = record["state"] == "RUNNING"
        state = JobState(record["state"])
        reason = "" if record["reason"] == "None" else str(record["reason"])
        if is_running and record["host"] != local_machine.host():
            state, reason = JobState.UNKNOWN, ELSEWHERE.format(record["host"])
        start, limit = _to_whole_seconds(record.get("start_time")), record["time_limit"]
        has_started = start is not None
        return JobStatus(
            job_id=queue.shown_id(record),
            raw_id=str(record["id"]),
            state=state,
            raw_state=str(record["state"]),
            flags=frozenset({StateFlag.COMPLETING}) if record.get("completing") else frozenset(),
            reason=reason,
            name=record["name"],
            partition=record["partition"],
            nodelist=hostlist.fold(list(range(1, record["nodes"] + 1))) if has_started else "",
            nodes=record["nodes"],
            exit_code=record.get("exit_code") if state.ended else None,
            signal=record.get("signal_number") if state.ended else None,
            submit_time=_to_whole_seconds(record["submit_time"]),
            start_time=start,
            end_time=_to_whole_seconds(record.get("end_time")),
            time_left=max(0, int(start + limit - now)) if is_running and start and limit else None,
            time_limit=int(limit) if is_running and limit else None,
            restarts=record["restarts"],
            comment=record["comment"],
            source="local",
            observed_at=now,
        )

    # ---- Changes ----

    def cancel(self, job_ids: Sequence[str], inspect_jobs: Look | None = None) -> None:
        """End jobs: SIGTERM, then SIGKILL after ``kill_wait``. Jobs that have ended are not changed.

        Raises:
            JobNotFound: a job does not exist; the other jobs were ended.
        """
        self._apply_to_each(job_ids, queue.cancel, inspect_jobs)

    def requeue(self, job_ids: Sequence[str], inspect_jobs: Look | None = None) -> None:
        """Requeue running or ended jobs under the same job id.

        Raises:
            SlurmError: a job is already pending, forbids requeuing, or does not exist.
        """
        requeueable_states = ("RUNNING", *queue.ENDED)
        self._apply_to_each(job_ids, queue.requeue, inspect_jobs, of_array=requeueable_states)

    def signal(self, job_ids: Sequence[str], name: str) -> None:
        """Send a signal to the tasks of running jobs; see `Scheduler.signal`."""
        self._apply_to_each(job_ids, lambda state, record: queue.signal_steps(state, record, name), None)

    def hold(self, job_ids: Sequence[str], inspect_jobs: Look | None = None) -> None:
        """Keep pending jobs from starting.

        Raises:
            SlurmError: a job is no longer pending or does not exist.
        """
        self._apply_to_each(job_ids, queue.hold, inspect_jobs, of_array=("PENDING",))

    def release(self, job_ids: Sequence[str], inspect_jobs: Look | None = None) -> None:
        """Let held jobs start again.

        Raises:
            SlurmError: a job is no longer pending or does not exist.
        """
        self._apply_to_each(job_ids, queue.release, inspect_jobs, of_array=("PENDING",))

    def _apply_to_each(
        self,
        job_ids: Sequence[str],
        action: Callable[[State, Record], None],
        inspect_jobs: Look | None,
        of_array: Sequence[str] = (),
    ) -> None:
        """Apply an action to each job.

        Of a whole array, change only the tasks whose state is in ``of_array``, or all tasks if no task is in
        such a state.
        """
        missing_ids, refusals = [], []
        if inspect_jobs is not None:
            inspect_jobs(self.query(job_ids))
        with self._locked_state() as state:
            for job in job_ids:
                records = self._find_records(job)
                if not records:
                    missing_ids.append(job)
                if len(records) > 1:
                    records = [record for record in records if record["state"] in of_array] or records
                for record in records:
                    try:
                        action(state, record)
                    except Refused as error:
                        refusals += error.problems
        self._start_ready_jobs()
        if missing_ids:
            raise JobNotFound(
                f"the embedded scheduler has no job {', '.join(missing_ids)}", evidence=refusals
            )
        if refusals:
            raise SlurmError("the embedded scheduler refused", evidence=refusals)

    def _start_ready_jobs(self) -> None:
        """Start the pending jobs that can run now."""
        with self._locked_state() as state:
            queue.schedule(state)

    @contextmanager
    def _locked_state(self) -> Iterator[State]:
        state = self._state
        try:
            with state.locked():
                yield state
        except OSError as error:
            raise SlurmUnavailable(
                f"the embedded scheduler's state folder {state.root} cannot be used",
                evidence=[str(error)],
                hint="set DTSLURM_LOCAL_STATE to a folder on a local disk that you can write to",
            ) from error


def _to_whole_seconds(time: float | None) -> int | None:
    return None if time is None else int(time)
