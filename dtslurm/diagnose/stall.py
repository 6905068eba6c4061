"""Whether a running job is stalled: samples of its nodes in, a verdict out."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.model.runs.activity import Activity, NodeActivity
from dtslurm.model.units import duration

FRESH_S = 150.0  # a sampler writes at least once a minute: an older file is no evidence of now
FLOOR_S = 60.0
FACTOR = 5.0  # a pause that long against the longest one of this training is no usual pause
START_S = 300.0
SAMPLED_S = 5.0  # between two looks of a sampler: shorter pauses are not seen
BUSY_FLOOR_S, BUSY_FACTOR = 300.0, 3.0
_MOST_WAITS = 2
_WAITS = {"child": "waits for its child {}", "stopped": "is stopped", "blocked": "is blocked in the kernel"}


def judge_activity(nodes: Sequence[NodeActivity], world_size: int, now: float) -> Activity | None:
    """Return what a running job does; None where that is not known of every rank.

    A job is stalled if none of its ranks has done anything for longer than a limit. Output, training metrics,
    CPU use of a rank or of its children, reading and writing, and computing GPUs are work.

    - The limit is five times the longest pause in the output since training began, and at least 60 s. The
      supervisor's ``--hang-timeout`` counts alike. It is the longest pause, not the usual one, since
      evaluations and checkpoints recur; 60 s, since samples and slow file systems are late by seconds.
    - A rank that waits in a collective may keep its CPU busy. Once training has begun, CPU use of the ranks
      themselves puts off the verdict only to three times the limit, and at least 300 s: an evaluation on CPUs
      may print nothing for minutes. Work of children, files and GPUs counts without end.
    - Before training has begun there is no usual pause: the limit is 300 s, and all CPU use is work. Imports
      from a slow file system take minutes, but they use a CPU or read.

    Args:
        nodes: the newest sample of each node.
        world_size: how many ranks the job has, where the ranks themselves do not tell.
        now: seconds since the epoch.
    """
    fresh = [node for node in nodes if node.over or now - node.time <= FRESH_S]
    if not _covers_all_ranks(fresh, world_size):
        return None
    looked = min(node.time for node in fresh if not node.over)
    learned = any(node.learned for node in fresh)
    longest = max(node.longest_s for node in fresh)
    limit = max(FLOOR_S, FACTOR * longest) if learned else START_S
    output = max(node.output for node in fresh)
    work = max(output, *(max(node.children, node.io, node.gpu) for node in fresh))
    busy = max(work, *(node.cpu for node in fresh))
    if looked - busy >= limit:
        since, what = busy, "no step, output or work of any rank"
    elif learned and looked - work >= max(BUSY_FLOOR_S, BUSY_FACTOR * limit):
        since, what = work, "no step or output of any rank, though ranks keep their CPUs busy,"
    else:
        return _not_stalled(fresh, output, max(now - output, 0.0), limit)
    quiet = max(now - since, 0.0)
    pause = [f"the longest pause before: {duration(longest)}"] if longest >= SAMPLED_S else []
    summary = "; ".join([f"{what} for {duration(quiet)}", *_waits(fresh), *pause])
    return Activity(stalled=True, since=since, quiet_s=quiet, summary=summary)


def _covers_all_ranks(nodes: Sequence[NodeActivity], world_size: int) -> bool:
    """Return whether every rank was sampled, and one still runs."""
    world = next((node.world_size for node in nodes if node.world_size), world_size)
    seen = {rank for node in nodes for rank in node.seen}
    return seen >= set(range(world)) and any(node.ranks and not node.over for node in nodes)


def _not_stalled(nodes: Sequence[NodeActivity], output: float, quiet: float, limit: float) -> Activity:
    """Return the activity of a job that works; a long pause in its output is explained where it can be."""
    waits = _waits(nodes) if quiet >= limit else []
    summary = "; ".join([f"no output for {duration(quiet)}", *waits]) if waits else ""
    return Activity(stalled=False, since=output, quiet_s=quiet, summary=summary)


def _waits(nodes: Sequence[NodeActivity]) -> list[str]:
    """Return what ranks wait for, in words: a rank that is stopped or blocked first."""
    found = [
        (kind == "child", rank, kind, name) for node in nodes for rank, (kind, name) in node.waits.items()
    ]
    told = [
        f"rank {rank} {_WAITS[kind].format(name)}" for _, rank, kind, name in sorted(found) if kind in _WAITS
    ]
    rest = len(told) - _MOST_WAITS
    return told[:_MOST_WAITS] + ([f"{rest} more ranks wait likewise"] if rest > 0 else [])
