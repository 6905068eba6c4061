"""The output of a run: all ranks, or chosen ones, as lines; followed while it grows."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dtslurm.errors import DtslurmError, TransportError
from dtslurm.model.job import JobRecord, LogLine
from dtslurm.services.context import Context
from dtslurm.services.mirror import refresh
from dtslurm.services.status import RunView, views
from dtslurm.store.rundir import RunDir

_CHUNK = 1 << 20
_LONGEST_LINE = 1 << 16  # what is longer is shown in pieces, so that memory stays bounded
_POLL_S = 0.25
_MIRROR_S = 1.0
_NAME = re.compile(r"rank-(\d+)\.log|node-(\d+)\.log")


@dataclass(frozen=True)
class LogFilter:
    """Which lines are wanted.

    Attributes:
        ranks: only these ranks (and neither launcher nor batch output); None for everything.
        node: only ranks that ran on this host.
        grep: only lines that match.
        attempt: only this attempt; None for the latest, and when following also those to come.
        tail: of what is there at the start, only the last lines of each file.
        task: only this array task.
    """

    ranks: frozenset[int] | None = None
    node: str | None = None
    grep: re.Pattern[str] | None = None
    attempt: int | None = None
    tail: int | None = None
    task: str | None = None

    def wants(self, line: LogLine) -> bool:
        """Return whether a line is wanted."""
        return self.grep is None or self.grep.search(line.text) is not None


@dataclass
class _Tail:
    """One growing file: what was read, and the piece of a line still without its end."""

    path: Path
    source: str
    rank: int | None
    attempt: int
    task: str | None
    offset: int = 0
    inode: int = 0
    rest: bytes = b""

    def read(self) -> Iterator[LogLine]:
        """Yield the lines added since the last call."""
        try:
            with self.path.open("rb") as file:
                yield from self._read_from(file.fileno(), file.seek, file.read)
        except OSError:
            return

    def _read_from(
        self, descriptor: int, seek: Callable[[int], int], read: Callable[[int], bytes]
    ) -> Iterator[LogLine]:
        import os

        now = os.fstat(descriptor)
        if self.inode not in (0, now.st_ino) or now.st_size < self.offset:
            self.offset, self.rest = 0, b""  # replaced or truncated: from the start
        self.inode = now.st_ino
        seek(self.offset)
        while chunk := read(_CHUNK):
            self.offset += len(chunk)
            *lines, self.rest = (self.rest + chunk).split(b"\n")
            for line in lines:
                yield self._line(line)
            while len(self.rest) > _LONGEST_LINE:
                yield self._line(self.rest[:_LONGEST_LINE])
                self.rest = self.rest[_LONGEST_LINE:]

    def last(self) -> Iterator[LogLine]:
        """Yield the unfinished last line, once nothing more will come."""
        if self.rest:
            yield self._line(self.rest)
            self.rest = b""

    def _line(self, data: bytes) -> LogLine:
        text = data.decode("utf-8", "replace").rstrip("\r")
        return LogLine(
            source=self.source,
            text=text.rsplit("\r", 1)[-1],  # a progress bar that rewrites its line: its last state
            rank=self.rank,
            attempt=self.attempt,
            task=self.task,
        )


@dataclass
class LogReader:
    """Reads the log files of one run on this machine."""

    record: JobRecord
    wanted: LogFilter
    _tails: dict[Path, _Tail] = field(default_factory=dict)

    def read(self, *, to_the_end: bool = False) -> Iterator[LogLine]:
        """Yield new lines of every wanted file: the batch script's first, then by node and rank.

        Args:
            to_the_end: the run is over, so unfinished last lines are lines too.
        """
        for tail in self._discover():
            for line in tail.read():
                if self.wanted.wants(line):
                    yield line
            if to_the_end:
                yield from filter(self.wanted.wants, tail.last())

    def skip_to_tail(self) -> Iterator[LogLine]:
        """Yield the last ``tail`` wanted lines of each file that is there now."""
        for tail in self._discover():
            kept: deque[LogLine] = deque(maxlen=self.wanted.tail)
            kept.extend(line for line in tail.read() if self.wanted.wants(line))
            yield from kept

    def _discover(self) -> list[_Tail]:
        run = RunDir(Path(self.record.folder))
        runs: dict[str | None, RunDir] = {None: run}
        if self.record.array is not None:
            runs = dict(run.tasks().items())
        for task, place in runs.items():
            if self.wanted.task in (None, task):
                self._discover_run(run, place, task)
        return list(self._tails.values())

    def _discover_run(self, top: RunDir, place: RunDir, task: str | None) -> None:
        attempts = place.attempts()
        wanted = [self.wanted.attempt] if self.wanted.attempt is not None else attempts[-1:]
        if self.wanted.ranks is None and self.wanted.node is None:
            name = "batch.log" if task is None else f"batch-{task}.log"
            self._add(top.path / "logs" / name, "batch", None, 0, task)
        for attempt in wanted:
            hosts = {record.rank: record.host for record in place.ranks(attempt)} if self.wanted.node else {}
            for path in _log_files(place.logs(attempt)):
                found = _NAME.fullmatch(path.name)
                rank = int(found[1]) if found and found[1] else None
                if self._wanted_file(rank, hosts):
                    self._add(path, _source(path), rank, attempt, task)

    def _wanted_file(self, rank: int | None, hosts: dict[int, str]) -> bool:
        if self.wanted.node is not None and (rank is None or hosts.get(rank) != self.wanted.node):
            return False
        return self.wanted.ranks is None or rank in self.wanted.ranks

    def _add(self, path: Path, source: str, rank: int | None, attempt: int, task: str | None) -> None:
        if path not in self._tails:
            self._tails[path] = _Tail(path, source, rank, attempt, task)


def _log_files(folder: Path) -> list[Path]:
    """Return the log files of an attempt: launcher output by node, then ranks in order."""
    try:
        files = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(files, key=lambda path: (path.name[:4], int(re.sub(r"\D", "", path.name))))


def _source(path: Path) -> str:
    return path.stem.replace("rank-", "").replace("node-", "node")


def follow(
    context: Context,
    reader: LogReader,
    *,
    watch: Callable[[RunView], None] = lambda _: None,
) -> Iterator[LogLine]:
    """Yield lines as they come, until the job is over and everything is shown.

    Args:
        watch: called with each new observation of the job, between polls of the scheduler.
    """
    min_poll = context.cluster_of(reader.record).profile.slurm.min_poll_s
    clock = _PollClock(context, reader.record, min_poll)
    mirrored = _Mirrored(context, reader.record)
    mirrored.refresh(at_once=True)
    if reader.wanted.tail is not None:
        yield from reader.skip_to_tail()
    while True:
        view = clock.look()
        if view is not None:
            watch(view)
        over = view is not None and view.terminal
        quiet = True
        mirrored.refresh(at_once=over)
        for line in reader.read(to_the_end=over):
            quiet = False
            yield line
        if over:
            return
        if quiet:
            context.sleep(_POLL_S)


class _Mirrored:
    """Keeps the copies of a far run's files fresh while it is followed; does nothing for a run of here."""

    def __init__(self, context: Context, record: JobRecord) -> None:
        self._context, self._record = context, record
        self._next = 0.0

    def refresh(self, *, at_once: bool = False) -> None:
        """Copy what is new, about once a second; a link that fails is tried again next time."""
        now = self._context.clock()
        if not self._record.mirror or (now < self._next and not at_once):
            return
        self._next = now + _MIRROR_S
        with contextlib.suppress(TransportError):
            refresh(self._context, [self._record], logs=True)


class _PollClock:
    """Asks the scheduler at its floor, and at once when the run itself says that it ended."""

    def __init__(self, context: Context, record: JobRecord, min_poll: float) -> None:
        self._context, self._record, self._min_poll = context, record, min_poll
        self._next = 0.0
        self._asked_for_end = 0
        self._early = 0

    def look(self) -> RunView | None:
        """Return a fresh observation if one is due."""
        now = self._context.clock()
        ends = self._own_ends()
        if ends > self._asked_for_end:
            self._asked_for_end = ends
            self._early, self._next = 5, now  # Slurm notices an end within seconds: look a few times soon
        if now < self._next:
            return None
        wait = self._min_poll
        if self._early:
            self._early -= 1
            wait = min(wait, 1.0)
        self._next = now + wait
        try:
            view = views(self._context, [self._record])[0]
        except DtslurmError:
            return None
        self._record = view.record
        return view

    def _own_ends(self) -> int:
        run = RunDir(Path(self._record.folder))
        places: Iterable[RunDir] = run.tasks().values() if self._record.array else [run]
        return sum(1 for place in places for event in place.events() if event.get("event") == "ended")


def wait(context: Context, record: JobRecord, watch: Callable[[RunView], None] = lambda _: None) -> RunView:
    """Return the last observation of a job once it is over."""
    clock = _PollClock(context, record, context.cluster_of(record).profile.slurm.min_poll_s)
    mirrored = _Mirrored(context, record)
    while True:
        mirrored.refresh()
        view = clock.look()
        if view is not None:
            watch(view)
            if view.terminal:
                return view
        context.sleep(_POLL_S)
