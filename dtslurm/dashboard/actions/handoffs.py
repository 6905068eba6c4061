"""What the dashboard hands over: a log to a pager or an editor, a report to a file, a run to the queue.

What writes reports and submits runs is imported when it is used: the list of runs opens sooner without.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dtslurm.errors import CommandNotFound, StoreError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.values import dataclass
from dtslurm.services.wiring.context import Context
from dtslurm.transport.interactive import run_interactive

_MOST_NAMES = 1000
DEMO_MODULE = "dtslurm.dashboard.actions.demo"


@dataclass(frozen=True)
class Opener:
    """A kind of program that opens a file.

    Attributes:
        what: its name for people.
        variables: the environment variables that name one, the first that is set counts.
        fallbacks: programs where none is named, or the named one is not there.
        remote: a shell's words that start one on a login node.
    """

    what: str
    variables: tuple[str, ...]
    fallbacks: tuple[str, ...]
    remote: str


PAGER = Opener("pager", ("PAGER",), ("less", "more"), "${PAGER:-less}")
EDITOR = Opener("editor", ("VISUAL", "EDITOR"), ("vi", "nano"), "${VISUAL:-${EDITOR:-vi}}")


def find_program(
    opener: Opener,
    env: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
) -> list[str]:
    """Return the command of the user's program of this kind, or of a fallback that is there.

    Raises:
        CommandNotFound: there is neither.
    """
    named = next(((name, env[name]) for name in opener.variables if env.get(name, "").strip()), None)
    if named is not None:
        try:
            command = shlex.split(named[1])
        except ValueError:
            command = []
        if command and which(command[0]):
            return command
    fallback = next((name for name in opener.fallbacks if which(name)), None)
    if fallback is not None:
        return [fallback]
    variable = opener.variables[-1]
    evidence = [f"${named[0]} is {named[1]!r}, which is no program here"] if named is not None else []
    raise CommandNotFound(
        f"there is no {opener.what} on this machine: neither {' nor '.join(opener.fallbacks)} is installed",
        evidence=evidence,
        hint=f"set ${variable} to a program that is installed",
    )


def log_path(record: JobRecord, rank: int, attempt: int, task: str | None) -> str:
    """Return where a rank's log of an attempt is on the machine with the run's files."""
    folder = record.run_dir if task is None else f"{record.run_dir}/tasks/{task}"
    return f"{folder}/logs/{attempt}/rank-{rank}.log"


def open_log(context: Context, record: JobRecord, path: str, opener: Opener) -> int:
    """Open a log at this terminal where it is, and return the program's exit code.

    Raises:
        StoreError: there is no such file.
        CommandNotFound: there is no such program.
        RequestInvalid, HostUnavailable, LoginRefused: no terminal on the login node could be opened.
    """
    transport = context.cluster_of(record).transport
    if not transport.local:
        return run_interactive(transport, ["sh", "-c", f'exec {opener.remote} "$1"', "sh", path])
    if not Path(path).is_file():
        raise StoreError(f"the rank has no log: there is no {path}")
    return run_interactive(transport, [*find_program(opener), path])


def write_report(context: Context, record: JobRecord, *, attempt: int | None, task: str | None) -> Path:
    """Write the page of ``dtslurm report`` to a new file in the current folder, and return its path.

    Raises:
        RequestInvalid: there is nothing to report yet.
        TransportError: the run's files could not be read where they are.
        StoreError: the file cannot be written.
    """
    from dtslurm.services.observe.report import report
    from dtslurm.services.submit.sweep_report import report_sweep

    if record.sweep and task is None and attempt is None:
        text = report_sweep(context, record)
    else:
        text = report(context, record, attempt=attempt, task=task)
    number = record.job_id if task is None else f"{record.job_id}_{task}"
    return write_new(context.cwd, f"{record.name}-{number}".replace("/", "-"), text)


def write_new(folder: Path, stem: str, text: str) -> Path:
    """Write ``STEM.html``, or ``STEM-2.html`` and so on where there is such a file, and return its path.

    Raises:
        StoreError: the disk refused.
    """
    for number in range(1, _MOST_NAMES):
        path = folder / f"{stem}{'' if number == 1 else f'-{number}'}.html"
        try:
            with path.open("x", encoding="utf-8", errors="surrogateescape") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        return path
    raise StoreError(f"cannot write {folder / stem}.html: there are {_MOST_NAMES} files of that name")


def resubmit(selector: str) -> tuple[JobRecord, Sequence[str]]:
    """Submit a run once more as ``dtslurm resubmit`` does; return its record and notes on it.

    Raises:
        DtslurmError: as `dtslurm.services.submit.resubmit.again` and `dtslurm.services.submit.submit.submit`.
    """
    from dtslurm.services.submit.resubmit import again
    from dtslurm.services.submit.submit import submit

    context, prepared = again(selector, from_checkpoint=False)
    return submit(context, prepared), prepared.submission.notices


def start_demo(context: Context) -> JobRecord:
    """Submit the demo to cluster ``local`` and return its record.

    Raises:
        DtslurmError: as `dtslurm.services.submit.submit.submit`.
    """
    from dtslurm.services.request.request import JobRequest
    from dtslurm.services.submit.prepare import prepare
    from dtslurm.services.submit.submit import submit

    request = JobRequest(
        script=DEMO_MODULE,
        module=True,
        cluster="local",
        job_name="demo",
        launcher="srun",
        ntasks_per_node=2,
        time="10",
        python=sys.executable,
    )
    return submit(context, prepare(context, request, standalone=False))
