"""The cluster resources that jobs requested, held and used."""

from __future__ import annotations

from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class JobUse:
    """One execution of a job in Slurm's accounting; times are seconds since the epoch.

    Attributes:
        job_id: the job id alone, or with that of the array task, as ``17_3``.
        start, end: None while the job is pending, and while it runs.
        limit_s: the time limit, None if there is none.
        gpus_asked, gpus: GPUs requested and allocated; 0 if there were none.
        gpu_type: the site's name of the allocated GPUs, empty if accounting has none or several.
        cpus: allocated CPUs.
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
    """GPU utilization according to a run's own samples: means over its GPUs and time.

    Attributes:
        used: share (0 to 1) of the time in which kernels ran.
        idle: share of the samples in which a GPU was nearly idle.
        power_w: mean power of one GPU in watts, None if unknown.
    """

    used: float
    idle: float
    power_w: float | None = None


@dataclass(frozen=True, kw_only=True)
class UsageRow:
    """Usage of a group of jobs.

    Attributes:
        gpu_hours_asked: requested GPUs times the time limit.
        gpu_hours_held: allocated GPUs times the time they were held, within the period.
        gpu_hours_known: the part of the held GPU-hours for which there are samples.
        gpu_hours_used, gpu_hours_idle: the used and idle parts of the known GPU-hours.
        gpu_kwh: electricity of the GPUs in the known hours, in kilowatt hours; None if no sample contains it.
        price: the price of the held GPU-hours; None unless the profiles have it for every GPU, in one
            currency.
        price_idle: the price of the idle GPU-hours.
        currency: the currency of both prices, empty if the profiles do not name it.
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
