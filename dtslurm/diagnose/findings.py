"""Typed access to the evidence that the worker program found.

There is one object per rank, also if its files are missing or truncated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from statistics import median
from typing import Any

from dtslurm.model.runs.live import RankLook, StackFrame
from dtslurm.model.values import dataclass
from dtslurm.worker.lib.json_records import finite_number, whole_number

_LOG_NAME = re.compile(r"(rank|node)-(\d+)\.log")
_MAX_FRAMES = 100
_MAX_NAME_CHARS = 200
_ROUNDING_S = 1.5  # times in records are whole seconds
_PLAUSIBLE_SKEW_S = 60.0  # a larger gap means that the file was copied or touched later


@dataclass(frozen=True)
class Hit:
    """A log line that a signature matched.

    Attributes:
        signature: the signature's name.
        line: the line number, from 1.
        time: the time in the line, in seconds since the epoch by the node's clock, if it has one.
        went_on: whether the log continues after the line as it did before.
        after: the number of bytes in the log after the line.
    """

    signature: str
    line: int
    text: str
    groups: Mapping[str, str]
    time: float | None
    went_on: bool
    after: int


@dataclass(frozen=True)
class TraceFrame:
    """A frame of a Python stack."""

    file: str
    line: int
    function: str
    code: str = ""
    offset: int = 0


@dataclass(frozen=True)
class Block:
    """One exception of a chain of exceptions.

    Attributes:
        line, error: the last line of the exception, where its message starts.
        more: the rest of the message, from the lines below.
        frame, frame_line: the innermost frame of the user's code, and the line that frames count from.
        link: the relation to the previous exception of the chain.
        top: the function of the outermost frame.
    """

    line: int
    error: str
    more: str
    frame: TraceFrame | None
    frame_line: int
    link: str
    top: str = ""


@dataclass(frozen=True)
class Traceback:
    """A chain of exceptions in order; or the stack of a crash, which has no blocks."""

    line: int
    blocks: tuple[Block, ...]
    ignored: bool
    went_on: bool
    after: int
    crash: TraceFrame | None = None


@dataclass(frozen=True)
class LogEvidence:
    """The evidence in one log; ``mtime`` is None if the file is missing."""

    file: str
    rank: int | None = None
    mtime: float | None = None
    hits: tuple[Hit, ...] = ()
    tracebacks: tuple[Traceback, ...] = ()
    tail: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rank:
    """The evidence on one rank.

    Attributes:
        ended: the end in seconds since the epoch, by the file system's clock if possible.
        recorded: whether a record of the rank's start exists; False for a rank that never started.
        told_to_end: whether the signal that ended the rank was sent through its launcher or to the whole job.
        error, error_frame: from torchelastic's error file.
    """

    rank: int
    local_rank: int | None = None
    node_rank: int | None = None
    host: str = ""
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    recorded: bool = False
    told_to_end: bool = False
    error: str = ""
    error_frame: TraceFrame | None = None
    log: LogEvidence = field(default_factory=lambda: LogEvidence(""))


@dataclass(frozen=True)
class Dump:
    """The dump of PyTorch's flight recorder on one rank.

    Attributes:
        groups: by process group, the numbers of the last collectives and the one that did not end.
    """

    rank: int
    file: str
    groups: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Findings:
    """The evidence on one attempt.

    Attributes:
        ranks: the ranks in order, from 0.
        job_logs: the logs of each node's launcher and of the batch script.
        first: (rank, exit code) of the rank whose end was recorded first.
        stacks: the rank that hung, else all ranks, as they were when the supervisor found the hang.
        exact: whether all times in ``Rank.ended`` are by the same clock.
        free: free bytes on the file system of the run directory, None if unknown.
    """

    ranks: tuple[Rank, ...]
    job_logs: tuple[LogEvidence, ...]
    events: tuple[Mapping[str, Any], ...]
    first: tuple[int, int] | None
    dumps: tuple[Dump, ...]
    exact: bool
    free: int | None = None
    stacks: tuple[RankLook, ...] = ()


def read(document: Mapping[str, Any], names: list[str], world_size: int) -> Findings:
    """Parse the evidence document of the worker program.

    Args:
        document: the document.
        names: the names of the signatures, in the order in which they were sent.
        world_size: the number of ranks that the job should have.
    """
    logs = [_parse_log(item, names) for item in _only_dicts(document.get("files"))]
    by_rank = {log.rank: log for log in logs if log.rank is not None}
    records = {
        int(item["rank"]): item
        for item in _only_dicts(document.get("records"))
        if _is_count(item.get("rank"))
    }
    manifest_world_size = document.get("manifest", {}).get("world_size")
    count = max(
        [
            manifest_world_size if _is_count(manifest_world_size) else world_size,
            *(rank + 1 for rank in (*records, *by_rank)),
        ]
    )
    has_one_clock = _has_one_clock(list(records.values()))
    first_failures = [tuple(item) for item in document.get("first_failures") or [] if len(item) == 2]
    return Findings(
        ranks=tuple(
            _build_rank(rank, records.get(rank), by_rank.get(rank), has_one_clock) for rank in range(count)
        ),
        job_logs=tuple(log for log in logs if log.rank is None),
        events=tuple(_only_dicts(document.get("events"))),
        first=(first_failures[-1][0], first_failures[-1][1]) if first_failures else None,
        dumps=tuple(
            Dump(item["rank"], item["file"], item["groups"]) for item in _only_dicts(document.get("dumps"))
        ),
        exact=has_one_clock,
        free=whole_number(document.get("free")),
        stacks=tuple(_parse_stack(item) for item in _only_dicts(document.get("stacks"))),
    )


def _parse_stack(item: Mapping[str, Any]) -> RankLook:
    frames = [
        StackFrame(
            str(frame.get("function"))[:_MAX_NAME_CHARS],
            str(frame.get("file"))[-_MAX_NAME_CHARS:],
            whole_number(frame.get("line")) or 0,
        )
        for frame in _only_dicts(item.get("frames"))[:_MAX_FRAMES]
    ]
    moved = item.get("moved")
    return RankLook(
        rank=whole_number(item.get("rank")) or 0,
        host=str(item.get("node") or ""),
        pid=whole_number(item.get("pid")),
        state=str(item.get("state") or "")[:1],
        cpu=finite_number(item.get("cpu")) or 0.0,
        moved=moved if isinstance(moved, bool) else None,
        waits=str(item.get("waits") or "")[:_MAX_NAME_CHARS],
        frames=tuple(frames),
        by=str(item.get("by") or ""),
    )


def _only_dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10_000_000


def _has_one_clock(records: list[dict[str, Any]]) -> bool:
    """Return whether the records' modification times can be by one clock, the file server's.

    If they are, they are close to each node's own time. On a file system whose clients set the times, they
    equal each node's own clock, without any difference, and are no better than the times in the records.
    """
    gaps_by_host: dict[str, list[float]] = {}
    for record in records:
        if isinstance(record.get("ended"), int) and isinstance(record.get("written"), (int, float)):
            gaps_by_host.setdefault(str(record.get("host")), []).append(record["written"] - record["ended"])
    median_gaps = [median(values) for values in gaps_by_host.values()]
    plausible = all(abs(gap) <= _PLAUSIBLE_SKEW_S for gap in median_gaps)
    one_node_or_skewed = (
        len(median_gaps) == 1 or max(median_gaps, default=0) - min(median_gaps, default=0) > _ROUNDING_S
    )
    return bool(median_gaps) and plausible and one_node_or_skewed


def _build_rank(
    rank: int, record: dict[str, Any] | None, log: LogEvidence | None, has_one_clock: bool
) -> Rank:
    log = log or LogEvidence(f"rank-{rank}.log", rank)
    if record is None:
        return Rank(rank, log=log)
    end_time = record.get("ended")
    if isinstance(end_time, int) and has_one_clock:
        end_time = record["written"]
    error = record.get("error") or {}
    return Rank(
        rank=rank,
        local_rank=whole_number(record.get("local_rank")),
        node_rank=whole_number(record.get("node_rank")),
        host=str(record.get("host", "")),
        started=whole_number(record.get("started")),
        ended=finite_number(end_time),
        exit_code=whole_number(record.get("exit_code")),
        signal=whole_number(record.get("signal")),
        recorded=True,
        told_to_end=record.get("told_to_end") is True,
        error=str(error.get("message", "")),
        error_frame=_parse_frame(error.get("frame")),
        log=log,
    )


def _parse_log(item: dict[str, Any], names: list[str]) -> LogEvidence:
    return LogEvidence(
        file=str(item.get("file", "")),
        rank=item.get("rank"),
        mtime=item.get("mtime"),
        hits=tuple(_parse_hits(item.get("hits") or [], names)),
        tracebacks=tuple(_parse_traceback(traceback) for traceback in _only_dicts(item.get("tracebacks"))),
        tail=tuple(str(text) for text in item.get("tail") or []),
    )


def _parse_hits(rows: Iterable[list[Any]], names: list[str]) -> Iterable[Hit]:
    for number, line, text, groups, time, _, has_continued, bytes_after in rows:
        yield Hit(names[number], line, text, groups, time, has_continued, bytes_after)


def _parse_frame(value: object) -> TraceFrame | None:
    return TraceFrame(**value) if isinstance(value, dict) else None


def _parse_traceback(item: dict[str, Any]) -> Traceback:
    blocks = (
        Block(
            line=block["line"],
            error=block["error"],
            more=block["more"],
            frame=_parse_frame(block["frame"]),
            frame_line=block["frame_line"],
            link=block["link"],
            top=str(block.get("top", "")),
        )
        for block in _only_dicts(item.get("blocks"))
    )
    return Traceback(
        line=item["line"],
        blocks=tuple(blocks),
        ignored=bool(item.get("ignored")),
        went_on=bool(item.get("went_on")),
        after=int(item.get("after", 0)),
        crash=_parse_frame(item.get("crash")),
    )


def node_of(log: LogEvidence, ranks: Iterable[Rank]) -> str:
    """Return the host whose launcher wrote the log, or "" if it is not known."""
    match = _LOG_NAME.fullmatch(log.file)
    if match is None or match[1] != "node":
        return ""
    return next((rank.host for rank in ranks if rank.node_rank == int(match[2]) and rank.host), "")
