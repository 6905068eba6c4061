"""Runs Slurm's commands over a transport and converts their failures to errors with hints."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dtslurm.errors import CommandNotFound, CommandTimeout, JobNotFound, SlurmError, SlurmUnavailable
from dtslurm.model.runs.state import JobStatus
from dtslurm.model.values import dataclass
from dtslurm.slurm import commands, parse, steps
from dtslurm.slurm.fields import SACCT
from dtslurm.slurm.parse_errors import Trouble, classify_error, distinct_lines, hint_for, private
from dtslurm.transport.base import Completed, Transport

QUERY_TIMEOUT_S = 30.0  # Slurm's own timeout is 10 s, and 9 s without a controller (22.05)
_SACCT_BATCH_SIZE = 200  # job ids in one call of sacct
_MAX_SHOW_JOB_CALLS = 4  # for more jobs than this, one request reads the whole job table

_HINTS = {
    Trouble.NOT_SENT: (
        "the controller is down or cannot be reached (see scontrol ping): try again in some minutes"
    ),
    Trouble.LOST: "the controller is too busy to answer: try again in some minutes",
    Trouble.AUTH: (
        "munge does not work on that host (not running, or a wrong clock): inform the cluster's support"
    ),
    Trouble.SETUP: "set SLURM_CONF to the cluster's slurm.conf, log in to a host where squeue works, or set "
    "login.host in the profile to use SSH",
    Trouble.BUSY: "Slurm limits the rate of requests: try again in some minutes",
}


@dataclass(frozen=True)
class CommandHost:
    """The user id on the host where Slurm's commands run, and a reason why they cannot run there.

    Attributes:
        uid: the user id, or None if it is not known.
        problem: why Slurm's commands cannot work there, empty if they can.
        hint: how to fix the problem.
        programs: whether Slurm's programs are on PATH.
    """

    uid: int | None
    problem: str = ""
    hint: str = ""
    programs: bool = True


class SlurmClient:
    """One user's access to one Slurm installation, with a cache of facts that rarely change.

    Attributes:
        requests: the number of requests made to the controller.
        accounting: whether Slurm has accounting; True until a query shows that it is disabled.
        columns: the columns that this sacct supports, empty until they are queried.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.time,
        uid: Callable[[], int | None] | None = None,
    ) -> None:
        self.transport = transport
        self._uid = uid
        self.clock = clock
        self._command_host: CommandHost | None = None
        self.requests = 0
        self.accounting = True
        self.columns: tuple[str, ...] = ()

    def site(self) -> CommandHost:
        """Return the host where the commands run, from one cheap command without a request to Slurm.

        The first call runs the command. If the user id is already known, no command is run: a missing program
        is then reported by the first Slurm command.
        """
        if self._command_host is None and self._uid is not None:
            self._command_host = CommandHost(self._uid())
        if self._command_host is None:
            answer = self.transport.run(commands.probe(), timeout=QUERY_TIMEOUT_S)
            self._command_host = _command_host(answer.stdout)
        return self._command_host

    def require(self) -> CommandHost:
        """Return the host where the commands run, or raise the reason why they cannot work there.

        Raises:
            CommandNotFound: Slurm's programs are missing.
            SlurmUnavailable: ``SLURM_CONF`` names a missing file.
        """
        site = self.site()
        if site.problem:
            kind = SlurmUnavailable if site.programs else CommandNotFound
            self._command_host = None  # check again at the next call: the problem may be fixed by then
            raise kind(site.problem, hint=site.hint)
        return site

    def ask(self, argv: Sequence[str], *, absent_ok: bool = False, private_ok: bool = False) -> str:
        """Run a command that only reads, and return its output.

        Args:
            absent_ok: return an empty output, not an error, if Slurm does not know the job.
            private_ok: return an empty output, not an error, if only operators may see the answer
                (``PrivateData``).

        Raises:
            SlurmUnavailable: Slurm did not answer.
            SlurmError: Slurm refused the query.
        """
        self.require()
        self.requests += commands.cost(argv)
        try:
            answer = self.transport.run(argv, timeout=QUERY_TIMEOUT_S)
        except CommandTimeout as error:
            raise SlurmUnavailable(
                f"{argv[0]} did not answer within {QUERY_TIMEOUT_S:g} s",
                evidence=error.evidence,
                hint=_HINTS[Trouble.LOST],
            ) from error
        if answer.ok or (absent_ok and classify_error(answer.stderr) is Trouble.NO_JOB):
            return answer.stdout
        if private_ok and private(answer.stderr):
            return ""
        raise failure(answer)

    def change(self, argv: Sequence[str], *, take_refusals: bool = False) -> Completed:
        """Run a command that changes jobs, and return its result. "Already over" is not a failure.

        Args:
            take_refusals: also return the result of a refused command: its messages on each job show which
                jobs were changed.

        Raises:
            SlurmUnavailable: Slurm did not answer.
            JobNotFound: Slurm knows no such job.
            SlurmError: Slurm refused; the error has Slurm's message.
        """
        self.require()
        self.requests += 1
        try:
            answer = self.transport.run(argv, timeout=QUERY_TIMEOUT_S)
        except CommandTimeout as error:
            raise SlurmUnavailable(
                f"{argv[0]} did not answer within {QUERY_TIMEOUT_S:g} s; the change may have been made",
                evidence=error.evidence,
                hint="check with dtslurm status before you try again",
            ) from error
        # scancel exits with 0 even if it prints "error:" (22.05).
        if (answer.ok and "error:" not in answer.stderr) or (take_refusals and not answer.ok):
            return answer
        if argv[0] == "scancel" and classify_error(answer.stderr) in {Trouble.OVER, Trouble.NO_JOB}:
            return answer
        raise failure(answer)

    def jobs(self) -> list[JobStatus]:
        """List the user's jobs that Slurm still knows, in one query of squeue."""
        now = self.clock()
        uid = self.require().uid
        output = self.ask(commands.squeue(), absent_ok=True)
        return parse.squeue(output, uid=uid, observed_at=now).jobs

    def steps(self) -> list[JobStatus]:
        """List the running steps of the user's jobs, in one request."""
        uid = self.require().uid
        output = self.ask(commands.squeue_steps(), absent_ok=True)
        return steps.running(output, uid=uid, observed_at=self.clock())

    def accounted_steps(self, step_ids: Sequence[str]) -> list[JobStatus]:
        """Return the accounting records of steps; empty if accounting is off or does not answer."""
        if not self.accounting or not step_ids:
            return []
        try:
            output = self._run_sacct(commands.sacct_steps(step_ids))
        except (CommandNotFound, CommandTimeout):
            return []
        return steps.accounted(output, observed_at=self.clock())

    def accounted(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """Return all accounting records of the jobs; empty if accounting is off or does not answer."""
        runs: list[JobStatus] = []
        for start in range(0, len(job_ids), _SACCT_BATCH_SIZE):
            runs += self._query_accounting(job_ids=job_ids[start : start + _SACCT_BATCH_SIZE])
        return sorted(runs, key=lambda run: run.submit_time or 0)

    def all_accounted(self) -> list[JobStatus]:
        """Return the user's jobs of the last 30 days from accounting; empty if it does not answer."""
        return self._query_accounting(job_ids=())

    def _query_accounting(self, *, job_ids: Sequence[str]) -> list[JobStatus]:
        uid = self.require().uid
        if not self.accounting or (not job_ids and uid is None):
            return []
        try:
            if not self.columns:
                self.columns = tuple(self._run_sacct(commands.sacct_fields()).split())
                if not self.columns:
                    return []
            fields = parse.select_supported_fields(SACCT, " ".join(self.columns))
            output = self._run_sacct(commands.sacct(fields, job_ids=job_ids, uid=uid))
        except (CommandNotFound, CommandTimeout):
            return []
        return parse.sacct(output, fields, uid=uid, observed_at=self.clock()).jobs

    def _run_sacct(self, argv: Sequence[str]) -> str:
        answer = self.transport.run(argv, timeout=QUERY_TIMEOUT_S)
        if "storage is disabled" in answer.stderr:
            self.accounting = False
        return answer.stdout if answer.ok else ""

    def fetch_job_records(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """Return the controller's records of the jobs, with exit codes, in at most 4 requests."""
        from dtslurm.slurm import parse_scontrol

        uid = self.require().uid
        if len(job_ids) > _MAX_SHOW_JOB_CALLS:
            outputs = [self.ask(commands.show_jobs(), absent_ok=True)]
        else:
            outputs = [self.ask(commands.show_job(job_id), absent_ok=True) for job_id in job_ids]
        return [
            job
            for output in outputs
            for job in parse_scontrol.jobs(output, uid=uid, observed_at=self.clock()).jobs
        ]


def failure(answer: Completed) -> SlurmError:
    """Return the error for a failed command, classified by its stderr."""
    kind = classify_error(answer.stderr)
    program = " ".join(answer.argv[:2]) if answer.argv[0] == "scontrol" else answer.argv[0]
    evidence = distinct_lines(answer.stderr) or [f"exit code {answer.code}, no message"]
    if kind in _HINTS:
        return SlurmUnavailable(f"{program}: {kind.value}", evidence=evidence, hint=_HINTS[kind])
    if kind is Trouble.NO_JOB:
        return JobNotFound(f"{program}: {kind.value}", evidence=evidence)
    return SlurmError(
        f"{program}: Slurm refused the request", evidence=evidence, hint=hint_for(answer.stderr)
    )


def _command_host(output: str) -> CommandHost:
    values: dict[str, str] = {}
    missing = []
    for line in output.split("\n"):
        key, _, value = line.partition("=")
        if key == "missing":
            missing.append(value)
        else:
            values.setdefault(key, value)
    uid = int(values["uid"]) if values.get("uid", "").isdecimal() else None
    if missing:
        return CommandHost(
            uid,
            f"not on PATH: {', '.join(missing)}",
            "log in to a machine of the cluster, or put Slurm's commands on PATH (module load slurm)",
            programs=False,
        )
    if "conf_missing" in values:
        return CommandHost(
            uid, f"SLURM_CONF names {values.get('conf', '')}, which cannot be read", _HINTS[Trouble.SETUP]
        )
    return CommandHost(uid)
