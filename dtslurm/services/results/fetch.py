"""Download files of a run from its cluster: resumable, with a check of every file's SHA-256."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from dtslurm.errors import JobNotFound, RequestInvalid, StoreError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.values import dataclass
from dtslurm.presentation.quantities import pluralize
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.login_node import find_remote_python
from dtslurm.store import pull
from dtslurm.store.pull import Copied, PullSpec, copy
from dtslurm.store.rundir import RunDir
from dtslurm.transport.deletion import remove
from dtslurm.worker.delivery.code_files import LIST

_ONLY_BY_NAME = ("claim", LIST)


@dataclass(frozen=True)
class SkippedFiles:
    """Files that the request covers but that were not downloaded.

    Attributes:
        kind: ``snapshot``, ``byte_code``, ``not_files``, ``secrets``, ``hidden``, or ``shared`` (by the tasks
            of an array).
        files: number of files.
        reason: what the files are, and why they were left out.
        names: paths below the run directory, only for some kinds; at most the first hundred.
    """

    kind: str
    files: int
    reason: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fetched:
    """A finished download: the local folder, its new or changed files, and the transferred bytes."""

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
    """Copy files of a run into ``target``, by default a folder named like the run directory.

    Only new and changed content is transferred, so an interrupted fetch can be resumed. The SHA-256 of every
    file is compared with that of the original.

    Args:
        patterns: patterns of paths below the run directory, such as ``checkpoints/*``; ``*`` also matches
            slashes, and a folder matches everything in it. Without patterns, everything is fetched except
            byte code and the unchanged code snapshot. The values of ``--secret`` are never fetched.
        target: if this folder contains other files already, no file with a path component that begins with a
            dot is fetched into it: a compromised login node could send one that runs code, such as
            ``.git/config``.
        task: array task whose folder the patterns are relative to.

    Raises:
        RequestInvalid: the secrets are requested, or the folder is the run directory itself.
        JobNotFound: the run directory is gone, or no file in it matches.
        StoreError: the local disk cannot be written, or a received file differs from its original.
        TransportError: the connection failed; the same command resumes the fetch.
    """
    folder = target or context.cwd / Path(record.run_dir).name
    if folder.resolve() == Path(record.run_dir):
        raise RequestInvalid([f"the run directory is already at {folder}"])
    if any(pattern.strip("/") in {RunDir.SECRETS, RunDir.NOTIFY} for pattern in patterns):
        raise RequestInvalid(
            [
                (
                    "the files secrets and notify.json are not downloaded: they hold the values of --secret "
                    "and --notify, which stay on the cluster"
                )
            ]
        )
    run_patterns = _run_patterns(task, patterns)
    spec = PullSpec(
        record.run_dir,
        folder,
        tuple(expanded for pattern in run_patterns or ["*"] for expanded in _file_and_folder(pattern)),
        skip=(
            RunDir.SECRETS,
            RunDir.NOTIFY,
            *((RunDir.RECORD,) if record.mirror else ()),
            *(name for name in _ONLY_BY_NAME if not _is_named(name, run_patterns)),
        ),
        outputs_only=not _is_named("code", run_patterns),
        hidden=_is_own_folder(folder, record),
    )
    result = _copy(context, record, spec, progress)
    for path in result.mismatched:  # the file changed during the transfer, or the local copy was another file
        remove(path, within=folder)
    second_result = _copy(context, record, spec, progress) if result.mismatched else Copied()
    if second_result.mismatched:
        names = ", ".join(str(path) for path in second_result.mismatched)
        raise StoreError(
            f"the downloaded copy differs from the file on the cluster: {names}",
            hint="the run may still be writing them; try again later",
        )
    if record.run_dir in result.unreadable:
        raise JobNotFound(
            f"the run directory {record.run_dir} no longer exists: {result.unreadable[record.run_dir]}"
        )
    if result.unreadable:
        raise StoreError(
            "some files cannot be read on the cluster",
            evidence=[f"{path}: {why}" for path, why in result.unreadable.items()],
        )
    unsent_files = result.left.get(0, pull.UnsentFiles())
    record_files = _write_record(context, record, spec, folder)
    if not (result.source_files or unsent_files.hidden or record_files is not None):
        raise JobNotFound(
            f"no file in {record.run_dir} matches {' '.join(run_patterns) or '*'}",
            hint="write patterns for paths below the run directory, such as 'checkpoints/*'",
        )
    left_out = _describe_unsent(unsent_files, record, shared=task is not None and not patterns)
    files = tuple(dict.fromkeys([*result.files, *second_result.files, *(record_files or ())]))
    return Fetched(folder, files, result.bytes + second_result.bytes, tuple(left_out))


def _write_record(context: Context, record: JobRecord, spec: PullSpec, folder: Path) -> list[Path] | None:
    """Write this machine's record of a remote run into the folder if a pattern matches it.

    The login node's copy is not trusted: a resubmission from the folder runs the command in the record.

    Returns:
        The file if it is new or changed; None if no pattern matches it or there is no record.
    """
    if not record.mirror or not any(fnmatchcase(RunDir.RECORD, pattern) for pattern in spec.patterns):
        return None
    try:
        content = RunDir(Path(record.mirror)).record_path.read_bytes()
    except OSError:
        return None
    target = folder / RunDir.RECORD
    if target.is_file() and target.read_bytes() == content:
        return []
    context.transport.put(content, str(target))
    return [target]


def _describe_unsent(
    unsent_files: pull.UnsentFiles, record: JobRecord, *, shared: bool
) -> Iterator[SkippedFiles]:
    """Describe the files left out; ``shared`` includes files that array tasks wrote in ``code/``."""
    if unsent_files.snapshot:
        reason = (
            f"{pluralize(unsent_files.snapshot, 'file')} of the snapshot in code/, unchanged since the "
            "submission; the pattern 'code/*' downloads all of code/"
        )
        yield SkippedFiles("snapshot", unsent_files.snapshot, reason)
    if unsent_files.byte_code:
        reason = (
            f"{pluralize(unsent_files.byte_code, 'file')} of byte code in code/, which Python creates again"
        )
        yield SkippedFiles("byte_code", unsent_files.byte_code, reason)
    if unsent_files.not_files:
        reason = (
            f"links, pipes and sockets ({unsent_files.not_files}), because only regular files are downloaded"
        )
        yield SkippedFiles("not_files", unsent_files.not_files, reason, unsent_files.names)
    if RunDir.SECRETS in unsent_files.skipped:
        reason = "the values of --secret, which stay on the cluster"
        yield SkippedFiles("secrets", 1, reason, (RunDir.SECRETS,))
    if unsent_files.hidden:
        reason = (
            f"{pluralize(unsent_files.hidden, 'hidden file')}: they are not written to a folder that already "
            "contained other files; without -o they are downloaded, except .git, whose configuration "
            "can run commands"
        )
        yield SkippedFiles("hidden", unsent_files.hidden, reason, unsent_files.hidden_names)
    if shared and unsent_files.outputs:
        reason = (
            f"{pluralize(unsent_files.outputs, 'file')} that the array tasks wrote to code/, which they "
            f"share; dtslurm fetch {record.job_id} downloads them"
        )
        yield SkippedFiles("shared", unsent_files.outputs, reason)


def _is_own_folder(folder: Path, record: JobRecord) -> bool:
    """Return whether a local folder is only for this run: it has the run's name, or is new or empty."""
    has_run_name = folder.name == PurePosixPath(record.run_dir).name
    return has_run_name or not folder.exists() or not any(folder.iterdir())


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    return any(pattern.startswith(name) for pattern in patterns)


def _run_patterns(task: str | None, patterns: Sequence[str]) -> Sequence[str]:
    """Convert patterns relative to an array task's folder into patterns relative to the run directory."""
    if task is None:
        return patterns
    return [f"tasks/{task}/{pattern.strip('/')}" for pattern in patterns] or [
        f"tasks/{task}",
        f"logs/batch-{task}.log",
    ]


def _file_and_folder(pattern: str) -> tuple[str, str]:
    path = pattern.strip("/")
    return path, f"{path}/*"


def _copy(
    context: Context, record: JobRecord, spec: PullSpec, progress: Callable[[Path, int, int], None]
) -> Copied:
    cluster = context.cluster_of(record)
    python = find_remote_python(context, cluster) if cluster.remote else sys.executable
    return copy(cluster.transport, [spec], python=python, digests=True, progress=progress)
