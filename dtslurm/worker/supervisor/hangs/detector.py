"""Finds out that training hangs: nothing is written, and nothing is computed or moves."""

import os
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from ..files import names_in
from .signals import PICTURES, GpuActivity, StackHistory

FIRST_S = 1800.0  # until training has begun, unless told otherwise
STEPS, PAUSES = 3, 10  # it has when steps were told so often, or something was written so often
FLOOR_S = 60.0
FACTOR = 5.0  # a pause that long against the longest one seen so far
BUSY_FACTOR = 3.0  # ranks that compute may yet say something
IDLE = 0.1  # of a CPU, of each rank: one may compute while the others wait for it
BYTES_PER_S = 1e5  # read and written by a rank: it loads or saves
STOPPED = ("T", "t", "Z")  # the others may compute as they like
STUCK = {"T": "stopped", "t": "held by a debugger", "D": "stuck in the kernel", "Z": "dead"}


class Hang(NamedTuple):
    """Ranks that hang: since when (epoch seconds) they wrote nothing, and the one that differs, if any."""

    since: float
    rank: Optional[int]
    node: Optional[str]
    summary: str


def odd_one(ranks: Dict[int, Dict[str, Any]]) -> Optional[Tuple[int, str]]:
    """Return the rank that is in another state or place than the others, and how it differs."""
    for rank, one in sorted(ranks.items()):
        if one.get("state") in STUCK:
            return rank, "its process is {}".format(STUCK[one["state"]])
    groups: Dict[str, List[int]] = {}
    for rank, one in ranks.items():
        if place_of(one):
            groups.setdefault(place_of(one), []).append(rank)
    few = sorted(groups.items(), key=lambda item: len(item[1]))
    if len(few) > 1 and len(few[0][1]) == 1 and len(few[1][1]) > 1:
        return few[0][1][0], "it is in {}, others in {}".format(few[0][0], few[-1][0])
    return None


def place_of(one: Dict[str, Any]) -> str:
    """Return where a rank's main thread is: its innermost functions, or what the kernel says it waits in."""
    threads = one.get("threads") or [{}]
    frames = [str(frame.get("function")) for frame in (threads[0].get("frames") or [])[:2]]
    return " < ".join(frames) or str(threads[0].get("waits") or one.get("waits") or "")


class HangDetector:
    """Watches the output and the metrics of one attempt.

    Attributes:
        longest: seconds of the longest pause so far, at first that of earlier attempts.
        idle: whether no rank computes, reads or writes, and no GPU works.
    """

    def __init__(
        self,
        logs: str,
        metrics: str,
        timeout_s: Optional[float],
        clock: Callable[[], float] = time.time,
        longest: float = 0.0,
    ) -> None:
        self.logs, self.metrics = logs, metrics
        self.timeout_s = timeout_s
        self.clock = clock
        self.sizes: Dict[str, int] = {}
        self.since = clock()
        self.longest = longest
        self.pauses = self.steps = 0
        self.used: Tuple[float, Dict[int, Tuple[float, float]]] = (self.since, {})
        self.idle = False
        self.gpus: Optional[bool] = None  # whether any works
        self.watched_gpus = GpuActivity(metrics)
        self.pictures = StackHistory()

    def look(self, ranks: Dict[int, Dict[str, Any]]) -> Optional[Hang]:
        """Look at the files' sizes, and what the ranks and GPUs do; return a hang if it is one."""
        now = self.clock()
        sizes = self._sizes()
        if sizes != self.sizes:
            self._heard(sizes, now)
            self.used = (now, _used(ranks))
            return None
        if now - self.used[0] >= 10.0 and ranks:
            self._rates(_used(ranks), now)
        limit = self.limit()
        silent = now - self.since
        if silent < limit:
            return None
        still = self.gpus is not True and self.pictures.is_stalled(now, max(20.0, limit / 2), len(ranks))
        stopped = any(one.get("state") in STOPPED for one in ranks.values())
        if self.idle or still or stopped or silent >= self.busy_limit():
            return self.hang(ranks, now)
        return None

    def _heard(self, sizes: Dict[str, int], now: float) -> None:
        if self.sizes:
            self.longest = max(self.longest, now - self.since)
            self.pauses += 1
            metrics = self._train()
            self.steps += sizes.get(metrics, 0) > self.sizes.get(metrics, 0)
        self.sizes, self.since = sizes, now
        self.idle, self.gpus, self.pictures = False, None, StackHistory()

    def _rates(self, used: Dict[int, Tuple[float, float]], now: float) -> None:
        """Tell by what each rank used since the last time whether any does something."""
        passed = now - self.used[0]
        before = self.used[1]
        busy = still = False
        for rank, (cpu, moved) in used.items():
            cpu_before, moved_before = before.get(rank, (cpu, moved))
            busy = busy or (cpu - cpu_before) / passed >= IDLE
            still = still or (moved - moved_before) / passed >= BYTES_PER_S
        self.gpus = self.watched_gpus.at_work(self.since, now)
        # Who asked for a time-out has told what silence means: idle GPUs are enough, whatever the CPUs do.
        if self.gpus is False and self.timeout_s is not None:
            busy = False
        self.idle = not busy and not still and self.gpus is not True
        self.used = (now, used)

    def silent(self) -> float:
        """Return for how many seconds nothing was written."""
        return self.clock() - self.since

    def learned(self) -> bool:
        """Tell whether training has begun, so that its pauses tell how long one may be."""
        return self.steps >= STEPS or self.pauses >= PAUSES

    def limit(self) -> float:
        """Return how many silent seconds are a hang: as asked for, or learned from the pauses so far."""
        if self.timeout_s is not None:
            return self.timeout_s
        return max(FLOOR_S, FACTOR * self.longest) if self.learned() else FIRST_S

    def busy_limit(self) -> float:
        """Return how many silent seconds are a hang though something is done all the while."""
        limit = BUSY_FACTOR * self.limit()
        return limit if self.timeout_s is not None else max(limit, FIRST_S)

    def wants_picture(self) -> bool:
        """Tell whether the ranks' stacks are of interest: nothing is written, and yet something is done."""
        return self.silent() >= self.limit() and not self.idle

    def see(self, stacks: Dict[int, Dict[str, Any]]) -> None:
        """Take in the ranks' stacks. That a rank wrote them into its log is no sign of life."""
        self.pictures.add(stacks, self.clock())
        self.sizes = self._sizes()

    def _train(self) -> str:
        return os.path.join(self.metrics, "train.jsonl")

    def _sizes(self) -> Dict[str, int]:
        found = {}
        names = [os.path.join(self.logs, name) for name in names_in(self.logs) if name.startswith("rank-")]
        for path in [*names, self._train()]:
            try:
                found[path] = os.stat(path).st_size
            except OSError:
                continue
        return found

    def hang(self, ranks: Dict[int, Dict[str, Any]], now: float) -> Hang:
        """Put a hang in words, by what is known of the ranks' processes."""
        text = "all ranks wrote nothing for {:.0f} s".format(now - self.since)
        if self.idle:
            text += " and computed nothing"
        elif self.pictures.alike >= PICTURES:
            text += " and stand still"
        if self.timeout_s is None and self.learned():
            text += " (the longest pause before: {:.0f} s)".format(self.longest)
        odd = odd_one(ranks)
        if odd is None:
            return Hang(self.since, None, None, text)
        rank, why = odd
        node = ranks[rank].get("node")
        return Hang(
            self.since, rank, node, "{}; rank {} on {} is the odd one: {}".format(text, rank, node, why)
        )


def _used(ranks: Dict[int, Dict[str, Any]]) -> Dict[int, Tuple[float, float]]:
    """Return what each rank has used: CPU seconds, and bytes read and written."""
    return {rank: (one.get("cpu", 0.0), one.get("moved", 0.0)) for rank, one in ranks.items()}
