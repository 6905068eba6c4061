"""What the far side found, as values: one object per rank, whatever was missing or torn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from statistics import median
from typing import Any

from dtslurm.model.values import dataclass

_LOG_NAME = re.compile(r"(rank|node)-(\d+)\.log")
_SAME_S = 1.5  # records hold whole seconds
_PLAUSIBLE_SKEW_S = 60.0  # files copied or touched later say nothing of the time they were written


@dataclass(frozen=True)
class Hit:
    """A line that a signature matched.

    Attributes:
        signature: its name.
        line: counts from 1.
        time: that the line carries, seconds since the epoch, by the node's clock.
        went_on: the log goes on after it as before it.
        after: bytes of log behind it.
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
    """One place of a Python stack."""

    file: str
    line: int
    function: str
    code: str = ""
    offset: int = 0


@dataclass(frozen=True)
class Block:
    """One exception of a chain.

    Attributes:
        line, error: its last line, where the message begins.
        more: what of the message stands below that line.
        frame, frame_line: the innermost frame of the user's code, and the line that frames count from.
        link: how it hangs together with the one before.
        top: the function of its outermost frame.
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
    """A chain of exceptions, first to last; or the stack of a crash (no blocks)."""

    line: int
    blocks: tuple[Block, ...]
    ignored: bool
    went_on: bool
    after: int
    crash: TraceFrame | None = None


@dataclass(frozen=True)
class LogEvidence:
    """What stands in one log; ``mtime`` is None where the file is missing."""

    file: str
    rank: int | None = None
    mtime: float | None = None
    hits: tuple[Hit, ...] = ()
    tracebacks: tuple[Traceback, ...] = ()
    tail: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rank:
    """Everything found of one rank.

    Attributes:
        ended: seconds since the epoch, corrected by the file system's clock where that is possible.
        recorded: whether there is a record of its start; False for a rank that never came up.
        told_to_end: whether the signal that ended it came through its launcher or to the whole job.
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
    """torch's flight record of one rank: per process group the last numbers and what did not end."""

    rank: int
    file: str
    groups: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Findings:
    """Everything found of one attempt.

    Attributes:
        ranks: by rank, from 0.
        others: logs of the launcher on each node, and of the batch script.
        first: (rank, exit code) of the rank whose end was recorded first.
        exact: whether ``Rank.ended`` is by one clock for all.
        free: bytes that are free on the file system of the run directory, None if not known.
    """

    ranks: tuple[Rank, ...]
    others: tuple[LogEvidence, ...]
    events: tuple[Mapping[str, Any], ...]
    first: tuple[int, int] | None
    dumps: tuple[Dump, ...]
    exact: bool
    free: int | None = None


def read(document: Mapping[str, Any], names: list[str], world_size: int) -> Findings:
    """Return the far side's findings as values.

    Args:
        names: the signatures' names in the order in which they were sent.
        world_size: how many ranks the job should have.
    """
    logs = [_log(item, names) for item in _dicts(document.get("files"))]
    by_rank = {log.rank: log for log in logs if log.rank is not None}
    records = {
        int(item["rank"]): item for item in _dicts(document.get("records")) if _whole(item.get("rank"))
    }
    world = document.get("manifest", {}).get("world_size")
    count = max([world if _whole(world) else world_size, *(rank + 1 for rank in (*records, *by_rank))])
    exact = _one_clock(list(records.values()))
    firsts = [tuple(item) for item in document.get("first_failures") or [] if len(item) == 2]
    return Findings(
        ranks=tuple(_rank(rank, records.get(rank), by_rank.get(rank), exact) for rank in range(count)),
        others=tuple(log for log in logs if log.rank is None),
        events=tuple(_dicts(document.get("events"))),
        first=(firsts[-1][0], firsts[-1][1]) if firsts else None,
        dumps=tuple(
            Dump(item["rank"], item["file"], item["groups"]) for item in _dicts(document.get("dumps"))
        ),
        exact=exact,
        free=_number(document.get("free")),
    )


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10_000_000


def _one_clock(records: list[dict[str, Any]]) -> bool:
    """Tell whether the times at which the records were written can be the file server's, one clock for all.

    They are near each node's own time then. A file system whose clients set the times gives each node's own
    clock back, with no gap at all: then they are no better than what the nodes wrote.
    """
    gaps: dict[str, list[float]] = {}
    for record in records:
        if isinstance(record.get("ended"), int) and isinstance(record.get("written"), (int, float)):
            gaps.setdefault(str(record.get("host")), []).append(record["written"] - record["ended"])
    middle = [median(values) for values in gaps.values()]
    near = all(abs(gap) <= _PLAUSIBLE_SKEW_S for gap in middle)
    one_node_or_skewed = len(middle) == 1 or max(middle, default=0) - min(middle, default=0) > _SAME_S
    return bool(middle) and near and one_node_or_skewed


def _rank(rank: int, record: dict[str, Any] | None, log: LogEvidence | None, exact: bool) -> Rank:
    log = log or LogEvidence(f"rank-{rank}.log", rank)
    if record is None:
        return Rank(rank, log=log)
    ended = record.get("ended")
    if isinstance(ended, int) and exact:
        ended = record["written"]
    error = record.get("error") or {}
    return Rank(
        rank=rank,
        local_rank=_number(record.get("local_rank")),
        node_rank=_number(record.get("node_rank")),
        host=str(record.get("host", "")),
        started=_number(record.get("started")),
        ended=ended if isinstance(ended, (int, float)) else None,
        exit_code=_number(record.get("exit_code")),
        signal=_number(record.get("signal")),
        recorded=True,
        told_to_end=record.get("told_to_end") is True,
        error=str(error.get("message", "")),
        error_frame=_frame(error.get("frame")),
        log=log,
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _log(item: dict[str, Any], names: list[str]) -> LogEvidence:
    return LogEvidence(
        file=str(item.get("file", "")),
        rank=item.get("rank"),
        mtime=item.get("mtime"),
        hits=tuple(_hits(item.get("hits") or [], names)),
        tracebacks=tuple(_traceback(one) for one in _dicts(item.get("tracebacks"))),
        tail=tuple(str(text) for text in item.get("tail") or []),
    )


def _hits(rows: Iterable[list[Any]], names: list[str]) -> Iterable[Hit]:
    for number, line, text, groups, time, _, went_on, after in rows:
        yield Hit(names[number], line, text, groups, time, went_on, after)


def _frame(value: object) -> TraceFrame | None:
    return TraceFrame(**value) if isinstance(value, dict) else None


def _traceback(item: dict[str, Any]) -> Traceback:
    blocks = (
        Block(
            line=one["line"],
            error=one["error"],
            more=one["more"],
            frame=_frame(one["frame"]),
            frame_line=one["frame_line"],
            link=one["link"],
            top=str(one.get("top", "")),
        )
        for one in _dicts(item.get("blocks"))
    )
    return Traceback(
        line=item["line"],
        blocks=tuple(blocks),
        ignored=bool(item.get("ignored")),
        went_on=bool(item.get("went_on")),
        after=int(item.get("after", 0)),
        crash=_frame(item.get("crash")),
    )


def node_of(log: LogEvidence, ranks: Iterable[Rank]) -> str:
    """Return the host whose launcher wrote a log, empty where it is not known."""
    found = _LOG_NAME.fullmatch(log.file)
    if found is None or found[1] != "node":
        return ""
    return next((rank.host for rank in ranks if rank.node_rank == int(found[2]) and rank.host), "")
