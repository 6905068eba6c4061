"""What fills the dashboard: threads that ask clusters and post frozen snapshots. The screen never waits."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Protocol

from dtslurm.dashboard.actions import handoffs
from dtslurm.dashboard.actions.handoffs import Opener
from dtslurm.dashboard.charts.strips import average_gpus
from dtslurm.dashboard.store import LineStore
from dtslurm.errors import DtslurmError
from dtslurm.logs.lines import LogBlock
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.telemetry import RunTelemetry, TrainPoint
from dtslurm.model.values import dataclass
from dtslurm.services.logs.log_stream import LogRequest, LogStream, Mark, Notice, OutputSummary, Rewritten
from dtslurm.services.observe.curves import points_of_attempts
from dtslurm.services.observe.diagnose import Diagnosis, diagnose
from dtslurm.services.observe.live import Live, diagnose_live
from dtslurm.services.observe.run_list import (
    Board,
    ClusterKey,
    ClusterLine,
    ClusterReader,
    JobRow,
    Runs,
    with_page,
)
from dtslurm.services.observe.telemetry import pulse
from dtslurm.services.observe.utilization_history import Percentages, UtilizationHistory, read_utilization
from dtslurm.services.runs.control import act
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.shell import open_shell
from dtslurm.services.wiring.context import Context
from dtslurm.views.run_page import Page, page

if TYPE_CHECKING:
    from dtslurm.services.observe.compare import Comparison

_NEW_RUNS_S = 3.0  # between looks at this machine's index
_PAGE_S = 2.0
_FAR_PAGE_S = 5.0
_IDLE_PAGE_S = 30.0  # of a job that has ended
_REST_S = 0.01
_PROGRESS_S = 15.0
_USE_S = 120.0  # between looks at the use of a running job's GPUs
_USE_COLUMNS = 16
_MOST_ENDED = 12  # newest ended jobs whose use is shown
_MOST_PROGRESS = 4  # running jobs whose progress is asked for at once
_EARLIER_POINTS = 1000  # of each attempt before the newest
_MOST_RANKS = 256  # whose whole output is followed without being asked for
LAST_LINES = 20_000  # of each file, without being asked for more
_LAST_LINES_OF_MANY = 100


@dataclass(frozen=True)
class LogState:
    """How following goes: ``words`` for the line below the log."""

    key: str
    words: str


@dataclass(frozen=True)
class Notification:
    """A word for the person: of an action, or of what went wrong."""

    text: str
    bad: bool = False


@dataclass(frozen=True)
class Diagnosed:
    """The verdict on a job, as lines; ``live``: on what its ranks do now."""

    key: str
    lines: tuple[str, ...]
    live: bool = False


@dataclass(frozen=True)
class EarlierAttempts:
    """What the attempts of a run before the newest said of their training, oldest first."""

    key: str
    attempts: Mapping[int, Sequence[TrainPoint]]


@dataclass(frozen=True)
class GpuUtilization:
    """The mean use of the GPUs of runs over time in percent, by key of their rows."""

    values: Mapping[str, Percentages]


@dataclass(frozen=True)
class RunUtilization:
    """The utilization of a run's GPUs and CPUs over an attempt; ``key`` is that of the run's row."""

    key: str
    attempt: int
    history: UtilizationHistory


@dataclass(frozen=True)
class ComparisonText:
    """The comparison of the marked runs, as lines."""

    lines: tuple[str, ...]


Post = Callable[[object], None]


class SnapshotSource(Protocol):
    """Where the dashboard's snapshots come from: `Feed`, or what a test makes up."""

    def start(self, post: Post) -> None:
        """Begin to post `Board`s."""

    def stop(self) -> None:
        """End; nothing is posted any more."""

    def refresh(self) -> None:
        """Ask anew now."""

    def watch(self, row: JobRow | None, attempt: int | None = None) -> None:
        """Post `Page`s of this job, and of no other."""

    def follow(
        self,
        row: JobRow | None,
        store: LineStore,
        ranks: str = "",
        *,
        attempt: int | None = None,
        lines: int = LAST_LINES,
    ) -> None:
        """Fill a store with the last ``lines`` of each file of the job's output, and with what follows.

        Args:
            ranks: only theirs, ``*`` all of them however many.
            attempt: only this one, None for the newest and those to come.
        """

    def verdict(self, row: JobRow, attempt: int | None = None) -> None:
        """Post the verdict on a job."""

    def history(self, row: JobRow, attempt: int) -> None:
        """Post the `RunUtilization` of an attempt of a job."""

    def live(self, row: JobRow) -> None:
        """Look at every rank of a running job, and post the verdict."""

    def act(self, verb: str, row: JobRow) -> None:
        """Cancel, requeue, hold or release, and tell how it went."""

    def shell(self, row: JobRow, node: str) -> int:
        """Open a shell on a node at this terminal."""

    def open_log(self, row: JobRow, rank: int, attempt: int, opener: Opener) -> int:
        """Open a rank's log at this terminal."""

    def report(self, row: JobRow, attempt: int | None = None) -> None:
        """Write the page about a run, and tell where it is."""

    def resubmit(self, row: JobRow) -> None:
        """Submit a run once more, and tell how it went."""

    def compare(self, rows: Sequence[JobRow]) -> None:
        """Post the comparison of some runs."""

    def demo(self) -> None:
        """Start the demo on this machine, and tell how it went."""


@dataclass
class _Cluster:
    """One cluster's thread: its own context, so that it waits for nobody else."""

    key: ClusterKey
    context: Context
    records: list[JobRecord] = field(default_factory=list)
    wake: threading.Event = field(default_factory=threading.Event)
    rows: tuple[JobRow, ...] = ()
    line: ClusterLine = field(default_factory=lambda: ClusterLine(name=""))
    pages: dict[str, Page] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    uses: dict[str, Percentages] = field(default_factory=dict)
    use_asked: dict[str, float] = field(default_factory=dict)

    def min_poll(self) -> float:
        try:
            profile = self.context.cluster_of(self.records[0]).profile
        except (DtslurmError, IndexError):
            return 30.0
        return 2.0 if profile.scheduler == "local" else max(2.0, profile.slurm.min_poll_s)


class Feed:
    """Asks all clusters at once, each in a thread of its own.

    Args:
        contexts: makes a context for each thread.
        say: makes lines of a verdict.
        say_comparison: makes lines of a comparison of runs.
        cluster: only runs on this one.
    """

    def __init__(
        self,
        contexts: Callable[[], Context],
        say: Callable[[Diagnosis | Live], Sequence[str]],
        *,
        cluster: str | None = None,
        say_comparison: Callable[[Comparison], Sequence[str]] = lambda _: (),
    ) -> None:
        self._say_comparison = say_comparison
        self._contexts, self._say, self._only = contexts, say, cluster
        self._post: Post = lambda _: None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._poked = threading.Event()
        self._clusters: dict[ClusterKey, _Cluster] = {}
        self._watching = 0
        self._following = 0
        self._rows: dict[str, JobRow] = {}
        self._looked = False

    def start(self, post: Post) -> None:
        """Begin to post boards."""
        self._post = lambda value: None if self._stop.is_set() else post(value)
        self._spawn(self._runs)

    def stop(self) -> None:
        """End all threads; those that wait for a network are left to it."""
        self._stop.set()
        self._poked.set()
        for cluster in self._clusters.values():
            cluster.wake.set()

    def refresh(self) -> None:
        """Ask all clusters now."""
        self._poked.set()
        for cluster in list(self._clusters.values()):
            cluster.wake.set()

    def _spawn(self, work: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=self._guarded, args=(work, args), daemon=True, name="dtslurm-feed").start()

    def _guarded(self, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            work(*args)
        except DtslurmError as error:
            self._post(Notification(" ".join(error.lines()[:3]), bad=True))
        except OSError as error:
            self._post(Notification(str(error), bad=True))
        except Exception as error:  # noqa: BLE001 - the screen hides what a thread prints as it ends
            fault = f"{type(error).__name__}: {error}"
            self._post(
                Notification(
                    f"a fault of dtslurm's own, {fault}; what it kept up to date stands still", bad=True
                )
            )

    # ---- The board

    def _runs(self) -> None:
        """Look for runs; each cluster that has some gets a thread."""
        runs = Runs(self._contexts())
        while not self._stop.is_set():
            try:
                found = runs.by_cluster()
            except DtslurmError as error:
                self._post(Notification(error.message, bad=True))
                found = {}
            for key, records in found.items():
                if self._only is not None and key[0] != self._only:
                    continue
                known = self._clusters.get(key)
                if known is None:
                    known = _Cluster(key, self._contexts(), line=ClusterLine(name=key[0]))
                    known.rows = ClusterReader(known.context, key[0]).first(records)
                    known.records = records
                    with self._lock:
                        self._clusters[key] = known
                    self._spawn(self._ask, known)
                elif {record.token for record in records} - {record.token for record in known.records}:
                    known.records = records
                    known.wake.set()
                else:
                    known.records = records
            if not self._looked:
                self._looked = True
                self._publish()
            self._poked.wait(_NEW_RUNS_S)
            self._poked.clear()

    def _ask(self, cluster: _Cluster) -> None:
        reader = ClusterReader(cluster.context, cluster.key[0])
        while not self._stop.is_set():
            cluster.rows, cluster.line = reader.read(cluster.records)
            self._publish()
            if not cluster.line.trouble:
                self._progress(cluster)
                self._ask_use(cluster)
            active = any(not row.over for row in cluster.rows)
            cluster.wake.wait(cluster.min_poll() * (1 if active else 4))
            cluster.wake.clear()

    def _progress(self, cluster: _Cluster) -> None:
        """Ask some running jobs how far they are."""
        context = cluster.context
        now = context.clock()
        running = [
            row for row in cluster.rows if row.state == "RUNNING" and row.recorded and not row.is_array
        ]
        due = [row for row in running if now - cluster.asked.get(row.key, 0.0) > _PROGRESS_S]
        records = {record.token: record for record in cluster.records}
        for row in sorted(due, key=lambda row: cluster.asked.get(row.key, 0.0))[:_MOST_PROGRESS]:
            cluster.asked[row.key] = now
            try:
                seen = pulse(context, records[row.token], task=row.task, points=200)
            except (DtslurmError, OSError, KeyError):
                continue
            cluster.pages[row.key] = page(seen, key=row.key, taken_at=context.clock(), limit_at=row.limit_at)
        if due:
            self._publish()

    def _ask_use(self, cluster: _Cluster) -> None:
        """Ask some jobs for the use of their GPUs.

        Of running jobs those that have samples of GPUs; of ended ones the newest, once, where that starts
        no process on a login node.
        """
        now = cluster.context.clock()
        here = {record.token for record in cluster.records if not record.mirror}
        rows = [row for row in cluster.rows if not row.is_array]
        ended = [row for row in rows if row.over and row.start is not None and row.token in here]
        ended = ended[:_MOST_ENDED]
        due = [row for row in rows if self._has_gpus(cluster, row) and _is_due(cluster, row, now)]
        due += [row for row in ended if row.key not in cluster.use_asked]
        records = {record.token: record for record in cluster.records}
        before = dict(cluster.uses)
        for row in due[:_MOST_PROGRESS]:
            cluster.use_asked[row.key] = now
            try:
                history = read_utilization(
                    cluster.context,
                    records[row.token],
                    attempt=row.attempt,
                    task=row.task,
                    columns=_USE_COLUMNS,
                )
            except (DtslurmError, OSError, KeyError):
                continue
            if use := average_gpus(history, _USE_COLUMNS):
                cluster.uses[row.key] = use
        if cluster.uses != before:
            with self._lock:
                known = [one.uses for one in self._clusters.values()]
                self._post(GpuUtilization({key: use for uses in known for key, use in uses.items()}))

    @staticmethod
    def _has_gpus(cluster: _Cluster, row: JobRow) -> bool:
        """Return whether a running job's newest samples tell of the use of a GPU."""
        known = cluster.pages.get(row.key)
        if row.state != "RUNNING" or known is None:
            return False
        return any(node.gpu is not None for node in known.nodes)

    def _publish(self) -> None:
        with self._lock:
            rows = [
                with_page(row, cluster.pages.get(row.key))
                for cluster in self._clusters.values()
                for row in cluster.rows
            ]
            lines = tuple(cluster.line for cluster in self._clusters.values())
            self._rows = {row.key: row for row in rows}
            rows = list(self._rows.values())  # two ways to a cluster have one queue
            taken = next((cluster.context.clock() for cluster in self._clusters.values()), 0.0)
        rows.sort(key=lambda row: -row.created)  # stable: an array's tasks stay behind it
        self._post(Board(rows=tuple(rows), clusters=lines, taken_at=taken))

    # ---- One job

    def watch(self, row: JobRow | None, attempt: int | None = None) -> None:
        """Post pages of this job, and of no other."""
        self._watching += 1
        if row is not None:
            self._spawn(self._watch, self._watching, row, attempt)

    def _watch(self, number: int, row: JobRow, attempt: int | None) -> None:
        context, last, seen = self._contexts(), None, None
        joined: tuple[int, ...] = ()
        record = find(context, row.token)
        pause = threading.Event()
        while number == self._watching and not self._stop.is_set():
            row = self._rows.get(row.key, row)
            begun = context.clock()
            try:
                seen = pulse(context, record, attempt=attempt, task=row.task, after=seen, rest=_rest)
                last = page(
                    seen,
                    key=row.key,
                    taken_at=context.clock(),
                    before=last,
                    limit_at=row.limit_at,
                    over=row.over or row.pending or is_earlier(seen),
                    world_size=record.world_size,
                    rest=_rest,
                )
            except (DtslurmError, OSError) as error:
                text = error.message if isinstance(error, DtslurmError) else str(error)
                last = replace(last or Page(key=row.key), trouble=text)
            if number == self._watching:
                self._post(last)
                joined = self._join(context, record, row.key, seen if attempt is None else None, joined)
            usual = _IDLE_PAGE_S if row.over else _FAR_PAGE_S if record.mirror else _PAGE_S
            pause.wait(max(usual, 3 * (context.clock() - begun)))  # of many ranks it is much to ask

    def _join(
        self,
        context: Context,
        record: JobRecord,
        key: str,
        seen: RunTelemetry | None,
        joined: tuple[int, ...],
    ) -> tuple[int, ...]:
        """Post what earlier attempts trained, once for each newest one; return the attempts so far."""
        if seen is None or seen.attempts == joined or len(seen.attempts) < 2:
            return joined
        try:
            points = points_of_attempts(context, record, seen, most=_EARLIER_POINTS)
        except (DtslurmError, OSError):
            return joined  # the curves stay those of the newest attempt until the next look
        earlier = {number: of_one for number, of_one in points.items() if number != seen.attempt}
        self._post(EarlierAttempts(key, earlier))
        return seen.attempts

    def follow(
        self,
        row: JobRow | None,
        store: LineStore,
        ranks: str = "",
        *,
        attempt: int | None = None,
        lines: int = LAST_LINES,
    ) -> None:
        """Fill a store with the job's output."""
        self._following += 1
        if row is not None:
            self._spawn(self._follow, self._following, row, store, (ranks, attempt, lines))

    def _follow(
        self, number: int, row: JobRow, store: LineStore, choice: tuple[str, int | None, int]
    ) -> None:
        try:
            self._fill(number, row, store, *choice)
        finally:
            store.loading = False

    def _fill(
        self, number: int, row: JobRow, store: LineStore, ranks: str, attempt: int | None, lines: int
    ) -> None:
        context = self._contexts()
        record = find(context, row.token)
        wanted, words = wanted_of(record, row, ranks, attempt, lines)
        self._post(LogState(row.key, words))
        try:
            with LogStream(context.cluster_of(record).transport, wanted) as stream:
                while number == self._following and not self._stop.is_set() and not stream.ended:
                    for item in stream.read(0.25):
                        _keep(store, item)
                        if isinstance(item, Notice):
                            self._post(LogState(row.key, item.text))
                        elif item is Mark.CAUGHT_UP:
                            store.loading = False
                            self._post(LogState(row.key, words))
                    store.skipped = stream.skipped and not wanted.summary
        except (DtslurmError, OSError) as error:
            text = error.message if isinstance(error, DtslurmError) else str(error)
            self._post(LogState(row.key, f"{text}; press r to try again"))

    def verdict(self, row: JobRow, attempt: int | None = None) -> None:
        """Post the verdict on a job."""
        self._spawn(self._verdict, row, attempt)

    def _verdict(self, row: JobRow, attempt: int | None) -> None:
        context = self._contexts()
        try:
            record = find(context, row.token)
            lines = tuple(self._say(diagnose(context, record, attempt=attempt, task=row.task)))
        except DtslurmError as error:
            lines = tuple(error.lines())
        self._post(Diagnosed(row.key, lines))

    def history(self, row: JobRow, attempt: int) -> None:
        """Post the use of GPUs and CPUs over an attempt of a job."""
        self._spawn(self._history, row, attempt)

    def _history(self, row: JobRow, attempt: int) -> None:
        context = self._contexts()
        record = find(context, row.token)
        history = read_utilization(context, record, attempt=attempt, task=row.task)
        self._post(RunUtilization(row.key, attempt, history))

    def live(self, row: JobRow) -> None:
        """Look at every rank of a running job, and post the verdict."""
        self._spawn(self._live, row)

    def _live(self, row: JobRow) -> None:
        context = self._contexts()
        try:
            found = diagnose_live(context, find(context, row.token), task=row.task)
            lines = tuple(self._say(found))
        except DtslurmError as error:
            lines = tuple(error.lines())
        self._post(Diagnosed(row.key, lines, live=True))

    def act(self, verb: str, row: JobRow) -> None:
        """Do it in a thread, and tell how it went."""
        self._spawn(self._act, verb, row)

    def _act(self, verb: str, row: JobRow) -> None:
        selector = row.token if row.task is None else row.job_id
        acted = act(self._contexts(), verb, [selector], row.cluster)
        self._post(Notification("; ".join(acted.lines(verb))))
        self.refresh()

    def shell(self, row: JobRow, node: str) -> int:
        """Open a shell on a node; the caller has made room on the terminal."""
        context = self._contexts()
        record = find(context, row.token)
        return open_shell(context, record, node, None if row.task is None else row.job_id)

    def open_log(self, row: JobRow, rank: int, attempt: int, opener: Opener) -> int:
        """Open a rank's log; the caller has made room on the terminal."""
        context = self._contexts()
        record = find(context, row.token)
        return handoffs.open_log(context, record, handoffs.log_path(record, rank, attempt, row.task), opener)

    def report(self, row: JobRow, attempt: int | None = None) -> None:
        """Write the page in a thread, and tell where it is."""
        self._spawn(self._report, row, attempt)

    def _report(self, row: JobRow, attempt: int | None) -> None:
        context = self._contexts()
        path = handoffs.write_report(context, find(context, row.token), attempt=attempt, task=row.task)
        self._post(Notification(f"wrote the report to {path}"))

    def resubmit(self, row: JobRow) -> None:
        """Submit it once more in a thread, and tell how it went."""
        self._spawn(self._resubmit, row)

    def _resubmit(self, row: JobRow) -> None:
        record, notices = handoffs.resubmit(row.token if row.task is None else row.job_id)
        told = f"submitted job {record.job_id} ({record.name}) to {record.cluster}; it repeats {row.job_id}"
        self._post(Notification("\n".join([told, *(f"note: {line}" for line in notices)])))
        self.refresh()

    def compare(self, rows: Sequence[JobRow]) -> None:
        """Compare the runs in a thread, and post the lines."""
        self._spawn(self._compare, tuple(rows))

    def _compare(self, rows: Sequence[JobRow]) -> None:
        from dtslurm.services.observe.compare import compare

        context = self._contexts()
        found = compare(context, [find(context, row.token) for row in rows])
        self._post(ComparisonText(tuple(self._say_comparison(found))))

    def demo(self) -> None:
        """Start the demo in a thread, and tell how it went."""
        self._spawn(self._demo)

    def _demo(self) -> None:
        record = handoffs.start_demo(self._contexts())
        self._post(Notification(f"submitted job {record.job_id} ({record.name}) to {record.cluster}"))
        self.refresh()


def _rest() -> None:
    """Leave the interpreter to the screen for a moment: ten thousand ranks are much to go through."""
    time.sleep(_REST_S)


def _is_due(cluster: _Cluster, row: JobRow, now: float) -> bool:
    return now - cluster.use_asked.get(row.key, 0.0) > _USE_S


def is_earlier(seen: RunTelemetry) -> bool:
    """Return whether a later attempt than the one that was looked at has started."""
    return seen.attempt != max(seen.attempts, default=seen.attempt)


def wanted_of(
    record: JobRecord, row: JobRow, ranks: str, attempt: int | None = None, lines: int = LAST_LINES
) -> tuple[LogRequest, str]:
    """Return what to follow of a run, and in words what that is.

    Raises:
        ValueError: ``ranks`` names none.
    """
    many = record.world_size > _MOST_RANKS
    chosen = ranges(ranks)
    summary = many and chosen is None and ranks != "*"
    words = f"rank {ranks}" if chosen else "all ranks"
    if summary:
        words = f"of {record.world_size:,} ranks only lines that look like errors; r chooses ranks, r * all"
    wanted = LogRequest(
        record.run_dir,
        array=record.array is not None,
        task=row.task,
        kinds=frozenset({"rank"} if chosen else {"batch", "node", "rank"}),
        ranks=chosen,
        attempt=attempt,
        lines=_LAST_LINES_OF_MANY * lines // LAST_LINES if many and not chosen else lines,
        follow=not row.over and attempt is None,
        summary=summary,
    )
    return wanted, words


def ranges(text: str) -> tuple[tuple[int, int], ...] | None:
    """Return ranges of ranks from ``0,3-7``; None for all of them.

    Raises:
        ValueError: it names no ranks.
    """
    if text.strip() in {"", "*"}:
        return None
    found = []
    for part in text.split(","):
        known = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip(), re.ASCII)
        first, last = (int(known[1]), int(known[2] or known[1])) if known else (1, 0)
        if last < first:
            raise ValueError(f"{text!r} names no ranks: write 0,3-7, or * for all")
        found.append((first, last))
    return tuple(found)


def _keep(store: LineStore, item: object) -> None:
    if isinstance(item, LogBlock) and item.file.kind not in {"events", "metrics"}:
        store.add(item.file.source, item.data)
    elif isinstance(item, OutputSummary) and item.alarm:
        store.add(item.file.source, item.alarm.encode("utf-8", "replace").replace(b"\n", b" ") + b"\n")
    elif isinstance(item, Rewritten):
        pass  # a progress bar: its end comes as a line
    elif isinstance(item, Notice):
        store.add("*", item.text.encode("utf-8", "replace").replace(b"\n", b" ") + b"\n")
