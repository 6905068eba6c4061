"""A run's registered results: listed, pinned, pruned and brought here."""

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
from dtslurm.services.wiring.remote_query import ask, far_side
from dtslurm.worker import artifacts as register

_Result = TypeVar("_Result")
_TIMEOUT_S = 3600.0  # a checksum of a large checkpoint takes its time


@dataclass(frozen=True)
class Artifact:
    """One registered result.

    Attributes:
        path: below the run directory, or a full path.
        kind: ``checkpoint``, ``results`` (brought back from local disks) or ``output``.
        bytes: as it is now, or as it was registered if it is not there any more.
        sha256: of a file's content; of a folder's, over the lines ``<sha256>  <path>`` of its files by path.
        problem: in what it is not what was registered, empty if it is.
        metrics: what training told of it, such as the loss.
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
    """Return a run's artifacts in the order in which they were registered.

    Args:
        check: paths of those that are read whole, to compare their checksums.

    Raises:
        RequestInvalid: the run directory is gone.
        TransportError: it cannot be reached.
    """
    return _ask(context, record, _artifacts("artifacts"), op="list", checksums=list(check))


def chosen(found: Sequence[Artifact], patterns: Sequence[str]) -> list[Artifact]:
    """Return the artifacts that match any of the patterns; ``latest`` is the newest checkpoint.

    Raises:
        RequestInvalid: a pattern matches none.
    """
    picked: dict[str, Artifact] = {}
    wrong = []
    for pattern in patterns:
        if pattern == "latest":
            there = [one for one in found if one.kind == "checkpoint" and one.there]
            hits = sorted(there, key=lambda one: (one.step or 0, one.time or 0))[-1:]
        else:
            plain = pattern.rstrip("/")
            hits = [one for one in found if one.path == plain or fnmatchcase(one.path, plain)]
        if not hits:
            wrong.append(f"no artifact matches {pattern!r}")
        picked.update((one.path, one) for one in hits)
    if wrong:
        known = ", ".join(one.path for one in found[:8]) or "none"
        raise RequestInvalid(wrong, hint=f"there are: {known}")
    return list(picked.values())


def pin(context: Context, record: JobRecord, paths: Sequence[str], *, keep: bool) -> list[str]:
    """Pin artifacts, or let them go; return all that are pinned then."""
    op = "pin" if keep else "unpin"
    return _ask(context, record, lambda answer: list(map(str, answer["pinned"])), op=op, paths=list(paths))


def prune(
    context: Context, record: JobRecord, keep: int, best: str | None, *, largest: bool, remove: bool
) -> list[Artifact]:
    """Return the checkpoints that need not be kept, having removed them if asked to.

    Kept are the ``keep`` newest; with ``best``, a metric, the ``keep`` best by it and the newest one; and
    what is pinned. The smallest value is the best unless ``largest``.
    """
    options = {"keep": keep, "best": best or "", "largest": largest, "remove": remove}
    return _ask(context, record, _artifacts("removed"), op="prune", **options)


def pull(
    context: Context,
    record: JobRecord,
    wanted: Sequence[Artifact],
    target: Path,
    progress: Callable[[Path, int, int], None] = lambda *_: None,
) -> list[Path]:
    """Bring artifacts into a folder here and compare checksums with those registered; return where they are.

    Raises:
        RequestInvalid: one is not in the run directory, or is not there any more.
        StoreError: one is not what was registered.
    """
    wrong = [f"{one.path}: {one.problem or 'it is gone'}" for one in wanted if not one.there]
    wrong += [
        f"{one.path}: it is outside the run directory, from which files are brought"
        for one in wanted
        if not is_plain_path(one.path)
    ]
    if wrong:
        raise RequestInvalid(wrong)
    if wanted and target.resolve() != Path(record.run_dir):
        fetch(context, record, [one.path for one in wanted], target, progress)
    places = []
    for one in wanted:
        place = target / one.path
        if not place.exists():
            raise StoreError(
                f"{place} was not brought: hidden files do not come into a folder that held files before",
                hint="name a new folder by -o",
            )
        if one.sha256:
            sha256 = register.measure(str(place), checksum=True)["sha256"]
            if sha256 != one.sha256:
                raise StoreError(
                    f"{place} is not what was registered: its SHA-256 differs",
                    hint="did something write to it since? dtslurm artifacts show --check looks there",
                )
        places.append(place)
    return places


def _artifacts(key: str) -> Callable[[Mapping[str, Any]], list[Artifact]]:
    return lambda answer: [_artifact(row) for row in answer[key]]


def _artifact(row: Mapping[str, Any]) -> Artifact:
    there = bool(row.get("there"))
    said, now = _text_or_none(row.get("sha256")), _text_or_none(row.get("now_sha256"))
    size = _whole_or_none(row.get("bytes"))
    problem = "" if there else "it is gone"
    if there and size is not None and row.get("now_bytes") not in {None, size}:
        problem = f"it has {row['now_bytes']} bytes now, not {size}"
    elif there and said and now and said != now:
        problem = "its SHA-256 is another now"
    step, attempt, time = row.get("step"), row.get("attempt"), row.get("time")
    return Artifact(
        path=_path(row["path"]),
        kind=str(row.get("kind") or "output"),
        bytes=_whole_or_none(row.get("now_bytes", size)) if there else size,
        files=_whole_or_none(row.get("files")),
        sha256=said or now,
        step=_whole_or_none(step),
        time=float(time) if isinstance(time, int | float) else None,
        attempt=_whole_or_none(attempt),
        there=there,
        pinned=bool(row.get("pinned")),
        problem=problem,
        metrics=dict(row.get("metrics") or {}),
    )


def _path(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"{value!r} is not a path")
    return value


def _whole_or_none(value: Any) -> int | None:
    return value if type(value) is int else None


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _ask(
    context: Context, record: JobRecord, read: Callable[[Mapping[str, Any]], _Result], **request: Any
) -> _Result:
    transport, python = far_side(context, record)
    answer = ask(transport, python, "artifacts", {"run_dir": record.run_dir, **request}, timeout=_TIMEOUT_S)
    if "refused" in answer:
        raise RequestInvalid([str(answer["refused"])])
    return interpret(answer, read, transport.host)
