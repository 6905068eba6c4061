"""The current state of a running job: its ranks, nodes and training. Unknown values are None, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from dtslurm.model.runs.activity import NodeActivity
from dtslurm.model.runs.roles import RoleState
from dtslurm.model.values import dataclass

# The values that a pattern can find in log lines; units as in `TrainPoint`, or as in their names.
VALUES = (
    "step", "total_steps", "loss", "learning_rate", "grad_norm", "epoch", "tokens_per_s",
    "tokens_per_s_per_gpu", "tflops_per_gpu", "step_time_s", "step_time_ms", "steps_per_s", "memory_gib",
    "epoch_number", "epochs", "epoch_step", "epoch_steps",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LinePattern:
    """The pattern of a kind of log line with training metrics.

    Attributes:
        words: literal texts; every such line contains one of them.
        values: by key of ``VALUES``, a regular expression with ``<number>`` in the number's place.
    """

    name: str
    words: tuple[str, ...]
    values: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class RankTelemetry:
    """The state of one rank of an attempt.

    Attributes:
        bytes: size of the rank's log.
        last_output_at: when the rank last wrote to its log, seconds since the epoch on the clock of the
            files' machine; None if it has written nothing.
        started, ended: seconds since the epoch on the rank's node; ``started`` is None until the rank has
            begun.
        exit_code: None while the rank runs, or if it was killed before its exit code could be recorded.
        told_to_end: whether the rank received SIGTERM from outside before it ended.
    """

    rank: int
    bytes: int = 0
    last_output_at: float | None = None
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
        """Whether the rank has begun and, according to its record, not ended."""
        return self.started is not None and self.ended is None


@dataclass(frozen=True, kw_only=True)
class FirstFailure:
    """The rank of an attempt that failed first.

    Attributes:
        error: the exception at the end of the rank's log, empty if there is none.
        file, line: the innermost line of the user's own code in that exception's traceback.
    """

    rank: int
    exit_code: int
    error: str = ""
    file: str = ""
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """A sample of one GPU.

    Attributes:
        util: percentage of the last interval in which a kernel ran.
        sm_activity: share (0 to 1) of the multiprocessors that were busy.
        memory_used, memory_total: bytes.
        power_w: watts.
        temperature_c: degrees Celsius.
        sm_mhz: clock of the multiprocessors.
        throttle: why the clock is throttled: ``power``, ``thermal``, ``hardware``, ….
        ecc_corrected, ecc_uncorrected: memory errors since the driver was loaded.
        xid: numbers of the driver's latest error reports since the sampler started.
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
    """The kernel's counters of a network port: bytes and errors since the port came up."""

    rx_bytes: int | None = None
    tx_bytes: int | None = None
    errors: int | None = None


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """Used and total bytes of a file system."""

    used: int
    total: int


@dataclass(frozen=True, kw_only=True)
class NodeSample:
    """A sample of one node, taken inside the job.

    Attributes:
        time: seconds since the epoch on the node.
        cpu_percent: utilization of the CPUs that are allocated to the job.
        load: the node's one-minute load average.
        memory_used, memory_total: of the whole node, bytes.
        cgroup_memory, cgroup_limit: of the job on this node, bytes; the limit is None if there is none.
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
    """Training metrics of one step. Numbers may be NaN or infinite, so that a diverged loss is visible.

    Attributes:
        time: seconds since the epoch, None if the line with the metrics has no time.
        tokens_per_s: of the whole job, unless the framework defines it differently.
        step_time_s, memory_gib: seconds, and GiB of one GPU.
        other: the remaining values of the record.
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
    """A snapshot of an attempt of a run, or of one array task.

    Attributes:
        now: time of the snapshot on the clock of the machine that holds the files; ages are relative to it.
        attempt: None if nothing has started.
        task, tasks: the array task of this snapshot, and the array tasks that have started; None and empty
            without an array.
        ranks: by rank number, the ranks that have a log or a record.
        first_failure: None while no rank has failed by itself.
        nodes: the latest sample of each node.
        nodes_before: samples of each node from about a minute earlier, to compute rates.
        activity: the latest activity of each node's ranks.
        roles: the roles beside the ranks, in a run with several roles.
        train, events: new entries since the snapshot that was passed as ``after``, in order.
        train_from: the source of ``train``: ``file`` (``$DTSLURM_METRICS``), ``logs``, or empty so far.
        cursor: opaque position from which the next snapshot continues.
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
    roles: tuple[RoleState, ...] = ()
    train: tuple[TrainPoint, ...] = ()
    train_from: str = ""
    events: tuple[Mapping[str, Any], ...] = ()
    cursor: Mapping[str, Any] = field(default_factory=dict)

    def silent_s(self, rank: int) -> float | None:
        """Return the seconds since a rank's last output, None if it has written nothing."""
        last_output = self.ranks[rank].last_output_at if rank in self.ranks else None
        return None if last_output is None else max(0.0, self.now - last_output)

    def rates(self, node_rank: int) -> dict[str, tuple[float, float]]:
        """Return the bytes per second (received, sent) of a node's network ports over about the last minute.

        A port whose counters decreased has no rate; nor has a node whose clock went back.
        """
        newest_sample = next((sample for sample in self.nodes if sample.node_rank == node_rank), None)
        earlier_sample = next((sample for sample in self.nodes_before if sample.node_rank == node_rank), None)
        if newest_sample is None or earlier_sample is None or newest_sample.time <= earlier_sample.time:
            return {}
        seconds = newest_sample.time - earlier_sample.time
        rates = {}
        for name, newest_counters in newest_sample.nics.items():
            earlier_counters = earlier_sample.nics.get(name, NicCounters())
            if None in {
                earlier_counters.rx_bytes,
                earlier_counters.tx_bytes,
                newest_counters.rx_bytes,
                newest_counters.tx_bytes,
            }:
                continue
            received_bytes = (newest_counters.rx_bytes or 0) - (earlier_counters.rx_bytes or 0)
            sent_bytes = (newest_counters.tx_bytes or 0) - (earlier_counters.tx_bytes or 0)
            if received_bytes >= 0 and sent_bytes >= 0:
                rates[name] = (received_bytes / seconds, sent_bytes / seconds)
        return rates


@dataclass(frozen=True, kw_only=True)
class RankCell:
    """The state of one rank.

    Attributes:
        state: ``waiting`` (no record yet), ``running``, ``done``, ``failed``, ``terminated`` (ended by
            SIGTERM) or ``lost`` (the attempt has ended and the rank recorded no end).
        failed_first: whether the rank was the first to fail.
        gpu: use of the rank's GPU in percent; ``memory`` is the used share of that GPU's memory, 0 to 1.
        silent: seconds since the rank last wrote output, None if it never did or has ended.
        deviation: a description of how the rank differs from the other ranks, empty if it does not.
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
    deviation: str = ""
