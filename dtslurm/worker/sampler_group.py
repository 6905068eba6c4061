"""Detect whether the ranks of a job form one process group as intended: part of ``sampler.py``.

A rank of a process group holds TCP connections to other ranks, or to the store of the group, as long as the
group exists; this is true of gloo, NCCL and torch's store. The ranks train apart if two checks find no such
connection while losses or epochs are printed, or if the logs of all ranks report a group smaller than the
job. The check is inconclusive, and nothing is reported, if a process may not be inspected or has not loaded
torch, if the logs contain no losses, or if a connection may lead to another rank.

Only one node runs the check: the second node of a job, whose ranks need a connection to the first node, or
the only node.
"""

import contextlib
import os
import re
import time
from typing import Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

try:
    from .sampler_values import Record, json_object, processes, rank_record
except ImportError:  # beside this file, in a run directory
    from sampler_values import (  # type: ignore[import-not-found,no-redef]
        Record,
        json_object,
        processes,
        rank_record,
    )

PROC = "/proc"
RANK = re.compile(rb"^\d+[:+] ", re.MULTILINE)  # before each line in the log of a node
NEW = 1 << 16  # bytes of a log that are read per check; of more new text, only the end
ENVIRONMENT = 1 << 20
SOON_S, LATE_S = 5.0, 60.0  # seconds between process checks: each pause is twice the previous one
MAPS = 1 << 23
WEB = ("0050", "01BB")  # hexadecimal ports 80 and 443: trackers and model hubs, not ranks
ESTABLISHED = "01"
MAPPED = "0000000000000000FFFF0000"  # prefix of an IPv4-mapped IPv6 address
TRAINS = re.compile(rb"(?i)loss['\"\])]*[ \t]*[:=]?[ \t]*[-+]?(?:\d|nan|inf)|\bepoch['\"]?\W{1,3}\d")
# Group sizes that frameworks print after they have formed the group.
SIZES = re.compile(
    rb"GLOBAL_RANK: \d+, MEMBER: \d+/(\d+)"  # Lightning
    rb"|^Num processes: (\d+)\s*$"  # Accelerate
    rb"|distributed training: (False)\b"  # examples of transformers
    rb"|^(?:rank \d+\W{1,3})?world[ _]size\W{1,3}(\d+)\b",
    re.MULTILINE | re.IGNORECASE,
)


class Socket(NamedTuple):
    """An established TCP connection, as seen from one of its ends: addresses with ports."""

    local: str
    remote: str


def sockets_of(text: str) -> Dict[str, Socket]:
    """Parse the established connections of a ``/proc/PID/net/tcp``, keyed by inode."""
    sockets = {}
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == ESTABLISHED:
            sockets[fields[9]] = Socket(*(address.replace(MAPPED, "") for address in fields[1:3]))
    return sockets


def file_text(path: str, max_bytes: int) -> str:
    """Return at most ``max_bytes`` of a file of /proc as text.

    Raises:
        OSError: the file may not be read.
    """
    with open(path, "rb") as file:
        return file.read(max_bytes).decode("utf-8", "replace")


def connections(pid: int, helpers: Set[int]) -> Set[Socket]:
    """Return the established TCP connections of a process and its helper processes.

    Raises:
        OSError: a process may not be inspected, or the main process has exited.
    """
    sockets = {}
    for name in ("tcp", "tcp6"):
        path = os.path.join(PROC, str(pid), "net", name)
        if name == "tcp" or os.path.exists(path):
            sockets.update(sockets_of(file_text(path, MAPS)))
    established = set()
    for process_id in (pid, *helpers):
        folder = os.path.join(PROC, str(process_id), "fd")
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            if process_id == pid:
                raise
            continue  # a helper process that has exited
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                kind, _, inode = os.readlink(os.path.join(folder, name)).partition(":[")
                if kind == "socket" and inode[:-1] in sockets:
                    established.add(sockets[inode[:-1]])
    return established


def split_links(by_rank: Mapping[int, Set[Socket]]) -> Tuple[int, int]:
    """Return how many connections this node's ranks have among each other, and to elsewhere.

    Connections within one rank (to its own helper processes) and connections to web servers are not counted.
    """
    between_ranks = outside = 0
    rank_by_address = {socket.local: rank for rank, sockets in by_rank.items() for socket in sockets}
    for rank, sockets in by_rank.items():
        for socket in sockets:
            peer_rank = rank_by_address.get(socket.remote)
            if peer_rank is None:
                outside += socket.remote.rpartition(":")[2] not in WEB
            else:
                between_ranks += peer_rank != rank
    return between_ranks, outside


def size_told(word: bytes) -> int:
    """Return the group size in a matched text of a framework."""
    return int(word) if word.isdigit() else 1


class LogReader:
    """A reader of the new text in a log: whether it contains losses, and the group size that it reports."""

    def __init__(self, path: str) -> None:
        self.path, self.offset, self.size = path, 0, 0

    def has_progress(self) -> bool:
        """Return whether a loss or an epoch was printed since the previous check."""
        try:
            with open(self.path, "rb") as file:
                start = max(self.offset, os.fstat(file.fileno()).st_size - NEW)
                file.seek(start)
                chunk = file.read(NEW)
        except OSError:
            return False
        # Read an incomplete line with the next check; a progress bar ends with a carriage return.
        complete_lines = chunk[: max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1]
        self.offset = start + len(complete_lines)
        if os.path.basename(self.path).startswith("ranks-"):
            complete_lines = RANK.sub(b"", complete_lines)
        for match in SIZES.finditer(complete_lines):
            self.size = max([self.size, *(size_told(word) for word in match.groups() if word)])
        return TRAINS.search(complete_lines) is not None


class GroupWatch:
    """A check of whether this node's ranks form a process group, repeated until the answer is known."""

    def __init__(self, env: Mapping[str, str], node: str, event: str) -> None:
        """Initialize the check; ``event`` is the name of the event for ranks that train apart."""
        self.run, self.attempt = env["DTSLURM_RUN_DIR"], env.get("DTSLURM_ATTEMPT", "0")
        self.node, self.node_rank = node, int(env.get("SLURM_NODEID", "0"))
        self.event = event
        self.settled = not event
        self.has_reported = False
        self.progress = False
        self.seen_apart = False
        self.pause = SOON_S
        self.not_before = 0.0
        self.world = 0
        self.ranks: List[int] = []
        self.logs: List[LogReader] = []
        self.with_torch: Set[int] = set()

    def look(self, now: float) -> Optional[Record]:
        """Return an event to record, None if there is nothing new.

        Reading the new log text is cheap. The processes are inspected only after training has made progress.
        """
        if self.settled or not (self.ranks or self.begin()):
            return None
        progress = [log.has_progress() for log in self.logs]
        self.progress = self.progress or any(progress)
        sizes = [log.size for log in self.logs[: len(self.ranks)]]
        if not self.has_reported and all(0 < size < self.world for size in sizes):
            self.settled = True  # inspecting connections is pointless: they may belong to an unused group
            count = max(sizes)
            group_text = "1 process" if count == 1 else "%d processes" % count
            return self.tell("the logs of {} report a process group of %s" % group_text)
        if not self.progress or now < self.not_before:
            return None
        self.progress, self.not_before, self.pause = False, now + self.pause, min(2 * self.pause, LATE_S)
        return self.look_at_processes()

    def look_at_processes(self) -> Optional[Record]:
        """Inspect the connections after training has made progress; return an event to record, or None."""
        between_ranks, outside = self.links()
        if outside or (between_ranks and self.world == len(self.ranks)):
            self.settled = True
            if not self.has_reported:
                return None
            return self.record("distributed", "network connections now lead from {} to other ranks")
        if self.has_reported or between_ranks is None:
            return None
        was_apart, self.seen_apart = self.seen_apart, True
        if not was_apart:
            return None
        missing_peer = "a rank of another node" if between_ranks else "another rank"
        return self.tell("training continues, but no network connection leads from {} to %s" % missing_peer)

    def begin(self) -> bool:
        """Determine this node's ranks; return whether this node runs the check."""
        manifest = json_object(os.path.join(self.run, "logs", self.attempt, "manifest.json"))
        world_size, ranks_per_node = manifest.get("world_size"), manifest.get("ranks_per_node")
        if not isinstance(world_size, int) or not isinstance(ranks_per_node, int) or ranks_per_node < 1:
            return False
        node_count = world_size // ranks_per_node
        self.settled = world_size < 2 or self.node_rank != min(1, node_count - 1)
        self.world = world_size
        self.ranks = list(range(self.node_rank * ranks_per_node, (self.node_rank + 1) * ranks_per_node))
        folder = os.path.join(self.run, "logs", self.attempt)
        names = ["rank-%d.log" % rank for rank in dict.fromkeys([*self.ranks, 0])]
        names += ["ranks-%d.log" % rank for rank in dict.fromkeys([self.ranks[0], 0])]  # in a large job
        paths = [os.path.join(folder, name) for name in names]
        paths.append(os.path.join(self.run, "metrics", self.attempt, "train.jsonl"))
        self.logs = [LogReader(path) for path in paths]
        return not self.settled

    def links(self) -> Tuple[Optional[int], Optional[int]]:
        """Return how many connections this node's ranks have among each other, and to elsewhere.

        Both are None if unknown: a rank is missing, may not be inspected, or has not loaded torch.
        """
        parents = {pid: int(fields[1]) for pid, fields in processes() if fields[0] not in "ZX"}
        by_rank = {}
        try:
            for rank in self.ranks:
                pid = self.process_of(rank)
                if pid is None:
                    return None, None
                helpers = descendants(pid, parents)
                if not self.has_torch(pid, helpers):
                    return None, None
                by_rank[rank] = connections(pid, helpers)
        except OSError:
            return None, None
        return split_links(by_rank)

    def process_of(self, rank: int) -> Optional[int]:
        """Return the pid of a rank that runs on this node, None if there is none."""
        record = rank_record(os.path.join(self.run, "ranks", self.attempt), rank, self.ranks[0])
        pid = record.get("pid")
        if record.get("host") != self.node or record.get("ended") is not None or not isinstance(pid, int):
            return None
        variables = file_text(os.path.join(PROC, str(pid), "environ"), ENVIRONMENT).split("\0")
        expected = ("DTSLURM_RUN_DIR=" + self.run, "RANK=%d" % rank)
        return pid if all(variable in variables for variable in expected) else None

    def has_torch(self, pid: int, helpers: Set[int]) -> bool:
        """Return whether one of a rank's processes has loaded torch."""
        if pid not in self.with_torch:
            maps_paths = (os.path.join(PROC, str(process_id), "maps") for process_id in (pid, *helpers))
            if any("/libtorch" in file_text(path, MAPS) for path in maps_paths if os.path.exists(path)):
                self.with_torch.add(pid)
        return pid in self.with_torch

    def tell(self, evidence: str) -> Record:
        """Return the event that reports that the ranks train apart."""
        self.has_reported = True
        return self.record(self.event, evidence)

    def record(self, event: str, evidence: str) -> Record:
        """Return an event about this node's ranks."""
        first_rank, last_rank = self.ranks[0], self.ranks[-1]
        ranks = str(first_rank) if first_rank == last_rank else "%d-%d" % (first_rank, last_rank)
        subject = "rank%s %s on %s" % ("" if first_rank == last_rank else "s", ranks, self.node)
        return {
            "time": int(time.time()),
            "event": event,
            "attempt": int(self.attempt),
            "node": self.node,
            "ranks": ranks,
            "world_size": self.world,
            "evidence": evidence.format(subject),
        }


def descendants(pid: int, parents: Mapping[int, int]) -> Set[int]:
    """Return the direct and indirect child processes of a process."""
    descendant_pids: Set[int] = set()
    newest = {pid}
    while newest:
        newest = {child for child, parent in parents.items() if parent in newest} - descendant_pids
        descendant_pids |= newest
    return descendant_pids
