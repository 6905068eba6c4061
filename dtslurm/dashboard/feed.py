"""The dashboard's data source: threads query the clusters and post immutable snapshots.

The screen never waits for a query.
"""

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
    add_page,
)
from dtslurm.services.observe.shell import open_shell
from dtslurm.services.observe.telemetry import RunPart, read_telemetry
from dtslurm.services.observe.utilization_history import Percentages, UtilizationHistory, read_utilization
from dtslurm.services.runs.control import change_jobs
from dtslurm.services.runs.runs import find
from dtslurm.services.wiring.context import Context
from dtslurm.views.run_page import JobOutlook, Page, page

if TYPE_CHECKING:
    from dtslurm.services.observe.compare import Comparison

_NEW_RUNS_S = 3.0  # between reads of the local index of runs
_PAGE_S = 2.0
_FAR_PAGE_S = 5.0
_IDLE_PAGE_S = 30.0  # for a job that has ended
_REST_S = 0.01
_PROGRESS_S = 15.0
_UTILIZATION_S = 120.0  # between reads of a running job's GPU utilization
_UTILIZATION_COLUMNS = 16
_MAX_ENDED_JOBS = 12  # newest ended jobs whose GPU utilization is shown
_MAX_QUERIES = 4  # jobs of a cluster that are queried in one round
_MAX_EARLIER_POINTS = 1000  # of each attempt before the newest one
_MAX_FOLLOWED_RANKS = 256  # largest run whose complete output is followed by default
LAST_LINES = 20_000  # of each file, until the user loads earlier lines
_LAST_LINES_OF_LARGE_RUNS = 100


@dataclass(frozen=True)
class LogState:
    """The state of the log follower; ``text`` is the text of the line below the log."""

    key: str
    text: str


@dataclass(frozen=True)
class Notification:
    """A message to the user about the outcome of an action or an error."""

    text: str
    bad: bool = False


@dataclass(frozen=True)
class Diagnosed:
    """The diagnosis of a job as lines; ``live`` if it describes the present activity of the ranks."""

    key: str
    lines: tuple[str, ...]
    live: bool = False


@dataclass(frozen=True)
class EarlierAttempts:
    """The training metrics of all attempts of a run before its newest, oldest attempt first."""

    key: str
    attempts: Mapping[int, Sequence[TrainPoint]]


@dataclass(frozen=True)
class GpuUtilization:
    """The mean GPU utilization of runs over time in percent, by key of their rows."""

    values: Mapping[str, Percentages]


@dataclass(frozen=True)
class RunUtilization:
    """The GPU and CPU utilization of a run over an attempt; ``key`` is the key of the run's row."""

    key: str
    attempt: int
    history: UtilizationHistory


@dataclass(frozen=True)
class ComparisonText:
    """The comparison of the marked runs, as lines."""

    lines: tuple[str, ...]


Post = Callable[[object], None]


class SnapshotSource(Protocol):
    """A source of snapshots for the dashboard: `Feed`, or a substitute in tests."""

    def start(self, post: Post) -> None:
        """Start to post `Board`s."""

    def stop(self) -> None:
        """Stop the source; nothing is posted afterwards."""

    def refresh(self) -> None:
        """Query all clusters now."""

    def watch(self, row: JobRow | None, attempt: int | None = None) -> None:
        """Post `Page`s of this job and of no other job; None stops."""

    def follow(
        self,
        row: JobRow | None,
        store: LineStore,
        ranks: str = "",
        *,
        attempt: int | None = None,
        lines: int = LAST_LINES,
    ) -> None:
        """Fill a store with the last ``lines`` of each output file of a job and with all later lines.

        Args:
            row: the job; None stops.
            ranks: the ranks to follow, such as ``0,3-7``; ``*`` follows all ranks, however many.
            attempt: the only attempt to follow; None follows the newest and all later attempts.
        """

    def verdict(self, row: JobRow, attempt: int | None = None) -> None:
        """Post the diagnosis of a job."""

    def history(self, row: JobRow, attempt: int) -> None:
        """Post the `RunUtilization` of an attempt of a job."""

    def live(self, row: JobRow) -> None:
        """Inspect every rank of a running job and post the live diagnosis."""

    def change_job(self, verb: str, row: JobRow) -> None:
        """Cancel, requeue, hold or release a job and post a `Notification` of the outcome."""

    def shell(self, row: JobRow, node: str) -> int:
        """Open a shell on a node in this terminal and return its exit code."""

    def open_log(self, row: JobRow, rank: int, attempt: int, opener: Opener) -> int:
        """Open a rank's log in this terminal and return the program's exit code."""

    def report(self, row: JobRow, attempt: int | None = None) -> None:
        """Write the report of a run and post a `Notification` with its path."""

    def resubmit(self, row: JobRow) -> None:
        """Resubmit a run and post a `Notification` of the outcome."""

    def compare(self, rows: Sequence[JobRow]) -> None:
        """Post the comparison of some runs."""

    def demo(self) -> None:
        """Start the demo on this machine and post a `Notification` of the outcome."""


@dataclass
class _Cluster:
    """The state of one cluster's thread, with a context of its own so that it waits for no other cluster."""

    key: ClusterKey
    context: Context
    records: list[JobRecord] = field(default_factory=list)
    wake: threading.Event = field(default_factory=threading.Event)
    rows: tuple[JobRow, ...] = ()
    line: ClusterLine = field(default_factory=lambda: ClusterLine(name=""))
    pages: dict[str, Page] = field(default_factory=dict)
    queried_at: dict[str, float] = field(default_factory=dict)
    uses: dict[str, Percentages] = field(default_factory=dict)
    use_asked: dict[str, float] = field(default_factory=dict)

    def min_poll(self) -> float:
        try:
            profile = self.context.cluster_of(self.records[0]).profile
        except (DtslurmError, IndexError):
            return 30.0
        return 2.0 if profile.scheduler == "local" else max(2.0, profile.slurm.min_poll_s)


class Feed:
    """A snapshot source that queries all clusters in parallel, each in a thread of its own.

    Args:
        contexts: creates a context for each thread.
        render_diagnosis: renders a diagnosis as lines.
        render_comparison: renders a comparison of runs as lines.
        cluster: name of the only cluster to show; None shows all.
    """

    def __init__(
        self,
        contexts: Callable[[], Context],
        render_diagnosis: Callable[[Diagnosis | Live], Sequence[str]],
        *,
        cluster: str | None = None,
        render_comparison: Callable[[Comparison], Sequence[str]] = lambda _: (),
    ) -> None:
        self._render_comparison = render_comparison
        self._make_context, self._render_diagnosis, self._only_cluster = contexts, render_diagnosis, cluster
        self._post: Post = lambda _: None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._refresh_requested = threading.Event()
        self._clusters: dict[ClusterKey, _Cluster] = {}
        self._watch_generation = 0
        self._follow_generation = 0
        self._rows: dict[str, JobRow] = {}
        self._has_published = False

    def start(self, post: Post) -> None:
        """Start to post boards."""
        self._post = lambda value: None if self._stop.is_set() else post(value)
        self._spawn(self._poll_run_index)

    def stop(self) -> None:
        """Stop all threads; threads that wait for a network answer are abandoned."""
        self._stop.set()
        self._refresh_requested.set()
        for cluster in self._clusters.values():
            cluster.wake.set()

    def refresh(self) -> None:
        """Query all clusters now."""
        self._refresh_requested.set()
        for cluster in list(self._clusters.values()):
            cluster.wake.set()

    def _spawn(self, function: Callable[..., None], *args: Any) -> None:
        threading.Thread(
            target=self._run_guarded, args=(function, args), daemon=True, name="dtslurm-feed"
        ).start()

    def _run_guarded(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except DtslurmError as error:
            self._post(Notification(" ".join(error.lines()[:3]), bad=True))
        except OSError as error:
            self._post(Notification(str(error), bad=True))
        except Exception as error:  # noqa: BLE001 - the screen hides a thread's traceback on stderr
            description = f"{type(error).__name__}: {error}"
            self._post(
                Notification(
                    f"internal error: {description}; a part of the screen is no longer updated", bad=True
                )
            )

    # ---- Board

    def _poll_run_index(self) -> None:
        """Poll the index of runs and start a thread for each cluster that has runs."""
        runs = Runs(self._make_context())
        while not self._stop.is_set():
            try:
                records_by_cluster = runs.by_cluster()
            except DtslurmError as error:
                self._post(Notification(error.message, bad=True))
                records_by_cluster = {}
            for key, records in records_by_cluster.items():
                if self._only_cluster is not None and key[0] != self._only_cluster:
                    continue
                cluster = self._clusters.get(key)
                if cluster is None:
                    cluster = _Cluster(key, self._make_context(), line=ClusterLine(name=key[0]))
                    cluster.rows = ClusterReader(cluster.context, key[0]).first(records)
                    cluster.records = records
                    with self._lock:
                        self._clusters[key] = cluster
                    self._spawn(self._poll_cluster, cluster)
                elif {record.token for record in records} - {record.token for record in cluster.records}:
                    cluster.records = records
                    cluster.wake.set()
                else:
                    cluster.records = records
            if not self._has_published:
                self._has_published = True
                self._publish()
            self._refresh_requested.wait(_NEW_RUNS_S)
            self._refresh_requested.clear()

    def _poll_cluster(self, cluster: _Cluster) -> None:
        reader = ClusterReader(cluster.context, cluster.key[0])
        while not self._stop.is_set():
            cluster.rows, cluster.line = reader.read(cluster.records)
            self._publish()
            if not cluster.line.trouble:
                self._read_progress(cluster)
                self._read_gpu_utilization(cluster)
            has_active_jobs = any(not row.over for row in cluster.rows)
            cluster.wake.wait(cluster.min_poll() * (1 if has_active_jobs else 4))
            cluster.wake.clear()

    def _read_progress(self, cluster: _Cluster) -> None:
        """Read the telemetry of the running jobs whose progress is the oldest, at most `_MAX_QUERIES`."""
        context = cluster.context
        now = context.clock()
        running_rows = [
            row for row in cluster.rows if row.state == "RUNNING" and row.recorded and not row.is_array
        ]
        due_rows = [row for row in running_rows if now - cluster.queried_at.get(row.key, 0.0) > _PROGRESS_S]
        records_by_token = {record.token: record for record in cluster.records}
        for row in sorted(due_rows, key=lambda row: cluster.queried_at.get(row.key, 0.0))[:_MAX_QUERIES]:
            cluster.queried_at[row.key] = now
            try:
                telemetry = read_telemetry(
                    context, records_by_token[row.token], RunPart(task=row.task), points=200
                )
            except (DtslurmError, OSError, KeyError):
                continue
            cluster.pages[row.key] = page(
                telemetry, key=row.key, taken_at=context.clock(), job=JobOutlook(limit_at=row.limit_at)
            )
        if due_rows:
            self._publish()

    def _read_gpu_utilization(self, cluster: _Cluster) -> None:
        """Read the GPU utilization of running jobs that have GPU samples, and of the newest ended jobs.

        Running jobs are read again every `_UTILIZATION_S` seconds. Ended jobs are read once, and only if
        their
        files can be read without a process on a login node.
        """
        now = cluster.context.clock()
        local_tokens = {record.token for record in cluster.records if not record.mirror}
        rows = [row for row in cluster.rows if not row.is_array]
        ended_rows = [row for row in rows if row.over and row.start is not None and row.token in local_tokens]
        ended_rows = ended_rows[:_MAX_ENDED_JOBS]
        due_rows = [
            row for row in rows if self._has_gpus(cluster, row) and _is_utilization_due(cluster, row, now)
        ]
        due_rows += [row for row in ended_rows if row.key not in cluster.use_asked]
        records_by_token = {record.token: record for record in cluster.records}
        previous = dict(cluster.uses)
        for row in due_rows[:_MAX_QUERIES]:
            cluster.use_asked[row.key] = now
            try:
                history = read_utilization(
                    cluster.context,
                    records_by_token[row.token],
                    attempt=row.attempt,
                    task=row.task,
                    columns=_UTILIZATION_COLUMNS,
                )
            except (DtslurmError, OSError, KeyError):
                continue
            if percentages := average_gpus(history, _UTILIZATION_COLUMNS):
                cluster.uses[row.key] = percentages
        if cluster.uses != previous:
            with self._lock:
                uses_by_cluster = [each_cluster.uses for each_cluster in self._clusters.values()]
                self._post(
                    GpuUtilization(
                        {key: percentages for uses in uses_by_cluster for key, percentages in uses.items()}
                    )
                )

    @staticmethod
    def _has_gpus(cluster: _Cluster, row: JobRow) -> bool:
        """Return whether the newest samples of a running job include GPU utilization."""
        cached_page = cluster.pages.get(row.key)
        if row.state != "RUNNING" or cached_page is None:
            return False
        return any(node.gpu is not None for node in cached_page.nodes)

    def _publish(self) -> None:
        with self._lock:
            rows = [
                add_page(row, cluster.pages.get(row.key))
                for cluster in self._clusters.values()
                for row in cluster.rows
            ]
            lines = tuple(cluster.line for cluster in self._clusters.values())
            self._rows = {row.key: row for row in rows}
            rows = list(self._rows.values())  # two profiles of one cluster report the same jobs
            taken_at = next((cluster.context.clock() for cluster in self._clusters.values()), 0.0)
        rows.sort(key=lambda row: -row.created)  # stable: the tasks of an array stay behind its row
        self._post(Board(rows=tuple(rows), clusters=lines, taken_at=taken_at))

    # ---- One job

    def watch(self, row: JobRow | None, attempt: int | None = None) -> None:
        """Post pages of this job and of no other job; None stops."""
        self._watch_generation += 1
        if row is not None:
            self._spawn(self._poll_page, self._watch_generation, row, attempt)

    def _poll_page(self, number: int, row: JobRow, attempt: int | None) -> None:
        context, last_page, telemetry = self._make_context(), None, None
        posted_attempts: tuple[int, ...] = ()
        record = find(context, row.token)
        pause = threading.Event()
        while number == self._watch_generation and not self._stop.is_set():
            row = self._rows.get(row.key, row)
            started_at = context.clock()
            try:
                telemetry = read_telemetry(
                    context,
                    record,
                    RunPart(attempt=attempt, task=row.task),
                    previous_telemetry=telemetry,
                    yield_control=_yield_to_screen,
                )
                last_page = page(
                    telemetry,
                    key=row.key,
                    taken_at=context.clock(),
                    job=JobOutlook(
                        limit_at=row.limit_at,
                        has_ended=row.over or row.pending or has_newer_attempt(telemetry),
                        world_size=record.world_size,
                    ),
                    previous_page=last_page,
                    yield_control=_yield_to_screen,
                )
            except (DtslurmError, OSError) as error:
                text = error.message if isinstance(error, DtslurmError) else str(error)
                last_page = replace(last_page or Page(key=row.key), trouble=text)
            if number == self._watch_generation:
                self._post(last_page)
                posted_attempts = self._post_earlier_attempts(
                    context, record, row.key, telemetry if attempt is None else None, posted_attempts
                )
            interval = _IDLE_PAGE_S if row.over else _FAR_PAGE_S if record.mirror else _PAGE_S
            pause.wait(max(interval, 3 * (context.clock() - started_at)))  # large runs take long to query

    def _post_earlier_attempts(
        self,
        context: Context,
        record: JobRecord,
        key: str,
        telemetry: RunTelemetry | None,
        posted_attempts: tuple[int, ...],
    ) -> tuple[int, ...]:
        """Post the metrics of the earlier attempts, once for each newest attempt.

        Returns:
            The attempts whose metrics have been posted.
        """
        if telemetry is None or telemetry.attempts == posted_attempts or len(telemetry.attempts) < 2:
            return posted_attempts
        try:
            points_by_attempt = points_of_attempts(context, record, telemetry, max_points=_MAX_EARLIER_POINTS)
        except (DtslurmError, OSError):
            return posted_attempts  # keep the newest attempt's curves until the next poll
        earlier = {
            number: attempt_points
            for number, attempt_points in points_by_attempt.items()
            if number != telemetry.attempt
        }
        self._post(EarlierAttempts(key, earlier))
        return telemetry.attempts

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
        self._follow_generation += 1
        if row is not None:
            self._spawn(self._follow_output, self._follow_generation, row, store, (ranks, attempt, lines))

    def _follow_output(
        self, number: int, row: JobRow, store: LineStore, scope: tuple[str, int | None, int]
    ) -> None:
        try:
            self._stream_output(number, row, store, *scope)
        finally:
            store.loading = False

    def _stream_output(
        self, number: int, row: JobRow, store: LineStore, ranks: str, attempt: int | None, lines: int
    ) -> None:
        context = self._make_context()
        record = find(context, row.token)
        request, description = build_log_request(record, row, ranks, attempt, lines)
        self._post(LogState(row.key, description))
        try:
            with LogStream(context.cluster_of(record).transport, request) as stream:
                while number == self._follow_generation and not self._stop.is_set() and not stream.ended:
                    for item in stream.read(0.25):
                        _store_output(store, item)
                        if isinstance(item, Notice):
                            self._post(LogState(row.key, item.text))
                        elif item is Mark.CAUGHT_UP:
                            store.loading = False
                            self._post(LogState(row.key, description))
                    store.skipped = stream.skipped and not request.summary
        except (DtslurmError, OSError) as error:
            text = error.message if isinstance(error, DtslurmError) else str(error)
            self._post(LogState(row.key, f"{text}; press r to try again"))

    def verdict(self, row: JobRow, attempt: int | None = None) -> None:
        """Post the diagnosis of a job."""
        self._spawn(self._post_diagnosis, row, attempt)

    def _post_diagnosis(self, row: JobRow, attempt: int | None) -> None:
        context = self._make_context()
        try:
            record = find(context, row.token)
            lines = tuple(self._render_diagnosis(diagnose(context, record, attempt=attempt, task=row.task)))
        except DtslurmError as error:
            lines = tuple(error.lines())
        self._post(Diagnosed(row.key, lines))

    def history(self, row: JobRow, attempt: int) -> None:
        """Post the GPU and CPU utilization over an attempt of a job."""
        self._spawn(self._post_utilization, row, attempt)

    def _post_utilization(self, row: JobRow, attempt: int) -> None:
        context = self._make_context()
        record = find(context, row.token)
        history = read_utilization(context, record, attempt=attempt, task=row.task)
        self._post(RunUtilization(row.key, attempt, history))

    def live(self, row: JobRow) -> None:
        """Inspect every rank of a running job and post the live diagnosis."""
        self._spawn(self._post_live_diagnosis, row)

    def _post_live_diagnosis(self, row: JobRow) -> None:
        context = self._make_context()
        try:
            diagnosis = diagnose_live(context, find(context, row.token), task=row.task)
            lines = tuple(self._render_diagnosis(diagnosis))
        except DtslurmError as error:
            lines = tuple(error.lines())
        self._post(Diagnosed(row.key, lines, live=True))

    def change_job(self, verb: str, row: JobRow) -> None:
        """Change the job in a thread and post the outcome."""
        self._spawn(self._change_job, verb, row)

    def _change_job(self, verb: str, row: JobRow) -> None:
        selector = row.token if row.task is None else row.job_id
        changes = change_jobs(self._make_context(), verb, [selector], row.cluster)
        self._post(Notification("; ".join(changes.lines(verb))))
        self.refresh()

    def shell(self, row: JobRow, node: str) -> int:
        """Open a shell on a node; the caller has suspended the application."""
        context = self._make_context()
        record = find(context, row.token)
        return open_shell(context, record, node, None if row.task is None else row.job_id)

    def open_log(self, row: JobRow, rank: int, attempt: int, opener: Opener) -> int:
        """Open a rank's log; the caller has suspended the application."""
        context = self._make_context()
        record = find(context, row.token)
        return handoffs.open_log(context, record, handoffs.log_path(record, rank, attempt, row.task), opener)

    def report(self, row: JobRow, attempt: int | None = None) -> None:
        """Write the report in a thread and post its path."""
        self._spawn(self._write_report, row, attempt)

    def _write_report(self, row: JobRow, attempt: int | None) -> None:
        context = self._make_context()
        path = handoffs.write_report(context, find(context, row.token), attempt=attempt, task=row.task)
        self._post(Notification(f"wrote the report to {path}"))

    def resubmit(self, row: JobRow) -> None:
        """Resubmit the run in a thread and post the outcome."""
        self._spawn(self._resubmit_run, row)

    def _resubmit_run(self, row: JobRow) -> None:
        record, notices = handoffs.resubmit(row.token if row.task is None else row.job_id)
        message = (
            f"submitted job {record.job_id} ({record.name}) to {record.cluster}; it repeats {row.job_id}"
        )
        self._post(Notification("\n".join([message, *(f"note: {line}" for line in notices)])))
        self.refresh()

    def compare(self, rows: Sequence[JobRow]) -> None:
        """Compare the runs in a thread and post the lines."""
        self._spawn(self._compare_runs, tuple(rows))

    def _compare_runs(self, rows: Sequence[JobRow]) -> None:
        from dtslurm.services.observe.compare import compare

        context = self._make_context()
        comparison = compare(context, [find(context, row.token) for row in rows])
        self._post(ComparisonText(tuple(self._render_comparison(comparison))))

    def demo(self) -> None:
        """Start the demo in a thread and post the outcome."""
        self._spawn(self._submit_demo)

    def _submit_demo(self) -> None:
        record = handoffs.start_demo(self._make_context())
        self._post(Notification(f"submitted job {record.job_id} ({record.name}) to {record.cluster}"))
        self.refresh()


def _yield_to_screen() -> None:
    """Sleep briefly so that the screen's thread can run while ten thousand ranks are processed."""
    time.sleep(_REST_S)


def _is_utilization_due(cluster: _Cluster, row: JobRow, now: float) -> bool:
    return now - cluster.use_asked.get(row.key, 0.0) > _UTILIZATION_S


def has_newer_attempt(telemetry: RunTelemetry) -> bool:
    """Return whether a newer attempt than the one in the telemetry has started."""
    return telemetry.attempt != max(telemetry.attempts, default=telemetry.attempt)


def build_log_request(
    record: JobRecord, row: JobRow, ranks: str, attempt: int | None = None, lines: int = LAST_LINES
) -> tuple[LogRequest, str]:
    """Return the log request for a run and a description of its scope.

    Raises:
        ValueError: ``ranks`` is not a valid list of ranks.
    """
    is_large = record.world_size > _MAX_FOLLOWED_RANKS
    rank_ranges = parse_rank_ranges(ranks)
    summary = is_large and rank_ranges is None and ranks != "*"
    description = f"rank {ranks}" if rank_ranges else "all ranks"
    if summary:
        description = (
            f"of {record.world_size:,} ranks only lines that look like errors; r chooses ranks, r * all"
        )
    request = LogRequest(
        record.run_dir,
        array=record.array is not None,
        task=row.task,
        kinds=frozenset({"rank"} if rank_ranges else {"batch", "node", "rank"}),
        ranks=rank_ranges,
        attempt=attempt,
        lines=_LAST_LINES_OF_LARGE_RUNS * lines // LAST_LINES if is_large and not rank_ranges else lines,
        follow=not row.over and attempt is None,
        summary=summary,
    )
    return request, description


def parse_rank_ranges(text: str) -> tuple[tuple[int, int], ...] | None:
    """Parse ranges of ranks such as ``0,3-7``; return None for all ranks.

    Raises:
        ValueError: the text is not a valid list of ranks.
    """
    if text.strip() in {"", "*"}:
        return None
    rank_ranges = []
    for range_text in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", range_text.strip(), re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ValueError(f"{text!r} names no ranks: write 0,3-7, or * for all")
        rank_ranges.append((first, last))
    return tuple(rank_ranges)


def _store_output(store: LineStore, item: object) -> None:
    if isinstance(item, LogBlock) and item.file.kind not in {"events", "metrics"}:
        store.add(item.file.source, item.data)
    elif isinstance(item, OutputSummary) and item.alarm:
        store.add(item.file.source, item.alarm.encode("utf-8", "replace").replace(b"\n", b" ") + b"\n")
    elif isinstance(item, Rewritten):
        pass  # a progress bar; its final state arrives as a line
    elif isinstance(item, Notice):
        store.add("*", item.text.encode("utf-8", "replace").replace(b"\n", b" ") + b"\n")
