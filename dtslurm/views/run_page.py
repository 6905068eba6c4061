"""The content of a run's dashboard page: ranks, nodes, curves and events. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from dtslurm.diagnose.ranks_apart import RanksApart, find_ranks_apart
from dtslurm.model.chunking import Rest, chunked
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.roles import RoleState
from dtslurm.model.runs.telemetry import (
    FirstFailure,
    GpuSample,
    NodeSample,
    RankCell,
    RankTelemetry,
    RunTelemetry,
    TrainPoint,
)
from dtslurm.model.values import dataclass
from dtslurm.views.events import drop_outdated_staging
from dtslurm.views.forecast import Forecast, forecast
from dtslurm.views.telemetry import activity_of
from dtslurm.worker.lib.json_records import finite_number

MOST_POINTS = 4000
MOST_EVENTS = 2000
_MIN_SILENCE_S = 30.0  # a rank that wrote within this time is never reported as silent
_SILENCE_FACTOR = 5.0
# A rank is an outlier if its GPU use or used memory is this many percentage points below the median.
_OUTLIER_MARGIN = 25.0
_SLOWDOWN_REASONS = {"thermal", "hardware"}


@dataclass(frozen=True, kw_only=True)
class NodeCell:
    """The newest sample of one node; values that the node did not report are None or missing.

    Attributes:
        age: seconds since the sample.
        cpu: use of the job's CPUs in percent.
        memory: the used share of the job's memory limit, 0 to 1.
        receives, sends: bytes per second over all network devices.
        disks: path and used share (0 to 1) of each file system.
    """

    name: str
    node_rank: int = 0
    age: float = 0.0
    gpus: tuple[GpuSample, ...] = ()
    cpu: float | None = None
    memory: float | None = None
    receives: float | None = None
    sends: float | None = None
    nic_errors: int = 0
    disks: tuple[tuple[str, float], ...] = ()

    @property
    def gpu(self) -> float | None:
        """The mean use of the node's GPUs in percent."""
        utilizations = finite(gpu.util for gpu in self.gpus)
        return statistics.fmean(utilizations) if utilizations else None

    @property
    def gpu_memory(self) -> float | None:
        """The highest used share of memory of a GPU, 0 to 1."""
        return max(finite(gpu_memory(gpu) for gpu in self.gpus), default=None)

    @property
    def temperature(self) -> float | None:
        """The highest temperature of a GPU in °C."""
        return max(finite(gpu.temperature_c for gpu in self.gpus), default=None)

    @property
    def alarms(self) -> tuple[str, ...]:
        """Descriptions of the problems of the node's GPUs and network."""
        alarms = []
        for gpu in self.gpus:
            if gpu.xid:
                alarms.append(f"GPU {gpu.index}: Xid {', '.join(map(str, gpu.xid))}")
            if gpu.ecc_uncorrected:
                alarms.append(f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected ECC errors")
            if throttle_reasons := _SLOWDOWN_REASONS.intersection(gpu.throttle):
                alarms.append(f"GPU {gpu.index}: slowed ({', '.join(sorted(throttle_reasons))})")
        if self.nic_errors:
            alarms.append(f"{self.nic_errors} new network errors")
        return tuple(alarms)


@dataclass(frozen=True, kw_only=True)
class Page:
    """The state of one attempt of a run (or array task) at one time.

    Attributes:
        key: key of the run's row in the run list.
        now: the time on the clock of the machine with the run's files.
        taken_at: the same time on the clock of this machine.
        points: training metrics, oldest first.
        events: the run's events, oldest first.
        activity: the activity of the ranks of a running job, None if unknown.
        roles: the roles beside the ranks, in a run with several roles.
        trouble: the reason why there is no newer data, empty if there is none.
    """

    key: str
    attempt: int = 0
    attempts: tuple[int, ...] = ()
    now: float = 0.0
    taken_at: float = 0.0
    world_size: int = 0
    ranks: tuple[RankCell, ...] = ()
    first_failure: FirstFailure | None = None
    nodes: tuple[NodeCell, ...] = ()
    points: tuple[TrainPoint, ...] = ()
    points_from: str = ""
    events: tuple[Mapping[str, Any], ...] = ()
    forecast: Forecast | None = None
    activity: Activity | None = None
    roles: tuple[RoleState, ...] = ()
    trouble: str = ""

    @cached_property
    def outliers(self) -> tuple[RankCell, ...]:
        """The ranks that differ from the other ranks."""
        return tuple(cell for cell in self.ranks if cell.deviation)

    @cached_property
    def ranks_apart(self) -> RanksApart | None:
        """The evidence that ranks train independently of each other, None if there is none."""
        return find_ranks_apart(self.events, self.attempt)

    def series(self, key: str) -> list[tuple[float, float]]:
        """Return (step, value) pairs of a metric; points without a step are numbered."""
        pairs = []
        for number, point in enumerate(self.points):
            value = getattr(point, key)
            if drawable(value):
                pairs.append((float(number if point.step is None else point.step), float(value)))
        return pairs

    @cached_property
    def losses(self) -> tuple[tuple[float, float], ...]:
        """The (step, loss) pairs."""
        return tuple(self.series("loss"))

    @property
    def loss_diverged_at(self) -> int | None:
        """The step since which the loss has been NaN or infinite, None while the loss is finite."""
        lost_step = None
        for point in reversed(self.points):
            if point.loss is None:
                continue
            if math.isfinite(point.loss):
                break
            lost_step = point.step
        return lost_step


class JobOutlook(NamedTuple):
    """What is known of a job without its telemetry.

    Attributes:
        limit_at: the time at which the time limit ends the run, on this machine's clock.
        has_ended: whether the job has ended.
        world_size: the number of ranks; 0 if it is unknown.
    """

    limit_at: float | None = None
    has_ended: bool = False
    world_size: int = 0


UNKNOWN_JOB = JobOutlook()


def page(
    telemetry: RunTelemetry,
    *,
    key: str,
    taken_at: float,
    job: JobOutlook = UNKNOWN_JOB,
    previous_page: Page | None = None,
    yield_control: Rest | None = None,
) -> Page:
    """Build the page of a run from its telemetry.

    Args:
        previous_page: the previous page, whose points and events are continued.
        yield_control: see `chunked`.
    """
    is_same_attempt = (
        previous_page is not None
        and previous_page.attempt == (telemetry.attempt or 0)
        and previous_page.key == key
    )
    old_points = previous_page.points if previous_page is not None and is_same_attempt else ()
    old_events = previous_page.events if previous_page is not None and is_same_attempt else ()
    points = thinned([*old_points, *telemetry.train])
    is_newest = telemetry.attempt == max(telemetry.attempts, default=telemetry.attempt)
    nodes = tuple(
        sorted(
            (_build_node_cell(sample, telemetry) for sample in telemetry.nodes),
            key=lambda cell: cell.node_rank,
        )
    )
    limit_at = job.limit_at
    if limit_at is not None:  # convert it to the clock of the machine with the run's files
        limit_at += telemetry.now - taken_at
    rank_count = telemetry.world_size or (job.world_size if telemetry.attempt is not None else 0)
    activity = None if job.has_ended else activity_of(telemetry, rank_count)
    end_forecast = None if job.has_ended else forecast_end(points, telemetry.now, limit_at)
    if end_forecast is not None and activity is not None and activity.stalled:
        end_forecast = replace(end_forecast, stalled=True)
    return Page(
        key=key,
        attempt=telemetry.attempt or 0,
        attempts=telemetry.attempts,
        now=telemetry.now,
        taken_at=taken_at,
        world_size=rank_count,
        ranks=build_rank_cells(
            telemetry,
            rank_count,
            nodes,
            has_ended=job.has_ended or not is_newest,
            yield_control=yield_control,
        ),
        first_failure=telemetry.first_failure,
        nodes=nodes,
        points=points,
        points_from=telemetry.train_from
        or (previous_page.points_from if previous_page is not None and is_same_attempt else ""),
        events=tuple(drop_outdated_staging((*old_events, *telemetry.events))[-MOST_EVENTS:]),
        forecast=end_forecast,
        activity=activity,
        roles=telemetry.roles,
    )


def drawable(value: object) -> bool:
    """Return whether a value is a finite number small enough that sums do not overflow."""
    return finite_number(value) is not None


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the values that are drawable numbers."""
    return [number for number in map(finite_number, values) if number is not None]


def gpu_memory(gpu: GpuSample) -> float | None:
    """Return the used share of a GPU's memory, 0 to 1, None if unknown."""
    if gpu.memory_used is None or not gpu.memory_total:
        return None
    return gpu.memory_used / gpu.memory_total


def build_rank_cells(
    telemetry: RunTelemetry,
    world_size: int,
    nodes: Sequence[NodeCell],
    *,
    has_ended: bool,
    yield_control: Rest | None = None,
) -> tuple[RankCell, ...]:
    """Return a cell for each rank.

    Args:
        has_ended: whether the attempt has ended, so that a rank without a recorded end is lost.
    """
    count = max(world_size, max(telemetry.ranks, default=-1) + 1)
    by_node: dict[int, list[int]] = {}
    for rank in sorted(telemetry.ranks):
        node_rank = telemetry.ranks[rank].node_rank
        if node_rank is not None:
            by_node.setdefault(node_rank, []).append(rank)
    gpus: dict[int, GpuSample] = {}
    for node in nodes:
        ranks_on_node = by_node.get(node.node_rank, [])
        if node.gpus and len(node.gpus) >= len(ranks_on_node):  # else ranks share GPUs
            gpus.update(zip(ranks_on_node, node.gpus, strict=False))
    rank_cells = [
        _build_rank_cell(rank, telemetry, gpus.get(rank), has_ended)
        for rank in chunked(range(count), yield_control)
    ]
    return tuple(_describe_differences(rank_cells, yield_control))


def _build_rank_cell(rank: int, telemetry: RunTelemetry, gpu: GpuSample | None, has_ended: bool) -> RankCell:
    record = telemetry.ranks.get(rank)
    if record is None:
        return RankCell(rank=rank)
    state = _rank_state(record, has_ended)
    is_running = state == "running"
    return RankCell(
        rank=rank,
        state=state,
        node_rank=record.node_rank,
        host=record.host,
        pid=record.pid,
        gpu=gpu.util if gpu is not None and is_running and drawable(gpu.util) else None,
        memory=gpu_memory(gpu) if gpu is not None and is_running else None,
        silent=telemetry.silent_s(rank) if is_running else None,
        size=record.bytes,
        exit_code=record.exit_code,
        signal=record.signal,
        failed_first=telemetry.first_failure is not None and telemetry.first_failure.rank == rank,
    )


def _rank_state(record: RankTelemetry, has_ended: bool) -> str:
    if record.ended is not None or record.exit_code is not None:
        if record.exit_code in {0, WANTS_REQUEUE} and not record.signal:
            return "done"
        return "terminated" if record.told_to_end else "failed"
    if record.started is None and record.last_output_at is None:
        return "waiting"
    return "lost" if has_ended else "running"


def _describe_differences(cells: list[RankCell], yield_control: Rest | None) -> list[RankCell]:
    """Return the cells with a description of how each rank differs from the other ranks."""
    silences = finite(cell.silent for cell in cells)
    gpu_uses = finite(cell.gpu for cell in cells)
    memory_shares = finite(cell.memory for cell in cells)
    silence_limit = (
        max(_MIN_SILENCE_S, _SILENCE_FACTOR * statistics.median(silences)) if len(silences) > 1 else math.inf
    )
    gpu_use_limit = statistics.median(gpu_uses) - _OUTLIER_MARGIN if len(gpu_uses) > 1 else -math.inf
    memory_limit = (
        statistics.median(memory_shares) - _OUTLIER_MARGIN / 100 if len(memory_shares) > 1 else -math.inf
    )
    running_count = sum(cell.state == "running" for cell in cells)
    done_count = sum(cell.state == "done" for cell in cells)
    described_cells = []
    for cell in chunked(cells, yield_control):
        differences = []
        if cell.failed_first:
            differences.append("failed first")
        if cell.state == "failed":
            differences.append(f"signal {cell.signal}" if cell.signal else f"exit code {cell.exit_code}")
        elif cell.state == "lost":
            differences.append("end not recorded")
        elif cell.state == "done" and done_count < running_count:
            differences.append("ended before the others")
        if cell.silent is not None and cell.silent > silence_limit:
            differences.append("no output while other ranks write")
        if cell.gpu is not None and cell.gpu < gpu_use_limit:
            differences.append("its GPU use is lower than that of other ranks")
        if cell.memory is not None and cell.memory < memory_limit:
            differences.append("its GPU memory use is lower than that of other ranks")
        described_cells.append(replace(cell, deviation="; ".join(differences)) if differences else cell)
    return described_cells


def _build_node_cell(sample: NodeSample, telemetry: RunTelemetry) -> NodeCell:
    rates = telemetry.rates(sample.node_rank)
    network_rates = [rate for name, rate in rates.items() if name != "lo"]
    previous_sample = next(
        (earlier for earlier in telemetry.nodes_before if earlier.node_rank == sample.node_rank),
        None,
    )
    new_errors = 0
    for name, nic in sample.nics.items():
        previous_nic = previous_sample.nics.get(name) if previous_sample is not None else None
        if previous_nic is not None and nic.errors is not None and previous_nic.errors is not None:
            new_errors += max(0, nic.errors - previous_nic.errors)
    used_bytes, total = sample.memory_used, sample.memory_total
    if sample.cgroup_memory is not None and sample.cgroup_limit:
        used_bytes, total = sample.cgroup_memory, sample.cgroup_limit
    return NodeCell(
        name=sample.node,
        node_rank=sample.node_rank,
        age=max(0.0, telemetry.now - sample.time),
        gpus=sample.gpus,
        cpu=sample.cpu_percent,
        memory=used_bytes / total if used_bytes is not None and total else None,
        receives=sum(rate[0] for rate in network_rates) if network_rates else None,
        sends=sum(rate[1] for rate in network_rates) if network_rates else None,
        nic_errors=new_errors,
        disks=tuple((name, disk.used / disk.total) for name, disk in sample.disks.items() if disk.total),
    )


def thinned(points: Sequence[TrainPoint]) -> tuple[TrainPoint, ...]:
    """Return at most ``MOST_POINTS`` points: drop every second point of the older half until they fit."""
    kept_points = list(points)
    while len(kept_points) > MOST_POINTS:
        half = len(kept_points) // 2
        kept_points = kept_points[:half:2] + kept_points[half:]
    return tuple(kept_points)


def forecast_end(points: Sequence[TrainPoint], now: float, limit_at: float | None) -> Forecast | None:
    """Return the forecast of the end of training from its metrics."""
    steps = [
        (float(point.time if point.time is not None else math.nan), float(point.step))
        for point in points
        if point.step is not None
    ]
    total = next((point.total_steps for point in reversed(points) if point.total_steps is not None), None)
    if steps and not any(math.isfinite(time) for time, _ in steps):
        steps = [(now, steps[-1][1])]  # points without a time give the progress, but no pace
    return forecast(steps, total=total, now=now, limit_at=limit_at)
