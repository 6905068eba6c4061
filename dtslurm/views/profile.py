"""Find where ranks spend their time, by traces of their stacks, and which rank the others wait for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from dtslurm.diagnose.places import format_frame, is_collective, is_data_loading, is_own
from dtslurm.model.runs.live import StackFrame
from dtslurm.model.runs.profile import KINDS, HotSpot, RankProfile
from dtslurm.model.values import dataclass

MAIN_THREAD = re.compile(r"thread \([^)]*\): MainThread|MainThread")
_CHECKPOINT = re.compile(
    r"torch/(?:distributed/checkpoint/|serialization)|safetensors|dtslurm/train/checkpoints?"
)
_MOST_SPOTS = 3
_LEAST_DIFFERENCE = 0.1  # of the time: smaller differences between ranks are noise


@dataclass(frozen=True)
class TraceEvent:
    """The begin or the end of a call in a thread.

    Attributes:
        time_us: microseconds since the begin of the trace.
        frame: its function; the outermost one of a thread has the name of the thread.
    """

    time_us: int
    thread: int
    begins: bool
    frame: StackFrame


def summarize(label: str, events: Iterable[TraceEvent]) -> RankProfile:
    """Return the profile of the main thread of a process; of all threads if none has this name."""
    spans = list(_spans(events))
    main_spans = [(us, stack) for us, stack in spans if MAIN_THREAD.fullmatch(stack[0].function)]
    kinds: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for us, stack in main_spans or spans:
        kinds[_kind_of(stack)] += us
        own_frames = [frame for frame in stack if frame.file and is_own(frame)]
        if own_frames:
            places[format_frame(own_frames[-1])] += us
    total = sum(kinds.values())
    largest_first = sorted(places.items(), key=lambda item: (-item[1], item[0]))
    return RankProfile(
        label=label,
        seconds=total / 1e6,
        shares={kind: kinds[kind] / total if total else 0.0 for kind in KINDS},
        hot_spots=tuple(HotSpot(place, us / total) for place, us in largest_first[:_MOST_SPOTS]),
    )


def _spans(events: Iterable[TraceEvent]) -> Iterable[tuple[int, tuple[StackFrame, ...]]]:
    """Yield the microseconds that a thread spent with each stack, outermost frame first."""
    stacks: dict[int, list[StackFrame]] = {}
    since: dict[int, int] = {}
    for event in events:
        stack = stacks.setdefault(event.thread, [])
        elapsed_us = event.time_us - since.get(event.thread, event.time_us)
        if stack and elapsed_us > 0:
            yield elapsed_us, tuple(stack)
        since[event.thread] = event.time_us
        if event.begins:
            stack.append(event.frame)
        elif stack:
            stack.pop()


def _kind_of(stack: Sequence[StackFrame]) -> str:
    """Return what a thread does with this stack; a checkpoint may also load data and communicate."""
    if any(_CHECKPOINT.search(frame.file) for frame in stack):
        return "checkpoint"
    if any(is_data_loading(frame) for frame in stack):
        return "data"
    if any(is_collective(frame) for frame in stack):
        return "communication"
    return "compute"


def find_straggler(profiles: Sequence[RankProfile]) -> tuple[RankProfile, RankProfile] | None:
    """Return the rank that communicates least and the one that communicates most, None if they hardly differ.

    A collective ends when the last rank has joined it, so the others wait in it for the slowest rank.
    """
    ordered = sorted(profiles, key=lambda profile: profile.shares["communication"])
    if len(ordered) < 2:
        return None
    least, most = ordered[0], ordered[-1]
    difference = most.shares["communication"] - least.shares["communication"]
    return (least, most) if difference >= _LEAST_DIFFERENCE else None
