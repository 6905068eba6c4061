"""What jobs asked for, held and used of a cluster."""

from __future__ import annotations

from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class JobUse:
    """One run of one job, as accounting has it; times are seconds since the epoch.

    Attributes:
        job_id: the number alone, or with an array task's, as ``17_3``.
        start, end: None while it waits, and while it runs.
        limit_s: its time limit, None where there is none.
        gpus_asked, gpus: GPUs asked for and given; 0 where there were none.
        gpu_type: the site's name of the GPUs given, empty where accounting has none or several.
        cpus: CPUs given.
    """

    job_id: str
    user: str = ""
    account: str = ""
    name: str = ""
    submit: int | None = None
    start: int | None = None
    end: int | None = None
    limit_s: int | None = None
    gpus_asked: int = 0
    gpus: int = 0
    gpu_type: str = ""
    cpus: int = 0
    comment: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuTime:
    """What a run's own samples tell: means over its GPUs and time.

    Attributes:
        used: share (0 to 1) of the time in which kernels ran.
        idle: share of the samples in which a GPU did next to nothing.
        power_w: watts of one GPU, None where that is not told.
    """

    used: float
    idle: float
    power_w: float | None = None


@dataclass(frozen=True, kw_only=True)
class UsageRow:
    """A group of jobs.

    Attributes:
        gpu_hours_asked: GPUs asked for times the time limit.
        gpu_hours_held: GPUs given times the time they were held, within the period.
        gpu_hours_known: of those held, how many samples tell of.
        gpu_hours_used, gpu_hours_idle: of those known.
        gpu_kwh: electricity of the GPUs in the hours known, kilowatt hours; None where no sample tells of it.
        price: of the GPU-hours held; None unless the profiles know it for every GPU, in one currency.
        price_idle: of those idle.
        currency: of both; empty where the profiles do not name it.
    """

    group: str
    jobs: int
    gpu_hours_asked: float
    gpu_hours_held: float
    gpu_hours_known: float
    gpu_hours_used: float
    gpu_hours_idle: float
    gpu_kwh: float | None
    cpu_hours_held: float
    price: float | None = None
    price_idle: float | None = None
    currency: str = ""
