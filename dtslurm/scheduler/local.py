"""The embedded scheduler: cluster ``local`` runs the same batch scripts on this machine.

There is no daemon. Whoever submits, asks or cancels takes the state folder's lock and decides who may
start; each running job has one detached keeper process that does the same when the job ends. The parts
that jobs need live in ``dtslurm/worker/local_*.py``.
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
from dtslurm.scheduler.base import Look, Runner
from dtslurm.worker.localslurm import environment, hostlist, queue
from dtslurm.worker.localslurm import machine as local_machine
from dtslurm.worker.localslurm import request as local_request
from dtslurm.worker.localslurm.options import Refused
from dtslurm.worker.localslurm.state import State, read_file
from dtslurm.worker.localslurm.values import job_id

NODE_TYPE = "this-machine"
KILL_WAIT = 30.0
REQUEUE_DELAY = 1.0
ELSEWHERE = "this job runs on host {}; only there can its state be told"

Record = dict[str, Any]


def default_state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the state folder: ``$DTSLURM_LOCAL_STATE``, else below ``$XDG_STATE_HOME``."""
    environ = os.environ if environ is None else environ
    if environ.get("DTSLURM_LOCAL_STATE"):
        return Path(environ["DTSLURM_LOCAL_STATE"])
    home = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "dtslurm" / "local"


class LocalScheduler:
    """The queue of this machine for this user. Making one touches nothing.

    Args:
        state_dir: where jobs are remembered; ``default_state_dir()`` if None.
        kill_wait: seconds between asking a job's processes to end (SIGTERM) and killing them;
            ``$DTSLURM_LOCAL_KILL_WAIT``, else 30, if None.
        requeue_delay: seconds a requeued job waits before it may start again.
        machine: what to count as this machine's ``cpus``, ``memory_mib`` and ``gpus`` (names); detected
            if None.
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

    # ---- what there is ----

    @property
    def state_dir(self) -> Path:
        """The folder in which jobs are remembered."""
        return self._state_dir if self._state_dir is not None else default_state_dir()

    @property
    def _state(self) -> State:
        return State(str(self.state_dir))

    def _machine(self) -> Record:
        return dict(self._given_machine) if self._given_machine is not None else local_machine.detect()

    @property
    def _patience(self) -> float:
        if self._kill_wait is not None:
            return self._kill_wait
        try:
            return float(os.environ.get("DTSLURM_LOCAL_KILL_WAIT", KILL_WAIT))
        except ValueError:
            return KILL_WAIT

    def profile(self, profile: ClusterProfile) -> ClusterProfile:
        """Return ``profile`` with this machine as its one node type, and nodes that meet on localhost."""
        machine = self._machine()
        memory = machine["memory_mib"]
        gpus = None
        if machine["gpus"]:
            model = local_machine.gpu_model()
            size = model.get("memory_mib")
            gpus = Gpus(
                model=model.get("name", "NVIDIA GPU"),
                count=len(machine["gpus"]),
                memory=None if size is None else Memory(size),
            )
        described = profile.node_type(None)
        node_type = NodeType(
            rank_cpus=described.rank_cpus if described else (),
            gpus=gpus,
            cpus=machine["cpus"],
            memory=None if memory is None else Memory(memory),
        )
        customs = replace(
            profile.slurm,
            head_address=profile.slurm.head_address or "127.0.0.1",
            max_nodes=min(profile.slurm.max_nodes or local_request.MAX_NODES, local_request.MAX_NODES),
        )
        return replace(profile, slurm=customs, node_types={NODE_TYPE: node_type}, default_node_type=NODE_TYPE)

    # ---- submitting ----

    def validate(self, submission: Submission) -> list[str]:
        """Return every reason why this machine cannot take the submission."""
        machine = self._machine()
        try:
            request = local_request.read_request(submission.script, machine)
        except Refused as error:
            return list(error.problems)
        problems = local_request.misfits(request, machine)
        return problems + queue.unknown_dependencies(self._state, request["dependency"])

    def notices(self, submission: Submission) -> list[str]:
        """Return what the user should know of how this machine stands in for a cluster, a line each."""
        machine = self._machine()
        try:
            return local_request.notices(local_request.read_request(submission.script, machine), machine)
        except Refused:
            return []

    def submit(self, submission: Submission, script_path: str, run: Runner | None = None) -> str:
        """Queue the script and return the job id; it starts at once if there is room.

        Raises:
            SubmitRejected: the machine cannot run it; there is no job.
            SlurmUnavailable: the state folder cannot be used; there is no job.
        """
        del run  # jobs are started from here
        machine = self._machine()
        try:
            script = read_file(script_path)
        except OSError as error:
            raise SubmitRejected(
                f"cannot read the batch script {script_path}", evidence=[str(error)]
            ) from error
        try:
            request = local_request.read_request(script, machine)
            problems = local_request.misfits(request, machine)
            if problems:
                raise Refused(problems)  # noqa: TRY301
            request["comment"] = submission.comment
            request["name"] = request["name"] or Path(script_path).name
            common = self._common(submission.spec.work_dir, request, machine)
            with self._deciding() as state:
                job = queue.add(state, request, script, common)
        except Refused as error:
            raise SubmitRejected("the embedded scheduler refused the job", evidence=error.problems) from error
        with suppress(SlurmUnavailable):  # the job is queued; whoever looks next starts it
            self._look()
        return str(job)

    def _common(self, folder: str, request: Record, machine: Record) -> Record:
        """Return what a job's record holds beside what its script asks."""
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
            "kill_wait": self._patience,
            "requeue_delay": self._requeue_delay,
        }

    def find(self, comment: str) -> str | None:
        """Return the id of the job that carries the submission's comment."""
        state = self._state
        for job in reversed(state.all_ids()):
            record = state.load(job)
            if record is not None and record["comment"] == comment:
                return str(record["id"] if record["array_id"] is None else record["array_id"])
        return None

    # ---- asking ----

    def query(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        """Return what is known of each job; an unknown id maps to an empty list.

        Raises:
            SlurmUnavailable: the state folder cannot be used.
        """
        self._look()
        now = time.time()
        return {job: [self._status(record, now) for record in self._records(job)] for job in job_ids}

    def own_jobs(self) -> list[JobStatus]:
        """Return the jobs that are not over; see `QueueLister.own_jobs`."""
        now = time.time()
        return [self._status(record, now) for record in self._state.active() if OUR_MARK in record["comment"]]

    def _records(self, text: str) -> list[Record]:
        try:
            job, task = job_id(text)
        except ValueError:
            return []
        state = self._state
        records = queue.find_records(state, job, task)
        if not records and task is None:
            found = state.load(job)
            records = [found] if found else []
        return records

    def _status(self, record: Record, now: float) -> JobStatus:
        running = record["state"] == "RUNNING"
        state = JobState(record["state"])
        reason = "" if record["reason"] == "None" else str(record["reason"])
        if running and record["host"] != local_machine.host():
            state, reason = JobState.UNKNOWN, ELSEWHERE.format(record["host"])
        start, limit = _seconds(record.get("start_time")), record["time_limit"]
        ran = start is not None
        return JobStatus(
            job_id=queue.shown_id(record),
            raw_id=str(record["id"]),
            state=state,
            raw_state=str(record["state"]),
            flags=frozenset({StateFlag.COMPLETING}) if record.get("completing") else frozenset(),
            reason=reason,
            name=record["name"],
            partition=record["partition"],
            nodelist=hostlist.fold(list(range(1, record["nodes"] + 1))) if ran else "",
            nodes=record["nodes"],
            exit_code=record.get("exit_code") if state.ended else None,
            signal=record.get("signal_number") if state.ended else None,
            submit_time=_seconds(record["submit_time"]),
            start_time=start,
            end_time=_seconds(record.get("end_time")),
            time_left=max(0, int(start + limit - now)) if running and start and limit else None,
            time_limit=int(limit) if running and limit else None,
            restarts=record["restarts"],
            comment=record["comment"],
            source="local",
            observed_at=now,
        )

    # ---- commanding ----

    def cancel(self, job_ids: Sequence[str], look: Look | None = None) -> None:
        """End jobs: SIGTERM, and SIGKILL for what is left after ``kill_wait``. Ended jobs stay as they are.

        Raises:
            JobNotFound: one of them does not exist; the others were ended.
        """
        self._each(job_ids, queue.cancel, look)

    def requeue(self, job_ids: Sequence[str], look: Look | None = None) -> None:
        """Put running or ended jobs back into the queue under the same id.

        Raises:
            SlurmError: one of them waits already, forbids it or does not exist.
        """
        ended = ("RUNNING", *queue.ENDED)
        self._each(job_ids, queue.requeue, look, of_array=ended)

    def signal(self, job_ids: Sequence[str], name: str) -> None:
        """Send a signal to the tasks of running jobs; see `Scheduler.signal`."""
        self._each(job_ids, lambda state, record: queue.signal_steps(state, record, name), None)

    def hold(self, job_ids: Sequence[str], look: Look | None = None) -> None:
        """Keep pending jobs from starting.

        Raises:
            SlurmError: one of them is no longer pending or does not exist.
        """
        self._each(job_ids, queue.hold, look, of_array=("PENDING",))

    def release(self, job_ids: Sequence[str], look: Look | None = None) -> None:
        """Let held jobs start again.

        Raises:
            SlurmError: one of them is no longer pending or does not exist.
        """
        self._each(job_ids, queue.release, look, of_array=("PENDING",))

    def _each(
        self,
        job_ids: Sequence[str],
        action: Callable[[State, Record], None],
        look: Look | None,
        of_array: Sequence[str] = (),
    ) -> None:
        """Do something to each job; of a whole array only to the tasks in these states, if there are any."""
        missing, refused = [], []
        if look is not None:
            look(self.query(job_ids))
        with self._deciding() as state:
            for job in job_ids:
                records = self._records(job)
                if not records:
                    missing.append(job)
                if len(records) > 1:
                    records = [record for record in records if record["state"] in of_array] or records
                for record in records:
                    try:
                        action(state, record)
                    except Refused as error:
                        refused += error.problems
        self._look()
        if missing:
            raise JobNotFound(f"the embedded scheduler knows no job {', '.join(missing)}", evidence=refused)
        if refused:
            raise SlurmError("the embedded scheduler refused", evidence=refused)

    def _look(self) -> None:
        """Let whoever may start do so."""
        with self._deciding() as state:
            queue.schedule(state)

    @contextmanager
    def _deciding(self) -> Iterator[State]:
        state = self._state
        try:
            with state.locked():
                yield state
        except OSError as error:
            raise SlurmUnavailable(
                f"the embedded scheduler's state folder {state.root} cannot be used",
                evidence=[str(error)],
                hint="set DTSLURM_LOCAL_STATE to a folder on a local disk that you may write to",
            ) from error


def _seconds(moment: float | None) -> int | None:
    return None if moment is None else int(moment)
