"""Hands work to other programs: logs to a pager or an editor, reports to files, runs to the queue.

Modules that write reports or submit runs are imported on first use, so that the job list opens sooner.
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
from dtslurm.worker.lib.rank_files import RANK_LOG, find_node_log

_MAX_FILE_NAMES = 1000
DEMO_MODULE = "dtslurm.dashboard.actions.demo"


@dataclass(frozen=True)
class Opener:
    """A kind of program that opens a file.

    Attributes:
        name: the name of this kind in messages.
        variables: environment variables that name the program; the first variable that is set is used.
        fallbacks: programs to try if no variable is set or its program is not installed.
        remote: shell expression that starts the program on a login node.
    """

    name: str
    variables: tuple[str, ...]
    fallbacks: tuple[str, ...]
    remote: str


PAGER = Opener("pager", ("PAGER",), ("less", "more"), "${PAGER:-less}")
EDITOR = Opener("editor", ("VISUAL", "EDITOR"), ("vi", "nano"), "${VISUAL:-${EDITOR:-vi}}")


def find_program(
    opener: Opener,
    env: Mapping[str, str] = os.environ,
    find_executable: Callable[[str], str | None] = shutil.which,
) -> list[str]:
    """Return the command of the user's program of this kind, or of an installed fallback.

    Raises:
        CommandNotFound: neither the user's program nor a fallback is installed.
    """
    setting = next(((name, env[name]) for name in opener.variables if env.get(name, "").strip()), None)
    if setting is not None:
        try:
            command = shlex.split(setting[1])
        except ValueError:
            command = []
        if command and find_executable(command[0]):
            return command
    fallback = next((name for name in opener.fallbacks if find_executable(name)), None)
    if fallback is not None:
        return [fallback]
    variable = opener.variables[-1]
    evidence = [f"${setting[0]} is {setting[1]!r}, which is no program here"] if setting is not None else []
    raise CommandNotFound(
        f"there is no {opener.name} on this machine: neither {' nor '.join(opener.fallbacks)} is installed",
        evidence=evidence,
        hint=f"set ${variable} to a program that is installed",
    )


# If the rank has no log of its own, $1 becomes the log of its node, named after the node's first rank.
_FIND_NODE_LOG = """\
if [ ! -e "$1" ]; then
  rank=${1##*/rank-} first=-1
  for log in "${1%/*}"/ranks-*.log; do
    number=${log##*/ranks-} number=${number%.log}
    [ "$number" -le "${rank%.log}" ] && [ "$number" -gt "$first" ] && first=$number
  done 2>/dev/null
  [ "$first" -lt 0 ] || set -- "${1%/*}/ranks-$first.log"
fi
"""


def log_path(record: JobRecord, rank: int, attempt: int, task: str | None) -> str:
    """Return the path of a rank's log in an attempt, on the host that stores the run directory."""
    folder = record.run_dir if task is None else f"{record.run_dir}/tasks/{task}"
    return f"{folder}/logs/{attempt}/rank-{rank}.log"


def open_log(context: Context, record: JobRecord, path: str, opener: Opener) -> int:
    """Open a log in this terminal, on the host that stores it, and return the program's exit code.

    Raises:
        StoreError: the log does not exist.
        CommandNotFound: no program of this kind is installed.
        HostUnavailable, LoginRefused, TransportError: a terminal on the login node cannot be opened.
    """
    transport = context.cluster_of(record).transport
    if not transport.local:
        program = f'{_FIND_NODE_LOG}exec {opener.remote} "$1"'
        return run_interactive(transport, ["sh", "-c", program, "sh", path])
    rank = RANK_LOG.fullmatch(Path(path).name)
    if rank and not Path(path).is_file():
        node_log = find_node_log(str(Path(path).parent), int(rank.group(1)))
        path = path if node_log is None else node_log.path
    if not Path(path).is_file():
        raise StoreError(f"the rank has no log: there is no {path}")
    return run_interactive(transport, [*find_program(opener), path])


def write_report(context: Context, record: JobRecord, *, attempt: int | None, task: str | None) -> Path:
    """Write the report of ``dtslurm report`` to a new file in the current folder and return its path.

    Raises:
        RequestInvalid: the run has nothing to report yet.
        TransportError: the run directory cannot be read on its host.
        StoreError: the file cannot be written.
    """
    from dtslurm.services.observe.report import report
    from dtslurm.services.submit.sweep_report import report_sweep

    if record.sweep and task is None and attempt is None:
        text = report_sweep(context, record)
    else:
        text = report(context, record, attempt=attempt, task=task)
    job_id = record.job_id if task is None else f"{record.job_id}_{task}"
    return write_new(context.cwd, f"{record.name}-{job_id}".replace("/", "-"), text)


def write_new(folder: Path, stem: str, text: str) -> Path:
    """Write ``STEM.html`` and return its path; if it exists, write ``STEM-2.html`` and so on.

    Raises:
        StoreError: the file cannot be written.
    """
    for number in range(1, _MAX_FILE_NAMES):
        path = folder / f"{stem}{'' if number == 1 else f'-{number}'}.html"
        try:
            with path.open("x", encoding="utf-8", errors="surrogateescape") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        return path
    raise StoreError(f"cannot write {folder / stem}.html: there are {_MAX_FILE_NAMES} files of that name")


def resubmit(selector: str) -> tuple[JobRecord, Sequence[str]]:
    """Resubmit a run as ``dtslurm resubmit`` does; return the new record and its notices.

    Raises:
        DtslurmError: as `prepare_resubmission` and `submit` of the services.
    """
    from dtslurm.services.submit.resubmit import prepare_resubmission
    from dtslurm.services.submit.submit import submit

    context, prepared = prepare_resubmission(selector, from_checkpoint=False)
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
