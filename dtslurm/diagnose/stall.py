"""Decides whether a running job is stalled, from the telemetry samples of its nodes."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.model.runs.activity import Activity, NodeActivity
from dtslurm.presentation.quantities import duration

FRESH_S = 150.0  # a sampler writes at least once a minute: an older sample shows nothing about now
FLOOR_S = 60.0
FACTOR = 5.0  # a pause this many times as long as the longest one so far is unusual
START_S = 300.0
SAMPLED_S = 5.0  # interval between two samples: shorter pauses are not visible
BUSY_FLOOR_S, BUSY_FACTOR = 300.0, 3.0
_MAX_SHOWN_WAITS = 2
_WAIT_WORDS = {
    "child": "waits for its child {}",
    "stopped": "is stopped",
    "blocked": "is blocked in the kernel",
}


def judge_activity(nodes: Sequence[NodeActivity], world_size: int, now: float) -> Activity | None:
    """Return a running job's activity and whether it is stalled; None if a rank's activity is unknown.

    A job is stalled if none of its ranks has worked for longer than a limit. Output, training metrics, CPU
    use of a rank or of its child processes, reading and writing, and GPU use are work.

    - The limit is five times the longest pause in the output since training started, and at least 60 s. The
      supervisor's ``--hang-timeout`` uses the same rule. The rule uses the longest pause, not the usual one,
      because evaluations and checkpoints recur; and at least 60 s, because samples and slow file systems lag
      by seconds.
    - A rank that waits in a collective may keep its CPU busy. After training has started, CPU use of the
      ranks themselves therefore delays the verdict only to three times the limit, and at least 300 s: an
      evaluation on CPUs may print nothing for minutes. Work of child processes, files and GPUs delays it
      without a limit.
    - Before training has started there is no usual pause: the limit is 300 s, and all CPU use is work.
      Imports from a slow file system take minutes, but they use a CPU or read files.

    Args:
        nodes: the newest sample of each node.
        world_size: the number of ranks of the job, used if the ranks themselves do not report it.
        now: seconds since the epoch.
    """
    fresh_nodes = [node for node in nodes if node.over or now - node.time <= FRESH_S]
    if not _covers_all_ranks(fresh_nodes, world_size):
        return None
    sampled_at = min(node.time for node in fresh_nodes if not node.over)
    has_started = any(node.learned for node in fresh_nodes)
    longest_pause_s = max(node.longest_s for node in fresh_nodes)
    limit_s = max(FLOOR_S, FACTOR * longest_pause_s) if has_started else START_S
    last_output = max(node.output for node in fresh_nodes)
    last_work = max(last_output, *(max(node.children, node.io, node.gpu) for node in fresh_nodes))
    last_busy = max(last_work, *(node.cpu for node in fresh_nodes))
    if sampled_at - last_busy >= limit_s:
        quiet_since, missing = last_busy, "no step, output or activity of any rank"
    elif has_started and sampled_at - last_work >= max(BUSY_FLOOR_S, BUSY_FACTOR * limit_s):
        quiet_since, missing = last_work, "no step or output of any rank, though ranks keep their CPUs busy,"
    else:
        return _not_stalled(fresh_nodes, last_output, max(now - last_output, 0.0), limit_s)
    quiet_s = max(now - quiet_since, 0.0)
    pause_note = (
        [f"the longest pause before: {duration(longest_pause_s)}"] if longest_pause_s >= SAMPLED_S else []
    )
    summary = "; ".join([f"{missing} for {duration(quiet_s)}", *_describe_waits(fresh_nodes), *pause_note])
    return Activity(stalled=True, since=quiet_since, quiet_s=quiet_s, summary=summary)


def _covers_all_ranks(nodes: Sequence[NodeActivity], world_size: int) -> bool:
    """Return whether every rank was sampled and at least one still runs."""
    reported_world_size = next((node.world_size for node in nodes if node.world_size), world_size)
    sampled_ranks = {rank for node in nodes for rank in node.seen}
    return sampled_ranks >= set(range(reported_world_size)) and any(
        node.ranks and not node.over for node in nodes
    )


def _not_stalled(nodes: Sequence[NodeActivity], last_output: float, quiet_s: float, limit: float) -> Activity:
    """Return the activity of a job that works, with the reason for a long pause in output if known."""
    waits = _describe_waits(nodes) if quiet_s >= limit else []
    summary = "; ".join([f"no output for {duration(quiet_s)}", *waits]) if waits else ""
    return Activity(stalled=False, since=last_output, quiet_s=quiet_s, summary=summary)


def _describe_waits(nodes: Sequence[NodeActivity]) -> list[str]:
    """Return what ranks wait for, in words; stopped or blocked ranks first."""
    waits = [
        (kind == "child", rank, kind, name) for node in nodes for rank, (kind, name) in node.waits.items()
    ]
    sentences = [
        f"rank {rank} {_WAIT_WORDS[kind].format(name)}"
        for _, rank, kind, name in sorted(waits)
        if kind in _WAIT_WORDS
    ]
    omitted_count = len(sentences) - _MAX_SHOWN_WAITS
    return sentences[:_MAX_SHOWN_WAITS] + (
        [f"{omitted_count} more ranks wait in the same way"] if omitted_count > 0 else []
    )
