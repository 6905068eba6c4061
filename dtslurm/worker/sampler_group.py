"""Finds out whether the ranks of a job, which are meant to train together, do: part of ``sampler.py``.

A rank of a process group holds TCP connections to other ranks, or to the store of the group, for as long as
the group exists: gloo, NCCL and the store of torch all do. Ranks train apart if two looks find no such
connection while losses or epochs are printed, or if the logs of all of them tell of a group that is smaller
than the job. Nothing is concluded from what cannot be seen: processes that may not be looked at or have not
loaded torch, logs without losses, connections that may lead to another rank.

One node decides: the second node of a job, whose ranks need a connection to the first, or else the only one.
"""

import contextlib
import os
import re
import time
from typing import Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

try:
    from .sampler_values import Record, json_object, processes
except ImportError:  # beside this file, in a run directory
    from sampler_values import (  # type: ignore[import-not-found,no-redef]
        Record,
        json_object,
        processes,
    )

PROC = "/proc"
NEW = 1 << 16  # bytes of a log that are read at once; of more, the last ones
ENVIRONMENT = 1 << 20
SOON_S, LATE_S = 5.0, 60.0  # pauses between looks at the processes, each twice as long as the one before
MAPS = 1 << 23
WEB = ("0050", "01BB")  # ports 80 and 443, hexadecimal: trackers and hubs, no ranks
ESTABLISHED = "01"
MAPPED = "0000000000000000FFFF0000"  # an IPv4 address in IPv6
TRAINS = re.compile(rb"(?i)loss['\"\])]*[ \t]*[:=]?[ \t]*[-+]?(?:\d|nan|inf)|\bepoch['\"]?\W{1,3}\d")
# What frameworks print of the size of the group that they have formed.
SIZES = re.compile(
    rb"GLOBAL_RANK: \d+, MEMBER: \d+/(\d+)"  # Lightning
    rb"|^Num processes: (\d+)\s*$"  # Accelerate
    rb"|distributed training: (False)\b"  # examples of transformers
    rb"|^(?:rank \d+\W{1,3})?world[ _]size\W{1,3}(\d+)\b",
    re.MULTILINE | re.IGNORECASE,
)


class Socket(NamedTuple):
    """An established TCP connection, as one of its two ends sees it: addresses with ports."""

    local: str
    remote: str


def sockets_of(text: str) -> Dict[str, Socket]:
    """Return the established connections in the text of a ``/proc/PID/net/tcp``, by inode."""
    found = {}
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) > 9 and words[3] == ESTABLISHED:
            found[words[9]] = Socket(*(word.replace(MAPPED, "") for word in words[1:3]))
    return found


def file_text(path: str, most: int) -> str:
    """Return the text of a file of /proc, at most so many bytes.

    Raises:
        OSError: the file may not be read.
    """
    with open(path, "rb") as file:
        return file.read(most).decode("utf-8", "replace")


def connections(pid: int, helpers: Set[int]) -> Set[Socket]:
    """Return the established TCP connections of a process and of those that it has started.

    Raises:
        OSError: one of them may not be looked at, or the process is gone.
    """
    table = {}
    for name in ("tcp", "tcp6"):
        path = os.path.join(PROC, str(pid), "net", name)
        if name == "tcp" or os.path.exists(path):
            table.update(sockets_of(file_text(path, MAPS)))
    found = set()
    for one in (pid, *helpers):
        folder = os.path.join(PROC, str(one), "fd")
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            if one == pid:
                raise
            continue  # a helper that has ended
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                kind, _, inode = os.readlink(os.path.join(folder, name)).partition(":[")
                if kind == "socket" and inode[:-1] in table:
                    found.add(table[inode[:-1]])
    return found


def split_links(by_rank: Mapping[int, Set[Socket]]) -> Tuple[int, int]:
    """Return how many connections of a node's ranks lead to each other, and how many to somewhere else.

    Those within one rank (to a helper process of its own) and those to web servers count for neither.
    """
    near = outside = 0
    ends = {socket.local: rank for rank, sockets in by_rank.items() for socket in sockets}
    for rank, sockets in by_rank.items():
        for socket in sockets:
            other = ends.get(socket.remote)
            if other is None:
                outside += socket.remote.rpartition(":")[2] not in WEB
            else:
                near += other != rank
    return near, outside


def size_told(word: bytes) -> int:
    """Return the size of a group that a framework has printed."""
    return int(word) if word.isdigit() else 1


class LogReader:
    """Reads what is new in a log: whether it tells of losses, and of which size of the group."""

    def __init__(self, path: str) -> None:
        self.path, self.offset, self.size = path, 0, 0

    def has_progress(self) -> bool:
        """Tell whether a loss or an epoch was printed since the last look."""
        try:
            with open(self.path, "rb") as file:
                start = max(self.offset, os.fstat(file.fileno()).st_size - NEW)
                file.seek(start)
                text = file.read(NEW)
        except OSError:
            return False
        # What is being written comes whole next time; a progress bar ends with a carriage return.
        whole = text[: max(text.rfind(b"\n"), text.rfind(b"\r")) + 1]
        self.offset = start + len(whole)
        for match in SIZES.finditer(whole):
            self.size = max([self.size, *(size_told(word) for word in match.groups() if word)])
        return TRAINS.search(whole) is not None


class GroupWatch:
    """Looks at the ranks of this node until it is known whether they form a group."""

    def __init__(self, env: Mapping[str, str], node: str, event: str) -> None:
        """Take the name of the event that tells of ranks that train apart."""
        self.run, self.attempt = env["DTSLURM_RUN_DIR"], env.get("DTSLURM_ATTEMPT", "0")
        self.node, self.node_rank = node, int(env.get("SLURM_NODEID", "0"))
        self.event = event
        self.settled = not event
        self.told = False
        self.progress = False
        self.seen_apart = False
        self.pause = SOON_S
        self.not_before = 0.0
        self.world = 0
        self.ranks: List[int] = []
        self.logs: List[LogReader] = []
        self.with_torch: Set[int] = set()

    def look(self, now: float) -> Optional[Record]:
        """Return an event to record, None where there is nothing new to tell.

        Reading what is new in the logs costs little. The processes are looked at only after training went on.
        """
        if self.settled or not (self.ranks or self.begin()):
            return None
        progress = [log.has_progress() for log in self.logs]
        self.progress = self.progress or any(progress)
        sizes = [log.size for log in self.logs[: len(self.ranks)]]
        if not self.told and all(0 < size < self.world for size in sizes):
            self.settled = True  # connections may be those of a group that is not used
            count = max(sizes)
            group = "1 process" if count == 1 else "%d processes" % count
            return self.tell("the logs of {} tell of a group of %s" % group)
        if not self.progress or now < self.not_before:
            return None
        self.progress, self.not_before, self.pause = False, now + self.pause, min(2 * self.pause, LATE_S)
        return self.look_at_processes()

    def look_at_processes(self) -> Optional[Record]:
        """Return an event to record after training has gone on, None where there is nothing to tell."""
        near, outside = self.links()
        if outside or (near and self.world == len(self.ranks)):
            self.settled = True
            if not self.told:
                return None
            return self.record("distributed", "network connections lead from {} to other ranks now")
        if self.told or near is None:
            return None
        before, self.seen_apart = self.seen_apart, True
        if not before:
            return None
        others = "a rank of another node" if near else "another rank"
        return self.tell("training goes on, and no network connection leads from {} to %s" % others)

    def begin(self) -> bool:
        """Find out which ranks are this node's, if it is the one that decides."""
        manifest = json_object(os.path.join(self.run, "logs", self.attempt, "manifest.json"))
        world, each = manifest.get("world_size"), manifest.get("ranks_per_node")
        if not isinstance(world, int) or not isinstance(each, int) or each < 1:
            return False
        nodes = world // each
        self.settled = world < 2 or self.node_rank != min(1, nodes - 1)
        self.world = world
        self.ranks = list(range(self.node_rank * each, (self.node_rank + 1) * each))
        folder = os.path.join(self.run, "logs", self.attempt)
        names = ["rank-%d.log" % rank for rank in dict.fromkeys([*self.ranks, 0])]
        paths = [os.path.join(folder, name) for name in names]
        paths.append(os.path.join(self.run, "metrics", self.attempt, "train.jsonl"))
        self.logs = [LogReader(path) for path in paths]
        return not self.settled

    def links(self) -> Tuple[Optional[int], Optional[int]]:
        """Return how many connections lead from this node's ranks to each other, and elsewhere.

        None where that is not known: a rank is not there or may not be looked at, or has not loaded torch.
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
        """Return the process of a rank that runs on this node, None where there is none."""
        record = json_object(os.path.join(self.run, "ranks", self.attempt, "%d.json" % rank))
        pid = record.get("pid")
        if record.get("host") != self.node or record.get("ended") is not None or not isinstance(pid, int):
            return None
        words = file_text(os.path.join(PROC, str(pid), "environ"), ENVIRONMENT).split("\0")
        mine = ("DTSLURM_RUN_DIR=" + self.run, "RANK=%d" % rank)
        return pid if all(word in words for word in mine) else None

    def has_torch(self, pid: int, helpers: Set[int]) -> bool:
        """Tell whether one of a rank's processes has torch loaded."""
        if pid not in self.with_torch:
            maps = (os.path.join(PROC, str(one), "maps") for one in (pid, *helpers))
            if any("/libtorch" in file_text(path, MAPS) for path in maps if os.path.exists(path)):
                self.with_torch.add(pid)
        return pid in self.with_torch

    def tell(self, evidence: str) -> Record:
        """Return the event that says that the ranks train apart."""
        self.told = True
        return self.record(self.event, evidence)

    def record(self, event: str, evidence: str) -> Record:
        """Return an event on this node's ranks."""
        first, last = self.ranks[0], self.ranks[-1]
        ranks = str(first) if first == last else "%d-%d" % (first, last)
        words = "rank%s %s on %s" % ("" if first == last else "s", ranks, self.node)
        return {
            "time": int(time.time()),
            "event": event,
            "attempt": int(self.attempt),
            "node": self.node,
            "ranks": ranks,
            "world_size": self.world,
            "evidence": evidence.format(words),
        }


def descendants(pid: int, parents: Mapping[int, int]) -> Set[int]:
    """Return the processes that a process has started, and those that they have started."""
    found: Set[int] = set()
    newest = {pid}
    while newest:
        newest = {child for child, parent in parents.items() if parent in newest} - found
        found |= newest
    return found
