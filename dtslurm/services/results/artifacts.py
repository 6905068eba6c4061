"""List, pin, prune and download the registered results (artifacts) of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from dtslurm.errors import RequestInvalid, StoreError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.values import dataclass
from dtslurm.remote.answers import interpret, is_plain_path
from dtslurm.services.results.fetch import fetch
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.remote_query import find_worker_host, query_worker
from dtslurm.worker import artifacts as register
from dtslurm.worker.lib.json_records import finite_number, whole_number

_Result = TypeVar("_Result")
_TIMEOUT_S = 3600.0  # the checksum of a large checkpoint takes long


@dataclass(frozen=True)
class Artifact:
    """One registered result of a run.

    Attributes:
        path: path relative to the run directory, or an absolute path.
        kind: ``checkpoint``, ``results`` (copied back from local disks) or ``output``.
        bytes: the present size; the registered size if the artifact no longer exists.
        sha256: hash of a file's content; for a folder, hash of the lines ``<sha256>  <path>`` of its files,
            sorted by path.
        there: whether the artifact still exists.
        problem: how the artifact differs from its registration, else empty.
        metrics: values that training registered with the artifact, such as the loss.
    """

    path: str
    kind: str
    bytes: int | None
    files: int | None
    sha256: str | None
    step: int | None
    time: float | None
    attempt: int | None
    there: bool
    pinned: bool
    problem: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)


def listing(context: Context, record: JobRecord, check: Sequence[str] = ()) -> list[Artifact]:
    """List a run's artifacts in the order of their registration.

    Args:
        check: paths of artifacts whose checksums are computed again and compared.

    Raises:
        RequestInvalid: the run directory is gone.
        TransportError: the host of the run directory cannot be reached.
    """
    return _query_artifacts(context, record, _artifact_parser("artifacts"), op="list", checksums=list(check))


def select_artifacts(artifacts: Sequence[Artifact], patterns: Sequence[str]) -> list[Artifact]:
    """Return the artifacts that match any pattern; the pattern ``latest`` means the newest checkpoint.

    Raises:
        RequestInvalid: a pattern matches no artifact.
    """
    artifacts_by_path: dict[str, Artifact] = {}
    problems = []
    for pattern in patterns:
        if pattern == "latest":
            checkpoints = [
                artifact for artifact in artifacts if artifact.kind == "checkpoint" and artifact.there
            ]
            matches = sorted(checkpoints, key=lambda artifact: (artifact.step or 0, artifact.time or 0))[-1:]
        else:
            path = pattern.rstrip("/")
            matches = [
                artifact
                for artifact in artifacts
                if artifact.path == path or fnmatchcase(artifact.path, path)
            ]
        if not matches:
            problems.append(f"no artifact matches {pattern!r}")
        artifacts_by_path.update((artifact.path, artifact) for artifact in matches)
    if problems:
        known_paths = ", ".join(artifact.path for artifact in artifacts[:8]) or "none"
        raise RequestInvalid(problems, hint=f"the artifacts are: {known_paths}")
    return list(artifacts_by_path.values())


def pin(context: Context, record: JobRecord, paths: Sequence[str], *, keep: bool) -> list[str]:
    """Pin artifacts if ``keep``, else unpin them; return the paths of all artifacts pinned afterwards."""
    op = "pin" if keep else "unpin"
    return _query_artifacts(
        context, record, lambda answer: list(map(str, answer["pinned"])), op=op, paths=list(paths)
    )


def prune(
    context: Context, record: JobRecord, keep: int, best: str | None, *, largest: bool, remove: bool
) -> list[Artifact]:
    """List the checkpoints that need not be kept, and remove them if ``remove``.

    The ``keep`` newest checkpoints are kept; with a metric ``best``, the ``keep`` best by it and the newest
    one instead. Pinned ones are always kept. The smallest value is the best unless ``largest``.
    """
    options = {"keep": keep, "best": best or "", "largest": largest, "remove": remove}
    return _query_artifacts(context, record, _artifact_parser("removed"), op="prune", **options)


def pull(
    context: Context,
    record: JobRecord,
    artifacts: Sequence[Artifact],
    target: Path,
    progress: Callable[[Path, int, int], None] = lambda *_: None,
) -> list[Path]:
    """Download artifacts into a local folder, verify their registered checksums, and return their paths.

    Raises:
        RequestInvalid: an artifact is outside the run directory, or no longer exists.
        StoreError: an artifact differs from its registration.
    """
    problems = [
        f"{artifact.path}: {artifact.problem or 'it no longer exists'}"
        for artifact in artifacts
        if not artifact.there
    ]
    problems += [
        (
            f"{artifact.path}: it is outside the run directory, and only files of the run directory are "
            "downloaded"
        )
        for artifact in artifacts
        if not is_plain_path(artifact.path)
    ]
    if problems:
        raise RequestInvalid(problems)
    if artifacts and target.resolve() != Path(record.run_dir):
        fetch(context, record, [artifact.path for artifact in artifacts], target, progress)
    paths = []
    for artifact in artifacts:
        path = target / artifact.path
        if not path.exists():
            raise StoreError(
                f"{path} was not downloaded: hidden files are not written to a folder that already "
                "contained files",
                hint="name a new folder with -o",
            )
        if artifact.sha256:
            sha256 = register.measure(str(path), checksum=True)["sha256"]
            if sha256 != artifact.sha256:
                raise StoreError(
                    f"{path} is not the registered file: its SHA-256 differs",
                    hint="find out what changed the file after it was registered; dtslurm artifacts show "
                    "--check compares the checksum on the cluster",
                )
        paths.append(path)
    return paths


def _artifact_parser(key: str) -> Callable[[Mapping[str, Any]], list[Artifact]]:
    return lambda answer: [_parse_artifact(row) for row in answer[key]]


def _parse_artifact(row: Mapping[str, Any]) -> Artifact:
    exists = bool(row.get("there"))
    registered, current = _text_or_none(row.get("sha256")), _text_or_none(row.get("now_sha256"))
    size = whole_number(row.get("bytes"))
    problem = "" if exists else "it no longer exists"
    if exists and size is not None and row.get("now_bytes") not in {None, size}:
        problem = f"its size is {row['now_bytes']} bytes now, not {size}"
    elif exists and registered and current and registered != current:
        problem = "its SHA-256 has changed"
    step, attempt, time = row.get("step"), row.get("attempt"), row.get("time")
    return Artifact(
        path=_parse_path(row["path"]),
        kind=str(row.get("kind") or "output"),
        bytes=whole_number(row.get("now_bytes", size)) if exists else size,
        files=whole_number(row.get("files")),
        sha256=registered or current,
        step=whole_number(step),
        time=finite_number(time),
        attempt=whole_number(attempt),
        there=exists,
        pinned=bool(row.get("pinned")),
        problem=problem,
        metrics=dict(row.get("metrics") or {}),
    )


def _parse_path(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"{value!r} is not a path")
    return value


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _query_artifacts(
    context: Context, record: JobRecord, decode: Callable[[Mapping[str, Any]], _Result], **request: Any
) -> _Result:
    host = find_worker_host(context, record)
    answer = query_worker(host, "artifacts", {"run_dir": record.run_dir, **request}, timeout=_TIMEOUT_S)
    if "refused" in answer:
        raise RequestInvalid([str(answer["refused"])])
    return interpret(answer, decode, host.transport.host)
