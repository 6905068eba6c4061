"""The output of a run: all ranks, or chosen ones, as lines; followed while it grows."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import field

from dtslurm.diagnose.ranks_apart import describe
from dtslurm.errors import StoreError, TransportError
from dtslurm.logs.lines import LogBlock, LogFile
from dtslurm.logs.stamps import written_at
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState
from dtslurm.model.values import dataclass
from dtslurm.services.logs.log_stream import Item, LogRequest, LogStream, Mark, Notice, Record
from dtslurm.services.runs.status import RunView
from dtslurm.services.runs.watch import Watcher
from dtslurm.services.wiring.context import ActiveCluster, Context

_POLL_S = 0.25
_NOT_WAITED_FOR = "nobody knows this job any more, and it writes nothing: not waiting for its end"
_UNKNOWN_S = 60.0  # a job that nobody knows of, and that writes nothing for so long, is not waited for


@dataclass(frozen=True)
class LogFilter:
    """Which lines are wanted.

    Attributes:
        ranks: ranges of ranks (and neither launcher nor batch output); None for everything.
        nodes: only ranks that ran on these hosts.
        grep: only lines that match.
        attempt: only this attempt; None for the latest, and when following also those to come.
        tail: of what is there at the start, only the last lines of each file.
        task: only this array task.
        since, until: only lines of this time (seconds since the epoch), as far as lines tell one; a line that
            does not is taken to be of the time of the one before it.
    """

    ranks: tuple[tuple[int, int], ...] | None = None
    nodes: frozenset[str] | None = None
    grep: re.Pattern[str] | None = None
    attempt: int | None = None
    tail: int | None = None
    task: str | None = None
    since: float | None = None
    until: float | None = None

    @property
    def picks_lines(self) -> bool:
        """Whether lines must be looked at one by one."""
        return self.grep is not None or self.since is not None or self.until is not None

    def request(self, record: JobRecord, *, follow: bool, in_turn: bool) -> LogRequest:
        """Return what to ask the far side for."""
        kinds = {"rank"}
        if self.ranks is None and self.nodes is None:
            kinds |= {"batch", "node"}
        if follow:
            kinds |= {"events", "metrics"}
        return LogRequest(
            run_dir=record.run_dir,
            array=record.array is not None,
            task=self.task,
            kinds=frozenset(kinds),
            ranks=self.ranks,
            nodes=self.nodes,
            attempt=self.attempt,
            lines=None if self.picks_lines else self.tail,
            follow=follow,
            in_turn=in_turn,
        )


@dataclass
class _LogFilter:
    """Lets the wanted lines through; of those there at the start, only the last of each file if asked."""

    wanted: LogFilter
    now: float
    stream: LogStream
    _times: dict[LogFile, float] = field(default_factory=dict)
    _kept: dict[LogFile, deque[bytes]] | None = None

    def __post_init__(self) -> None:
        if self.wanted.tail is not None and self.wanted.picks_lines:
            self._kept = {}

    def __call__(self, item: Item) -> Iterator[Item]:
        if item is Mark.CAUGHT_UP:
            yield from self._release()
        if not isinstance(item, LogBlock) or not self.wanted.picks_lines:
            yield item
            return
        lines = self._chosen(item)
        if self._kept is not None:
            self._kept.setdefault(item.file, deque(maxlen=self.wanted.tail)).extend(lines)
        elif lines:
            yield LogBlock(item.file, b"".join(lines))

    def _release(self) -> Iterator[Item]:
        kept, self._kept = self._kept or {}, None
        for file, lines in kept.items():
            if lines:
                yield LogBlock(file, b"".join(lines))

    def _chosen(self, block: LogBlock) -> list[bytes]:
        raw = [line + b"\n" for line in block.data[:-1].split(b"\n")]
        grep = self.wanted.grep
        timed = self.wanted.since is not None or self.wanted.until is not None
        return [
            line
            for line, text in zip(raw, block.texts(), strict=True)
            if (not timed or self._in_time(block.file, text)) and (grep is None or grep.search(text))
        ]

    def _in_time(self, file: LogFile, text: str) -> bool:
        time = written_at(text, self.now, self.stream.utc_offset)
        if time is None:
            time = self._times.get(file)
        else:
            self._times[file] = time
        if time is None:
            return True  # nothing in this file has told a time yet
        since, until = self.wanted.since, self.wanted.until
        return (since is None or time >= since) and (until is None or time <= until)


def read(
    context: Context, record: JobRecord, wanted: LogFilter, *, in_turn: bool = False
) -> Iterator[list[Item]]:
    """Yield what is there now, file by file; ``in_turn``, a piece of each in turn.

    Raises:
        TransportError: the cluster cannot be reached.
        StoreError: the run's folder is not there.
    """
    request = wanted.request(record, follow=False, in_turn=in_turn)
    with _stream(context, context.cluster_of(record), request) as stream:
        sieve = _LogFilter(wanted, context.clock(), stream)
        while not stream.ended:
            yield [kept for item in stream.read(_POLL_S) for kept in sieve(item)]


def _stream(context: Context, cluster: ActiveCluster, request: LogRequest) -> LogStream:
    python = cluster.profile.login.python or ""
    return LogStream(cluster.transport, request, sleep=context.sleep, python=python)


def follow(
    context: Context,
    record: JobRecord,
    wanted: LogFilter,
    *,
    watch: Callable[[RunView], None] = lambda _: None,
) -> Iterator[list[Item]]:
    """Yield what comes, until the job is over and everything is shown; also, often, that nothing came.

    Args:
        watch: called with each new observation of the job, between polls of the scheduler.

    Raises:
        TransportError: the cluster cannot be reached; once it was, a lost link is made anew.
        StoreError: the run's folder is not there.
    """
    quiet_since = context.clock()
    request = wanted.request(record, follow=True, in_turn=True)
    cluster = context.cluster_of(record)
    with _stream(context, cluster, request) as stream, Watcher(context, [record]) as watcher:
        sieve = _LogFilter(wanted, context.clock(), stream)
        attempts = _Attempts()
        waiting = False
        while not stream.ended:
            items = stream.read(_POLL_S)
            for item in items:
                if isinstance(item, Record) and item.file.kind == "events":
                    watcher.heard(str(item.values.get("event")))
                elif waiting and isinstance(item, LogBlock):
                    waiting = False
                    watcher.heard("started")  # what writes runs, whatever was heard last
            if items:
                quiet_since = context.clock()
            yield [kept for item in items for kept in (*attempts(item), *sieve(item))]
            for view in watcher.news():
                watch(view)
                waiting = any(status.state is JobState.PENDING for status in view.statuses)
                if view.terminal:
                    stream.drain()
                elif _unknown(view) and context.clock() - quiet_since > _UNKNOWN_S:
                    yield [Notice(_NOT_WAITED_FOR)]
                    stream.drain()


class _Attempts:
    """Tells when lines of another attempt begin, and of ranks that train apart."""

    def __init__(self) -> None:
        self._seen: dict[str | None, int] = {}

    def __call__(self, item: Item) -> list[Notice]:
        if isinstance(item, Record) and item.values.get("event") == "not_distributed":
            return [Notice(describe(item.values))]
        if not isinstance(item, LogBlock) or item.file.kind not in {"rank", "node"}:
            return []
        task, attempt = item.file.task, item.file.attempt
        before = self._seen.setdefault(task, attempt)
        if attempt <= before:
            return []
        self._seen[task] = attempt
        return [
            Notice(
                f"attempt {attempt} begins" if task is None else f"attempt {attempt} of task {task} begins"
            )
        ]


def _unknown(view: RunView) -> bool:
    """Return whether the scheduler was asked, and knows nothing of the job."""
    return not view.trouble and all(status.state is JobState.UNKNOWN for status in view.statuses)


def wait(context: Context, record: JobRecord, watch: Callable[[RunView], None] = lambda _: None) -> RunView:
    """Return the last observation of a job once it is over."""
    request = LogRequest(record.run_dir, array=record.array is not None, kinds=frozenset({"events"}))
    cluster = context.cluster_of(record)
    with _stream(context, cluster, request) as stream, Watcher(context, [record]) as watcher:
        listening = True
        while True:
            try:
                items = stream.read(_POLL_S) if listening else []
            except (TransportError, StoreError):
                listening, items = False, []  # the run's own words only tell of its end sooner
            for item in items:
                if isinstance(item, Record):
                    watcher.heard(str(item.values.get("event")))
            for view in watcher.news():
                watch(view)
                if view.terminal:
                    return view
            if not listening:
                context.sleep(_POLL_S)
