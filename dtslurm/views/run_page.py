"""One run as its page of the dashboard shows it: ranks, nodes, curves, events. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from dtslurm.diagnose.ranks_apart import RanksApart, find_ranks_apart
from dtslurm.model.chunking import Rest, chunked
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.telemetry import (
    FirstFailure,
    GpuSample,
    NodeSample,
    RankTelemetry,
    RunTelemetry,
    TrainPoint,
)
from dtslurm.model.values import dataclass
from dtslurm.views.events import condensed
from dtslurm.views.forecast import Forecast, forecast
from dtslurm.views.telemetry import activity_of

MOST_POINTS = 4000
MOST_EVENTS = 2000
_STRAGGLES_S = 30.0  # a rank is not called quiet before so many seconds, however chatty the others are
_STRAGGLES_TIMES = 5.0
_APART = 25.0  # percentage points of GPU use, or of used memory, below the median that stand out
_SLOWED = {"thermal", "hardware"}


@dataclass(frozen=True, kw_only=True)
class RankCell:
    """One rank.

    Attributes:
        state: ``waiting`` (no record yet), ``running``, ``done``, ``failed``, ``terminated`` (it was told to
            end by SIGTERM) or ``lost`` (its attempt is over and it recorded no end).
        failed_first: whether it is the first rank that failed.
        gpu: use of its GPU in percent, ``memory`` the used share of that GPU's memory, 0 to 1.
        silent: seconds since it last wrote, None if it never did or has ended.
        odd: in words why it stands out among the others, empty if it does not.
    """

    rank: int
    state: str = "waiting"
    node_rank: int | None = None
    host: str = ""
    pid: int | None = None
    gpu: float | None = None
    memory: float | None = None
    silent: float | None = None
    size: int = 0
    exit_code: int | None = None
    signal: int | None = None
    failed_first: bool = False
    odd: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeCell:
    """One node's newest sample; what the node could not tell is None or missing.

    Attributes:
        age: seconds since the sample.
        cpu: percent of the job's CPUs; ``memory`` the used share of what the job may use, 0 to 1.
        receives, sends: bytes a second over all network devices.
        disks: used share of each file system, 0 to 1.
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
        """Mean use of its GPUs in percent."""
        known = finite(item.util for item in self.gpus)
        return statistics.fmean(known) if known else None

    @property
    def gpu_memory(self) -> float | None:
        """The fullest GPU's used share of memory, 0 to 1."""
        return max(finite(gpu_memory(item) for item in self.gpus), default=None)

    @property
    def temperature(self) -> float | None:
        """The hottest GPU, °C."""
        return max(finite(item.temperature_c for item in self.gpus), default=None)

    @property
    def alarms(self) -> tuple[str, ...]:
        """What is wrong with its GPUs and its network, in words."""
        found = []
        for item in self.gpus:
            if item.xid:
                found.append(f"GPU {item.index}: Xid {', '.join(map(str, item.xid))}")
            if item.ecc_uncorrected:
                found.append(f"GPU {item.index}: {item.ecc_uncorrected} uncorrected ECC errors")
            if slowed := _SLOWED.intersection(item.throttle):
                found.append(f"GPU {item.index}: slowed ({', '.join(sorted(slowed))})")
        if self.nic_errors:
            found.append(f"{self.nic_errors} new network errors")
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Page:
    """One attempt of a run (or array task) at one moment.

    Attributes:
        key: of the row of the board that it belongs to.
        now: on the clock of the machine with the run's files; ``taken_at`` on this machine's.
        points: training metrics, ``events``: the run's events, both oldest first.
        activity: what the ranks of a running job do, None where that is not known.
        trouble: why there is nothing newer.
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
    trouble: str = ""

    @cached_property
    def odd(self) -> tuple[RankCell, ...]:
        """The ranks that stand out."""
        return tuple(cell for cell in self.ranks if cell.odd)

    @cached_property
    def ranks_apart(self) -> RanksApart | None:
        """What was seen of ranks that train apart, None if nothing was."""
        return find_ranks_apart(self.events, self.attempt)

    def series(self, key: str) -> list[tuple[float, float]]:
        """Return (step, value) pairs of a metric; points without a step are numbered."""
        found = []
        for number, point in enumerate(self.points):
            value = getattr(point, key)
            if drawable(value):
                found.append((float(number if point.step is None else point.step), float(value)))
        return found

    @cached_property
    def losses(self) -> tuple[tuple[float, float], ...]:
        """(step, loss) pairs."""
        return tuple(self.series("loss"))

    @property
    def lost_at(self) -> int | None:
        """The step from which on the loss is no number, None while it is one."""
        lost = None
        for point in reversed(self.points):
            if point.loss is None:
                continue
            if math.isfinite(point.loss):
                break
            lost = point.step
        return lost


def page(
    pulse: RunTelemetry,
    *,
    key: str,
    taken_at: float,
    before: Page | None = None,
    limit_at: float | None = None,
    over: bool = False,
    world_size: int = 0,
    rest: Rest | None = None,
) -> Page:
    """Return the page of a run.

    Args:
        before: the page of the pulse before this one, whose points and events go on.
        limit_at: when the time limit ends the run; on this machine's clock.
        over: whether the job has ended.
        rest: see `chunked`.
    """
    same = before is not None and before.attempt == (pulse.attempt or 0) and before.key == key
    old_points = before.points if before is not None and same else ()
    old_events = before.events if before is not None and same else ()
    points = thinned([*old_points, *pulse.train])
    newest = pulse.attempt == max(pulse.attempts, default=pulse.attempt)
    nodes = tuple(sorted((_node(sample, pulse) for sample in pulse.nodes), key=lambda cell: cell.node_rank))
    if limit_at is not None:
        limit_at += pulse.now - taken_at
    size = pulse.world_size or (world_size if pulse.attempt is not None else 0)
    activity = None if over else activity_of(pulse, size)
    told = None if over else forecast_end(points, pulse.now, limit_at)
    if told is not None and activity is not None and activity.stalled:
        told = replace(told, stalled=True)
    return Page(
        key=key,
        attempt=pulse.attempt or 0,
        attempts=pulse.attempts,
        now=pulse.now,
        taken_at=taken_at,
        world_size=size,
        ranks=cells(pulse, size, nodes, over=over or not newest, rest=rest),
        first_failure=pulse.first_failure,
        nodes=nodes,
        points=points,
        points_from=pulse.train_from or (before.points_from if before is not None and same else ""),
        events=tuple(condensed((*old_events, *pulse.events))[-MOST_EVENTS:]),
        forecast=told,
        activity=activity,
    )


def failure_words(failure: FirstFailure, ranks: Sequence[RankCell]) -> str:
    """Return the rank that failed first, why and where, and how many ranks were terminated after it."""
    place = f"{PurePosixPath(failure.file).name}:{failure.line}" if failure.file else ""
    why = failure.error or next(
        (f"signal {cell.signal}" for cell in ranks if cell.failed_first and cell.signal),
        f"exit code {failure.exit_code}",
    )
    told = f"failed first: rank {failure.rank} ({', '.join(filter(None, (why, place)))})"
    count = sum(cell.state == "terminated" for cell in ranks)
    return f"{told}; {count:,} terminated after it" if count else told


def drawable(value: object) -> bool:
    """Return whether it is a finite number that can be drawn; what would overflow sums is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and abs(value) < 1e100


def finite(values: Iterable[float | None]) -> list[float]:
    """Return those values that are numbers."""
    return [float(value) for value in values if value is not None and drawable(value)]


def gpu_memory(gpu: GpuSample) -> float | None:
    """Return the used share of a GPU's memory."""
    if gpu.memory_used is None or not gpu.memory_total:
        return None
    return gpu.memory_used / gpu.memory_total


def cells(
    pulse: RunTelemetry, world_size: int, nodes: Sequence[NodeCell], *, over: bool, rest: Rest | None = None
) -> tuple[RankCell, ...]:
    """Return a cell for each rank; ``over``: who recorded no end is lost."""
    count = max(world_size, max(pulse.ranks, default=-1) + 1)
    by_node: dict[int, list[int]] = {}
    for rank in sorted(pulse.ranks):
        node_rank = pulse.ranks[rank].node_rank
        if node_rank is not None:
            by_node.setdefault(node_rank, []).append(rank)
    gpus: dict[int, GpuSample] = {}
    for node in nodes:
        on_it = by_node.get(node.node_rank, [])
        if node.gpus and len(node.gpus) >= len(on_it):
            gpus.update(zip(on_it, node.gpus, strict=False))
    made = [_cell(rank, pulse, gpus.get(rank), over) for rank in chunked(range(count), rest)]
    return tuple(_with_odd(made, rest))


def _cell(rank: int, pulse: RunTelemetry, gpu: GpuSample | None, over: bool) -> RankCell:
    known = pulse.ranks.get(rank)
    if known is None:
        return RankCell(rank=rank)
    state = _state(known, over)
    alive = state == "running"
    return RankCell(
        rank=rank,
        state=state,
        node_rank=known.node_rank,
        host=known.host,
        pid=known.pid,
        gpu=gpu.util if gpu is not None and alive and drawable(gpu.util) else None,
        memory=gpu_memory(gpu) if gpu is not None and alive else None,
        silent=pulse.silent_s(rank) if alive else None,
        size=known.bytes,
        exit_code=known.exit_code,
        signal=known.signal,
        failed_first=pulse.first_failure is not None and pulse.first_failure.rank == rank,
    )


def _state(known: RankTelemetry, over: bool) -> str:
    if known.ended is not None or known.exit_code is not None:
        if known.exit_code in {0, WANTS_REQUEUE} and not known.signal:
            return "done"
        return "terminated" if known.told_to_end else "failed"
    if known.started is None and known.spoke is None:
        return "waiting"
    return "lost" if over else "running"


def _with_odd(made: list[RankCell], rest: Rest | None) -> list[RankCell]:
    """Say of each rank in which way it differs from what most ranks do."""
    silences = finite(cell.silent for cell in made)
    uses = finite(cell.gpu for cell in made)
    shares = finite(cell.memory for cell in made)
    quiet = (
        max(_STRAGGLES_S, _STRAGGLES_TIMES * statistics.median(silences)) if len(silences) > 1 else math.inf
    )
    idle = statistics.median(uses) - _APART if len(uses) > 1 else -math.inf
    low = statistics.median(shares) - _APART / 100 if len(shares) > 1 else -math.inf
    running = sum(cell.state == "running" for cell in made)
    ended = sum(cell.state == "done" for cell in made)
    marked = []
    for cell in chunked(made, rest):
        words = []
        if cell.failed_first:
            words.append("failed first")
        if cell.state == "failed":
            words.append(f"signal {cell.signal}" if cell.signal else f"exit code {cell.exit_code}")
        elif cell.state == "lost":
            words.append("no record of its end")
        elif cell.state == "done" and ended < running:
            words.append("ended before the others")
        if cell.silent is not None and cell.silent > quiet:
            words.append("silent while others speak")
        if cell.gpu is not None and cell.gpu < idle:
            words.append("its GPU works less than the others'")
        if cell.memory is not None and cell.memory < low:
            words.append("its GPU holds less than the others'")
        marked.append(replace(cell, odd="; ".join(words)) if words else cell)
    return marked


def _node(sample: NodeSample, pulse: RunTelemetry) -> NodeCell:
    rates = pulse.rates(sample.node_rank)
    wires = [rate for name, rate in rates.items() if name != "lo"]
    before = next((item for item in pulse.nodes_before if item.node_rank == sample.node_rank), None)
    errors = 0
    for name, nic in sample.nics.items():
        old = before.nics.get(name) if before is not None else None
        if old is not None and nic.errors is not None and old.errors is not None:
            errors += max(0, nic.errors - old.errors)
    used, total = sample.memory_used, sample.memory_total
    if sample.cgroup_memory is not None and sample.cgroup_limit:
        used, total = sample.cgroup_memory, sample.cgroup_limit
    return NodeCell(
        name=sample.node,
        node_rank=sample.node_rank,
        age=max(0.0, pulse.now - sample.time),
        gpus=sample.gpus,
        cpu=sample.cpu_percent,
        memory=used / total if used is not None and total else None,
        receives=sum(rate[0] for rate in wires) if wires else None,
        sends=sum(rate[1] for rate in wires) if wires else None,
        nic_errors=errors,
        disks=tuple((name, disk.used / disk.total) for name, disk in sample.disks.items() if disk.total),
    )


def thinned(points: Sequence[TrainPoint]) -> tuple[TrainPoint, ...]:
    """Return at most ``MOST_POINTS`` points: of old ones every other, as often as needed."""
    kept = list(points)
    while len(kept) > MOST_POINTS:
        half = len(kept) // 2
        kept = kept[:half:2] + kept[half:]
    return tuple(kept)


def forecast_end(points: Sequence[TrainPoint], now: float, limit_at: float | None) -> Forecast | None:
    """Return what the training metrics foretell."""
    steps = [
        (float(point.time if point.time is not None else math.nan), float(point.step))
        for point in points
        if point.step is not None
    ]
    total = next((point.total_steps for point in reversed(points) if point.total_steps is not None), None)
    if steps and not any(math.isfinite(moment) for moment, _ in steps):
        steps = [(now, steps[-1][1])]  # lines that carry no time tell how far it is, not how fast it goes
    return forecast(steps, total=total, now=now, limit_at=limit_at)
