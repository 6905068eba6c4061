"""Find the rank of a running job that blocks the others.

The evidence is one look at each rank: the state, the stack and the latest output of its process. Conclusions
that are only likely have a lower confidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from dtslurm.diagnose.follow_on_errors import format_ranges
from dtslurm.diagnose.places import format_frame, kind_of, own_frame, places, rendezvous, words
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.live import LiveVerdict, RankLook

FRESH_S = 30.0  # a rank that wrote output within this time does not hang
LONG_S = 120.0  # longer silence is unusual
_STUCK_KINDS = ("stopped", "gone", "ended", "absent", "blocked")

_ADVICE = {
    "stopped": "the process was stopped by a signal or by an attached debugger: run kill -CONT {pid} on "
    "{node} to continue it, or detach the debugger",
    "blocked": "the kernel waits for a disk, a network file system or a device: check dmesg on {node}, and "
    "whether the file system responds on this node; try without the node (--exclude {node})",
    "gone": "the process was killed without a record (kill -9, out of memory): cancel the job, run dtslurm "
    "diagnose without --live, and check dmesg on {node}",
    "ended": "the rank ended before the others, because of unequal numbers of batches or an early return: "
    "all ranks must run the same number of collectives",
    "failed": "find the cause with dtslurm diagnose without --live; cancel the job if the other ranks do not "
    "end",
    "absent": "the other ranks wait for this rank to start: check the log of its node, and whether the node "
    "can reach the port of the head node",
    "data": "its data loader returns no data: check its worker processes, the file system that they read, "
    "and whether its shard has fewer samples than other shards",
    "locked": "if no build is running, delete the file lock in the folder of the extension below "
    "TORCH_EXTENSIONS_DIR or ~/.cache/torch_extensions: a build that was killed leaves this file behind",
    "sleeps": "check this place in the code: find out why only this rank waits here",
    "busy": "an endless loop, a long computation or a GPU that does not respond: check this place in the "
    "code, and this GPU (nvidia-smi, Xid in dmesg on {node})",
    "computes": "if it is always this rank or node, check the clock and the errors of its GPU, its CPU "
    "binding and its share of the data",
}


def judge(looks: Sequence[RankLook], world_size: int) -> LiveVerdict:
    """Return the verdict on a running job.

    Args:
        looks: the looks at the ranks that are known. Ranks of ``0 … world_size-1`` without a look never
            started.
        world_size: the number of ranks of the job.
    """
    known_ranks = {look.rank for look in looks}
    missing = [RankLook(rank=rank, started=False) for rank in range(world_size) if rank not in known_ranks]
    all_looks = sorted([*looks, *missing], key=lambda look: look.rank)
    verdict = replace(
        _withdraw_doubtful_hang(_judge_by_kinds(all_looks), all_looks), places=places(all_looks)
    )
    if verdict.rank is None:
        return verdict
    look = next(item for item in all_looks if item.rank == verdict.rank)
    return replace(verdict, local_rank=look.local_rank, node=look.host or None)


def _judge_by_kinds(looks: Sequence[RankLook]) -> LiveVerdict:
    """Judge a job by its ranks: which are stuck, which wait for others, and which do something else."""
    by_kind: dict[str, list[RankLook]] = {}
    for look in looks:
        by_kind.setdefault(kind_of(look), []).append(look)
    waiting_looks = by_kind.get("waits", [])
    seen_count = sum(len(members) for kind, members in by_kind.items() if kind not in ("unseen", "absent"))
    if not seen_count:
        return LiveVerdict(cause="unknown", confidence=1.0, summary="no rank was examined")
    stuck_looks = [look for kind in _STUCK_KINDS for look in by_kind.get(kind, [])]
    excluded_kinds = ("waits", "unseen", *_STUCK_KINDS)
    other_looks = [
        look for kind, members in by_kind.items() if kind not in excluded_kinds for look in members
    ]
    if stuck_looks:
        return _judge_stuck(stuck_looks, waiting_looks, other_looks)
    if by_kind.get("builds"):
        return _judge_building(by_kind["builds"], by_kind.get("locked", []))
    if by_kind.get("locked"):
        other_looks = [look for look in other_looks if kind_of(look) != "locked"]
        verdict = _judge_locked(by_kind["locked"], waiting_looks, other_looks)
        may_be_building = bool(by_kind.get("unseen"))
        return replace(verdict, confidence=min(verdict.confidence, 0.5)) if may_be_building else verdict
    if waiting_looks and other_looks:
        return _judge_awaited(other_looks, waiting_looks)
    if waiting_looks:
        return _judge_all_waiting(waiting_looks)
    if other_looks:
        return _judge_none_waiting(other_looks)
    return LiveVerdict(cause="unknown", confidence=1.0, summary="no rank could be examined")


def _withdraw_doubtful_hang(verdict: LiveVerdict, looks: Sequence[RankLook]) -> LiveVerdict:
    """Return the verdict; turn a hang into "unknown" if a rank that was not examined still writes output."""
    active_looks = [look for look in looks if kind_of(look) == "unseen" and _wrote_recently([look])]
    if verdict.cause != "hang" or not active_looks:
        return verdict
    summary = (
        f"{verdict.summary}; but {_name_ranks(active_looks)}, which could not be examined, wrote output "
        f"{_format_age(active_looks)} ago"
    )
    return replace(verdict, cause="unknown", confidence=min(verdict.confidence, 0.4), summary=summary)


def _wrote_recently(looks: Sequence[RankLook], limit: float = FRESH_S) -> bool:
    """Return whether one of the ranks wrote output recently."""
    return any(look.silent_s is not None and look.silent_s < limit for look in looks)


def _name_ranks(looks: Sequence[RankLook]) -> str:
    if len(looks) == 1:
        return f"rank {looks[0].rank}"
    return f"{len(looks):,} ranks ({format_ranges(look.rank for look in looks)})"


def _make_verdict(cause: str, confidence: float, suspects: Sequence[RankLook], summary: str) -> LiveVerdict:
    first_suspect = suspects[0] if suspects else None
    advice = ""
    if first_suspect is not None:
        kind = "failed" if _has_failed(first_suspect) else kind_of(first_suspect)
        advice = _ADVICE.get(kind, "").format(
            pid=first_suspect.pid or "PID", node=first_suspect.host or "its node"
        )
    return LiveVerdict(
        cause=cause,
        confidence=confidence,
        summary=summary,
        rank=first_suspect.rank if first_suspect is not None and len(suspects) == 1 else None,
        suspects=format_ranges(look.rank for look in suspects),
        advice=advice,
    )


def _has_failed(look: RankLook) -> bool:
    return look.ended and look.exit_code not in (None, 0, WANTS_REQUEUE)


def _find_progressing(looks: Sequence[RankLook], has_fresh_output: bool) -> list[RankLook]:
    """Return the ranks that make progress.

    A rank that is busy at one place counts only if the job wrote output recently (``has_fresh_output``).
    """
    return [
        look
        for look in looks
        if kind_of(look) == "computes" or (has_fresh_output and kind_of(look) == "busy")
    ]


def _judge_stuck(
    stuck_looks: Sequence[RankLook], waiting_looks: Sequence[RankLook], other_looks: Sequence[RankLook]
) -> LiveVerdict:
    """Judge a job with ranks that are stopped, blocked, gone, ended or never started.

    Ranks that wait for others wait for these.
    """
    kinds = Counter(kind_of(look) for look in stuck_looks)
    worst_kind = next(kind for kind in _STUCK_KINDS if kinds[kind])
    suspects = [look for look in stuck_looks if kind_of(look) == worst_kind]
    suspects = [look for look in suspects if _has_failed(look)] or suspects
    is_single = len(suspects) == 1
    verb = (
        ("has" if is_single else "have")
        if worst_kind in ("ended", "absent")
        else ("is" if is_single else "are")
    )
    summary = f"{_name_ranks(suspects)} {verb} {words(suspects[0], worst_kind)}"
    if waiting_looks:
        plural = "s" if len(waiting_looks) == 1 else ""
        summary += f"; {_name_ranks(waiting_looks)} wait{plural} {_waiting_place(waiting_looks)}"
    others_continue = bool(_find_progressing(other_looks, _wrote_recently(other_looks))) or _wrote_recently(
        other_looks
    )
    if worst_kind in ("ended", "blocked") and not waiting_looks:
        if others_continue:
            return _make_verdict("none", 0.6, [], f"the other ranks continue, although {summary}")
        return _make_verdict("hang", 0.8 if _has_failed(suspects[0]) else 0.5, suspects, summary)
    if worst_kind == "absent" and not waiting_looks and others_continue:
        return _make_verdict("none", 0.5, [], f"{_name_ranks(other_looks)} continue, although {summary}")
    confidence = {"stopped": 0.95, "gone": 0.9, "ended": 0.85, "absent": 0.85, "blocked": 0.8}[worst_kind]
    if worst_kind == "absent" and any(rendezvous(look) for look in waiting_looks):
        confidence = 0.95
    return _make_verdict("hang", confidence if waiting_looks else confidence - 0.2, suspects, summary)


def _judge_building(building_looks: Sequence[RankLook], locked_looks: Sequence[RankLook]) -> LiveVerdict:
    """Judge a job of which a rank builds a C++ extension: the others wait for it, however long that takes."""
    verb = "is" if len(building_looks) == 1 else "are"
    summary = f"{_name_ranks(building_looks)} {verb} {words(building_looks[0], 'builds')}"
    if locked_looks:
        plural = "s" if len(locked_looks) == 1 else ""
        summary += f"; {_name_ranks(locked_looks)} wait{plural} for the lock of this build"
    return _make_verdict("none", 0.7, [], summary)


def _judge_locked(
    locked_looks: Sequence[RankLook], waiting_looks: Sequence[RankLook], other_looks: Sequence[RankLook]
) -> LiveVerdict:
    """Judge a job with ranks that wait until another build of a C++ extension ends, which no rank does.

    The build may run in another job, or it was killed and has left its lock behind.
    """
    plural = "s" if len(locked_looks) == 1 else ""
    subject = _name_ranks(locked_looks)
    if not waiting_looks and not other_looks and len(locked_looks) > 1:
        subject = f"all {subject}"
    location = words(locked_looks[0], "locked").removeprefix("waiting ")
    summary = f"{subject} wait{plural} {location}"
    if waiting_looks:
        plural = "s" if len(waiting_looks) == 1 else ""
        summary += f"; {_name_ranks(waiting_looks)} wait{plural} {_waiting_place(waiting_looks)}"
    elif _find_progressing(other_looks, _wrote_recently(other_looks)):
        return _make_verdict("none", 0.6, [], f"the other ranks continue, although {summary}")
    is_recent = _wrote_recently([*locked_looks, *waiting_looks, *other_looks], LONG_S)
    return _make_verdict("hang", 0.5 if is_recent else 0.8, locked_looks, summary)


def _judge_awaited(other_looks: Sequence[RankLook], waiting_looks: Sequence[RankLook]) -> LiveVerdict:
    """Judge a job in which some ranks wait for others, which do something else: the others are suspect."""
    has_fresh_output = _wrote_recently([*waiting_looks, *other_looks])
    moving_looks = _find_progressing(other_looks, has_fresh_output)
    if len(moving_looks) > len(waiting_looks):
        return _make_verdict(
            "none",
            0.7,
            [],
            f"{_name_ranks(moving_looks)} are still working, {_name_ranks(waiting_looks)} arrived first",
        )
    idle_looks = [look for look in other_looks if kind_of(look) in ("sleeps", "data")]
    suspects = idle_looks or list(other_looks)
    location = words(suspects[0], kind_of(suspects[0]))
    if len({words(look, kind_of(look)) for look in suspects}) > 1:
        location = f"elsewhere, rank {suspects[0].rank} {location}"
    verb = "is" if len(suspects) == 1 else "are"
    plural = "s" if len(waiting_looks) == 1 else ""
    summary = (
        f"{_name_ranks(waiting_looks)} wait{plural} {_waiting_place(waiting_looks)}; "
        f"{_name_ranks(suspects)} {verb} {location}"
    )
    if idle_looks:
        # Ranks that sleep in their own code and have just written output may continue at any time.
        confidence = 0.9 if len(idle_looks) <= len(waiting_looks) else 0.6
        return _make_verdict("hang", 0.6 if has_fresh_output else confidence, idle_looks, summary)
    if has_fresh_output:
        return _make_verdict(
            "none",
            0.7,
            [],
            f"{summary}, and the last output is {_format_age([*waiting_looks, *other_looks])} old",
        )
    silent_s = max((look.silent_s or 0.0 for look in suspects), default=0.0)
    return _make_verdict("slow", 0.65 if silent_s >= LONG_S else 0.5, suspects, summary)


def _format_age(looks: Sequence[RankLook]) -> str:
    times = [look.silent_s for look in looks if look.silent_s is not None]
    return f"{min(times, default=0.0):.0f} s"


def _waiting_place(waiting_looks: Sequence[RankLook]) -> str:
    """Return where most of the waiting ranks wait, in words."""
    [(location, count)] = Counter(words(look, "waits") for look in waiting_looks).most_common(1)
    return location if count == len(waiting_looks) else f"{location} (and at other places)"


def _judge_all_waiting(waiting_looks: Sequence[RankLook]) -> LiveVerdict:
    """Judge a job in which all ranks wait for others, at one place or at several that do not match."""
    counts = Counter(words(look, "waits") for look in waiting_looks)
    if _wrote_recently(waiting_looks):
        summary = (
            f"all {len(waiting_looks):,} ranks are in collectives, but some wrote output just now: the job "
            "seems to make progress"
        )
        return _make_verdict("none", 0.6, [], summary)
    if len(counts) == 1:
        summary = (
            f"all {len(waiting_looks):,} ranks wait at the same place, {next(iter(counts))}: no rank is "
            "missing, so the network or a GPU is more likely than the code"
        )
        verdict = _make_verdict("hang", 0.5, [], summary)
        return replace(
            verdict,
            advice="check the network links and the GPUs (dtslurm submit --fabric-check); NCCL_DEBUG=INFO "
            "logs more details",
        )
    usual_location, _ = counts.most_common(1)[0]
    odd_looks = [look for look in waiting_looks if words(look, "waits") != usual_location]
    if len(odd_looks) * 2 > len(waiting_looks):
        summary = f"all {len(waiting_looks):,} ranks wait for others, at {len(counts)} places"
        return _make_verdict("hang", 0.5, [], summary + "; which of them is wrong is not known")
    outlier = odd_looks[0]
    summary = (
        f"{len(waiting_looks) - len(odd_looks):,} ranks wait {usual_location}, {_name_ranks(odd_looks)} "
        f"{words(outlier, 'waits')}: they wait for each other, which happens if ranks take different "
        "paths through the code"
    )
    verdict = _make_verdict("hang", 0.7, odd_looks, summary)
    frame = own_frame(outlier)
    reference = f" (see {format_frame(frame)})" if frame is not None else ""
    return replace(
        verdict, advice=f"all ranks of a group must call the same collectives in the same order{reference}"
    )


def _judge_none_waiting(other_looks: Sequence[RankLook]) -> LiveVerdict:
    """Judge a job in which no rank is known to wait for another."""
    has_fresh_output = _wrote_recently(other_looks)
    moving_looks = _find_progressing(other_looks, has_fresh_output)
    if len(moving_looks) * 2 >= len(other_looks):
        confidence = 0.9 if len(moving_looks) == len(other_looks) else 0.7
        verb = "is" if len(moving_looks) == 1 else "are"
        return _make_verdict(
            "none", confidence, [], f"{_name_ranks(moving_looks)} of {len(other_looks):,} {verb} computing"
        )
    if has_fresh_output:
        return _make_verdict(
            "none",
            0.6,
            [],
            f"the last output is {_format_age(other_looks)} old: the job seems to make progress",
        )
    silent_s = min((look.silent_s for look in other_looks if look.silent_s is not None), default=None)
    note = f"; no rank has written output for {silent_s:.0f} s" if silent_s is not None else ""
    counts = Counter(words(look, kind_of(look)) for look in other_looks)
    usual_location, count = counts.most_common(1)[0]
    odd_looks = [look for look in other_looks if words(look, kind_of(look)) != usual_location]
    if odd_looks and len(odd_looks) * 4 <= len(other_looks):
        odd_location = words(odd_looks[0], kind_of(odd_looks[0]))
        summary = f"{count:,} ranks are {usual_location}; {_name_ranks(odd_looks)}: {odd_location}{note}"
        return _make_verdict("hang", 0.6, odd_looks, summary)
    if count < len(other_looks):
        summary = f"the ranks are at {len(counts)} places, and none is known to wait for others{note}"
        return _make_verdict("unknown", 0.3, [], summary)
    subject = f"{'all ' if count > 1 else ''}{_name_ranks(other_looks)}"
    summary = f"{subject} {'are' if count > 1 else 'is'} {usual_location}{note}"
    if silent_s is not None and silent_s < LONG_S:
        return _make_verdict("unknown", 0.4, [], summary)
    return _make_verdict("hang", 0.5, other_looks, summary)


def place_of(look: RankLook) -> str:
    """Return where a process is, in words."""
    return words(look, kind_of(look))
