"""What a running job is doing now: its ranks, its nodes, its training. Absent is None, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from dtslurm.model.runs.activity import NodeActivity
from dtslurm.model.values import dataclass

# What a pattern of log lines can tell; units as in `TrainPoint`, and those that their names say.
VALUES = (
    "step", "total_steps", "loss", "learning_rate", "grad_norm", "epoch", "tokens_per_s",
    "tokens_per_s_per_gpu", "tflops_per_gpu", "step_time_s", "step_time_ms", "steps_per_s", "memory_gib",
    "epoch_number", "epochs", "epoch_step", "epoch_steps",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LinePattern:
    """Where one kind of log line tells of training.

    Attributes:
        words: literal texts of which every such line has one.
        values: by key of ``VALUES``, a regular expression with ``<number>`` where the number stands.
    """

    name: str
    words: tuple[str, ...]
    values: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class RankTelemetry:
    """One rank of an attempt.

    Attributes:
        bytes: size of its log.
        spoke: when it last wrote to its log; seconds since the epoch on the clock of the files' machine, None
            if it has not said anything.
        started, ended: seconds since the epoch on the rank's node; ``started`` is None until it has begun.
        exit_code: None while it runs, or if it was killed before that could be recorded.
        told_to_end: whether it was sent SIGTERM from outside before it ended.
    """

    rank: int
    bytes: int = 0
    spoke: float | None = None
    node_rank: int | None = None
    local_rank: int | None = None
    host: str = ""
    pid: int | None = None
    started: int | None = None
    ended: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    told_to_end: bool = False

    @property
    def running(self) -> bool:
        """Whether it has begun and, as far as its record tells, not ended."""
        return self.started is not None and self.ended is None


@dataclass(frozen=True, kw_only=True)
class FirstFailure:
    """The rank of an attempt that failed first.

    Attributes:
        error: the exception that its log ends with, empty if there is none.
        file, line: the innermost line of the user's own code in that exception's traceback.
    """

    rank: int
    exit_code: int
    error: str = ""
    file: str = ""
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One GPU at one moment.

    Attributes:
        util: percent of the last interval in which a kernel ran.
        sm_activity: share (0 to 1) of the multiprocessors that were busy.
        memory_used, memory_total: bytes.
        power_w: watts.
        temperature_c: degrees Celsius.
        sm_mhz: clock of the multiprocessors.
        throttle: why the clock is held down: ``power``, ``thermal``, ``hardware``, ….
        ecc_corrected, ecc_uncorrected: memory errors since the driver was loaded.
        xid: numbers of the driver's last error reports since the sampler began.
    """

    index: int
    uuid: str = ""
    name: str = ""
    util: float | None = None
    sm_activity: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_mhz: float | None = None
    throttle: tuple[str, ...] = ()
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    xid: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NicCounters:
    """A network port's counters, as the kernel gives them: bytes and errors since it came up."""

    rx_bytes: int | None = None
    tx_bytes: int | None = None
    errors: int | None = None


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """How full a file system is, in bytes."""

    used: int
    total: int


@dataclass(frozen=True, kw_only=True)
class NodeSample:
    """One node at one moment, as seen from inside the job.

    Attributes:
        time: seconds since the epoch on the node.
        cpu_percent: of the CPUs given to the job.
        load: the node's one-minute load average.
        memory_used, memory_total: of the whole node, bytes.
        cgroup_memory, cgroup_limit: of the job on this node, bytes; the limit is None where there is none.
        nics, disks: by name, and by path.
    """

    node: str
    node_rank: int
    time: float = 0.0
    gpus: tuple[GpuSample, ...] = ()
    cpu_percent: float | None = None
    load: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    cgroup_memory: int | None = None
    cgroup_limit: int | None = None
    nics: Mapping[str, NicCounters] = field(default_factory=dict)
    disks: Mapping[str, DiskUse] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainPoint:
    """What training code said of one step. Numbers may be NaN or infinite: a loss that is gone is news.

    Attributes:
        time: seconds since the epoch; None where the line that told the step carries no time.
        tokens_per_s: of the whole job, if the framework does not say otherwise.
        step_time_s, memory_gib: seconds, and GiB of one GPU.
        other: what else was in the record.
    """

    time: float | None = None
    rank: int | None = None
    step: int | None = None
    total_steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    tflops_per_gpu: float | None = None
    grad_norm: float | None = None
    step_time_s: float | None = None
    memory_gib: float | None = None
    other: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunTelemetry:
    """One look at an attempt of a run, or of one task of an array.

    Attributes:
        now: when it was taken, by the clock of the machine that holds the files; ages are told against it.
        attempt: None where nothing has started.
        task, tasks: which array task this is of, and which have started; None and empty without an array.
        ranks: by rank; those that have a log or a record.
        first_failure: None while no rank has failed by itself.
        nodes: the newest sample of each node.
        nodes_before: of each node, counters that are about a minute older, for rates.
        activity: what the ranks of each node last did.
        train, events: what is new since the pulse that was given as ``after``, in order.
        train_from: where ``train`` is from: ``file`` (``$DTSLURM_METRICS``), ``logs``, or nothing yet.
        cursor: where the next look goes on; of no other use.
    """

    now: float
    attempt: int | None = None
    attempts: tuple[int, ...] = ()
    task: str | None = None
    tasks: tuple[str, ...] = ()
    world_size: int | None = None
    ranks: Mapping[int, RankTelemetry] = field(default_factory=dict)
    first_failure: FirstFailure | None = None
    nodes: tuple[NodeSample, ...] = ()
    nodes_before: tuple[NodeSample, ...] = ()
    activity: tuple[NodeActivity, ...] = ()
    train: tuple[TrainPoint, ...] = ()
    train_from: str = ""
    events: tuple[Mapping[str, Any], ...] = ()
    cursor: Mapping[str, Any] = field(default_factory=dict)

    def silent_s(self, rank: int) -> float | None:
        """Return for how many seconds a rank has said nothing, None if it never spoke."""
        spoke = self.ranks[rank].spoke if rank in self.ranks else None
        return None if spoke is None else max(0.0, self.now - spoke)

    def rates(self, node_rank: int) -> dict[str, tuple[float, float]]:
        """Return bytes per second (received, sent) of a node's network ports over about the last minute.

        A port whose counters went back, or a clock that did, has no rate.
        """
        newest = next((item for item in self.nodes if item.node_rank == node_rank), None)
        before = next((item for item in self.nodes_before if item.node_rank == node_rank), None)
        if newest is None or before is None or newest.time <= before.time:
            return {}
        seconds = newest.time - before.time
        found = {}
        for name, after in newest.nics.items():
            first = before.nics.get(name, NicCounters())
            if None in {first.rx_bytes, first.tx_bytes, after.rx_bytes, after.tx_bytes}:
                continue
            received = (after.rx_bytes or 0) - (first.rx_bytes or 0)
            sent = (after.tx_bytes or 0) - (first.tx_bytes or 0)
            if received >= 0 and sent >= 0:
                found[name] = (received / seconds, sent / seconds)
        return found
