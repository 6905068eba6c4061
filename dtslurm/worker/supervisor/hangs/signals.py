"""Evidence for and against a hang besides silence: GPU activity and changing stacks."""

import os
from typing import Any, Dict, List, Optional, Tuple

from ...lib.json_records import finite_number, read_lines, whole_number
from ..files import names_in

FRESH_S = 150.0  # a sampler writes a record at least every minute
AT_WORK = 5.0  # percent utilization above which a GPU counts as working
POWER = 0.5  # share of a GPU's power in training: a GPU that waits in a collective is busy but draws little
TAIL = 1 << 17  # bytes of a node's samples that are read, from the end
PICTURES = 3  # identical snapshots of the stacks that mean a stall

Record = Dict[str, Any]


class GpuActivity:
    """The GPUs of an attempt, as sampled in ``metrics/<attempt>/node-<n>.jsonl``.

    Attributes:
        clocks: seconds by which each node's wall clock, which dates its samples, is behind this node's.
        since: when the current silence began.
        drew: the most power in watts that each GPU drew before that.
    """

    def __init__(self, metrics: str) -> None:
        self.metrics = metrics
        self.clocks: Dict[str, float] = {}
        self.since = 0.0
        self.drew: Dict[Tuple[str, int], float] = {}

    def at_work(self, silent_since: float, now: float) -> Optional[bool]:
        """Return whether any GPU works although no output was written since; None if unknown.

        The power that a GPU drew before distinguishes a GPU that computes from one that only waits for
        others.
        """
        names = [name for name in names_in(self.metrics) if name.startswith("node-")]
        records = {name: self._read_samples(name) for name in names}
        if silent_since != self.since:
            self.since, self.drew = silent_since, _find_peak_power(records, silent_since)
        activity: List[bool] = []
        for name, samples in records.items():
            last = samples[-1] if samples else {}
            sampled_at = finite_number(last.get("time"))
            if sampled_at is not None and sampled_at > max(silent_since + 5.0, now - FRESH_S):
                usages = [self._is_working(name, gpu) for gpu in _list_gpus(last)]
                activity += [usage for usage in usages if usage is not None]
        return any(activity) if activity else None

    def _read_samples(self, name: str) -> List[Record]:
        """Return a node's samples, with their times converted to this node's clock."""
        samples = list(read_lines(os.path.join(self.metrics, name), TAIL))
        for sample in samples:
            sampled_at = finite_number(sample.get("time"))
            if sampled_at is not None:
                sample["time"] = sampled_at + self.clocks.get(str(sample.get("node")), 0.0)
        return samples

    def _is_working(self, name: str, gpu: Record) -> Optional[bool]:
        usage = finite_number(gpu.get("util"))
        if usage is None or usage < AT_WORK:
            return None if usage is None else False
        peak_power, power = self.drew.get((name, _index_of(gpu))), finite_number(gpu.get("power_w"))
        return not peak_power or power is None or power >= POWER * peak_power


def _find_peak_power(records: Dict[str, List[Record]], end: float) -> Dict[Tuple[str, int], float]:
    """Return the most that each GPU drew before a moment."""
    peaks: Dict[Tuple[str, int], float] = {}
    for name, samples in records.items():
        for sample in samples:
            sampled_at = finite_number(sample.get("time"))
            for gpu in _list_gpus(sample) if sampled_at is not None and sampled_at < end else []:
                key, power = (name, _index_of(gpu)), finite_number(gpu.get("power_w"))
                peaks[key] = max(peaks.get(key, 0.0), power or 0.0)
    return peaks


def _list_gpus(sample: Record) -> List[Record]:
    gpus = sample.get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []


def _index_of(gpu: Record) -> int:
    return whole_number(gpu.get("index")) or 0


class StackHistory:
    """The ranks' stacks at several moments, to see whether they change."""

    def __init__(self) -> None:
        self.last: Dict[int, List[Tuple[str, Any]]] = {}
        self.alike = 0
        self.began = 0.0

    def add(self, stacks: Dict[int, Record], now: float) -> None:
        """Add a snapshot of the stacks; ``stacks`` is the answer of `worker.stacks.look`, by rank."""
        frames_by_rank = {rank: main_frames(process) for rank, process in stacks.items()}
        has_moved = any(process.get("moved") for process in stacks.values())
        if frames_by_rank and all(frames_by_rank.values()) and frames_by_rank == self.last and not has_moved:
            self.alike += 1
            return
        self.last, self.alike, self.began = frames_by_rank, 1, now

    def is_stalled(self, now: float, seconds: float, ranks: int) -> bool:
        """Return whether every rank stayed in the same frames for so long, in several snapshots."""
        is_complete = len(self.last) >= ranks > 0 and all(self.last.values())
        return is_complete and self.alike >= PICTURES and now - self.began >= seconds


def main_frames(process: Record) -> List[Tuple[str, Any]]:
    """Return the functions and lines of a process's main thread, empty if unknown."""
    threads = process.get("threads") or [{}]
    return [(str(frame.get("function")), frame.get("line")) for frame in threads[0].get("frames") or []]
