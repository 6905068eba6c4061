"""Find a run's log files as they appear, and track a reader's position in each of them."""

import contextlib
import json
import os
import re
import time
import zlib
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from ..lib.json_records import read_object
from ..lib.rank_files import NODE_LOG, LogInNodeLog, NodeLog, OpenLog, PlainLog, read_node_records

TAIL = 32  # bytes before the offset that are read again each time, to detect a rewritten file
CHECKED = 256  # bytes before the offset (at most) whose CRC-32 a reader sends to resume
BLOCK = 65536
LONGEST_TAIL = 1 << 24  # bytes; limit of the last lines if one of them is a progress bar without a newline
# Other file systems may be written by another host, and may show new data only after the file is reopened.
LOCAL_FILE_SYSTEMS = frozenset(
    [
        "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs",
        "squashfs", "tmpfs", "xfs", "zfs",
    ]
)  # fmt: skip
ALARMS = [
    "Traceback (most",
    "Error:",
    "ERROR",
    "FATAL",
    "NCCL WARN",
    "Segmentation fault",
    "Killed",
    "CANCELLED",
]
NAME = re.compile(r"(rank|node)-(\d{1,9})\.log")
INSTANCE_NAME = re.compile(r"([A-Za-z][A-Za-z0-9_-]{0,39})-(\d{1,5})")  # the folder of an instance of a role
BATCH_NAME = re.compile(r"batch(?:-(\d{1,9}))?\.log")

Ranges = Optional[Sequence[Sequence[int]]]
Position = Sequence[int]  # inode, offset, number of checked bytes before the offset, CRC-32 of these bytes


class Request:
    """A reader's request: which log files to follow, and how.

    Attributes:
        run: the run directory.
        array: whether the run has array tasks; ``task`` selects one of them.
        kinds: subset of ``batch node rank role events metrics``.
        roles: the roles whose instances are selected with the kind ``role``; None for all.
        ranks: list of ``[first, last]``, None for all.
        nodes: hosts whose ranks are selected, None for all.
        attempt: the only selected attempt. Without it, the latest attempt and later ones are selected, or
            with ``since`` (attempt by task, "" for a run without tasks) all attempts from there on.
        lines: if given, each file starts with only this many of its last lines.
        follow: continue until DRAIN. Without it, ``in_turn`` sends a chunk of each file in turn.
        summary: send the full output of ranks only after FOCUS.
        positions: positions to resume from, by path relative to ``run``.
        alarms: words of lines that summaries highlight.
        credit: see CREDIT.
        pack: compress the data on slow connections.
    """

    def __init__(self, values: Dict[str, Any]) -> None:
        self.run: str = values["run"]
        self.array: bool = values.get("array", False)
        self.task: Optional[str] = values.get("task")
        self.kinds: Set[str] = set(values.get("kinds", ["batch", "node", "rank"]))
        self.roles: Optional[Set[str]] = set(values["roles"]) if values.get("roles") is not None else None
        self.ranks: Ranges = values.get("ranks")
        self.nodes: Optional[Set[str]] = set(values["nodes"]) if values.get("nodes") is not None else None
        self.attempt: Optional[int] = values.get("attempt")
        self.since: Optional[Dict[str, int]] = values.get("since")
        self.lines: Optional[int] = values.get("lines")
        self.follow: bool = values.get("follow", True)
        self.in_turn: bool = values.get("in_turn", True)
        self.summary: bool = values.get("summary", False)
        self.positions: Dict[str, Position] = values.get("positions", {})
        self.alarms: List[bytes] = [text.encode() for text in values.get("alarms", ALARMS)]
        self.credit: int = values.get("credit", 0)
        self.pack: bool = values.get("pack", False)


def within(ranges: Ranges, number: int) -> bool:
    """Return whether a number is in one of the ranges; None contains every number."""
    return ranges is None or any(first <= number <= last for first, last in ranges)


class GrowingFile:
    """A growing log file.

    ``offset`` is the end of what was sent or summarized, and ``tail`` are the last bytes before it.
    ``lines``: when the file is first opened, only this many of its last lines are sent. ``replaced``: another
    file has the name now. ``lost``: no file has the name. ``node_log``: the log of its node that
    has the lines, if any.
    """

    __slots__ = (
        "attempt", "changed", "failed", "file", "hot", "inode", "kind", "lines", "lost", "name", "node_log",
        "number", "offset", "path", "replaced", "stream", "summed", "tail", "task", "waiting",
    )  # fmt: skip

    def __init__(self, stream: int, path: str, name: str, kind: str, number: int, attempt: int) -> None:
        self.stream, self.path, self.name = stream, path, name
        self.kind, self.number, self.attempt = kind, number, attempt
        self.task: Optional[str] = None
        self.file: Optional[OpenLog] = None
        self.node_log: Optional[NodeLog] = None
        self.inode = 0
        self.offset = 0
        self.tail = b""
        self.lines: Optional[int] = None
        self.changed = 0.0
        self.failed = self.hot = self.lost = self.replaced = self.summed = self.waiting = False

    def describe(self, reason: str) -> bytes:
        """Return the payload of FILE; ``reason`` is new, resumed, replaced, truncated or skipped."""
        values = {
            "name": self.name, "kind": self.kind, "number": self.number, "attempt": self.attempt,
            "task": self.task, "inode": self.inode, "offset": self.offset, "why": reason,
        }  # fmt: skip
        return json.dumps(values, separators=(",", ":")).encode()

    def restart(self, inode: int) -> None:
        """Restart at the beginning of the file that has the name now."""
        self.inode, self.offset, self.tail = inode, 0, b""
        self.replaced = self.lost = False

    def open(self) -> OpenLog:
        """Open the file that has the log's lines.

        Raises:
            OSError: it cannot be opened.
        """
        if self.node_log is not None:
            return LogInNodeLog(self.node_log, self.number)
        return PlainLog(self.path)

    def begin(self, file: OpenLog, position: Optional[Position]) -> str:
        """Choose the offset to start from; return the reason for FILE."""
        size = file.size()
        self.inode, self.offset = file.inode, 0
        reason = "new"
        if position is not None:
            is_resumable = can_resume(file, size, position)
            self.offset, reason = (position[1], "resumed") if is_resumable else (0, "replaced")
        elif self.lines is not None:
            self.offset = start_of_last(file, size, self.lines)
        elif self.summed:
            self.offset = max(0, size - BLOCK)
        tail_size = min(TAIL, self.offset)
        self.tail = file.read(tail_size, self.offset - tail_size)
        return reason

    def fresh(self, file: OpenLog, limit: int) -> Optional[bytes]:
        """Return up to ``limit`` bytes after the offset, None if the bytes before the offset changed."""
        tail_size = len(self.tail)
        start = self.offset - tail_size
        chunk = file.read(tail_size + 1, start)  # usually nothing is new: read one byte first
        if len(chunk) > tail_size:
            chunk = file.read(tail_size + limit, start)
        if not chunk.startswith(self.tail):
            return None
        return chunk[tail_size:]

    def take(self, data: bytes) -> None:
        """Advance the offset by data that has been sent."""
        self.offset += len(data)
        self.tail = data[-TAIL:] if len(data) >= TAIL else (self.tail + data)[-TAIL:]


def can_resume(file: OpenLog, size: int, position: Position) -> bool:
    """Return whether a file still has the content that the reader has read."""
    _, offset, checked_size, crc = position
    return size >= offset and zlib.crc32(file.read(checked_size, offset - checked_size)) & 0xFFFFFFFF == crc


def start_of_last(file: OpenLog, size: int, lines: int) -> int:
    """Return the offset of the last lines of a file; an unterminated line counts, too.

    A reader shows a very long line in pieces, so each block without a newline counts as a line. Of a progress
    bar the reader shows the last state, so a progress bar counts as one line.
    """
    end = size
    if lines and end and file.read(1, end - 1) == b"\n":
        end -= 1
    elif not lines:
        return size
    while end > 0:
        start = max(0, end - BLOCK)
        block = file.read(end - start, start)
        newlines = block.count(b"\n")
        is_piece = not newlines and len(block) == BLOCK and b"\r" not in block
        if (is_piece and lines == 1) or size - start > LONGEST_TAIL:
            return start + next(
                (position for position, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80), 0
            )
        if is_piece or newlines < lines:
            lines -= 1 if is_piece else newlines
            end = start
            continue
        position = len(block)
        for _ in range(lines):
            position = block.rindex(b"\n", 0, position)
        return start + position + 1
    return 0


def find_renamed(path: str, inode: int) -> Optional[str]:
    """Return the current path of the file with this inode, if it was renamed within its folder."""
    folder, original_name = os.path.split(path)
    for _ in range(2):  # a file that is renamed during the listing may be missed
        try:
            names = os.listdir(folder)
        except OSError:
            return None
        for name in names:
            candidate = os.path.join(folder, name)
            try:
                if name != original_name and os.lstat(candidate).st_ino == inode:
                    return candidate
            except OSError:
                continue
    return None


def on_network(path: str) -> bool:
    """Return whether other hosts may write to a path; also true if unknown."""
    best, kind = "", ""
    path = os.path.realpath(path)
    try:
        with open("/proc/self/mountinfo", "rb") as mounts:
            for line in mounts:
                fields = line.decode("utf-8", "surrogateescape").split()
                point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4])
                is_inside = path == point or path.startswith(point.rstrip("/") + "/")
                if is_inside and len(point) >= len(best):
                    best, kind = point, fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        return True
    return kind not in LOCAL_FILE_SYSTEMS


class WatchedFolder:
    """A folder that is listed again when it may have changed."""

    __slots__ = ("at", "found", "mtime", "path", "racy")

    def __init__(self, path: str) -> None:
        self.path = path
        self.at = -1e9
        self.mtime = -1
        self.racy = True
        self.found: Dict[str, int] = {}

    def changed(self, now: float, longest: float) -> bool:
        """List the folder if it may have changed, or if the listing is older than ``longest`` seconds.

        Returns:
            Whether the folder was listed.
        """
        try:
            mtime = os.stat(self.path).st_mtime_ns
            if mtime == self.mtime and not self.racy and now - self.at < longest:
                return False
            with os.scandir(self.path) as entries:
                self.found = {entry.name: entry.inode() for entry in entries}
        except OSError:
            return False
        # A file created within the clock resolution after the listing would not change the modification time.
        self.racy = abs(time.time() - mtime / 1e9) < 2
        self.at, self.mtime = now, mtime
        return True


class AttemptsFolder:
    """The folder of a run's, or an array task's, attempts; ``first`` is the first selected attempt."""

    __slots__ = ("attempts", "first", "folder", "logs", "task")

    def __init__(self, folder: str, task: Optional[str], first: Optional[int]) -> None:
        self.folder, self.task, self.first = folder, task, first
        self.logs = WatchedFolder(os.path.join(folder, "logs"))
        self.attempts: Dict[int, WatchedFolder] = {}


class Finder:
    """A finder of a run's log files, which notices new files as they appear."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.network = on_network(request.run)
        self.top = WatchedFolder(os.path.join(request.run, "logs"))
        self.tasks = WatchedFolder(os.path.join(request.run, "tasks"))
        self.instances: Dict[Optional[str], WatchedFolder] = {}
        self.roles: Dict[str, AttemptsFolder] = {}
        self.places: Dict[Optional[str], AttemptsFolder] = {}
        self.logs: Dict[str, GrowingFile] = {}
        self.hosts: Dict[str, str] = {}
        self.node_logs: Dict[str, NodeLog] = {}
        self.has_mixed_ranks = False
        if not request.array:
            self.watch(request.run, None)

    def watch(self, folder: str, task: Optional[str]) -> None:
        """Start watching the folder of the run, or of an array task."""
        self.places[task] = self.place(folder, task)
        self.instances[task] = WatchedFolder(os.path.join(folder, "roles"))

    def place(self, folder: str, task: Optional[str]) -> AttemptsFolder:
        """Return a new `AttemptsFolder`."""
        since = self.request.since
        return AttemptsFolder(folder, task, None if since is None else since.get(task or "", 0))

    def look_again(self) -> None:
        """Force the next scan to list every folder."""
        for folder in [self.top, self.tasks, *self.instances.values()]:
            folder.racy = True
        for attempts_folder in [*self.places.values(), *self.roles.values()]:
            for folder in [attempts_folder.logs, *attempts_folder.attempts.values()]:
                folder.racy = True

    def scan(self, now: float) -> List[GrowingFile]:
        """Return the logs found for the first time; mark logs whose name another file has now."""
        new_logs: List[GrowingFile] = []
        max_age = 10.0 if self.network else 30.0
        if self.request.array and self.tasks.changed(now, max_age):
            for task in sorted(filter(str.isdigit, self.tasks.found), key=int):
                if task not in self.places and self.request.task in (None, task):
                    self.watch(os.path.join(self.tasks.path, task), task)
        if "role" in self.request.kinds:
            new_logs += self.role_logs(now, max_age)
        if "batch" in self.request.kinds and self.top.changed(now, max_age):
            new_logs += self.batch_logs()
        for attempts_folder in self.places.values():
            new_logs += self.own_file(attempts_folder, "events", 0, "events.jsonl")
            if attempts_folder.logs.changed(now, max_age):
                self.find_attempts(attempts_folder)
            for attempt, folder in attempts_folder.attempts.items():
                if folder.changed(now, max_age):
                    new_logs += self.attempt_logs(attempts_folder, attempt, folder)
                new_logs += self.own_file(
                    attempts_folder, "metrics", attempt, "metrics/" + str(attempt) + "/train.jsonl"
                )
        return new_logs

    def pause(self) -> float:
        """Return the seconds between two scans, which grow with the number of folders."""
        return max(
            2.0 if self.network else 0.5,
            0.001 * sum(1 + len(attempts_folder.attempts) for attempts_folder in self.places.values()),
        )

    def find_attempts(self, place: AttemptsFolder) -> None:
        """Start watching the selected attempts."""
        attempts = sorted(int(name) for name in place.logs.found if name.isdigit())
        if place.first is None:
            place.first = attempts[-1] if attempts else 0
        selected = self.request.attempt
        for attempt in attempts:
            if attempt not in place.attempts and (
                attempt == selected or (selected is None and attempt >= place.first)
            ):
                place.attempts[attempt] = WatchedFolder(os.path.join(place.logs.path, str(attempt)))

    def batch_logs(self) -> Iterator[GrowingFile]:
        """Yield new logs of the batch script."""
        for name, inode in sorted(self.top.found.items()):
            match = BATCH_NAME.fullmatch(name)
            if match and (match.group(1) is not None) == self.request.array:
                task = match.group(1)
                if self.request.task in (None, task):
                    yield from self.add(
                        os.path.join(self.top.path, name), inode, ("batch", 0, 0), match.group(1)
                    )

    def role_logs(self, now: float, max_age: float) -> Iterator[GrowingFile]:
        """Yield new logs of the instances of roles, one for each start of an instance."""
        for task, instances in self.instances.items():
            if not instances.changed(now, max_age):
                continue
            for name in sorted(instances.found):
                match, path = INSTANCE_NAME.fullmatch(name), os.path.join(instances.path, name)
                if match and path not in self.roles and self.is_selected_role(match.group(1)):
                    role = match.group(1) if task is None else "{}/{}".format(task, match.group(1))
                    self.roles[path] = self.place(path, role)
        for folder in self.roles.values():
            number = int(folder.folder.rpartition("-")[2])
            if folder.logs.changed(now, max_age):
                self.find_attempts(folder)
            for start, start_folder in folder.attempts.items():
                if start_folder.changed(now, max_age) and "rank-0.log" in start_folder.found:
                    path = os.path.join(start_folder.path, "rank-0.log")
                    inode = start_folder.found["rank-0.log"]
                    yield from self.add(path, inode, ("role", number, start), folder.task)

    def is_selected_role(self, name: str) -> bool:
        """Return whether the request selects a role."""
        return self.request.roles is None or name in self.request.roles

    def own_file(self, place: AttemptsFolder, kind: str, attempt: int, name: str) -> Iterator[GrowingFile]:
        """Yield a record file (events, metrics) when it appears."""
        path = os.path.join(place.folder, name)
        if kind in self.request.kinds and path not in self.logs and os.path.exists(path):
            yield from self.add(path, 0, (kind, 0, attempt), place.task)

    def attempt_logs(
        self, place: AttemptsFolder, attempt: int, folder: WatchedFolder
    ) -> Iterator[GrowingFile]:
        """Yield new logs of launchers and ranks, in order."""
        logs = []
        for name, inode in folder.found.items():
            match = NAME.fullmatch(name)
            if match and match.group(1) in self.request.kinds:
                logs.append((match.group(1), int(match.group(2)), name, inode))
        for kind, number, name, inode in sorted(logs):
            path = os.path.join(folder.path, name)
            if kind == "rank" and path not in self.logs:
                if not within(self.request.ranks, number):
                    continue
                if not self.on_node(place, attempt, number):
                    folder.racy = True  # the rank's record may be written later
                    continue
            yield from self.add(path, inode, (kind, number, attempt), place.task)
        if "rank" in self.request.kinds:
            yield from self.logs_of_nodes(place, attempt, folder)

    def logs_of_nodes(
        self, place: AttemptsFolder, attempt: int, folder: WatchedFolder
    ) -> Iterator[GrowingFile]:
        """Yield new logs of ranks whose lines are in the logs of their nodes."""
        records = os.path.join(place.folder, "ranks", str(attempt))
        for node_log in self.find_node_logs(folder):
            if self.request.nodes is not None:
                for record in read_node_records(node_log.records_path(records)).values():
                    path = os.path.join(records, "{}.json".format(record["rank"]))
                    self.hosts[path] = str(record.get("host"))
            for rank in sorted(node_log.groups):
                path = os.path.join(folder.path, "rank-{}.log".format(rank))
                if path in self.logs or not within(self.request.ranks, rank):
                    continue
                if not self.on_node(place, attempt, rank):
                    continue
                for log in self.add(path, 0, ("rank", rank, attempt), place.task):
                    log.node_log = node_log
                    yield log

    def find_node_logs(self, folder: WatchedFolder) -> Iterator[NodeLog]:
        """Yield the logs of the nodes that may have selected ranks, with their new lines.

        The ranks of a node follow each other, unless a node turns out to have others.
        """
        firsts = sorted(int(match.group(1)) for match in map(NODE_LOG.fullmatch, folder.found) if match)
        firsts.append(10**9)
        for index, first in enumerate(firsts[:-1]):
            following = firsts[index + 1]
            may_match = self.request.ranks is None or any(
                low < following and high >= first for low, high in self.request.ranks
            )
            if may_match or self.has_mixed_ranks:
                path = os.path.join(folder.path, "ranks-{}.log".format(first))
                node_log = self.node_logs.setdefault(path, NodeLog(path))
                with contextlib.suppress(OSError):
                    node_log.look()
                    self.has_mixed_ranks = (
                        self.has_mixed_ranks or max(node_log.groups, default=0) >= following
                    )
                    yield node_log
        if len(firsts) > 1 and not self.network:
            folder.racy = True  # another rank may write its first line, which does not change the folder

    def add(
        self, path: str, inode: int, origin: Tuple[str, int, int], task: Optional[str]
    ) -> Iterator[GrowingFile]:
        """Yield the log if it is new; otherwise check whether its file was replaced."""
        log = self.logs.get(path)
        if log is None:
            name = path[len(self.request.run.rstrip("/")) + 1 :]
            log = self.logs[path] = GrowingFile(len(self.logs) + 1, path, name, *origin)
            log.task = task
            yield log
            return
        log.lost = False
        log.node_log = None if inode else log.node_log
        if log.inode and inode not in (0, log.inode):
            try:  # some overlay file systems list different inode numbers than stat returns
                log.replaced = os.stat(path).st_ino != log.inode
            except OSError:
                return

    def on_node(self, place: AttemptsFolder, attempt: int, rank: int) -> bool:
        """Return whether a rank is known to run on one of the selected hosts."""
        if self.request.nodes is None:
            return True
        path = os.path.join(place.folder, "ranks", str(attempt), str(rank) + ".json")
        if path not in self.hosts:
            host = read_object(path).get("host")
            if host is None:
                return False
            self.hosts[path] = str(host)
        host = self.hosts[path]
        return host in self.request.nodes or host.partition(".")[0] in self.request.nodes
