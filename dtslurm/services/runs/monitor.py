"""Query schedulers for the status of jobs, and share the answers between all processes of a user.

Answers are cached in a file of the user's cache folder, protected by a lock and a budget of requests to the
controller: 20 at once and 5 per minute on average, however many processes read them. A background reader uses
the cached answer until the next query is due: 30 s after the last one while a job runs, 120 s while all jobs
wait. A command that the user runs gets an answer at most some seconds old. Changes that dtslurm makes to jobs
(submit, cancel, requeue, hold, release) invalidate the cache.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace

from dtslurm.errors import DtslurmError
from dtslurm.model.runs.queue import QueueMemory
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.values import dataclass
from dtslurm.scheduler.base import QueueLister, SharedScheduler
from dtslurm.services.wiring.context import ActiveCluster, Context, identify_slurm
from dtslurm.store.index import cache_folder
from dtslurm.store.queue_cache import QueueCache, SharedQueue

RUNNING_TICK_S = 30.0
PENDING_TICK_S = 120.0
LONGEST_TICK_S = 600.0
BURST = 20.0  # requests
PER_SECOND = 5.0 / 60
QUESTION = 2.0  # requests that one squeue costs
_REUSE_S = 3.0  # a foreground query reuses an answer up to this age
_REUSE_OVER_BUDGET_S = 24.0  # the same, when the request budget is used up
_SLOW_S = 2.0
_CONFIRM_S = 1.0  # between queries that confirm a recent event
_LOCK_WAIT_S = 12.0  # longest wait for another process's query; Slurm's own timeout is 10 s
_LOCK_POLL_S = 0.05


@dataclass(frozen=True)
class Freshness:
    """How fresh an answer must be.

    Attributes:
        background: no user waits for the answer: it may be as old as the query interval, and a lock held by
            another process is not waited for.
        after: the answer must be newer than this time of a known event, in seconds since the epoch.
    """

    background: bool = False
    after: float = 0.0


@dataclass(frozen=True)
class QueueSnapshot:
    """The status of jobs as the scheduler last reported it.

    Attributes:
        jobs: statuses by requested job id; an unknown job has no entry.
        observed_at: when the scheduler was queried, in seconds since the epoch; None if it never answered.
        trouble: why the last query failed, else empty.
        own_jobs: all jobs in the queue that have dtslurm's comment.
    """

    jobs: Mapping[str, list[JobStatus]] = field(default_factory=dict)
    observed_at: float | None = None
    trouble: str = ""
    own_jobs: Sequence[JobStatus] = ()


def observe(
    context: Context, cluster: ActiveCluster, job_ids: Sequence[str], need: Freshness
) -> QueueSnapshot:
    """Return the status of jobs, and query the scheduler if the cached answer is not fresh enough.

    If the scheduler does not answer, `QueueSnapshot.trouble` says why, and the last answer is returned.
    """
    scheduler = cluster.scheduler
    if not isinstance(scheduler, SharedScheduler):
        return _query_uncached(context, cluster, job_ids)
    cache = cache_of(context, cluster)
    deadline = time.monotonic() + (0.0 if need.background else _LOCK_WAIT_S)
    while True:
        shared, generation = _read_newest(context, cache), cache.generation()
        if not needs_refresh(context, cluster, shared, generation, job_ids, need):
            return _make_snapshot(scheduler, shared, generation, job_ids)
        with cache.lock() as has_lock:
            if has_lock or (not need.background and time.monotonic() > deadline):
                shared, generation = _read_newest(context, cache), cache.generation()
                if needs_refresh(context, cluster, shared, generation, job_ids, need):
                    shared = context.queues[cache.name] = _query(
                        context, scheduler, shared, generation, job_ids
                    )
                    cache.write(shared)
                return _make_snapshot(scheduler, shared, generation, job_ids)
        if need.background:
            return _make_snapshot(scheduler, shared, generation, job_ids)
        time.sleep(_LOCK_POLL_S)


@contextlib.contextmanager
def invalidating_cache(context: Context, cluster: ActiveCluster) -> Iterator[None]:
    """Invalidate the queue cache after the body of the ``with`` statement has changed jobs."""
    try:
        yield
    finally:
        if isinstance(cluster.scheduler, SharedScheduler):
            cache = cache_of(context, cluster)
            if not cache.change():  # the cache is not writable: mark it invalid for this process at least
                shared = _read_newest(context, cache)
                context.queues[cache.name] = replace(shared, generation="none", tokens_at=context.clock())


def _read_newest(context: Context, cache: QueueCache) -> SharedQueue:
    """Return the newest cached answer: the shared one, or this process's own if the cache is not writable.

    An own answer from the future is ignored: the clock was set back since, and it would stay the newest.
    """
    shared, own = cache.read(), context.queues.get(cache.name)
    return own if own is not None and shared.tokens_at < own.tokens_at <= context.clock() else shared


def cache_of(context: Context, cluster: ActiveCluster) -> QueueCache:
    """Return this user's queue cache for one Slurm installation."""
    installation = identify_slurm(context.env, cluster.transport, cluster.access, cluster.path)
    digest = hashlib.sha256(installation.encode("utf-8", "surrogateescape")).hexdigest()
    name = re.sub(r"[^\w.-]", "-", cluster.name)[:60]
    return QueueCache(cache_folder(context.env) / "queues", f"{name}-{digest[:12]}")


# ---- When to query ----


def needs_refresh(
    context: Context,
    cluster: ActiveCluster,
    shared: SharedQueue,
    generation: str,
    job_ids: Sequence[str],
    need: Freshness,
) -> bool:
    """Return whether the cached answer is not fresh enough, and the scheduler may be queried now."""
    now = context.clock()
    age = now - shared.memory.asked_at
    is_valid = shared.generation == generation and age >= 0
    failed_ago = now - shared.failed_at if shared.failures else float("inf")
    floor = cluster.access.min_poll_s
    if not need.background:
        if 0 <= failed_ago < _REUSE_S and is_valid:
            return False
        if not is_valid or shared.memory.asked_at < need.after:
            return True
        return age > (_REUSE_S if allowance(shared, now) >= QUESTION else _REUSE_OVER_BUDGET_S)
    if shared.failures:
        return not 0 <= failed_ago < _interval(RUNNING_TICK_S * 2.0 ** min(shared.failures, 9), floor, shared)
    if not is_valid:
        return True
    if allowance(shared, now) < QUESTION:
        return False
    if shared.memory.asked_at < need.after:
        return age >= (floor if floor > RUNNING_TICK_S else _CONFIRM_S)
    return age >= _interval(tick(shared.memory, job_ids, cluster.scheduler), floor, shared)


def tick(memory: QueueMemory, job_ids: Sequence[str], scheduler: object) -> float:
    """Return the interval between queries for these jobs, in seconds; infinite when all have ended."""
    if not isinstance(scheduler, SharedScheduler):
        return RUNNING_TICK_S
    statuses_by_id = _with_memory(scheduler, memory).recall(job_ids)
    statuses = [status for jobs in statuses_by_id.values() for status in jobs]
    if all(statuses_by_id.values()) and all(status.terminal for status in statuses):
        return float("inf")
    waiting = {JobState.PENDING, JobState.UNKNOWN}
    if all(status.terminal or status.state in waiting for status in statuses):
        return PENDING_TICK_S
    return RUNNING_TICK_S


def _interval(seconds: float, floor: float, shared: SharedQueue) -> float:
    longest = max(LONGEST_TICK_S, floor)
    return min(max(seconds, floor) * shared.slowness, longest) * shared.jitter if seconds < 1e9 else seconds


def allowance(shared: SharedQueue, now: float) -> float:
    """Return how many requests the budget permits now."""
    return min(BURST, shared.tokens + max(0.0, now - shared.tokens_at) * PER_SECOND)


# ---- Querying ----


def _query(
    context: Context, scheduler: SharedScheduler, shared: SharedQueue, generation: str, ids: Sequence[str]
) -> SharedQueue:
    querying = _with_memory(scheduler, shared.memory)
    started_at, requests_before = context.clock(), querying.requests
    trouble = ""
    try:
        querying.query(ids)
    except DtslurmError as error:
        trouble = error.message
    memory = querying.memory
    is_slow = context.clock() - started_at > _SLOW_S if trouble else memory.took_s > _SLOW_S
    now = context.clock()
    updated = replace(
        shared,
        memory=memory,
        tokens=max(-BURST, allowance(shared, started_at) - (querying.requests - requests_before)),
        tokens_at=now,
        slowness=min(shared.slowness * 2, 16.0) if is_slow else 1.0,
        jitter=0.9 + 0.2 * int.from_bytes(os.urandom(2), "big") / 0xFFFF,
    )
    if trouble:
        return replace(updated, failures=shared.failures + 1, failed_at=now, trouble=trouble)
    return replace(updated, generation=generation, failures=0, trouble="")


def _make_snapshot(
    scheduler: SharedScheduler, shared: SharedQueue, generation: str, job_ids: Sequence[str]
) -> QueueSnapshot:
    if shared.generation != generation or not shared.memory.asked_at:
        return QueueSnapshot(
            trouble=shared.trouble or "the scheduler was not queried since jobs were changed"
        )
    restored = _with_memory(scheduler, shared.memory)
    return QueueSnapshot(
        restored.recall(job_ids), shared.memory.asked_at, shared.trouble, _list_own_jobs(restored)
    )


def _list_own_jobs(scheduler: object) -> Sequence[JobStatus]:
    return scheduler.own_jobs() if isinstance(scheduler, QueueLister) else ()


def _with_memory(scheduler: SharedScheduler, memory: QueueMemory) -> SharedScheduler:
    """Return a copy of a scheduler with its own memory, because threads must not mix their answers."""
    copied = copy.copy(scheduler)
    copied.memory = memory
    return copied


def _query_uncached(context: Context, cluster: ActiveCluster, job_ids: Sequence[str]) -> QueueSnapshot:
    now = context.clock()
    try:
        return QueueSnapshot(
            cluster.scheduler.query(job_ids), now, own_jobs=_list_own_jobs(cluster.scheduler)
        )
    except DtslurmError as error:
        return QueueSnapshot(trouble=error.message)
