"""The heartbeats of a large job, which the supervisor receives through the tree."""

import contextlib
import json
import os
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from ...lib.json_records import read_object
from ...sampler_values import plain_nodes
from ..files import names_in
from ..hangs import ActivitySummary
from ..heartbeats import SILENT_S, Heartbeats
from .beats import COMPUTING, FILE_EVERY_S, STOPPED, TRANSFERRING, beat_of, pack_beat, unpack_beat
from .root import HeartbeatRoot, known_members

FILES_S = 30.0  # between two readings of those files
DELAY_S = 1.5  # by which two nodes on the way delay a heartbeat, each by the pause between two messages
REJOIN_S = 8.0  # for a node to find another parent after its own was lost
CLOCK_LOOKS = 16  # looks between two comparisons of the nodes' clocks
MOST_FILES = 64  # files of silent nodes that one look reads
RESUMED_S = 30.0  # for the nodes to join the tree of a restarted supervisor


class TreeHeartbeats(Heartbeats):
    """The heartbeats of an attempt's nodes; a node that reaches no other node writes one file a minute.

    Attributes:
        by_file: the nodes whose last heartbeat came in a file.
    """

    arrive_by_tcp = True

    def __init__(
        self,
        ranks: str,
        head: str,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(ranks, silent_s, clock)
        os.makedirs(self.folder, exist_ok=True)
        self.by_file: Set[str] = set()
        self._lines: Dict[str, bytes] = {}  # the newest heartbeat of each node
        self._codes: Dict[bytes, bytes] = {}  # the kinds of these, by the node's name
        self._names: Dict[bytes, str] = {}
        self._files_at = clock()
        self._looks = 0
        for node in known_members(self.folder):  # an earlier supervisor of this attempt was killed
            self.last_seen[node] = clock() + RESUMED_S
            self.last[node] = {"kind": "beat", "node": node}
        self.root = HeartbeatRoot(self.folder, head, clock)

    def look(self) -> None:
        """Read the heartbeats that have arrived, and confirm to the nodes that the supervisor runs."""
        self._looks += 1
        self.root.give_orders(looks=self._looks)
        super().look()

    def _read_heartbeats(self, now: float) -> None:
        received = self.root.take()
        for name, (received_at, line) in received.items():  # thousands each second
            code = line[len(name) + 1 : len(name) + 2]
            if self._codes.get(name) != code:
                self._note_kind(name, code, line)
            node = self._names[name]
            self.last_seen[node] = received_at
            self._lines[node] = line
        if self._looks % CLOCK_LOOKS == 0:
            for name, (_, line) in received.items():
                self._compare_clock(self._names[name], unpack_beat(line).time)
        if now - self._files_at >= FILES_S:
            self._files_at = now
            self._read_files([name[:-5] for name in names_in(self.folder) if name.endswith(".json")], now)
        else:
            self._read_files(self._find_silent(self.silent_s / 2)[:MOST_FILES], now)

    def _note_kind(self, name: bytes, code: bytes, line: bytes) -> None:
        """Record that a node sent its first heartbeat or its farewell, or has another agent."""
        node, beat = name.decode(), unpack_beat(line)
        if self.last.get(node, {}).get("restarted") and not beat.restarted:
            self.root.give_orders(back=[node])
        self._codes[name], self._names[name] = code, node
        self.last[node] = {"kind": beat.kind, "node": node}
        if beat.restarted:
            self.last[node]["restarted"] = True
        self.by_file.discard(node)
        self._compare_clock(node, beat.time)

    def _read_files(self, nodes: List[str], now: float) -> None:
        for node in nodes:
            record = read_object(os.path.join(self.folder, node + ".json"))
            line = self._lines.get(node)
            if record.get("node") != node or (line and float(record["time"]) <= unpack_beat(line).time):
                continue
            self.last_seen[node], self.last[node] = now, record
            self._lines[node] = pack_beat(node, beat_of(record))
            self._codes.pop(node.encode(), None)  # the next one over TCP counts as another kind
            self.by_file.add(node)

    def silent(self, seconds: float) -> List[str]:
        """Return the nodes without a heartbeat for ``seconds``, and for as long as the tree may delay it.

        The heartbeats of a node whose parent in the tree is silent are missing until it has another parent.
        """
        silent_nodes = self._find_silent(seconds)
        names, now = set(silent_nodes), self.clock()
        return [
            node for node in silent_nodes if now - self.last_seen[node] > seconds + self._grace(node, names)
        ]

    def _find_silent(self, seconds: float) -> List[str]:
        limit = self.clock() - seconds
        return super().silent(seconds) if any(at < limit for at in self.last_seen.values()) else []

    def _grace(self, node: str, silent_nodes: Set[str]) -> float:
        if node in self.by_file:
            return FILE_EVERY_S + FILES_S
        return REJOIN_S if self.root.parent_of(node) in silent_nodes else DELAY_S

    def ranks(self) -> Dict[int, Dict[str, Any]]:
        """Return the last known state of each rank's processes, with its node."""
        process_by_rank: Dict[int, Dict[str, Any]] = {}
        for node, line in self._lines.items():
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                for rank, process in json.loads(unpack_beat(line).ranks.decode()).items():
                    process_by_rank[int(rank)] = dict(process, node=node)
        return process_by_rank

    def activity(self) -> Optional[ActivitySummary]:
        """Return the activity of the ranks of all nodes, which does not need the state of each rank."""
        beats = {node: unpack_beat(line) for node, line in self._lines.items()}
        letters = set("".join({beat.activity for beat in beats.values()}))
        return ActivitySummary(
            outputs={node: beat.output for node, beat in beats.items()},
            is_computing=COMPUTING in letters,
            is_transferring=TRANSFERRING in letters,
            has_stopped_rank=STOPPED in letters,
            rank_count=sum(beat.rank_count for beat in beats.values()),
        )

    def ask_stacks(self) -> None:
        """Request a new snapshot of the ranks' stacks; nodes without a link find the request in a file."""
        super().ask_stacks()
        self.root.give_orders(stacks=self.stack_requests)

    def close(self) -> None:
        """Close the supervisor's port."""
        self.root.close()


def choose_heartbeats(ranks: str, nodes: List[str], head: str) -> Tuple[Heartbeats, str]:
    """Return the heartbeats of an attempt, and why a large job has none over TCP; empty if it has."""
    if len(nodes) <= plain_nodes(os.environ):
        return Heartbeats(ranks), ""
    try:
        return TreeHeartbeats(ranks, head), ""
    except OSError as error:
        return Heartbeats(ranks), str(error)
