"""GPU-hours requested, allocated, used and idle, from accounting and from the samples of dtslurm's runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dtslurm.errors import DtslurmError, RequestInvalid, SlurmError
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.usage import GpuTime, JobUse, UsageRow
from dtslurm.model.units import parse_past_time
from dtslurm.model.values import dataclass
from dtslurm.remote.answers import interpret
from dtslurm.services.runs.run_times import RunTimes
from dtslurm.services.runs.runs import recent
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.remote_query import find_worker_host, query_worker
from dtslurm.slurm import accounting
from dtslurm.slurm.arrays import base_id
from dtslurm.transport.base import QUERY_ENVIRONMENT

GROUPS = ("account", "user", "name", "cluster", "week")
_LIMIT_S = 120.0
_MOST_RUNS = 1000  # number of the user's runs whose samples are read
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}  # units as sacct spells them


@dataclass(frozen=True)
class AccountedJob:
    """One accounted start of a job on a cluster, with its sampled GPU use and GPU-hour price if known."""

    cluster: str
    use: JobUse
    gpu_time: GpuTime | None = None
    price: float | None = None
    currency: str = ""


@dataclass(frozen=True)
class Usage:
    """All accounted jobs of a period; ``trouble`` lists the clusters that could not be queried, and why."""

    since: float
    until: float
    held: tuple[AccountedJob, ...]
    trouble: tuple[str, ...] = ()


def usage(
    context: Context, *, cluster: str | None = None, period_start: str = "30d", everybody: bool = False
) -> Usage:
    """Return the resources that jobs have held since a time, with one sacct query per cluster.

    Args:
        cluster: only this cluster; by default all clusters with runs, and the default cluster.
        period_start: ``12h``, ``30d``, ``8w``, or a date such as ``2026-01-31``.

    Raises:
        RequestInvalid: ``period_start`` cannot be parsed.
        ProfileNotFound, ProfileInvalid: the profile of the cluster is missing or invalid.
    """
    now = context.clock()
    start, sacct_start = _period(period_start, now)
    records = recent(context, _MOST_RUNS, cluster)
    jobs: list[AccountedJob] = []
    errors: list[str] = []
    for active in _clusters(context, records, cluster):
        if active.profile.scheduler != "slurm":
            continue
        try:
            answer = active.transport.run(
                accounting.command(sacct_start, all_users=everybody), timeout=_LIMIT_S, env=QUERY_ENVIRONMENT
            )
            if not answer.ok:
                raise SlurmError("sacct: Slurm rejected the query", evidence=answer.stderr.splitlines()[:3])
        except DtslurmError as error:
            errors.append(_describe_error(active, error))
            continue
        uses = accounting.read(answer.stdout)
        samples: Mapping[str, GpuTime] = {}
        try:
            samples = _samples(context, [record for record in records if record.cluster == active.name], uses)
        except DtslurmError as error:  # the allocation is known without the samples, only the use is not
            errors.append(_describe_error(active, error))
        for use in uses:
            gpu_time = samples.get(base_id(use.job_id))
            hourly = price(active.profile, use.gpu_type)
            jobs.append(AccountedJob(active.name, use, gpu_time, *(hourly or (None, ""))))
    return Usage(start, now, tuple(jobs), tuple(errors))


def _describe_error(cluster: ActiveCluster, error: DtslurmError) -> str:
    return f"{cluster.name}: {' '.join((error.message, *error.evidence))}"


def _period(start: str, now: float) -> tuple[float, str]:
    """Return the start of the period in seconds since the epoch, and in sacct's format."""
    try:
        began = parse_past_time(start, now)
    except (ValueError, OverflowError):
        raise RequestInvalid([f"--since {start!r} is not a time: write 12h, 30d, 8w or 2026-01-31"]) from None
    unit = _UNITS.get(start[-1])
    return began, f"now-{start[:-1]}{unit}" if unit else start


def _clusters(context: Context, records: Sequence[JobRecord], name: str | None) -> list[ActiveCluster]:
    clusters_by_name: dict[str, ActiveCluster] = {}
    if name is not None:
        clusters_by_name[name] = context.cluster(name)
    for record in records:
        if record.cluster not in clusters_by_name:
            try:
                clusters_by_name[record.cluster] = context.cluster_of(record)
            except DtslurmError:
                continue
    if name is None:
        default, _ = context.default_cluster()
        clusters_by_name.setdefault(default, context.cluster(default))
    return list(clusters_by_name.values())


def _samples(context: Context, records: Sequence[JobRecord], uses: Sequence[JobUse]) -> dict[str, GpuTime]:
    """Return the sampled GPU use of the user's runs on one cluster, by job id."""
    gpu_uses = {base_id(use.job_id): use for use in uses if use.gpus}
    own_records = [
        record
        for record in records
        if record.job_id and _belongs_to_record(record, gpu_uses.get(record.job_id))
    ]
    if not own_records:
        return {}
    host = find_worker_host(context, own_records[0])
    request = {"runs": [record.run_dir for record in own_records]}
    answer = query_worker(host, "telemetry.gpu_time", request, timeout=_LIMIT_S)
    times = interpret(
        answer, lambda answer: [_parse_gpu_time(*counts) for counts in answer["runs"]], "gpu_time.py"
    )
    return {
        record.job_id or "": time
        for record, time in zip(own_records, times, strict=False)
        if time is not None
    }


def _parse_gpu_time(count: int, util: float, idle_count: float, powered: int, watts: float) -> GpuTime | None:
    if not count:
        return None
    power = watts / powered if powered else None
    return GpuTime(used=util / count / 100, idle=idle_count / count, power_w=power)


def _belongs_to_record(record: JobRecord, use: JobUse | None) -> bool:
    """Return whether an accounted job belongs to a run: job ids are reused, and some sites drop comments."""
    if use is None:
        return False
    return record.comment in use.comment.split() or (not use.comment and use.name == record.name)


def price(profile: ClusterProfile, gpu_type: str) -> tuple[float, str] | None:
    """Return the price of a GPU-hour and its currency; None if the profile does not determine them.

    Args:
        gpu_type: Slurm's name of the GPU type; empty if unknown.
    """
    gpu_specs = [node.gpus for node in profile.node_types.values() if node.gpus is not None]
    prices = {
        (gpus.price, gpus.currency or "")
        for gpus in gpu_specs
        if not gpu_type or gpus.slurm_type in {None, gpu_type}
    }
    amount, currency = prices.pop() if len(prices) == 1 else (None, "")
    return None if amount is None else (amount, currency)


def rows(period_usage: Usage, by: str) -> list[UsageRow]:
    """Return the usage of each group, sorted by idle GPU-hours, then by held GPU-hours, largest first.

    Args:
        by: one of ``GROUPS``.
    """
    keys: Mapping[str, Callable[[AccountedJob], str]] = {
        "account": lambda item: item.use.account or "(none)",
        "user": lambda item: item.use.user or "(unknown)",
        "name": lambda item: item.use.name,
        "cluster": lambda item: item.cluster,
        "week": lambda item: _iso_week(max(item.use.start or item.use.submit or 0, period_usage.since)),
    }
    groups: dict[str, list[AccountedJob]] = {}
    for item in period_usage.held:
        groups.setdefault(keys[by](item), []).append(item)
    totals = [total(name, items, period_usage) for name, items in groups.items()]
    if by == "week":
        return sorted(totals, key=lambda row: row.group)
    return sorted(
        totals, key=lambda row: (-row.gpu_hours_idle, -row.gpu_hours_held, -row.cpu_hours_held, row.group)
    )


def total(name: str, items: Iterable[AccountedJob], period_usage: Usage) -> UsageRow:
    """Return the sums over the accounted jobs of one group."""
    requested_h = held_h = sampled_h = used_h = idle_h = energy_kwh = cpu_h = cost = idle_cost = 0.0
    has_power, is_priced = False, True
    jobs = set()
    currencies: set[str] = set()
    for item in items:
        job_use, gpu_time = item.use, item.gpu_time
        jobs.add((item.cluster, job_use.job_id.partition("+")[0]))  # not each part of a heterogeneous job
        hours = _hours_in_period(job_use, period_usage)
        requested_h += job_use.gpus_asked * (job_use.limit_s or 0) / 3600
        held_h += job_use.gpus * hours
        cpu_h += job_use.cpus * hours
        is_priced = is_priced and (item.price is not None or not job_use.gpus * hours)
        cost += job_use.gpus * hours * (item.price or 0.0)
        if item.price is not None:
            currencies.add(item.currency)
        if gpu_time is not None:
            sampled_h += job_use.gpus * hours
            used_h += job_use.gpus * hours * gpu_time.used
            idle_h += job_use.gpus * hours * gpu_time.idle
            idle_cost += job_use.gpus * hours * gpu_time.idle * (item.price or 0.0)
            energy_kwh += job_use.gpus * hours * (gpu_time.power_w or 0.0) / 1000
            has_power = has_power or gpu_time.power_w is not None
    is_priced = is_priced and held_h > 0 and len(currencies) <= 1
    return UsageRow(
        group=name,
        jobs=len(jobs),
        gpu_hours_asked=round(requested_h, 3),
        gpu_hours_held=round(held_h, 3),
        gpu_hours_known=round(sampled_h, 3),
        gpu_hours_used=round(used_h, 3),
        gpu_hours_idle=round(idle_h, 3),
        gpu_kwh=round(energy_kwh, 3) if has_power else None,
        cpu_hours_held=round(cpu_h, 3),
        price=round(cost, 2) if is_priced else None,
        price_idle=round(idle_cost, 2) if is_priced and sampled_h else None,
        currency=currencies.pop() if is_priced and currencies else "",
    )


def _hours_in_period(use: JobUse, period_usage: Usage) -> float:
    """Return the hours within the period during which a job held its allocation."""
    if use.start is None:
        return 0.0
    end = period_usage.until if use.end is None else min(use.end, period_usage.until)
    return max(0.0, end - max(use.start, period_usage.since)) / 3600


def _iso_week(time_s: float) -> str:
    year, week, _ = time.strftime("%G %V %u", time.localtime(time_s)).split()
    return f"{year}-W{week}"


def count_gpus(document: Mapping[str, Any]) -> int:
    """Return the number of GPUs of a run from its ``job.json``; 0 for a job without GPUs."""
    layout = document.get("layout") or {}
    return int(layout.get("nodes") or 0) * int(layout.get("gpus_per_node") or 0)


def count_gpu_hours(gpus: int, times: RunTimes | None, now: float) -> float | None:
    """Return the GPU-hours of all attempts, without the time between them; None without GPUs or times."""
    return gpus * times.running_s(now) / 3600 if times is not None and gpus else None


def price_gpu_hours(context: Context, record: JobRecord, hours: float | None) -> tuple[float | None, str]:
    """Return the cost of GPU-hours and its currency; None and empty if the profile has no price."""
    if hours is None:
        return None, ""
    try:
        hourly = price(context.cluster(record.cluster).profile, "")
    except DtslurmError:
        return None, ""
    return (round(hourly[0] * hours, 2), hourly[1]) if hourly else (None, "")
