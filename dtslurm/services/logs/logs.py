"""Read and follow the output of a run, filtered by rank, node, time or pattern."""

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
_STOPPED_FOLLOWING = (
    "the scheduler no longer knows this job, and the job writes no output: dtslurm stops following it"
)
_UNKNOWN_S = 60.0  # stop following a job that the scheduler does not know after this time without output


@dataclass(frozen=True)
class LogFilter:
    """Which lines of a run's output to show.

    Attributes:
        roles: show the output of these roles instead of that of the main role.
        ranks: ranges of ranks, without launcher and batch output; None for all output.
        nodes: only ranks that ran on these hosts.
        grep: only lines that match.
        attempt: only this attempt; None for the latest, and when following also later ones.
        tail: of the existing output, only this number of last lines of each file.
        task: only this array task.
        since, until: only lines with a timestamp in this interval, in seconds since the epoch; a line without
            a timestamp has the time of the previous line.
    """

    roles: frozenset[str] | None = None
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
        """Whether the filter applies to single lines."""
        return self.grep is not None or self.since is not None or self.until is not None

    def request(self, record: JobRecord, *, follow: bool, in_turn: bool) -> LogRequest:
        """Return the log request that selects the files of this filter."""
        kinds = {"rank"}
        if self.ranks is None and self.nodes is None:
            kinds |= {"batch", "node"}
        if self.roles is not None:
            kinds = {"role"}
        if follow:
            kinds |= {"events", "metrics"}
        return LogRequest(
            run_dir=record.run_dir,
            array=record.array is not None,
            task=self.task,
            kinds=frozenset(kinds),
            roles=self.roles,
            ranks=self.ranks,
            nodes=self.nodes,
            attempt=self.attempt,
            lines=None if self.picks_lines else self.tail,
            follow=follow,
            in_turn=in_turn,
        )


@dataclass
class _LogFilter:
    """A filter for selected lines; with ``tail``, passes only the last existing lines of each file."""

    selection: LogFilter
    now: float
    stream: LogStream
    _times: dict[LogFile, float] = field(default_factory=dict)
    _tails: dict[LogFile, deque[bytes]] | None = None

    def __post_init__(self) -> None:
        if self.selection.tail is not None and self.selection.picks_lines:
            self._tails = {}

    def __call__(self, item: Item) -> Iterator[Item]:
        if item is Mark.CAUGHT_UP:
            yield from self._release_tails()
        if not isinstance(item, LogBlock) or not self.selection.picks_lines:
            yield item
            return
        lines = self._select_lines(item)
        if self._tails is not None:
            self._tails.setdefault(item.file, deque(maxlen=self.selection.tail)).extend(lines)
        elif lines:
            yield LogBlock(item.file, b"".join(lines))

    def _release_tails(self) -> Iterator[Item]:
        lines_by_file, self._tails = self._tails or {}, None
        for file, lines in lines_by_file.items():
            if lines:
                yield LogBlock(file, b"".join(lines))

    def _select_lines(self, block: LogBlock) -> list[bytes]:
        raw_lines = [line + b"\n" for line in block.data[:-1].split(b"\n")]
        grep = self.selection.grep
        has_time_limits = self.selection.since is not None or self.selection.until is not None
        return [
            line
            for line, text in zip(raw_lines, block.texts(), strict=True)
            if (not has_time_limits or self._is_in_time(block.file, text))
            and (grep is None or grep.search(text))
        ]

    def _is_in_time(self, file: LogFile, text: str) -> bool:
        time = written_at(text, self.now, self.stream.utc_offset)
        if time is None:
            time = self._times.get(file)
        else:
            self._times[file] = time
        if time is None:
            return True  # no line of this file has had a timestamp yet
        since, until = self.selection.since, self.selection.until
        return (since is None or time >= since) and (until is None or time <= until)


def read(
    context: Context, record: JobRecord, selection: LogFilter, *, in_turn: bool = False
) -> Iterator[list[Item]]:
    """Yield the existing output file by file, or with ``in_turn`` a piece of each file in turn.

    Raises:
        TransportError: the cluster cannot be reached.
        StoreError: the run directory does not exist.
    """
    request = selection.request(record, follow=False, in_turn=in_turn)
    with _open_stream(context, context.cluster_of(record), request) as stream:
        log_filter = _LogFilter(selection, context.clock(), stream)
        while not stream.ended:
            yield [output for item in stream.read(_POLL_S) for output in log_filter(item)]


def _open_stream(context: Context, cluster: ActiveCluster, request: LogRequest) -> LogStream:
    python = cluster.profile.login.python or ""
    return LogStream(cluster.transport, request, sleep=context.sleep, python=python)


def follow(
    context: Context,
    record: JobRecord,
    selection: LogFilter,
    *,
    watch: Callable[[RunView], None] = lambda _: None,
) -> Iterator[list[Item]]:
    """Yield new output until the job has ended and all output was shown; yield empty lists meanwhile.

    Args:
        watch: called with each new view of the run.

    Raises:
        TransportError: the first connection to the cluster failed; a link lost later is reopened.
        StoreError: the run directory does not exist.
    """
    quiet_since = context.clock()
    request = selection.request(record, follow=True, in_turn=True)
    cluster = context.cluster_of(record)
    with _open_stream(context, cluster, request) as stream, Watcher(context, [record]) as watcher:
        log_filter = _LogFilter(selection, context.clock(), stream)
        attempt_notices = _AttemptNotices()
        is_pending = False
        while not stream.ended:
            items = stream.read(_POLL_S)
            for item in items:
                if isinstance(item, Record) and item.file.kind == "events":
                    watcher.confirm_event(str(item.values.get("event")))
                elif is_pending and isinstance(item, LogBlock):
                    is_pending = False
                    watcher.confirm_event("started")  # a job that writes output runs
            if items:
                quiet_since = context.clock()
            yield [output for item in items for output in (*attempt_notices(item), *log_filter(item))]
            for view in watcher.news():
                watch(view)
                is_pending = any(status.state is JobState.PENDING for status in view.statuses)
                if view.terminal:
                    stream.drain()
                elif _is_unknown(view) and context.clock() - quiet_since > _UNKNOWN_S:
                    yield [Notice(_STOPPED_FOLLOWING)]
                    stream.drain()


class _AttemptNotices:
    """The notices about the begin of another attempt, and about ranks that train independently."""

    def __init__(self) -> None:
        self._latest_by_task: dict[str | None, int] = {}

    def __call__(self, item: Item) -> list[Notice]:
        if isinstance(item, Record) and item.values.get("event") == "not_distributed":
            return [Notice(describe(item.values))]
        if not isinstance(item, LogBlock) or item.file.kind not in {"rank", "node"}:
            return []
        task, attempt = item.file.task, item.file.attempt
        previous = self._latest_by_task.setdefault(task, attempt)
        if attempt <= previous:
            return []
        self._latest_by_task[task] = attempt
        return [
            Notice(
                f"attempt {attempt} begins" if task is None else f"attempt {attempt} of task {task} begins"
            )
        ]


def _is_unknown(view: RunView) -> bool:
    """Return whether the scheduler was queried and does not know the job."""
    return not view.trouble and all(status.unknown for status in view.statuses)


def wait(
    context: Context,
    record: JobRecord,
    watch: Callable[[RunView], None] = lambda _: None,
    *,
    condition: Callable[[RunView], bool] = lambda view: view.terminal,
) -> RunView:
    """Wait until a job has ended, or until a condition holds, and return its last view."""
    request = LogRequest(record.run_dir, array=record.array is not None, kinds=frozenset({"events"}))
    cluster = context.cluster_of(record)
    with _open_stream(context, cluster, request) as stream, Watcher(context, [record]) as watcher:
        listening = True
        while True:
            try:
                items = stream.read(_POLL_S) if listening else []
            except (TransportError, StoreError):
                listening, items = False, []  # the events only show the end earlier than the scheduler
            for item in items:
                if isinstance(item, Record):
                    watcher.confirm_event(str(item.values.get("event")))
            for view in watcher.news():
                watch(view)
                if condition(view):
                    return view
            if not listening:
                context.sleep(_POLL_S)
