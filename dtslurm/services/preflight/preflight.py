"""Checks on the cluster before a job is submitted: one command that reports all problems at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from dtslurm.errors import CommandNotFound
from dtslurm.model.jobs.job import Submission
from dtslurm.presentation.quantities import format_bytes
from dtslurm.scheduler.slurm_client import failure
from dtslurm.services.preflight import associations, interpreter, quota
from dtslurm.services.preflight.containers import specs_by_option, unpulled
from dtslurm.services.request import launcher_files, staging
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.login_node import explain_local_path
from dtslurm.slurm import commands
from dtslurm.slurm.parse_errors import Trouble, can_never_run, classify_error, distinct_lines

_MIN_FREE_KIB = 10 * 1024
_UNAVAILABLE = {Trouble.LOST, Trouble.NOT_SENT, Trouble.AUTH, Trouble.SETUP}
_MAX_CLOCK_OFFSET_S = 60.0  # munge rejects credentials if clocks differ by 5 minutes

# For a shell with ``$root``, which becomes its nearest existing parent folder. A file system of size 0 stores
# no files (/proc) or does not report its size; it does not count as full. In an ``open`` folder every user
# may rename the entries, and thereby replace a run's script.
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
    "every user could replace the files of your runs: {} is writable by all users and has no sticky bit"
)
# Arguments: the run directory, then pairs: the letter of a ``test`` option and a path.
_CHECK_SCRIPT = f"""\
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
    """The findings of the preflight.

    Attributes:
        refusals: why the job cannot be submitted; without the preflight the submission would fail.
        problems: why the job would fail after it starts, or why Slurm may refuse it.
        notices: messages to the user.
    """

    refusals: list[str]
    problems: list[str]
    notices: list[str]


def preflight(context: Context, cluster: ActiveCluster, submission: Submission) -> PreflightReport:
    """Check the cluster and the submission on it.

    Raises:
        TransportError: the cluster cannot be reached.
        SlurmUnavailable: Slurm does not answer.
    """
    started_at = context.clock()
    path_tests = [
        *_list_needed_paths(submission, cluster),
        *launcher_files.list_needed_files(submission, _describe_host(cluster)),
        *unpulled(submission, cluster),
    ]
    pairs = [word for letter, path, _ in path_tests for word in (letter, path)]
    is_slurm = cluster.profile.scheduler == "slurm" and submission.allocation is None
    limits = associations.read_cached_limits(context, cluster) if is_slurm else None
    script = _CHECK_SCRIPT + ("" if context.dry_run else interpreter.look(submission.spec, cluster))
    script += associations.QUERY if is_slurm and limits is None else ""
    script += quota.QUERY if cluster.remote else ""  # on this machine the write itself fails, a moment later
    answer = cluster.transport.run(["sh", "-c", script, "sh", submission.run_dir, *pairs], timeout=60)
    ended_at = context.clock()
    refusals: list[str] = []
    problems: list[str] = []
    notices: list[str] = []
    fields: dict[str, str] = {}
    is_writable = True
    for line in answer.stdout.splitlines():
        key, _, value = line.partition("=")
        if key == "missing":
            explanation = explain_local_path(context, cluster, value[1:])
            problems += [text + explanation for letter, path, text in path_tests if (letter + path) == value]
        elif key == "unwritable" and cluster.remote:
            is_writable = False
            refusals.append(f"the run root is not writable: {value}")
        elif key == "open" and cluster.remote:
            refusals.append(IN_AN_OPEN_FOLDER.format(value))
        else:
            fields[key] = value
    problems += interpreter.problems(submission.spec, fields.get("absent", ""))
    problems += staging.sizes(cluster, submission.spec)
    if cluster.remote:
        # Free space means nothing in a folder that cannot be written: /proc has none at all.
        refusals += _space(fields, submission.run_dir) if is_writable else ()
        refusals += quota.problems(answer.stdout)
    notices += quota.notices(answer.stdout)
    notices += _clock(fields.get("clock", ""), started_at, ended_at)
    if is_slurm:
        limits = associations.keep_limits(context, cluster, answer.stdout) if limits is None else limits
        problems += associations.problems(context, cluster, submission, limits)
        dry_run_refusals, dry_run_notices = _test_submission(cluster, submission)
        refusals += dry_run_refusals
        notices += dry_run_notices
    return PreflightReport(refusals, problems, notices)


def _list_needed_paths(submission: Submission, cluster: ActiveCluster) -> Iterator[tuple[str, str, str]]:
    """Yield (test, path, problem if the test fails) for each path that must exist when the job starts."""
    spec = submission.spec
    host_text = _describe_host(cluster)
    if not submission.runs_from_snapshot:
        yield "d", spec.work_dir, f"the working directory {spec.work_dir} does not exist {host_text}"
        script = PurePosixPath(spec.work_dir) / spec.script
        is_sent = PurePosixPath(submission.run_dir) in script.parents
        if cluster.remote and not spec.module and spec.script and not is_sent:
            yield "f", str(script), f"the script {script} does not exist {host_text}"
    if spec.activate and not spec.container:
        yield "d", spec.activate, f"the environment {spec.activate} does not exist {host_text}"
    if spec.python.startswith("/") and not spec.container:
        yield "x", spec.python, f"the interpreter {spec.python} does not exist {host_text}"
    if not cluster.remote:
        return  # the image and its mounts were checked already
    images = [image_spec.container or "" for image_spec in specs_by_option(spec).values()]
    for image in images:
        if image.startswith("/"):
            yield "e", image, f"the image does not exist {host_text}: {image}"
    for mount in spec.container_mounts if images else ():
        source = mount.partition(":")[0]
        if source.startswith("/"):
            yield "e", source, f"--container-mount {mount}: {source} does not exist {host_text}"


def _describe_host(cluster: ActiveCluster) -> str:
    return f"on {cluster.transport.host}" if cluster.remote else "here"


def _space(fields: dict[str, str], run_dir: str) -> Iterator[str]:
    free, files = fields.get("free", ""), fields.get("files", "")
    if free.isdecimal() and int(free) < _MIN_FREE_KIB:
        yield f"the file system of {run_dir} is full: {format_bytes(int(free) * 1024)} are free"
    if files.isdecimal() and 0 < int(files) < 100:
        yield f"the file system of {run_dir} has room for only {files} more files"


def _clock(remote_time: str, started_at: float, ended_at: float) -> Iterator[str]:
    """Yield a notice if the clocks differ: the events of the two machines then have no common order."""
    if not remote_time.isdecimal():
        return
    gap = int(remote_time) - (started_at + ended_at) / 2
    if abs(gap) > _MAX_CLOCK_OFFSET_S:
        yield f"the cluster's clock is {abs(gap):.0f} s {'ahead of' if gap > 0 else 'behind'} this machine's"


def _test_submission(cluster: ActiveCluster, submission: Submission) -> tuple[list[str], list[str]]:
    """Let Slurm check the script with ``sbatch --test-only``; return (refusals, notices).

    A reason that only keeps the job pending is a notice.

    Raises:
        SlurmUnavailable: Slurm does not answer, so the request to submit the job could be lost, too.
    """
    script = submission.script.encode("utf-8", "surrogateescape")
    try:
        answer = cluster.transport.run(commands.test_only(), stdin=script, timeout=60)
    except CommandNotFound:
        return [], []  # the submission itself reports the missing sbatch
    if answer.ok:
        return [], []
    if classify_error(answer.stderr) in _UNAVAILABLE:
        raise failure(answer)
    messages = distinct_lines(answer.stderr)
    if can_never_run(answer.stderr):
        return [f"sbatch --test-only: {line}" for line in messages], []
    return [], [f"sbatch --test-only: {line}" for line in messages]
