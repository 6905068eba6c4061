"""The nodes' signs of life, as the supervisor reads them: by its own clock."""

import os
import time
from typing import Any, Callable, Dict, List, Set, Tuple

from .files import json_of, names_in, try_put

SILENT_S = 10.0  # with the time between two signs and between two looks, 15 s at most
WANTED = "wanted"  # the number of the look at the ranks' stacks that is asked for
STALL_S = 8.0  # looks are a second or a few apart: when more than that, it was the reader who stood still


class Beats:
    """Which nodes of an attempt are there.

    A node is silent when its signs of life stop without a last word; `Agents` tells whether it is lost. One
    that never gave any says nothing: there may be no Python on it. Signs that stop on all nodes at once tell
    of a file system that stands still, not of lost nodes; and the node that asks is there.
    """

    def __init__(
        self, ranks: str, silent_s: float = SILENT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = os.path.join(ranks, "beats")
        self.silent_s = silent_s
        self.clock = clock
        self.seen: Dict[str, float] = {}
        self.last: Dict[str, Dict[str, Any]] = {}
        self.vouched: Set[str] = set()
        self.own = os.environ.get("SLURMD_NODENAME", "")
        self.looked = clock()
        self.asked = 0
        self.clocks: Dict[str, float] = {}  # by how many seconds each node's wall clock is behind this one's

    def look(self) -> None:
        """Read all nodes' last words."""
        self._read(self.clock())
        stood_still = self.clock() - self.looked
        if stood_still > STALL_S:  # held up by the file system, as were those who write there
            self.seen = {node: at + stood_still for node, at in self.seen.items()}
        self.looked = self.clock()

    def _read(self, now: float) -> None:
        for name in names_in(self.folder):
            if not name.endswith(".json"):
                continue
            record = json_of(os.path.join(self.folder, name))
            node = record.get("node")
            if not node:
                continue
            if record != self.last.get(node):
                self.seen[node] = now
                self.last[node] = record
                self._compare_clock(str(node), record.get("time"))

    def _compare_clock(self, node: str, told: Any) -> None:
        """Note how far a node's clock is behind; the sign that came fastest tells best."""
        if isinstance(told, (int, float)):
            behind = time.time() - told
            self.clocks[node] = min(behind, self.clocks.get(node, behind))

    def silent(self, seconds: float) -> List[str]:
        """Return the nodes that gave no sign for so long; while none gives any, for four times `silent_s`."""
        now = self.clock()
        ages = {node: now - self.seen[node] for node in self.still_there()}
        heard = len(ages) == 1 or any(age < self.silent_s / 2 for age in ages.values())
        limit = seconds if heard else 4 * self.silent_s
        return [node for node, age in ages.items() if age > limit]

    def log_of(self, node: str) -> str:
        """Return the file with the output of an agent that the supervisor starts."""
        return os.path.join(self.folder, node + ".log")

    def without_farewell(self) -> List[str]:
        """Return, of an attempt that has ended, the nodes that gave no last word though others did."""
        kinds = {node: record.get("kind") for node, record in self.last.items()}
        if "bye" not in kinds.values():
            return []
        return sorted(node for node, kind in kinds.items() if kind == "beat" and node not in self.vouched)

    def mark_alive(self, since: float) -> None:
        """Note who gave a sign since then: they are ended by force now, which leaves no last word."""
        self.vouched = {node for node in self.still_there() if self.seen[node] > since}

    def still_there(self) -> List[str]:
        """Return the nodes whose last sign was no farewell."""
        return [node for node, record in self.last.items() if record.get("kind") == "beat"]

    def ask_stacks(self) -> None:
        """Ask the nodes what each rank does, once more."""
        folder = self._stacks()
        os.makedirs(folder, exist_ok=True)
        self.asked += 1
        try_put(os.path.join(folder, WANTED), "{}\n".format(self.asked))

    def told_stacks(self) -> Tuple[Dict[int, Dict[str, Any]], bool]:
        """Return what the nodes have told of their ranks, by rank and with its node; and whether all have."""
        found, whole = {}, True
        for node in self.still_there():
            record = json_of(os.path.join(self._stacks(), node + ".json"))
            if record.get("number") != self.asked:
                whole = False
                continue
            for rank, one in (record.get("ranks") or {}).items():
                found[int(rank)] = dict(one, node=node)
        return found, whole

    def stacks(self, patience_s: float) -> Dict[int, Dict[str, Any]]:
        """Ask the nodes what each rank does, and return what they tell in time: by rank, with its node."""
        self.ask_stacks()
        end = self.clock() + patience_s
        while not self.told_stacks()[1] and self.clock() < end:
            time.sleep(0.2)
        return self.told_stacks()[0]

    def _stacks(self) -> str:
        return os.path.join(os.path.dirname(self.folder), "stacks")

    def ranks(self) -> Dict[int, Dict[str, Any]]:
        """Return what is known of each rank's processes, with its node."""
        found = {}
        for node, record in self.last.items():
            for rank, one in (record.get("ranks") or {}).items():
                found[int(rank)] = dict(one, node=node)
        return found
