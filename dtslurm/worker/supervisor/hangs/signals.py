"""What speaks for and against a hang beside silence: GPUs that work, stacks that move."""

import os
from typing import Any, Dict, List, Optional, Tuple

from ...evidence.evidence import json_lines
from ..files import names_in

FRESH_S = 150.0  # a sampler notes something at least every minute
AT_WORK = 5.0  # % of the time
POWER = 0.5  # of what a GPU drew while it trained: one that waits in a collective is busy and draws little
TAIL = 1 << 17  # bytes of a node's notes that are read, from the end
PICTURES = 3  # of the stacks, all alike

Record = Dict[str, Any]


class GpuActivity:
    """The GPUs of an attempt, as the sampler notes them in ``metrics/<attempt>/node-<n>.jsonl``.

    Attributes:
        clocks: by how many seconds the wall clock of each node, whose times those are, is behind this node's.
    """

    def __init__(self, metrics: str) -> None:
        self.metrics = metrics
        self.clocks: Dict[str, float] = {}
        self.since = 0.0
        self.drew: Dict[Tuple[str, int], float] = {}

    def at_work(self, since: float, now: float) -> Optional[bool]:
        """Tell whether any GPU works although nothing was written since; None where nothing is known.

        The power that it drew before tells a GPU that computes from one that only waits for others.
        """
        names = [name for name in names_in(self.metrics) if name.startswith("node-")]
        records = {name: self._read(name) for name in names}
        if since != self.since:
            self.since, self.drew = since, _power(records, since)
        seen: List[bool] = []
        for name, rows in records.items():
            last = rows[-1] if rows else {}
            at = last.get("time")
            if isinstance(at, (int, float)) and at > max(since + 5.0, now - FRESH_S):
                seen += [self._works(name, gpu) for gpu in last.get("gpus") or [] if "util" in gpu]
        return any(seen) if seen else None

    def _read(self, name: str) -> List[Record]:
        """Return a node's notes, with their times by this node's clock."""
        rows = list(json_lines(os.path.join(self.metrics, name), TAIL))
        for row in rows:
            if isinstance(row.get("time"), (int, float)):
                row["time"] += self.clocks.get(str(row.get("node")), 0.0)
        return rows

    def _works(self, name: str, gpu: Record) -> bool:
        if gpu["util"] < AT_WORK:
            return False
        drew, draws = self.drew.get((name, gpu.get("index", 0))), gpu.get("power_w")
        return not drew or draws is None or draws >= POWER * drew


def _power(records: Dict[str, List[Record]], before: float) -> Dict[Tuple[str, int], float]:
    """Return the most that each GPU drew before a moment."""
    most: Dict[Tuple[str, int], float] = {}
    for name, rows in records.items():
        for row in rows:
            for gpu in (row.get("gpus") or []) if row.get("time", before) < before else []:
                if isinstance(gpu.get("power_w"), (int, float)):
                    key = name, gpu.get("index", 0)
                    most[key] = max(most.get(key, 0.0), float(gpu["power_w"]))
    return most


class StackHistory:
    """The ranks' stacks at several moments: whether they move."""

    def __init__(self) -> None:
        self.last: Dict[int, List[Tuple[str, Any]]] = {}
        self.alike = 0
        self.began = 0.0

    def add(self, stacks: Dict[int, Record], now: float) -> None:
        """Take a picture in; ``stacks`` is what `worker.stacks.look` tells, by rank."""
        picture = {rank: main_frames(one) for rank, one in stacks.items()}
        moved = any(one.get("moved") for one in stacks.values())
        if picture and all(picture.values()) and picture == self.last and not moved:
            self.alike += 1
            return
        self.last, self.alike, self.began = picture, 1, now

    def is_stalled(self, now: float, seconds: float, ranks: int) -> bool:
        """Tell whether every rank was seen at the same place for so long, in all of several pictures."""
        whole = len(self.last) >= ranks > 0 and all(self.last.values())
        return whole and self.alike >= PICTURES and now - self.began >= seconds


def main_frames(one: Record) -> List[Tuple[str, Any]]:
    """Return the functions and lines that a process's main thread is in; nothing where they are not known."""
    threads = one.get("threads") or [{}]
    return [(str(frame.get("function")), frame.get("line")) for frame in threads[0].get("frames") or []]
