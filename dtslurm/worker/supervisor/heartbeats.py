"""The nodes' heartbeats as the supervisor reads them, dated by the supervisor's own clock."""

import os
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from ..lib.json_records import finite_number, read_object
from .files import names_in, try_put
from .hangs import ActivitySummary

SILENT_S = 10.0  # with the intervals between heartbeats and between checks, 15 s at most
WANTED = "wanted"  # file with the number of the requested snapshot of the ranks' stacks
STALL_S = 8.0  # checks are a few seconds apart; a longer interval means that the reader was stalled


class Heartbeats:
    """The heartbeats of an attempt's nodes.

    A node is silent when its heartbeats stop without a farewell; `Agents` decides whether it is lost. A node
    that never wrote a heartbeat is never silent, because it may have no Python. Heartbeats that stop on all
    nodes at once mean a stalled file system, not lost nodes; and the supervisor's own node is never lost.

    Attributes:
        last_seen: when each node's heartbeat last changed, by `clock`.
        last: each node's last record, a heartbeat or a farewell.
        vouched: nodes that were alive when their ranks were killed, see `mark_alive`.
        stack_requests: number of the last requested snapshot of the stacks.
        clocks: seconds by which each node's wall clock is behind this node's.
        arrive_by_tcp: whether they come over the network, not in files.
    """

    arrive_by_tcp = False

    def __init__(
        self, ranks: str, silent_s: float = SILENT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = os.path.join(ranks, "beats")
        self.silent_s = silent_s
        self.clock = clock
        self.last_seen: Dict[str, float] = {}
        self.last: Dict[str, Dict[str, Any]] = {}
        self.vouched: Set[str] = set()
        self.own = os.environ.get("SLURMD_NODENAME", "")
        self.looked = clock()
        self.stack_requests = 0
        self.clocks: Dict[str, float] = {}

    def look(self) -> None:
        """Read the last heartbeats of all nodes."""
        self._read_heartbeats(self.clock())
        stalled_s = self.clock() - self.looked
        if stalled_s > STALL_S:  # stalled by the file system, as were the nodes that write there
            self.last_seen = {node: at + stalled_s for node, at in self.last_seen.items()}
        self.looked = self.clock()

    def _read_heartbeats(self, now: float) -> None:
        for name in names_in(self.folder):
            if not name.endswith(".json"):
                continue
            record = read_object(os.path.join(self.folder, name))
            node = record.get("node")
            if not node:
                continue
            if record != self.last.get(node):
                self.last_seen[node] = now
                self.last[node] = record
                self._compare_clock(str(node), record.get("time"))

    def _compare_clock(self, node: str, sent_at: Any) -> None:
        """Record how far a node's clock is behind; the heartbeat with the least delay is the most exact."""
        heartbeat_time = finite_number(sent_at)
        if heartbeat_time is not None:
            behind = time.time() - heartbeat_time
            self.clocks[node] = min(behind, self.clocks.get(node, behind))

    def silent(self, seconds: float) -> List[str]:
        """Return the nodes without a heartbeat for ``seconds``.

        While no node writes any, the limit is four times `silent_s`.
        """
        now = self.clock()
        ages = {node: now - self.last_seen[node] for node in self.still_there()}
        any_fresh = len(ages) == 1 or any(age < self.silent_s / 2 for age in ages.values())
        limit = seconds if any_fresh else 4 * self.silent_s
        return [node for node, age in ages.items() if age > limit]

    def log_of(self, node: str) -> str:
        """Return the path of the output of an agent that the supervisor starts."""
        return os.path.join(self.folder, node + ".log")

    def without_farewell(self) -> List[str]:
        """Return the nodes of an ended attempt that wrote no farewell although others did."""
        kinds = {node: record.get("kind") for node, record in self.last.items()}
        if "bye" not in kinds.values():
            return []
        return sorted(node for node, kind in kinds.items() if kind == "beat" and node not in self.vouched)

    def mark_alive(self, seen_since: float) -> None:
        """Record the nodes with a heartbeat since then: their ranks are killed now, without a farewell."""
        self.vouched = {node for node in self.still_there() if self.last_seen[node] > seen_since}

    def still_there(self) -> List[str]:
        """Return the nodes whose last record was a heartbeat, not a farewell."""
        return [node for node, record in self.last.items() if record.get("kind") == "beat"]

    def ask_stacks(self) -> None:
        """Request a new snapshot of the ranks' stacks from the nodes."""
        folder = self._stacks_dir()
        os.makedirs(folder, exist_ok=True)
        self.stack_requests += 1
        try_put(os.path.join(folder, WANTED), "{}\n".format(self.stack_requests))

    def reported_stacks(self) -> Tuple[Dict[int, Dict[str, Any]], bool]:
        """Return the stacks that the nodes have written, by rank and with its node; and whether all have."""
        process_by_rank, is_complete = {}, True
        for node in self.still_there():
            record = read_object(os.path.join(self._stacks_dir(), node + ".json"))
            if record.get("number") != self.stack_requests:
                is_complete = False
                continue
            for rank, process in (record.get("ranks") or {}).items():
                process_by_rank[int(rank)] = dict(process, node=node)
        return process_by_rank, is_complete

    def stacks(self, patience_s: float) -> Dict[int, Dict[str, Any]]:
        """Request the ranks' stacks, and return those written in time: by rank, with its node."""
        self.ask_stacks()
        end = self.clock() + patience_s
        while not self.reported_stacks()[1] and self.clock() < end:
            time.sleep(0.2)
        return self.reported_stacks()[0]

    def _stacks_dir(self) -> str:
        return os.path.join(os.path.dirname(self.folder), "stacks")

    def ranks(self) -> Dict[int, Dict[str, Any]]:
        """Return the last known state of each rank's processes, with its node."""
        process_by_rank = {}
        for node, record in self.last.items():
            for rank, process in (record.get("ranks") or {}).items():
                process_by_rank[int(rank)] = dict(process, node=node)
        return process_by_rank

    def activity(self) -> Optional[ActivitySummary]:
        """Return what all ranks do; None if the state of each rank contains that."""
        return None

    def close(self) -> None:
        """End the reception of heartbeats; files need no end."""
