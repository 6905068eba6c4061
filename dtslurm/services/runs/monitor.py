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
from dtslurm.slurm.arrays import is_step_id
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
    context: Context, cluster: ActiveCluster, job_ids: Sequence[str], freshness: Freshness
) -> QueueSnapshot:
    """Return the status of jobs, and query the scheduler if the cached answer is not fresh enough.

    If the scheduler does not answer, `QueueSnapshot.trouble` is the reason, and the last answer is returned.
    """
    scheduler = cluster.scheduler
    if not isinstance(scheduler, SharedScheduler):
        return _query_uncached(context, cluster, job_ids)
    cache = cache_of(context, cluster)
    deadline = time.monotonic() + (0.0 if freshness.background else _LOCK_WAIT_S)
    while True:
        shared_queue, generation = _read_newest(context, cache), cache.generation()
        if not needs_refresh(context, cluster, shared_queue, generation, job_ids, freshness):
            return _make_snapshot(scheduler, shared_queue, generation, job_ids)
        with cache.lock() as has_lock:
            if has_lock or (not freshness.background and time.monotonic() > deadline):
                shared_queue, generation = _read_newest(context, cache), cache.generation()
                if needs_refresh(context, cluster, shared_queue, generation, job_ids, freshness):
                    shared_queue = context.queues[cache.name] = _query(
                        context, scheduler, shared_queue, generation, job_ids
                    )
                    cache.write(shared_queue)
                return _make_snapshot(scheduler, shared_queue, generation, job_ids)
        if freshness.background:
            return _make_snapshot(scheduler, shared_queue, generation, job_ids)
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
                shared_queue = _read_newest(context, cache)
                context.queues[cache.name] = replace(
                    shared_queue, generation="none", tokens_at=context.clock()
                )


def _read_newest(context: Context, cache: QueueCache) -> SharedQueue:
    """Return the newest cached answer: the shared one, or this process's own if the cache is not writable.

    An own answer from the future is ignored: the clock was set back since, and it would stay the newest.
    """
    shared_queue, own_queue = cache.read(), context.queues.get(cache.name)
    return (
        own_queue
        if own_queue is not None and shared_queue.tokens_at < own_queue.tokens_at <= context.clock()
        else shared_queue
    )


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
    shared_queue: SharedQueue,
    generation: str,
    job_ids: Sequence[str],
    freshness: Freshness,
) -> bool:
    """Return whether the cached answer is not fresh enough, and the scheduler may be queried now."""
    now = context.clock()
    age = now - shared_queue.memory.asked_at
    is_valid = shared_queue.generation == generation and age >= 0
    failed_ago = now - shared_queue.failed_at if shared_queue.failures else float("inf")
    floor = cluster.access.min_poll_s
    lacks_steps = not shared_queue.memory.has_steps and any(map(is_step_id, job_ids))
    if not freshness.background:
        if 0 <= failed_ago < _REUSE_S and is_valid:
            return False
        if not is_valid or lacks_steps or shared_queue.memory.asked_at < freshness.after:
            return True
        return age > (_REUSE_S if allowance(shared_queue, now) >= QUESTION else _REUSE_OVER_BUDGET_S)
    if shared_queue.failures:
        return (
            not 0
            <= failed_ago
            < _interval(RUNNING_TICK_S * 2.0 ** min(shared_queue.failures, 9), floor, shared_queue)
        )
    if not is_valid or lacks_steps:
        return True
    if allowance(shared_queue, now) < QUESTION:
        return False
    if shared_queue.memory.asked_at < freshness.after:
        return age >= (floor if floor > RUNNING_TICK_S else _CONFIRM_S)
    return age >= _interval(tick(shared_queue.memory, job_ids, cluster.scheduler), floor, shared_queue)


def tick(memory: QueueMemory, job_ids: Sequence[str], scheduler: object) -> float:
    """Return the interval between queries for these jobs, in seconds; infinite when all have ended."""
    if not isinstance(scheduler, SharedScheduler):
        return RUNNING_TICK_S
    statuses_by_id = _with_memory(scheduler, memory).recall(job_ids)
    statuses = [status for jobs in statuses_by_id.values() for status in jobs]
    if all(statuses_by_id.values()) and all(status.terminal for status in statuses):
        return float("inf")
    if all(status.terminal or status.state is JobState.PENDING or status.unknown for status in statuses):
        return PENDING_TICK_S
    return RUNNING_TICK_S


def _interval(seconds: float, floor: float, shared_queue: SharedQueue) -> float:
    max_interval = max(LONGEST_TICK_S, floor)
    return (
        min(max(seconds, floor) * shared_queue.slowness, max_interval) * shared_queue.jitter
        if seconds < 1e9
        else seconds
    )


def allowance(shared_queue: SharedQueue, now: float) -> float:
    """Return how many requests the budget permits now."""
    return min(BURST, shared_queue.tokens + max(0.0, now - shared_queue.tokens_at) * PER_SECOND)


# ---- Querying ----


def _query(
    context: Context,
    scheduler: SharedScheduler,
    shared_queue: SharedQueue,
    generation: str,
    ids: Sequence[str],
) -> SharedQueue:
    querying = _with_memory(scheduler, shared_queue.memory)
    started_at, requests_before = context.clock(), querying.requests
    error_text = ""
    try:
        querying.query(ids)
    except DtslurmError as error:
        error_text = error.message
    memory = querying.memory
    is_slow = context.clock() - started_at > _SLOW_S if error_text else memory.took_s > _SLOW_S
    now = context.clock()
    updated_queue = replace(
        shared_queue,
        memory=memory,
        tokens=max(-BURST, allowance(shared_queue, started_at) - (querying.requests - requests_before)),
        tokens_at=now,
        slowness=min(shared_queue.slowness * 2, 16.0) if is_slow else 1.0,
        jitter=0.9 + 0.2 * int.from_bytes(os.urandom(2), "big") / 0xFFFF,
    )
    if error_text:
        return replace(updated_queue, failures=shared_queue.failures + 1, failed_at=now, trouble=error_text)
    return replace(updated_queue, generation=generation, failures=0, trouble="")


def _make_snapshot(
    scheduler: SharedScheduler, shared_queue: SharedQueue, generation: str, job_ids: Sequence[str]
) -> QueueSnapshot:
    if shared_queue.generation != generation or not shared_queue.memory.asked_at:
        return QueueSnapshot(
            trouble=shared_queue.trouble or "the scheduler was not queried since jobs were changed"
        )
    restored_scheduler = _with_memory(scheduler, shared_queue.memory)
    return QueueSnapshot(
        restored_scheduler.recall(job_ids),
        shared_queue.memory.asked_at,
        shared_queue.trouble,
        _list_own_jobs(restored_scheduler),
    )


def _list_own_jobs(scheduler: object) -> Sequence[JobStatus]:
    return scheduler.own_jobs() if isinstance(scheduler, QueueLister) else ()


def _with_memory(scheduler: SharedScheduler, memory: QueueMemory) -> SharedScheduler:
    """Return a copy of a scheduler with its own memory, because threads must not mix their answers."""
    scheduler_copy = copy.copy(scheduler)
    scheduler_copy.memory = memory
    return scheduler_copy


def _query_uncached(context: Context, cluster: ActiveCluster, job_ids: Sequence[str]) -> QueueSnapshot:
    now = context.clock()
    try:
        return QueueSnapshot(
            cluster.scheduler.query(job_ids), now, own_jobs=_list_own_jobs(cluster.scheduler)
        )
    except DtslurmError as error:
        return QueueSnapshot(trouble=error.message)
