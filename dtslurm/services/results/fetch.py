"""Brings files of a run from where it ran: resumable, and checked against what is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from dtslurm.errors import JobNotFound, RequestInvalid, StoreError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.units import pluralize
from dtslurm.model.values import dataclass
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.login_node import far_python
from dtslurm.store import pull
from dtslurm.store.pull import Copied, PullSpec, copy
from dtslurm.store.rundir import RunDir
from dtslurm.transport.deletion import remove
from dtslurm.worker.delivery.code_files import LIST

_LEFT_UNASKED = ("claim", LIST)


@dataclass(frozen=True)
class SkippedFiles:
    """Files that a pattern matches, or that belong to what was asked for, and that were not brought.

    Attributes:
        kind: ``snapshot``, ``byte_code``, ``not_files``, ``secrets``, ``hidden``, or ``shared`` by the tasks
            of an array.
        files: how many there are.
        reason: what they are, and why they were left out.
        names: paths below the run directory, where they matter; of many the first hundred.
    """

    kind: str
    files: int
    reason: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fetched:
    """What was brought: the folder here, its new or changed files, and the bytes that travelled."""

    folder: Path
    files: tuple[Path, ...]
    bytes: int
    left_out: tuple[SkippedFiles, ...] = ()


def fetch(
    context: Context,
    record: JobRecord,
    patterns: Sequence[str],
    target: Path | None,
    progress: Callable[[Path, int, int], None] = lambda *_: None,
    task: str | None = None,
) -> Fetched:
    """Copy files of a run into ``target`` (a folder of the run's name here by default).

    What is there already is kept and only what is new travels, so a fetch that was cut off goes on where it
    stopped. Every file's SHA-256 is compared with that of the file there.

    Args:
        patterns: of paths below the run directory, such as ``checkpoints/*``; ``*`` matches slashes too,
            and a folder stands for all in it. None given: everything but the code as it was submitted, and
            byte code; what the job wrote or changed there comes. No pattern brings the values of
            ``--secret``.
        target: into a folder that holds files already no file comes whose path has a name that begins with a
            dot: a login node that is compromised could name one that runs code, such as ``.git/config``.
        task: number of an array's task, to whose folder the patterns belong then.

    Raises:
        RequestInvalid: the secrets are asked for, or the folder is the run directory itself.
        JobNotFound: the run directory is gone, or nothing in it matches.
        StoreError: the disk here refused, or a file does not arrive as it is there.
        TransportError: the link failed; the same command goes on where it stopped.
    """
    folder = target or context.cwd / Path(record.run_dir).name
    if folder.resolve() == Path(record.run_dir):
        raise RequestInvalid([f"the run is in {folder} already"])
    if any(pattern.strip("/") == RunDir.SECRETS for pattern in patterns):
        raise RequestInvalid(
            ["secrets is not fetched: it holds the values of --secret, which stay where the job runs"]
        )
    below = _patterns_of(task, patterns)
    wanted = PullSpec(
        record.run_dir,
        folder,
        tuple(found for pattern in below or ["*"] for found in _both(pattern)),
        skip=(
            RunDir.SECRETS,
            *((RunDir.RECORD,) if record.mirror else ()),
            *(name for name in _LEFT_UNASKED if not _is_named(name, below)),
        ),
        outputs_only=not _is_named("code", below),
        hidden=_is_own_folder(folder, record),
    )
    copied = _copy(context, record, wanted, progress)
    for path in copied.wrong:  # it changed while it travelled, or the copy here was another file
        remove(path, within=folder)
    again = _copy(context, record, wanted, progress) if copied.wrong else Copied()
    if again.wrong:
        names = ", ".join(str(path) for path in again.wrong)
        raise StoreError(
            f"{names}: what arrived is not what is there", hint="is the run still writing it? try again later"
        )
    if record.run_dir in copied.gone:
        raise JobNotFound(f"the run directory {record.run_dir} is gone: {copied.gone[record.run_dir]}")
    if copied.gone:
        raise StoreError(
            "some files cannot be read there",
            evidence=[f"{path}: {why}" for path, why in copied.gone.items()],
        )
    left = copied.left.get(0, pull.UnsentFiles())
    own = _bring_record(context, record, wanted, folder)
    if not (copied.seen or left.hidden or own is not None):
        raise JobNotFound(
            f"nothing in {record.run_dir} matches {' '.join(below) or '*'}",
            hint="patterns are of paths below the run directory, such as 'checkpoints/*'",
        )
    left_out = _describe(left, record, shared=task is not None and not patterns)
    files = tuple(dict.fromkeys([*copied.files, *again.files, *(own or ())]))
    return Fetched(folder, files, copied.bytes + again.bytes, tuple(left_out))


def _bring_record(context: Context, record: JobRecord, wanted: PullSpec, folder: Path) -> list[Path] | None:
    """Write the record of a run elsewhere, as this machine has it, into the folder if it is wanted.

    That of the login node could say what a resubmission of the folder runs here.

    Returns:
        The file if it is new or changed; None if it is not wanted or not known.
    """
    if not record.mirror or not any(fnmatchcase(RunDir.RECORD, pattern) for pattern in wanted.patterns):
        return None
    try:
        data = RunDir(Path(record.mirror)).record_path.read_bytes()
    except OSError:
        return None
    target = folder / RunDir.RECORD
    if target.is_file() and target.read_bytes() == data:
        return []
    context.transport.put(data, str(target))
    return [target]


def _describe(left: pull.UnsentFiles, record: JobRecord, *, shared: bool) -> Iterator[SkippedFiles]:
    """Yield what was left out in words; ``shared``: with what the tasks of an array wrote in ``code/``."""
    if left.snapshot:
        reason = (
            f"{pluralize(left.snapshot, 'file')} of the snapshot in code/, unchanged since the submission; "
            "the pattern 'code/*' brings all of code/"
        )
        yield SkippedFiles("snapshot", left.snapshot, reason)
    if left.byte_code:
        reason = f"{pluralize(left.byte_code, 'file')} of byte code in code/, which Python makes again"
        yield SkippedFiles("byte_code", left.byte_code, reason)
    if left.not_files:
        reason = f"links, pipes and sockets ({left.not_files}), as only regular files are brought"
        yield SkippedFiles("not_files", left.not_files, reason, left.names)
    if RunDir.SECRETS in left.skipped:
        reason = "the values of --secret, which stay where the job runs"
        yield SkippedFiles("secrets", 1, reason, (RunDir.SECRETS,))
    if left.hidden:
        reason = (
            f"{pluralize(left.hidden, 'hidden file')}: none comes into a folder that held other files "
            "before, nor ever a .git, whose configuration runs commands; without -o the others come"
        )
        yield SkippedFiles("hidden", left.hidden, reason, left.hidden_names)
    if shared and left.outputs:
        reason = (
            f"{pluralize(left.outputs, 'file')} that the tasks wrote in code/, which they share; "
            f"dtslurm fetch {record.job_id} brings them"
        )
        yield SkippedFiles("shared", left.outputs, reason)


def _is_own_folder(folder: Path, record: JobRecord) -> bool:
    """Whether a folder here holds files of the run alone: by its name, or as it is new or empty."""
    named = folder.name == PurePosixPath(record.run_dir).name
    return named or not folder.exists() or not any(folder.iterdir())


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    return any(pattern.startswith(name) for pattern in patterns)


def _patterns_of(task: str | None, patterns: Sequence[str]) -> Sequence[str]:
    """Return patterns of paths in the folder of an array's task as ones of paths in the run directory."""
    if task is None:
        return patterns
    return [f"tasks/{task}/{one.strip('/')}" for one in patterns] or [
        f"tasks/{task}",
        f"logs/batch-{task}.log",
    ]


def _both(pattern: str) -> tuple[str, str]:
    plain = pattern.strip("/")
    return plain, f"{plain}/*"


def _copy(
    context: Context, record: JobRecord, wanted: PullSpec, progress: Callable[[Path, int, int], None]
) -> Copied:
    cluster = context.cluster_of(record)
    python = far_python(context, cluster) if cluster.remote else sys.executable
    return copy(cluster.transport, [wanted], python=python, digests=True, progress=progress)
