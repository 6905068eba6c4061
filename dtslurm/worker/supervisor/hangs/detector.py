"""Detects that training hangs: no output is written, and no process computes or changes its stack."""

import os
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from ...lib.wait_words import describe_wait
from ..files import names_in
from . import BYTES_PER_S, IDLE, STOPPED, WINDOW_S, ActivitySummary
from .signals import PICTURES, GpuActivity, StackHistory

FIRST_S = 1800.0  # limit of silence until training has begun, unless configured otherwise
STEPS, PAUSES = 3, 10  # training has begun after this many reports of steps, or pauses of output
FLOOR_S = 60.0
FACTOR = 5.0  # a pause this many times as long as the longest one so far is a hang
BUSY_FACTOR = 3.0  # longer limit for ranks that compute, which may still write output
STUCK = {"T": "stopped", "t": "held by a debugger", "D": "stuck in the kernel", "Z": "dead"}


class Hang(NamedTuple):
    """Ranks that hang: since when (epoch seconds) they wrote nothing, and the one that differs, if any."""

    since: float
    rank: Optional[int]
    node: Optional[str]
    summary: str


def find_differing_rank(ranks: Dict[int, Dict[str, Any]]) -> Optional[Tuple[int, str]]:
    """Return the rank whose state or main thread differs from the others', and how it differs."""
    for rank, process in sorted(ranks.items()):
        if process.get("state") in STUCK:
            return rank, "its process is {}".format(STUCK[process["state"]])
    groups: Dict[str, List[int]] = {}
    for rank, process in ranks.items():
        if place_of(process):
            groups.setdefault(place_of(process), []).append(rank)
    sorted_groups = sorted(groups.items(), key=lambda item: len(item[1]))
    if len(sorted_groups) > 1 and len(sorted_groups[0][1]) == 1 and len(sorted_groups[1][1]) > 1:
        return sorted_groups[0][1][0], "it is {}, the others are {}".format(
            sorted_groups[0][0], sorted_groups[-1][0]
        )
    return None


def place_of(process: Dict[str, Any]) -> str:
    """Return in words where a rank's main thread is: in its innermost functions, or what it waits for."""
    threads = process.get("threads") or [{}]
    frames = [str(frame.get("function")) for frame in (threads[0].get("frames") or [])[:2]]
    if frames:
        return "in {}".format(" < ".join(frames))
    return describe_wait(str(threads[0].get("waits") or process.get("waits") or ""))


class HangDetector:
    """Watches the output and the metrics of one attempt.

    Attributes:
        longest: seconds of the longest pause so far, at first that of earlier attempts.
        idle: whether no rank computes, reads or writes, and no GPU works.
        gpus: whether any GPU works; None if unknown.
        used: when the ranks' usage was last read, and each rank's CPU seconds and bytes then.
        read_activity: returns what the ranks do in a large job, None in a small one.
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
        self.gpus: Optional[bool] = None
        self.watched_gpus = GpuActivity(metrics)
        self.pictures = StackHistory()
        self.read_activity: Callable[[], Optional[ActivitySummary]] = lambda: None

    def look(self, ranks: Dict[int, Dict[str, Any]]) -> Optional[Hang]:
        """Check the output files and the activity of ranks and GPUs; return a hang if there is one.

        Args:
            ranks: the state of each rank; empty in a large job, where `read_activity` summarizes it.
        """
        now = self.clock()
        summary = self.read_activity()
        sizes = self._read_sizes(summary)
        if sizes != self.sizes:
            self._record_output(sizes, now)
            self.used = (now, _read_usage(ranks))
            return None
        if now - self.used[0] >= WINDOW_S and (ranks or summary):
            self._update_activity(_read_usage(ranks), summary, now)
        limit = self.limit()
        silent_s = now - self.since
        if silent_s < limit:
            return None
        rank_count = summary.rank_count if summary else len(ranks)
        is_stalled = self.gpus is not True and self.pictures.is_stalled(now, max(20.0, limit / 2), rank_count)
        has_stopped_rank = any(process.get("state") in STOPPED for process in ranks.values())
        if summary is not None:
            has_stopped_rank = summary.has_stopped_rank
        if self.idle or is_stalled or has_stopped_rank or silent_s >= self.busy_limit():
            return self.hang(ranks, now)
        return None

    def _record_output(self, sizes: Dict[str, int], now: float) -> None:
        if self.sizes:
            self.longest = max(self.longest, now - self.since)
            self.pauses += 1
            metrics = self._train_metrics()
            self.steps += sizes.get(metrics, 0) > self.sizes.get(metrics, 0)
        self.sizes, self.since = sizes, now
        self.idle, self.gpus, self.pictures = False, None, StackHistory()

    def _update_activity(
        self, usage: Dict[int, Tuple[float, float]], summary: Optional[ActivitySummary], now: float
    ) -> None:
        """Update whether any rank or GPU is active, from the ranks' usage since the last reading."""
        elapsed_s = now - self.used[0]
        usage_before = self.used[1]
        is_computing = is_transferring = False
        for rank, (cpu, moved) in usage.items():
            cpu_before, moved_before = usage_before.get(rank, (cpu, moved))
            is_computing = is_computing or (cpu - cpu_before) / elapsed_s >= IDLE
            is_transferring = is_transferring or (moved - moved_before) / elapsed_s >= BYTES_PER_S
        if summary is not None:
            is_computing, is_transferring = summary.is_computing, summary.is_transferring
            # In a large job the samples of all GPUs are read only if they can change the verdict.
            if (is_computing or is_transferring) and now - self.since < self.limit():
                self.gpus, self.idle, self.used = None, False, (now, usage)
                return
        self.gpus = self.watched_gpus.at_work(self.since, now)
        # With a configured timeout, idle GPUs are enough for a hang, whatever the CPUs do.
        if self.gpus is False and self.timeout_s is not None:
            is_computing = False
        self.idle = not is_computing and not is_transferring and self.gpus is not True
        self.used = (now, usage)

    def silent(self) -> float:
        """Return the seconds since the last output."""
        return self.clock() - self.since

    def learned(self) -> bool:
        """Return whether training has begun, so that its pauses show how long a pause may be."""
        return self.steps >= STEPS or self.pauses >= PAUSES

    def limit(self) -> float:
        """Return how many silent seconds mean a hang: as configured, or learned from the pauses so far."""
        if self.timeout_s is not None:
            return self.timeout_s
        return max(FLOOR_S, FACTOR * self.longest) if self.learned() else FIRST_S

    def busy_limit(self) -> float:
        """Return how many silent seconds mean a hang although ranks or GPUs are active."""
        limit = BUSY_FACTOR * self.limit()
        return limit if self.timeout_s is not None else max(limit, FIRST_S)

    def wants_picture(self) -> bool:
        """Return whether the ranks' stacks are needed: there is no output, yet some activity."""
        return self.silent() >= self.limit() and not self.idle

    def see(self, stacks: Dict[int, Dict[str, Any]]) -> None:
        """Add the ranks' stacks. Stacks that a rank wrote into its log do not count as output."""
        self.pictures.add(stacks, self.clock())
        self.sizes = self._read_sizes(self.read_activity())

    def _train_metrics(self) -> str:
        return os.path.join(self.metrics, "train.jsonl")

    def _read_sizes(self, summary: Optional[ActivitySummary]) -> Dict[str, int]:
        sizes = dict(summary.outputs) if summary else {}
        names = [] if summary else names_in(self.logs)
        paths = [os.path.join(self.logs, name) for name in names if name.startswith("rank-")]
        for path in [*paths, self._train_metrics()]:
            try:
                sizes[path] = os.stat(path).st_size
            except OSError:
                continue
        return sizes

    def hang(self, ranks: Dict[int, Dict[str, Any]], now: float) -> Hang:
        """Return a hang with its description, from the last known state of the ranks' processes."""
        text = "no rank wrote output for {:.0f} s".format(now - self.since)
        if self.idle:
            text += ", and no rank computed"
        elif self.pictures.alike >= PICTURES:
            text += ", and the stacks did not change"
        if self.timeout_s is None and self.learned():
            text += " (the longest pause before: {:.0f} s)".format(self.longest)
        odd_rank = find_differing_rank(ranks)
        if odd_rank is None:
            return Hang(self.since, None, None, text)
        rank, why = odd_rank
        node = ranks[rank].get("node")
        return Hang(
            self.since,
            rank,
            node,
            "{}; rank {} on {} differs from the others: {}".format(text, rank, node, why),
        )


def _read_usage(ranks: Dict[int, Dict[str, Any]]) -> Dict[int, Tuple[float, float]]:
    """Return each rank's usage so far: CPU seconds, and bytes read and written."""
    return {rank: (process.get("cpu", 0.0), process.get("moved", 0.0)) for rank, process in ranks.items()}
