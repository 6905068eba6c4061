"""The one place from which a scheduler is asked how jobs fare: one question serves every process of a user.

What was heard lies in a file of the user's cache, behind a lock, with an allowance of requests to the
controller: 20 at once, 5 a minute in the long run, however many windows look. Who looks in the background
takes what is there until its time has come: 30 s after the last question while something runs, 120 s while
all waits. Who asks by hand gets an answer of the last seconds. What we do to jobs ourselves (submit, cancel,
requeue, hold, release) makes what was heard before worth nothing.
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
from dtslurm.services.wiring.context import ActiveCluster, Context, slurm_place
from dtslurm.store.index import cache_folder
from dtslurm.store.queue_cache import QueueCache, SharedQueue

RUNNING_TICK_S = 30.0
PENDING_TICK_S = 120.0
LONGEST_TICK_S = 600.0
BURST = 20.0  # requests
PER_SECOND = 5.0 / 60
QUESTION = 2.0  # requests of one squeue
_SHARED_S = 3.0  # an answer as old as that is as good as one's own
_SPENT_S = 24.0  # the same, when the allowance is used up
_SLOW_S = 2.0
_SOON_S = 1.0  # between questions about something that was just heard of
_PATIENCE_S = 12.0  # for another process's question; Slurm's own time-out is 10 s
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True)
class Freshness:
    """What an answer must be good for.

    Attributes:
        background: nobody waits for it: it may be as old as the time between questions, and the lock of
            another process is not waited for.
        after: it must be of after this moment, for something is known to have happened then.
    """

    background: bool = False
    after: float = 0.0


@dataclass(frozen=True)
class QueueSnapshot:
    """What is known of jobs.

    Attributes:
        jobs: statuses by the job id asked for; without an entry where nothing is known.
        observed_at: when the scheduler was asked, seconds since the epoch; None if it never answered.
        trouble: why it could not be asked (any more), empty if it was.
        own_jobs: all jobs that the queue listed with dtslurm's comment.
    """

    jobs: Mapping[str, list[JobStatus]] = field(default_factory=dict)
    observed_at: float | None = None
    trouble: str = ""
    own_jobs: Sequence[JobStatus] = ()


def observe(
    context: Context, cluster: ActiveCluster, job_ids: Sequence[str], need: Freshness
) -> QueueSnapshot:
    """Return what is known of jobs, asking the scheduler if what is there is not good enough.

    A scheduler that does not answer is told as `QueueSnapshot.trouble`, with the last answer if there is one.
    """
    scheduler = cluster.scheduler
    if not isinstance(scheduler, SharedScheduler):
        return _ask_alone(context, cluster, job_ids)
    cache = cache_of(context, cluster)
    end = time.monotonic() + (0.0 if need.background else _PATIENCE_S)
    while True:
        shared, generation = _known(context, cache), cache.generation()
        if not needs_refresh(context, cluster, shared, generation, job_ids, need):
            return _told(scheduler, shared, generation, job_ids)
        with cache.lock() as ours:
            if ours or (not need.background and time.monotonic() > end):
                shared, generation = _known(context, cache), cache.generation()
                if needs_refresh(context, cluster, shared, generation, job_ids, need):
                    shared = context.queues[cache.name] = _ask(
                        context, scheduler, shared, generation, job_ids
                    )
                    cache.write(shared)
                return _told(scheduler, shared, generation, job_ids)
        if need.background:
            return _told(scheduler, shared, generation, job_ids)
        time.sleep(_LOOK_AGAIN_S)


@contextlib.contextmanager
def invalidating_cache(context: Context, cluster: ActiveCluster) -> Iterator[None]:
    """Do something to jobs; what was heard of them before is worth nothing afterwards."""
    try:
        yield
    finally:
        if isinstance(cluster.scheduler, SharedScheduler):
            cache = cache_of(context, cluster)
            if not cache.change():  # then at least this process shall know
                known = _known(context, cache)
                context.queues[cache.name] = replace(known, generation="none", tokens_at=context.clock())


def _known(context: Context, cache: QueueCache) -> SharedQueue:
    """Return what is known: of all processes, or of this one alone where nothing can be written.

    What this one wrote before its clock was set back would be the newest for as long as it was ahead.
    """
    shared, own = cache.read(), context.queues.get(cache.name)
    return own if own is not None and shared.tokens_at < own.tokens_at <= context.clock() else shared


def cache_of(context: Context, cluster: ActiveCluster) -> QueueCache:
    """Return the cache of one Slurm for this user."""
    place = slurm_place(context.env, cluster.transport, cluster.access, cluster.path)
    digest = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()
    name = re.sub(r"[^\w.-]", "-", cluster.name)[:60]
    return QueueCache(cache_folder(context.env) / "queues", f"{name}-{digest[:12]}")


# ---- When to ask ----


def needs_refresh(
    context: Context,
    cluster: ActiveCluster,
    shared: SharedQueue,
    generation: str,
    job_ids: Sequence[str],
    need: Freshness,
) -> bool:
    """Return whether what is there is not good enough, and the scheduler may be asked now."""
    now = context.clock()
    age = now - shared.memory.asked_at
    valid = shared.generation == generation and age >= 0
    since_failure = now - shared.failed_at if shared.failures else float("inf")
    floor = cluster.access.min_poll_s
    if not need.background:
        if 0 <= since_failure < _SHARED_S and valid:
            return False
        if not valid or shared.memory.asked_at < need.after:
            return True
        return age > (_SHARED_S if allowance(shared, now) >= QUESTION else _SPENT_S)
    if shared.failures:
        return not 0 <= since_failure < _pace(RUNNING_TICK_S * 2.0 ** min(shared.failures, 9), floor, shared)
    if not valid:
        return True
    if allowance(shared, now) < QUESTION:
        return False
    if shared.memory.asked_at < need.after:
        return age >= (floor if floor > RUNNING_TICK_S else _SOON_S)
    return age >= _pace(tick(shared.memory, job_ids, cluster.scheduler), floor, shared)


def tick(memory: QueueMemory, job_ids: Sequence[str], scheduler: object) -> float:
    """Return the time between questions about these jobs, in seconds; infinite when all are over."""
    if not isinstance(scheduler, SharedScheduler):
        return RUNNING_TICK_S
    told = _remembering(scheduler, memory).recall(job_ids)
    states = [status for jobs in told.values() for status in jobs]
    if all(told.values()) and all(status.terminal for status in states):
        return float("inf")
    waiting = {JobState.PENDING, JobState.UNKNOWN}
    if all(status.terminal or status.state in waiting for status in states):
        return PENDING_TICK_S
    return RUNNING_TICK_S


def _pace(seconds: float, floor: float, shared: SharedQueue) -> float:
    longest = max(LONGEST_TICK_S, floor)
    return min(max(seconds, floor) * shared.slowness, longest) * shared.jitter if seconds < 1e9 else seconds


def allowance(shared: SharedQueue, now: float) -> float:
    """Return how many requests may be made now."""
    return min(BURST, shared.tokens + max(0.0, now - shared.tokens_at) * PER_SECOND)


# ---- Asking ----


def _ask(
    context: Context, scheduler: SharedScheduler, shared: SharedQueue, generation: str, ids: Sequence[str]
) -> SharedQueue:
    asking = _remembering(scheduler, shared.memory)
    begin, before = context.clock(), asking.requests
    trouble = ""
    try:
        asking.query(ids)
    except DtslurmError as error:
        trouble = error.message
    heard = asking.memory
    slow = context.clock() - begin > _SLOW_S if trouble else heard.took_s > _SLOW_S
    now = context.clock()
    asked = replace(
        shared,
        memory=heard,
        tokens=max(-BURST, allowance(shared, begin) - (asking.requests - before)),
        tokens_at=now,
        slowness=min(shared.slowness * 2, 16.0) if slow else 1.0,
        jitter=0.9 + 0.2 * int.from_bytes(os.urandom(2), "big") / 0xFFFF,
    )
    if trouble:
        return replace(asked, failures=shared.failures + 1, failed_at=now, trouble=trouble)
    return replace(asked, generation=generation, failures=0, trouble="")


def _told(
    scheduler: SharedScheduler, shared: SharedQueue, generation: str, job_ids: Sequence[str]
) -> QueueSnapshot:
    if shared.generation != generation or not shared.memory.asked_at:
        return QueueSnapshot(trouble=shared.trouble or "it was not asked since jobs were changed")
    remembering = _remembering(scheduler, shared.memory)
    return QueueSnapshot(
        remembering.recall(job_ids), shared.memory.asked_at, shared.trouble, _own_jobs(remembering)
    )


def _own_jobs(scheduler: object) -> Sequence[JobStatus]:
    return scheduler.own_jobs() if isinstance(scheduler, QueueLister) else ()


def _remembering(scheduler: SharedScheduler, memory: QueueMemory) -> SharedScheduler:
    """Return a scheduler of its own memory: threads that look at different moments must not mix them."""
    own = copy.copy(scheduler)
    own.memory = memory
    return own


def _ask_alone(context: Context, cluster: ActiveCluster, job_ids: Sequence[str]) -> QueueSnapshot:
    now = context.clock()
    try:
        return QueueSnapshot(cluster.scheduler.query(job_ids), now, own_jobs=_own_jobs(cluster.scheduler))
    except DtslurmError as error:
        return QueueSnapshot(trouble=error.message)
