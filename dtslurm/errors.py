"""The exceptions of dtslurm.

::

    DtslurmError                     exit  transient
    ├── RequestInvalid                  2      the request is invalid; contains every problem found
    │   ├── ProfileInvalid              2      a profile, project file or job file is invalid
    │   └── ProfileNotFound             2      no cluster profile has this name
    ├── RenderError                     2      a template failed
    ├── RunExists                       2      the folder already contains a run
    ├── SlurmError                      3      Slurm refused the request, or its answer is unusable
    │   ├── SlurmUnavailable            3  yes the controller did not answer; nothing was sent
    │   ├── SubmitRejected              3      sbatch refused the job; there is no job
    │   ├── SubmitUnknown               3      sbatch was cut off; there may be a job
    │   └── JobNotFound                 3      no such run or job
    ├── TransportError                  4  yes the connection, or a command on it, failed
    │   ├── HostUnavailable             4  yes there is no connection to the host; nothing was sent
    │   │   └── LoginRefused            4      host key, password or key refused; nothing was sent
    │   ├── CommandNotFound             4      the program is not installed on the host
    │   └── CommandTimeout              4  yes the command did not end in time
    ├── StoreError                      5      a disk error: full, read-only, no permission
    └── JobFailed                       *      the job itself failed (``--wait``); exit is the job's

``SubmitInterrupted`` is a KeyboardInterrupt, not a DtslurmError: Ctrl-C arrived during a submission.

Every error has a message, evidence, and a hint at what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from dtslurm.model.runs.record import JobRecord


class DtslurmError(Exception):
    """An error that the user can act on."""

    exit_code: ClassVar[int] = 1
    transient: ClassVar[bool] = False

    def __init__(self, message: str, *, evidence: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.evidence = tuple(evidence)
        self.hint = hint

    def lines(self) -> list[str]:
        """Return the error as lines for the user: message, indented evidence, hint."""
        return [f"error: {self.message}", *self._detail_lines()]

    def __str__(self) -> str:
        """Return the text of an uncaught error, which Python prints after the name of the exception."""
        return "\n".join([self.message, *self._detail_lines()])

    def _detail_lines(self) -> list[str]:
        lines = [f"  {line}" for text in self.evidence for line in text.splitlines() or [""]]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return lines


class SubmitInterrupted(KeyboardInterrupt):
    """Ctrl-C during a submission; the text states whether there is a job.

    Attributes:
        record: the run whose job was queued, None if there is no job or that is unknown.
    """

    def __init__(self, message: str, record: JobRecord | None = None) -> None:
        super().__init__(message)
        self.record = record


class RequestInvalid(DtslurmError):
    """The request cannot work; ``problems`` lists all problems, each in one line."""

    exit_code = 2

    def __init__(self, problems: Sequence[str], *, message: str = "", hint: str = "") -> None:
        self.problems = tuple(problems)
        if not message and len(self.problems) == 1:
            super().__init__(self.problems[0], hint=hint)
            return
        count = len(self.problems)
        super().__init__(message or f"{count} problems in the request", evidence=self.problems, hint=hint)


class ProfileInvalid(RequestInvalid):
    """A profile, project file or job file is invalid; each problem reads ``file:line: key: message``."""


class ProfileNotFound(RequestInvalid):
    """No cluster profile has that name."""


class RenderError(DtslurmError):
    """A template could not be rendered."""

    exit_code = 2


class RunExists(DtslurmError):
    """The folder already contains a run, which was not changed; nothing was queued."""

    exit_code = 2


class SlurmError(DtslurmError):
    """Slurm refused the request, or its answer is unusable."""

    exit_code = 3


class SlurmUnavailable(SlurmError):
    """The controller could not be reached; this call queued nothing."""

    transient = True


class SubmitRejected(SlurmError):
    """``sbatch`` refused the job; its message is the evidence. There is no job."""


class SubmitUnknown(SlurmError):
    """``sbatch`` was cut off before its answer arrived. There may be a job: look for it, do not resubmit."""


class JobNotFound(SlurmError):
    """No run or job matches the selector."""


class TransportError(DtslurmError):
    """The connection, or a command on it, failed."""

    exit_code = 4
    transient = True


class HostUnavailable(TransportError):
    """No connection to the host could be made: name, network or server. No command was sent."""


class LoginRefused(HostUnavailable):
    """The host's key or the user's credentials were refused; an unchanged retry would fail again."""

    transient = False


class CommandNotFound(TransportError):
    """The program is not installed on that host."""

    transient = False


class CommandTimeout(TransportError):
    """The command did not end within its time limit; its effects are unknown."""


class StoreError(DtslurmError):
    """A file could not be written or read: the disk is full or read-only, or permission is denied."""

    exit_code = 5


class JobFailed(DtslurmError):
    """The job itself failed; ``code`` is the exit code that ``--wait`` returns."""

    def __init__(self, message: str, *, code: int, evidence: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message, evidence=evidence, hint=hint)
        self.code = code
