"""GPU-hours asked for, held, used and idle: accounting tells what was held, the runs' own samples how."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from dtslurm.errors import DtslurmError, RequestInvalid, SlurmError
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.usage import GpuTime, JobUse, UsageRow
from dtslurm.model.units import moment_before
from dtslurm.model.values import dataclass
from dtslurm.remote.answers import interpret
from dtslurm.services.runs.runs import recent
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.remote_query import ask, far_side
from dtslurm.slurm import accounting
from dtslurm.transport.base import QUERY_ENVIRONMENT

GROUPS = ("account", "user", "name", "cluster", "week")
_LIMIT_S = 120.0
_RUNS = 1000  # of one's own, whose samples are looked at
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}  # sacct's words


@dataclass(frozen=True)
class Held:
    """One run of a job on a cluster, what its samples tell and what a GPU-hour costs, if that is known."""

    cluster: str
    use: JobUse
    told: GpuTime | None = None
    price: float | None = None
    currency: str = ""


@dataclass(frozen=True)
class Usage:
    """All runs of a period; ``trouble`` says which clusters did not tell, and why."""

    since: float
    until: float
    held: tuple[Held, ...]
    trouble: tuple[str, ...] = ()


def usage(
    context: Context, *, cluster: str | None = None, since: str = "30d", everybody: bool = False
) -> Usage:
    """Return what jobs have held since then: one question to each cluster's accounting.

    Args:
        cluster: only that one; by default all on which there are runs, and the default cluster.
        since: ``12h``, ``30d``, ``8w``, or a date as ``2026-01-31``.

    Raises:
        RequestInvalid: ``since`` makes no sense.
        ProfileNotFound, ProfileInvalid: so with the cluster's profile.
    """
    now = context.clock()
    began, words = _period(since, now)
    records = recent(context, _RUNS, cluster)
    held: list[Held] = []
    trouble: list[str] = []
    for one in _clusters(context, records, cluster):
        if one.profile.scheduler != "slurm":
            continue
        try:
            answer = one.transport.run(
                accounting.command(words, everybody=everybody), timeout=_LIMIT_S, env=QUERY_ENVIRONMENT
            )
            if not answer.ok:
                raise SlurmError("sacct: Slurm refused", evidence=answer.stderr.splitlines()[:3])
        except DtslurmError as error:
            trouble.append(_in_words(one, error))
            continue
        uses = accounting.read(answer.stdout)
        samples: Mapping[str, GpuTime] = {}
        try:
            samples = _samples(context, [record for record in records if record.cluster == one.name], uses)
        except DtslurmError as error:  # how the GPUs were used is not known then; that they were held is
            trouble.append(_in_words(one, error))
        for use in uses:
            told = samples.get(use.job_id.partition("_")[0])
            each = price(one.profile, use.gpu_type)
            held.append(Held(one.name, use, told, *(each or (None, ""))))
    return Usage(began, now, tuple(held), tuple(trouble))


def _in_words(cluster: ActiveCluster, error: DtslurmError) -> str:
    return f"{cluster.name}: {' '.join((error.message, *error.evidence))}"


def _period(since: str, now: float) -> tuple[float, str]:
    """Return the period's beginning, and sacct's words for it."""
    try:
        began = moment_before(since, now)
    except (ValueError, OverflowError):
        raise RequestInvalid([f"--since {since!r}: write 12h, 30d, 8w or 2026-01-31"]) from None
    unit = _UNITS.get(since[-1])
    return began, f"now-{since[:-1]}{unit}" if unit else since


def _clusters(context: Context, records: Sequence[JobRecord], name: str | None) -> list[ActiveCluster]:
    found: dict[str, ActiveCluster] = {}
    if name is not None:
        found[name] = context.cluster(name)
    for record in records:
        if record.cluster not in found:
            try:
                found[record.cluster] = context.cluster_of(record)
            except DtslurmError:
                continue
    if name is None:
        default, _ = context.default_cluster()
        found.setdefault(default, context.cluster(default))
    return list(found.values())


def _samples(context: Context, records: Sequence[JobRecord], uses: Sequence[JobUse]) -> dict[str, GpuTime]:
    """Return what the samples of one's own runs on one cluster tell, by job number."""
    with_gpus = {use.job_id.partition("_")[0]: use for use in uses if use.gpus}
    mine = [record for record in records if record.job_id and _is_of(record, with_gpus.get(record.job_id))]
    if not mine:
        return {}
    transport, python = far_side(context, mine[0])
    request = {"runs": [record.run_dir for record in mine]}
    answer = ask(transport, python, "telemetry.gpu_time", request, timeout=_LIMIT_S)
    times = interpret(answer, lambda answer: [_gpu_time(*counts) for counts in answer["runs"]], "gpu_time.py")
    return {record.job_id or "": time for record, time in zip(mine, times, strict=False) if time is not None}


def _gpu_time(count: int, util: float, idle: float, powered: int, watts: float) -> GpuTime | None:
    if not count:
        return None
    power = watts / powered if powered else None
    return GpuTime(used=util / count / 100, idle=idle / count, power_w=power)


def _is_of(record: JobRecord, use: JobUse | None) -> bool:
    """Whether an accounted job is this run's: numbers are used again, and not every site keeps comments."""
    if use is None:
        return False
    return record.comment in use.comment.split() or (not use.comment and use.name == record.name)


def price(profile: ClusterProfile, gpu_type: str) -> tuple[float, str] | None:
    """Return what a GPU-hour costs there and in which currency, None where that is not certain.

    Args:
        gpu_type: Slurm's name of the GPU; empty if only their number is known.
    """
    there = [node.gpus for node in profile.node_types.values() if node.gpus is not None]
    prices = {
        (gpus.price, gpus.currency or "")
        for gpus in there
        if not gpu_type or gpus.slurm_type in {None, gpu_type}
    }
    amount, currency = prices.pop() if len(prices) == 1 else (None, "")
    return None if amount is None else (amount, currency)


def rows(found: Usage, by: str) -> list[UsageRow]:
    """Return the usage of each group, most idle GPU time first, then most held.

    Args:
        by: one of ``GROUPS``.
    """
    keys: Mapping[str, Callable[[Held], str]] = {
        "account": lambda item: item.use.account or "(none)",
        "user": lambda item: item.use.user or "(unknown)",
        "name": lambda item: item.use.name,
        "cluster": lambda item: item.cluster,
        "week": lambda item: _week(max(item.use.start or item.use.submit or 0, found.since)),
    }
    groups: dict[str, list[Held]] = {}
    for item in found.held:
        groups.setdefault(keys[by](item), []).append(item)
    told = [total(name, items, found) for name, items in groups.items()]
    if by == "week":
        return sorted(told, key=lambda row: row.group)
    return sorted(
        told, key=lambda row: (-row.gpu_hours_idle, -row.gpu_hours_held, -row.cpu_hours_held, row.group)
    )


def total(name: str, items: Iterable[Held], found: Usage) -> UsageRow:
    """Return the sums over some runs."""
    asked = held = known = used = idle = energy = cpu = cost = wasted = 0.0
    measured, priced = False, True
    jobs = set()
    currencies: set[str] = set()
    for item in items:
        use, told = item.use, item.told
        jobs.add((item.cluster, use.job_id))
        hours = _hours(use, found)
        asked += use.gpus_asked * (use.limit_s or 0) / 3600
        held += use.gpus * hours
        cpu += use.cpus * hours
        priced = priced and (item.price is not None or not use.gpus * hours)
        cost += use.gpus * hours * (item.price or 0.0)
        if item.price is not None:
            currencies.add(item.currency)
        if told is not None:
            known += use.gpus * hours
            used += use.gpus * hours * told.used
            idle += use.gpus * hours * told.idle
            wasted += use.gpus * hours * told.idle * (item.price or 0.0)
            energy += use.gpus * hours * (told.power_w or 0.0) / 1000
            measured = measured or told.power_w is not None
    priced = priced and held > 0 and len(currencies) <= 1
    return UsageRow(
        group=name,
        jobs=len(jobs),
        gpu_hours_asked=round(asked, 3),
        gpu_hours_held=round(held, 3),
        gpu_hours_known=round(known, 3),
        gpu_hours_used=round(used, 3),
        gpu_hours_idle=round(idle, 3),
        gpu_kwh=round(energy, 3) if measured else None,
        cpu_hours_held=round(cpu, 3),
        price=round(cost, 2) if priced else None,
        price_idle=round(wasted, 2) if priced and known else None,
        currency=currencies.pop() if priced and currencies else "",
    )


def _hours(use: JobUse, found: Usage) -> float:
    """Return for how long a run held what it was given, within the period."""
    if use.start is None:
        return 0.0
    end = found.until if use.end is None else min(use.end, found.until)
    return max(0.0, end - max(use.start, found.since)) / 3600


def _week(moment: float) -> str:
    year, week, _ = time.strftime("%G %V %u", time.localtime(moment)).split()
    return f"{year}-W{week}"
