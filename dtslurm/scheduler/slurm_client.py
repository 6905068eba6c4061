"""Runs Slurm's commands over a transport and turns their failures into errors people can act on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dtslurm.errors import CommandNotFound, CommandTimeout, JobNotFound, SlurmError, SlurmUnavailable
from dtslurm.model.runs.state import JobStatus
from dtslurm.model.values import dataclass
from dtslurm.slurm import commands, parse
from dtslurm.slurm.fields import SACCT
from dtslurm.slurm.parse_errors import Trouble, hint_for, private, trouble, words
from dtslurm.transport.base import Completed, Transport

QUERY_TIMEOUT_S = 30.0  # Slurm's own time-out for an answer is 10 s, 9 s without a controller (22.05)
_CHUNK = 200  # ids in one sacct call
_ONE_BY_ONE = 4  # more jobs than that are shown by one request for the whole table

_HINTS = {
    Trouble.NOT_SENT: "the controller is down or out of reach (see scontrol ping): try again in some minutes",
    Trouble.LOST: "the controller is too busy to answer: try again in some minutes",
    Trouble.AUTH: "munge does not work there (not running, or a wrong clock): tell the site",
    Trouble.SETUP: "set SLURM_CONF to the cluster's slurm.conf, go where squeue works, "
    "or give the profile a login.host for SSH",
    Trouble.BUSY: "Slurm limits requests: try again in some minutes",
}


@dataclass(frozen=True)
class CommandHost:
    """What was found where the commands run: the user's number, and a reason why they cannot work."""

    uid: int | None
    problem: str = ""
    hint: str = ""
    programs: bool = True


class SlurmClient:
    """One user's view of one Slurm, with the few things worth remembering between calls.

    Attributes:
        requests: how many requests were made to the controller.
        accounting: whether there is accounting, as far as is known.
        columns: the columns that this sacct has, empty while that is not known.
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
        self._site: CommandHost | None = None
        self.requests = 0
        self.accounting = True
        self.columns: tuple[str, ...] = ()

    def site(self) -> CommandHost:
        """Look once where the commands run, in one cheap command that asks nothing of Slurm.

        Where the user's number there is known, even that is saved: a command that is missing says so itself.
        """
        if self._site is None and self._uid is not None:
            self._site = CommandHost(self._uid())
        if self._site is None:
            answer = self.transport.run(commands.probe(), timeout=QUERY_TIMEOUT_S)
            self._site = _site(answer.stdout)
        return self._site

    def require(self) -> CommandHost:
        """Return the site, or raise what keeps Slurm's commands from working there.

        Raises:
            CommandNotFound: Slurm's programs are missing.
            SlurmUnavailable: ``SLURM_CONF`` names a missing file.
        """
        site = self.site()
        if site.problem:
            kind = SlurmUnavailable if site.programs else CommandNotFound
            self._site = None  # it may have been mended by the next call
            raise kind(site.problem, hint=site.hint)
        return site

    def ask(self, argv: Sequence[str], *, absent_ok: bool = False, private_ok: bool = False) -> str:
        """Run a command that only reads, and return its output.

        With ``absent_ok``, an unknown job gives an empty output instead of an error; with ``private_ok``
        what the site tells nobody but its operators (``PrivateData``).

        Raises:
            SlurmUnavailable: there is no answer.
            SlurmError: Slurm refused to answer.
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
        if answer.ok or (absent_ok and trouble(answer.stderr) is Trouble.NO_JOB):
            return answer.stdout
        if private_ok and private(answer.stderr):
            return ""
        raise failure(answer)

    def change(self, argv: Sequence[str], *, take_refusals: bool = False) -> Completed:
        """Run a command that changes jobs, and return its answer; "already over" is no failure.

        With ``take_refusals``, a refusal is returned too: what it says of each job tells what was done.

        Raises:
            SlurmUnavailable: there is no answer.
            JobNotFound: Slurm knows no such job.
            SlurmError: refused, with Slurm's words.
        """
        self.require()
        self.requests += 1
        try:
            answer = self.transport.run(argv, timeout=QUERY_TIMEOUT_S)
        except CommandTimeout as error:
            raise SlurmUnavailable(
                f"{argv[0]} did not answer within {QUERY_TIMEOUT_S:g} s; it may have been done all the same",
                evidence=error.evidence,
                hint="look with dtslurm status before trying again",
            ) from error
        # scancel exits with 0 though it says "error" (22.05).
        if (answer.ok and "error:" not in answer.stderr) or (take_refusals and not answer.ok):
            return answer
        if argv[0] == "scancel" and trouble(answer.stderr) in {Trouble.OVER, Trouble.NO_JOB}:
            return answer
        raise failure(answer)

    def jobs(self) -> list[JobStatus]:
        """List the user's jobs that Slurm still knows, in one question however many are wanted."""
        now = self.clock()
        uid = self.require().uid
        output = self.ask(commands.squeue(), absent_ok=True)
        return parse.squeue(output, uid=uid, observed_at=now).jobs

    def accounted(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """Return every run of the jobs from accounting; nothing if it is off or cannot be asked now."""
        runs: list[JobStatus] = []
        for start in range(0, len(job_ids), _CHUNK):
            runs += self._sacct(job_ids=job_ids[start : start + _CHUNK])
        return sorted(runs, key=lambda run: run.submit_time or 0)

    def all_accounted(self) -> list[JobStatus]:
        """Return the user's jobs of the last 30 days from accounting; nothing if it cannot be asked."""
        return self._sacct(job_ids=())

    def _sacct(self, *, job_ids: Sequence[str]) -> list[JobStatus]:
        uid = self.require().uid
        if not self.accounting or (not job_ids and uid is None):
            return []
        try:
            if not self.columns:
                self.columns = tuple(self._sacct_answer(commands.sacct_fields()).split())
                if not self.columns:
                    return []
            fields = parse.supported(SACCT, " ".join(self.columns))
            output = self._sacct_answer(commands.sacct(fields, job_ids=job_ids, uid=uid))
        except (CommandNotFound, CommandTimeout):
            return []
        return parse.sacct(output, fields, uid=uid, observed_at=self.clock()).jobs

    def _sacct_answer(self, argv: Sequence[str]) -> str:
        answer = self.transport.run(argv, timeout=QUERY_TIMEOUT_S)
        if "storage is disabled" in answer.stderr:
            self.accounting = False
        return answer.stdout if answer.ok else ""

    def shown(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """Return what the controller still has of the jobs, with exit codes, in a few requests at most."""
        from dtslurm.slurm import parse_scontrol

        uid = self.require().uid
        if len(job_ids) > _ONE_BY_ONE:
            outputs = [self.ask(commands.show_jobs(), absent_ok=True)]
        else:
            outputs = [self.ask(commands.show_job(job_id), absent_ok=True) for job_id in job_ids]
        return [
            job
            for output in outputs
            for job in parse_scontrol.jobs(output, uid=uid, observed_at=self.clock()).jobs
        ]


def failure(answer: Completed) -> SlurmError:
    """Return the error for a failed command, told by its words."""
    kind = trouble(answer.stderr)
    program = " ".join(answer.argv[:2]) if answer.argv[0] == "scontrol" else answer.argv[0]
    evidence = words(answer.stderr) or [f"exit code {answer.code}, no message"]
    if kind in _HINTS:
        return SlurmUnavailable(f"{program}: {kind.value}", evidence=evidence, hint=_HINTS[kind])
    if kind is Trouble.NO_JOB:
        return JobNotFound(f"{program}: {kind.value}", evidence=evidence)
    return SlurmError(f"{program}: Slurm refused", evidence=evidence, hint=hint_for(answer.stderr))


def _site(output: str) -> CommandHost:
    found: dict[str, str] = {}
    missing = []
    for line in output.split("\n"):
        key, _, value = line.partition("=")
        if key == "missing":
            missing.append(value)
        else:
            found.setdefault(key, value)
    uid = int(found["uid"]) if found.get("uid", "").isdecimal() else None
    if missing:
        return CommandHost(
            uid,
            f"no {', '.join(missing)} on PATH there",
            "log in to a machine of the cluster, or put Slurm's commands on PATH (module load slurm)",
            programs=False,
        )
    if "conf_missing" in found:
        return CommandHost(
            uid, f"SLURM_CONF names {found.get('conf', '')}, which cannot be read", _HINTS[Trouble.SETUP]
        )
    return CommandHost(uid)
