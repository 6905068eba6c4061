"""The one error tree.

::

    DtslurmError                     exit  transient
    ├── RequestInvalid                  2      the request is wrong; carries every problem found
    │   ├── ProfileInvalid              2      a profile or project file is wrong
    │   └── ProfileNotFound             2      no cluster profile of that name
    ├── RenderError                     2      a template failed
    ├── RunExists                       2      there is a run in that folder already
    ├── SlurmError                      3      Slurm refused, or said something we cannot use
    │   ├── SlurmUnavailable            3  yes the controller did not answer; nothing was sent
    │   ├── SubmitRejected              3      sbatch said no; there is no job
    │   ├── SubmitUnknown               3      sbatch was cut off; there may be a job
    │   └── JobNotFound                 3      no such run or job
    ├── TransportError                  4  yes the link or a command on it failed
    │   ├── HostUnavailable             4  yes there is no link to the host; nothing was sent
    │   │   └── LoginRefused            4      host key, password or key not accepted; nothing was sent
    │   ├── CommandNotFound             4      the program is not installed there
    │   └── CommandTimeout              4  yes the command did not end in time
    ├── StoreError                      5      the disk refused: full, read-only, no permission
    └── JobFailed                       *      the job itself failed (``--wait``); exit is the job's

``SubmitInterrupted`` is a KeyboardInterrupt, not a DtslurmError: Ctrl-C arrived during a submission.

Every error says what failed (``message``), shows the evidence (``evidence``) and what to do (``hint``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from dtslurm.model.runs.record import JobRecord


class DtslurmError(Exception):
    """Something failed in a way a person can act on."""

    exit_code: ClassVar[int] = 1
    transient: ClassVar[bool] = False

    def __init__(self, message: str, *, evidence: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.evidence = tuple(evidence)
        self.hint = hint

    def lines(self) -> list[str]:
        """Return the error as lines for people: message, indented evidence, hint."""
        return [f"error: {self.message}", *self._more()]

    def __str__(self) -> str:
        """Return what an uncaught error should show: as ``lines``, after Python's name of it."""
        return "\n".join([self.message, *self._more()])

    def _more(self) -> list[str]:
        lines = [f"  {line}" for item in self.evidence for line in item.splitlines() or [""]]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return lines


class SubmitInterrupted(KeyboardInterrupt):
    """Ctrl-C during a submission; its text tells whether there is a job.

    Attributes:
        record: the run whose job was queued, None if there is no job or that is not known.
    """

    def __init__(self, message: str, record: JobRecord | None = None) -> None:
        super().__init__(message)
        self.record = record


class RequestInvalid(DtslurmError):
    """The request cannot work; ``problems`` lists everything wrong with it, each in one line."""

    exit_code = 2

    def __init__(self, problems: Sequence[str], *, message: str = "", hint: str = "") -> None:
        self.problems = tuple(problems)
        if not message and len(self.problems) == 1:
            super().__init__(self.problems[0], hint=hint)
            return
        count = len(self.problems)
        super().__init__(message or f"{count} problems in the request", evidence=self.problems, hint=hint)


class ProfileInvalid(RequestInvalid):
    """A profile or project file is wrong; each problem reads ``file:line: key: message``."""


class ProfileNotFound(RequestInvalid):
    """No cluster profile has that name."""


class RenderError(DtslurmError):
    """A template could not be rendered."""

    exit_code = 2


class RunExists(DtslurmError):
    """There is a run in that folder already; nothing of it was touched and nothing was queued."""

    exit_code = 2


class SlurmError(DtslurmError):
    """Slurm refused, or answered something that cannot be used."""

    exit_code = 3


class SlurmUnavailable(SlurmError):
    """The controller could not be reached; nothing was queued by this call."""

    transient = True


class SubmitRejected(SlurmError):
    """``sbatch`` refused the job; its words are the evidence. There is no job."""


class SubmitUnknown(SlurmError):
    """``sbatch`` was cut off before its answer came. There may be a job: look it up, do not repeat."""


class JobNotFound(SlurmError):
    """No run or job matches what was asked for."""


class TransportError(DtslurmError):
    """The link, or a command run over it, failed."""

    exit_code = 4
    transient = True


class HostUnavailable(TransportError):
    """No link to the host could be made: name, network, server. No command was sent."""


class LoginRefused(HostUnavailable):
    """The host's key or our login was not accepted; trying again as before would fail again."""

    transient = False


class CommandNotFound(TransportError):
    """The program is not installed on that host."""

    transient = False


class CommandTimeout(TransportError):
    """The command did not end within its time limit; what it did is unknown."""


class StoreError(DtslurmError):
    """The disk refused a write or read: full, read-only, no permission."""

    exit_code = 5


class JobFailed(DtslurmError):
    """The job itself failed; ``code`` is the exit code ``--wait`` passes on."""

    def __init__(self, message: str, *, code: int, evidence: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message, evidence=evidence, hint=hint)
        self.code = code
