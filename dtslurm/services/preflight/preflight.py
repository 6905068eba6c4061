"""What can be seen to be wrong on the cluster before a job is queued: one command, all problems at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from dtslurm.errors import CommandNotFound
from dtslurm.model.jobs.job import JobSpec, Submission
from dtslurm.scheduler.slurm_client import failure
from dtslurm.services.preflight import associations, interpreter, quota
from dtslurm.services.preflight.containers import unpulled
from dtslurm.services.request import staging
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.slurm import commands
from dtslurm.slurm.parse_errors import Trouble, cannot_run, trouble, words

_LEAST_FREE_KIB = 10 * 1024
_NO_ANSWER = {Trouble.LOST, Trouble.NOT_SENT, Trouble.AUTH, Trouble.SETUP}
_CLOCK_OFF_S = 60.0  # munge refuses credentials of clocks that differ by 5 minutes

# For a shell with ``$root``, which becomes the folder nearest to it that is there. Without any size, a file
# system is none for files (/proc), or does not tell: that is not full. In an ``open`` folder everybody may
# rename what is in it, and put a script in place of a run's.
ROOT_LOOK = """\
asked=$root
while [ ! -e "$root" ] && [ "$root" != / ]; do root=$(dirname "$root"); done
[ -d "$root" ] && [ -w "$root" ] || printf 'unwritable=%s\\n' "$root"
printf 'free=%s\\n' "$(df -Pk "$root" 2>/dev/null | awk 'NR == 2 && $2 > 0 { print $4 }')"
[ "$asked" = "$root" ] &&
  find "$root/." -prune ! -user root ! -user "$(id -u)" -exec printf 'foreign=yes\\n' \\;
place=$(cd "$root" 2>/dev/null && pwd -P)
while [ -n "$place" ]; do
  find "$place/." -prune -perm -0002 ! -perm -1000 -exec printf 'open=%s\\n' "$place" \\;
  place=${place%/*}
done
"""
IN_AN_OPEN_FOLDER = (
    "every user there may swap the files of runs: {} is writable by all, without the sticky bit"
)
# Arguments: the run directory, then pairs of a test's letter and a path.
_LOOK = f"""\
root=$1
shift
{ROOT_LOOK}\
printf 'files=%s\\n' "$(df -Pi "$root" 2>/dev/null | awk 'NR == 2 {{ print $4 }}')"
printf 'clock=%s\\n' "$(date +%s)"
while [ "$#" -gt 1 ]; do
  test "-$1" "$2" || printf 'missing=%s%s\\n' "$1" "$2"
  shift 2
done
"""


class PreflightReport(NamedTuple):
    """What the preflight found.

    Attributes:
        refusals: why the job cannot be submitted at all; without the preflight the submission would fail.
        problems: why the job would fail once it starts, or Slurm may refuse it.
        notices: what the user should know.
    """

    refusals: list[str]
    problems: list[str]
    notices: list[str]


def preflight(context: Context, cluster: ActiveCluster, submission: Submission) -> PreflightReport:
    """Return what is wrong with the cluster or with the submission there.

    Raises:
        TransportError: the cluster cannot be reached.
        SlurmUnavailable: Slurm does not answer.
    """
    before = context.clock()
    needed = [*_needed(submission.spec, cluster), *unpulled(submission, cluster)]
    pairs = [word for letter, path, _ in needed for word in (letter, path)]
    slurm = cluster.profile.scheduler == "slurm"
    said = associations.kept(context, cluster) if slurm else None
    look = _LOOK + ("" if context.dry_run else interpreter.look(submission.spec, cluster))
    look += associations.LOOK if slurm and said is None else ""
    look += quota.LOOK if cluster.remote else ""  # here the disk itself says so, a moment later
    answer = cluster.transport.run(["sh", "-c", look, "sh", submission.run_dir, *pairs], timeout=60)
    after = context.clock()
    refusals: list[str] = []
    problems: list[str] = []
    notices: list[str] = []
    found: dict[str, str] = {}
    writable = True
    for line in answer.stdout.splitlines():
        key, _, value = line.partition("=")
        if key == "missing":
            problems += [text for letter, path, text in needed if (letter + path) == value]
        elif key == "unwritable" and cluster.remote:
            writable = False
            refusals.append(f"the run root cannot be written to: {value}")
        elif key == "open" and cluster.remote:
            refusals.append(IN_AN_OPEN_FOLDER.format(value))
        else:
            found[key] = value
    problems += interpreter.problems(submission.spec, found.get("absent", ""))
    problems += staging.sizes(cluster, submission.spec)
    if cluster.remote:
        # What cannot be written to has no room to tell of: /proc has none at all.
        refusals += _space(found, submission.run_dir) if writable else ()
        refusals += quota.problems(answer.stdout)
    notices += quota.notices(answer.stdout)
    notices += _clock(found.get("clock", ""), before, after)
    if slurm:
        said = associations.keep_limits(context, cluster, answer.stdout) if said is None else said
        problems += associations.problems(context, cluster, submission, said)
        refused, seen = _dry_run(cluster, submission)
        refusals += refused
        notices += seen
    return PreflightReport(refusals, problems, notices)


def _needed(spec: JobSpec, cluster: ActiveCluster) -> Iterator[tuple[str, str, str]]:
    """Yield (test, path, what to say without it) of what must be there when the job starts."""
    where = f"on {cluster.transport.host}" if cluster.remote else "here"
    if "/code/" not in f"{spec.work_dir}/":
        yield "d", spec.work_dir, f"there is no folder {spec.work_dir} {where} to run in"
        if cluster.remote and not spec.module and spec.script:
            script = str(PurePosixPath(spec.work_dir) / spec.script)
            yield "f", script, f"there is no script {script} {where}"
    if spec.activate and not spec.container:
        yield "d", spec.activate, f"there is no environment {spec.activate} {where}"
    if spec.python.startswith("/") and not spec.container:
        yield "x", spec.python, f"there is no interpreter {spec.python} {where}"
    if not cluster.remote:
        return  # the image and its mounts were looked for already
    if spec.container and spec.container.startswith("/"):
        yield "e", spec.container, f"no such image {where}: {spec.container}"
    for mount in spec.container_mounts if spec.container else ():
        source = mount.partition(":")[0]
        if source.startswith("/"):
            yield "e", source, f"--container-mount {mount}: there is no {source} {where}"


def _space(found: dict[str, str], run_dir: str) -> Iterator[str]:
    free, files = found.get("free", ""), found.get("files", "")
    if free.isdecimal() and int(free) < _LEAST_FREE_KIB:
        yield f"the file system of {run_dir} is full: {int(free)} KiB are free"
    if files.isdecimal() and 0 < int(files) < 100:
        yield f"the file system of {run_dir} takes only {files} more files"


def _clock(there: str, before: float, after: float) -> Iterator[str]:
    """Tell of a clock that differs; what the two machines record cannot be put in order then."""
    if not there.isdecimal():
        return
    off = int(there) - (before + after) / 2
    if abs(off) > _CLOCK_OFF_S:
        yield f"the cluster's clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} this machine's"


def _dry_run(cluster: ActiveCluster, submission: Submission) -> tuple[list[str], list[str]]:
    """Let Slurm itself judge the script; what only keeps it waiting is no problem.

    Raises:
        SlurmUnavailable: it does not answer: a request to queue the job could be lost on its way, too.
    """
    script = submission.script.encode("utf-8", "surrogateescape")
    try:
        answer = cluster.transport.run(commands.test_only(), stdin=script, timeout=60)
    except CommandNotFound:
        return [], []  # told by whoever submits
    if answer.ok:
        return [], []
    if trouble(answer.stderr) in _NO_ANSWER:
        raise failure(answer)
    said = words(answer.stderr)
    if cannot_run(answer.stderr):
        return [f"sbatch --test-only: {line}" for line in said], []
    return [], [f"sbatch --test-only: {line}" for line in said]
