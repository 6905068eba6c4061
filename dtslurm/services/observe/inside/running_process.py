"""Wait until a selected process of a run is running, also after a restart or a requeue of the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ClusterShell.NodeSet import NodeSet, NodeSetException

from dtslurm.errors import RequestInvalid, TransportError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.runs.telemetry import RunTelemetry
from dtslurm.model.values import dataclass
from dtslurm.services.observe.inside.session import SessionServer, read_session
from dtslurm.services.observe.inside.target_process import ProcessSelector, TargetProcess, choose_processes
from dtslurm.services.observe.telemetry import RunPart, read_telemetry
from dtslurm.services.runs.roles import role_names
from dtslurm.services.runs.status import choose_status, views
from dtslurm.services.wiring.context import Context

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0
_FOREGROUND_S = 120.0  # a user who waits longer gets the answers that all programs share
_MAY_START = {"waiting", "failed"}  # states of an instance


@dataclass(frozen=True)
class RunningProcess:
    """A process that runs now.

    Attributes:
        job_id: the number of its job, or of its task of a job array, for Slurm's commands.
        run_dir: the run directory, or that of the task.
        session: the server of a notebook or an editor that the job runs, if its port was requested.
    """

    process: TargetProcess
    job_id: str
    run_dir: str
    session: SessionServer | None = None


class ProcessFinder:
    """Finds the process that a user selected, again and again; once found, it is the same rank or instance.

    Args:
        selector: the rank or the instance; of several, the first one is taken.
        task: the task of a job array; None for the first one that runs.
        needs_port_names: whether the ports of an instance, or of a session, must be known.
        say: receives the reason for waiting, each once.

    Attributes:
        was_found: whether the process was found before.
    """

    def __init__(
        self,
        context: Context,
        record: JobRecord,
        selector: ProcessSelector,
        *,
        task: str | None,
        needs_port_names: bool,
        say: Callable[[str], None],
    ) -> None:
        self._context, self._record = context, record
        self._selector, self._task = selector, task
        self._needs_port_names = needs_port_names
        self._say = say
        self._said = ""
        self.was_found = False

    def wait(self, *, newer_than: float = 0.0) -> RunningProcess | None:
        """Return the process as soon as it runs, None if the run has ended since it was found.

        Args:
            newer_than: when the process was lost, in seconds since the epoch.

        Raises:
            RequestInvalid: the run ended before the process was found, or never has such a process.
            TransportError: the files of the run cannot be read, and the process was never found.
        """
        self._check_rank()
        start, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            is_background = time.monotonic() - start > _FOREGROUND_S
            [view] = views(self._context, [self._record], background=is_background, newer_than=newer_than)
            self._record = view.record
            status = choose_status(view, self._task)
            if status.terminal:
                self._end(status)
                return None
            if status.state is JobState.RUNNING:
                found = self._find(status)
                if isinstance(found, RunningProcess):
                    self.was_found, self._said = True, ""
                    return found
                self._say_once(f"{found}; waiting")
            else:
                reason = view.trouble or status.reason
                detail = f" ({reason})" if reason and reason != "None" else ""
                self._say_once(f"job {self._name(status)} is {status.word}{detail}; waiting until it runs")
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 1.5 * pause)

    def _name(self, status: JobStatus) -> str:
        return status.job_id or self._record.name

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._say(text)
            self._said = text

    def _check_rank(self) -> None:
        """Refuse a rank that the run never has, also before it starts."""
        ranks, size = self._selector.ranks, self._record.world_size
        if ranks is not None and ranks[0][0] >= size:
            numbers = "rank 0" if size == 1 else f"ranks 0 to {size - 1}"
            raise RequestInvalid([f"the run has no rank {ranks[0][0]}, only {numbers}"])

    def _end(self, status: JobStatus) -> None:
        name = self._name(status)
        if not self.was_found:
            raise RequestInvalid(
                [f"job {name} is not running: its state is {status.word}"],
                hint=f"dtslurm status {name} shows its state and the reason",
            )
        self._say(f"job {name} has ended: {status.word}")

    def _find(self, status: JobStatus) -> RunningProcess | str:
        """Return the process, or why it does not run yet.

        Raises:
            RequestInvalid: it never runs.
        """
        name, task = self._name(status), self._task
        if task is None and self._record.array is not None:
            task = status.job_id.rpartition("_")[2]
        try:
            telemetry = read_telemetry(self._context, self._record, RunPart(task=task))
        except RequestInvalid as error:  # the task has not started
            return error.message
        except TransportError as error:
            if not self.was_found or not error.transient:
                raise
            return ": ".join([error.message, *error.evidence[-1:]])
        try:
            process = choose_processes(telemetry, self._selector, name)[0]
        except RequestInvalid as error:
            if not self._may_start(telemetry, status):
                raise
            return error.message
        if self._needs_port_names and process.is_starting and not process.ports:
            return f"{process.label} of job {name} has not opened its ports"
        self._task = task
        self._keep(process)
        run_dir = self._record.run_dir if task is None else f"{self._record.run_dir}/tasks/{task}"
        running = RunningProcess(process, status.step_id(process.component), run_dir)
        if self._needs_port_names and self._record.has_session:
            return self._add_session(running, name)
        return running

    def _keep(self, process: TargetProcess) -> None:
        """Select this process from now on."""
        if self._selector.role is not None:
            self._selector = replace(self._selector, role=process.label)
        elif self._selector.node is None:
            rank = int(process.label)
            self._selector = replace(self._selector, ranks=((rank, rank),))

    def _add_session(self, running: RunningProcess, name: str) -> RunningProcess | str:
        """Return the process with its session, or why its server does not answer yet."""
        session = read_session(self._context.cluster_of(self._record).transport, running.run_dir)
        if session is None:
            return f"the server of job {name} has not started"
        process = replace(running.process, ports={"session": session.port})
        return replace(running, process=process, session=session)

    def _may_start(self, telemetry: RunTelemetry, status: JobStatus) -> bool:
        """Return whether a process that does not run may still start, in this or another attempt."""
        selector = self._selector
        if selector.role is not None:
            role_name, _, number = selector.role.partition("/")
            if role_name not in role_names(self._record)[1]:
                return False
            states = [
                instance.state
                for role in telemetry.roles
                if role.name == role_name
                for instance in role.instances
                if number in {"", str(instance.number)}
            ]
            return self.was_found or not telemetry.roles or bool(_MAY_START & set(states))
        if selector.node is not None:
            try:
                return selector.node in NodeSet(status.nodelist)
            except NodeSetException:
                return False
        if selector.ranks is not None and not self.was_found:
            rank = telemetry.ranks.get(selector.ranks[0][0])
            return rank is None or rank.ended is None
        return True
