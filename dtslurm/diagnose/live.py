"""Which rank of a running job keeps the others: values in, a verdict out. What is only likely is said so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from dtslurm.diagnose.follow_on_errors import folded
from dtslurm.diagnose.places import at, kind_of, own_frame, places, rendezvous, words
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.live import LiveVerdict, RankLook

FRESH_S = 30.0  # who spoke within this time is not hanging
LONG_S = 120.0  # silence of that length is unusual
_STUCK = ("stopped", "gone", "ended", "absent", "blocked")

_ADVICE = {
    "stopped": "something stopped the process: kill -CONT {pid} on {node} lets it go on; a debugger that was "
    "left attached does the same",
    "blocked": "the kernel waits there for a disk, a network file system or a device: see dmesg on {node}, "
    "and whether the file system answers there; try without that node (--exclude {node})",
    "gone": "it was killed without a word (kill -9, out of memory): cancel the job, ask dtslurm diagnose "
    "without --live, see dmesg on {node}",
    "ended": "it left before the others: unequal numbers of batches, or an early return in one rank; all "
    "ranks must do the same number of collectives",
    "failed": "dtslurm diagnose without --live tells why it failed; cancel the job if the others do not "
    "end with it",
    "absent": "the others wait for it to come up: see its node's log, and whether that node can reach the "
    "head node's port",
    "data": "its data loader gives nothing: see what its workers do, the file system they read from, and "
    "whether its shard has fewer samples than the others'",
    "sleeps": "that place in the code is where to look: what does it wait for that the others do not",
    "busy": "a loop without end, a long computation or a GPU that does not answer: look at that place, and "
    "at that GPU (nvidia-smi, Xid in dmesg on {node})",
    "computes": "if it is always this rank or node, look at its GPU's clock and errors, its CPU binding and "
    "its share of the data",
}


def judge(looks: Sequence[RankLook], world_size: int) -> LiveVerdict:
    """Return what is said of a running job.

    Args:
        looks: of the ranks that are known; those of ``0 … world_size-1`` that are missing never started.
    """
    known = {look.rank for look in looks}
    missing = [RankLook(rank=rank, started=False) for rank in range(world_size) if rank not in known]
    every = sorted([*looks, *missing], key=lambda look: look.rank)
    found = replace(_unless_unseen_go_on(_judge(every), every), places=places(every))
    if found.rank is None:
        return found
    look = next(item for item in every if item.rank == found.rank)
    return replace(found, local_rank=look.local_rank, node=look.host or None)


def _judge(looks: Sequence[RankLook]) -> LiveVerdict:
    by_kind: dict[str, list[RankLook]] = {}
    for look in looks:
        by_kind.setdefault(kind_of(look), []).append(look)
    waiting = by_kind.get("waits", [])
    seen = sum(len(members) for kind, members in by_kind.items() if kind not in ("unseen", "absent"))
    if not seen:
        return LiveVerdict(cause="unknown", confidence=1.0, summary="no rank was seen")
    stuck = [look for kind in _STUCK for look in by_kind.get(kind, [])]
    apart = ("waits", "unseen", *_STUCK)
    others = [look for kind, members in by_kind.items() if kind not in apart for look in members]
    if stuck:
        return _stuck(stuck, waiting, others)
    if waiting and others:
        return _awaited(others, waiting)
    if waiting:
        return _all_wait(waiting)
    if others:
        return _none_waits(others)
    return LiveVerdict(cause="unknown", confidence=1.0, summary="no rank could be looked at")


def _unless_unseen_go_on(found: LiveVerdict, looks: Sequence[RankLook]) -> LiveVerdict:
    """Call nothing a hang as long as a rank speaks that could not be looked at."""
    unseen = [look for look in looks if kind_of(look) == "unseen" and _fresh([look])]
    if found.cause != "hang" or not unseen:
        return found
    summary = f"{found.summary}; but {_named(unseen)}, which could not be looked at, spoke {_ago(unseen)} ago"
    return replace(found, cause="unknown", confidence=min(found.confidence, 0.4), summary=summary)


def _fresh(looks: Sequence[RankLook], limit: float = FRESH_S) -> bool:
    """Tell whether one of the ranks has spoken of late."""
    return any(look.silent_s is not None and look.silent_s < limit for look in looks)


def _named(looks: Sequence[RankLook]) -> str:
    if len(looks) == 1:
        return f"rank {looks[0].rank}"
    return f"{len(looks):,} ranks ({folded(look.rank for look in looks)})"


def _verdict(cause: str, confidence: float, suspects: Sequence[RankLook], summary: str) -> LiveVerdict:
    first = suspects[0] if suspects else None
    advice = ""
    if first is not None:
        kind = "failed" if _failed(first) else kind_of(first)
        advice = _ADVICE.get(kind, "").format(pid=first.pid or "PID", node=first.host or "its node")
    return LiveVerdict(
        cause=cause,
        confidence=confidence,
        summary=summary,
        rank=first.rank if first is not None and len(suspects) == 1 else None,
        suspects=folded(look.rank for look in suspects),
        advice=advice,
    )


def _failed(look: RankLook) -> bool:
    return look.ended and look.exit_code not in (None, 0, WANTS_REQUEUE)


def _moving(looks: Sequence[RankLook], fresh: bool) -> list[RankLook]:
    """Return the ranks that do something: of those busy at one place only where the job has just spoken."""
    return [look for look in looks if kind_of(look) == "computes" or (fresh and kind_of(look) == "busy")]


def _stuck(stuck: Sequence[RankLook], waiting: Sequence[RankLook], others: Sequence[RankLook]) -> LiveVerdict:
    """Some ranks are stopped, blocked, gone, ended or never came: that keeps whoever waits for others."""
    kinds = Counter(kind_of(look) for look in stuck)
    worst = next(kind for kind in _STUCK if kinds[kind])
    suspects = [look for look in stuck if kind_of(look) == worst]
    suspects = [look for look in suspects if _failed(look)] or suspects
    one = len(suspects) == 1
    verb = ("has" if one else "have") if worst in ("ended", "absent") else ("is" if one else "are")
    summary = f"{_named(suspects)} {verb} {words(suspects[0], worst)}"
    if waiting:
        summary += f"; {_named(waiting)} wait{'s' if len(waiting) == 1 else ''} {_held(waiting)}"
    goes_on = bool(_moving(others, _fresh(others))) or _fresh(others)
    if worst in ("ended", "blocked") and not waiting:
        if goes_on:
            return _verdict("none", 0.6, [], f"the other ranks go on, though {summary}")
        return _verdict("hang", 0.8 if _failed(suspects[0]) else 0.5, suspects, summary)
    if worst == "absent" and not waiting and goes_on:
        return _verdict("none", 0.5, [], f"{_named(others)} go on, though {summary}")
    sure = {"stopped": 0.95, "gone": 0.9, "ended": 0.85, "absent": 0.85, "blocked": 0.8}[worst]
    if worst == "absent" and any(rendezvous(look) for look in waiting):
        sure = 0.95
    return _verdict("hang", sure if waiting else sure - 0.2, suspects, summary)


def _awaited(others: Sequence[RankLook], waiting: Sequence[RankLook]) -> LiveVerdict:
    """Some ranks wait for others, some do something else: it is those that are awaited."""
    fresh = _fresh([*waiting, *others])
    moving = _moving(others, fresh)
    if len(moving) > len(waiting):
        return _verdict("none", 0.7, [], f"{_named(moving)} do their work, {_named(waiting)} came first")
    quiet = [look for look in others if kind_of(look) in ("sleeps", "data")]
    suspects = quiet or list(others)
    where = words(suspects[0], kind_of(suspects[0]))
    if len({words(look, kind_of(look)) for look in suspects}) > 1:
        where = f"elsewhere, rank {suspects[0].rank} {where}"
    be = "is" if len(suspects) == 1 else "are"
    plural = "s" if len(waiting) == 1 else ""
    summary = f"{_named(waiting)} wait{plural} {_held(waiting)}; {_named(suspects)} {be} {where}"
    if quiet:
        # Of ranks that sleep in code of their own and have just spoken, nobody knows how long they will.
        sure = 0.9 if len(quiet) <= len(waiting) else 0.6
        return _verdict("hang", 0.6 if fresh else sure, quiet, summary)
    if fresh:
        return _verdict("none", 0.7, [], f"{summary}, and the last word is {_ago([*waiting, *others])} old")
    silent = max((look.silent_s or 0.0 for look in suspects), default=0.0)
    return _verdict("slow", 0.65 if silent >= LONG_S else 0.5, suspects, summary)


def _ago(looks: Sequence[RankLook]) -> str:
    times = [look.silent_s for look in looks if look.silent_s is not None]
    return f"{min(times, default=0.0):.0f} s"


def _held(waiting: Sequence[RankLook]) -> str:
    """Return where most of the waiting ranks wait."""
    [(where, count)] = Counter(words(look, "waits") for look in waiting).most_common(1)
    return where if count == len(waiting) else f"{where} (and at other places)"


def _all_wait(waiting: Sequence[RankLook]) -> LiveVerdict:
    """Every rank waits for others: at one place, or at several that do not go together."""
    by_place = Counter(words(look, "waits") for look in waiting)
    if _fresh(waiting):
        summary = f"all {len(waiting):,} ranks are in collectives, but some spoke just now: it seems to go on"
        return _verdict("none", 0.6, [], summary)
    if len(by_place) == 1:
        summary = (
            f"all {len(waiting):,} ranks wait at the same place, {next(iter(by_place))}: no rank is missing, "
            "so the network or a GPU is more likely than the code"
        )
        found = _verdict("hang", 0.5, [], summary)
        return replace(
            found,
            advice="check the links and GPUs (dtslurm submit --fabric-check), NCCL_DEBUG=INFO tells more",
        )
    usual, _ = by_place.most_common(1)[0]
    odd = [look for look in waiting if words(look, "waits") != usual]
    if len(odd) * 2 > len(waiting):
        summary = f"all {len(waiting):,} ranks wait for others, at {len(by_place)} places"
        return _verdict("hang", 0.5, [], summary + "; which of them is wrong is not known")
    first = odd[0]
    summary = (
        f"{len(waiting) - len(odd):,} ranks wait {usual}, {_named(odd)} {words(first, 'waits')}: they wait "
        "for each other, as where ranks take different ways through the code"
    )
    found = _verdict("hang", 0.7, odd, summary)
    frame = own_frame(first)
    where = f" (see {at(frame)})" if frame is not None else ""
    return replace(
        found, advice=f"all ranks of a group must call the same collectives in the same order{where}"
    )


def _none_waits(others: Sequence[RankLook]) -> LiveVerdict:
    """No rank is known to wait for another."""
    fresh = _fresh(others)
    moving = _moving(others, fresh)
    if len(moving) * 2 >= len(others):
        sure = 0.9 if len(moving) == len(others) else 0.7
        be = "is" if len(moving) == 1 else "are"
        return _verdict("none", sure, [], f"{_named(moving)} of {len(others):,} {be} computing")
    if fresh:
        return _verdict("none", 0.6, [], f"the last word is {_ago(others)} old: it seems to go on")
    silent = min((look.silent_s for look in others if look.silent_s is not None), default=None)
    quiet = f"; no rank has spoken for {silent:.0f} s" if silent is not None else ""
    by_place = Counter(words(look, kind_of(look)) for look in others)
    usual, count = by_place.most_common(1)[0]
    odd = [look for look in others if words(look, kind_of(look)) != usual]
    if odd and len(odd) * 4 <= len(others):
        summary = f"{count:,} ranks are {usual}; {_named(odd)}: {words(odd[0], kind_of(odd[0]))}{quiet}"
        return _verdict("hang", 0.6, odd, summary)
    if count < len(others):
        summary = f"the ranks are at {len(by_place)} places, and none is known to wait for others{quiet}"
        return _verdict("unknown", 0.3, [], summary)
    summary = f"{'all ' if count > 1 else ''}{_named(others)} {'are' if count > 1 else 'is'} {usual}{quiet}"
    if silent is not None and silent < LONG_S:
        return _verdict("unknown", 0.4, [], summary)
    return _verdict("hang", 0.5, others, summary)


def place_of(look: RankLook) -> str:
    """Return where a process is, in words."""
    return words(look, kind_of(look))
