"""Which log files a run has, as they appear, and where in them a reader stands."""

import errno
import json
import os
import re
import stat
import time
import zlib
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

TAIL = 32  # bytes before the offset that are read again each time: they tell a rewritten file
CHECKED = 256  # bytes before the offset by whose CRC-32 a reader resumes, if it has had so many
BLOCK = 65536
LONGEST_TAIL = 1 << 24  # bytes of the last lines, where one of them is a progress bar without an end
# Everything else may be written on another machine, and may show that only to those who open the file anew.
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
BATCH_NAME = re.compile(r"batch(?:-(\d{1,9}))?\.log")

Ranges = Optional[Sequence[Sequence[int]]]
Position = Sequence[int]  # inode, offset, number of bytes before it that were checked, their CRC-32


class Request:
    """What to follow.

    ``run`` is the run's folder; ``array``: it has tasks, and ``task`` is the only one wanted. ``kinds`` are
    those of ``batch node rank events metrics``; ``ranks`` a list of ``[first, last]`` or null for all;
    ``nodes`` hosts whose ranks are wanted, or null. ``attempt`` is the only one wanted; without it the latest
    and those to come, or with ``since`` (attempt by task, "" for a run without tasks) those from there on.
    ``lines``: at first, only the last so many of each file. ``follow``: go on until DRAIN; without it,
    ``in_turn``: a piece of each file in turn. ``summary``: ranks in full only on FOCUS. ``positions``: by
    path relative to ``run``, to resume. ``alarms``: words of lines to point out in summaries. ``credit``: see
    CREDIT. ``pack``: compress where the way is long.
    """

    def __init__(self, values: Dict[str, Any]) -> None:
        self.run: str = values["run"]
        self.array: bool = values.get("array", False)
        self.task: Optional[str] = values.get("task")
        self.kinds: Set[str] = set(values.get("kinds", ["batch", "node", "rank"]))
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
    """Return whether a number lies in one of the ranges; every one does where there are no ranges."""
    return ranges is None or any(first <= number <= last for first, last in ranges)


class GrowingFile:
    """One growing file.

    ``offset`` is the end of what was sent (or summed up) and ``tail`` the last bytes before it; ``lines``:
    when it is first opened, only the last ones; ``replaced``: another file has the name now; ``lost``: there
    is none.
    """

    __slots__ = (
        "attempt", "changed", "failed", "fd", "hot", "inode", "kind", "lines", "lost", "name", "number",
        "offset", "path", "replaced", "stream", "summed", "tail", "task", "waiting",
    )  # fmt: skip

    def __init__(self, stream: int, path: str, name: str, kind: str, number: int, attempt: int) -> None:
        self.stream, self.path, self.name = stream, path, name
        self.kind, self.number, self.attempt = kind, number, attempt
        self.task: Optional[str] = None
        self.fd = -1
        self.inode = 0
        self.offset = 0
        self.tail = b""
        self.lines: Optional[int] = None
        self.changed = 0.0
        self.failed = self.hot = self.lost = self.replaced = self.summed = self.waiting = False

    def describe(self, why: str) -> bytes:
        """Return the payload of FILE; why: new, resumed, replaced, truncated or skipped."""
        values = {
            "name": self.name, "kind": self.kind, "number": self.number, "attempt": self.attempt,
            "task": self.task, "inode": self.inode, "offset": self.offset, "why": why,
        }  # fmt: skip
        return json.dumps(values, separators=(",", ":")).encode()

    def restart(self, inode: int) -> None:
        """Begin with the file that has the name now."""
        self.inode, self.offset, self.tail = inode, 0, b""
        self.replaced = self.lost = False

    def begin(self, fd: int, known: Optional[Position]) -> str:
        """Choose where in a file to begin, and return why there."""
        status = os.fstat(fd)
        self.inode, self.offset = status.st_ino, 0
        why = "new"
        if known is not None:
            resumed = resumes(fd, status.st_size, known)
            self.offset, why = (known[1], "resumed") if resumed else (0, "replaced")
        elif self.lines is not None:
            self.offset = start_of_last(fd, status.st_size, self.lines)
        elif self.summed:
            self.offset = max(0, status.st_size - BLOCK)
        back = min(TAIL, self.offset)
        self.tail = os.pread(fd, back, self.offset - back)
        return why

    def fresh(self, fd: int, most: int) -> Optional[bytes]:
        """Return what follows the offset, or None if what stood before it does not stand there any more."""
        back = len(self.tail)
        start = self.offset - back
        data = os.pread(fd, back + 1, start)  # mostly nothing is new: a small look first
        if len(data) > back:
            data = os.pread(fd, back + most, start)
        if not data.startswith(self.tail):
            return None
        return data[back:]

    def take(self, data: bytes) -> None:
        """Count data as sent."""
        self.offset += len(data)
        self.tail = data[-TAIL:] if len(data) >= TAIL else (self.tail + data)[-TAIL:]


def resumes(fd: int, size: int, known: Position) -> bool:
    """Return whether a file is the one that a reader knows, as far as the reader has read it."""
    _, offset, back, crc = known
    return size >= offset and zlib.crc32(os.pread(fd, back, offset - back)) & 0xFFFFFFFF == crc


def start_of_last(fd: int, size: int, lines: int) -> int:
    """Return where the last lines of a file begin; one without its end is a line, too.

    A reader shows a very long line in pieces: each block without a line's end counts as a line. Of a progress
    bar it shows the last state: that is one line.
    """
    end = size
    if lines and end and os.pread(fd, 1, end - 1) == b"\n":
        end -= 1
    elif not lines:
        return size
    while end > 0:
        start = max(0, end - BLOCK)
        block = os.pread(fd, end - start, start)
        found = block.count(b"\n")
        piece = not found and len(block) == BLOCK and b"\r" not in block
        if (piece and lines == 1) or size - start > LONGEST_TAIL:
            return start + next((at for at, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80), 0)
        if piece or found < lines:
            lines -= 1 if piece else found
            end = start
            continue
        at = len(block)
        for _ in range(lines):
            at = block.rindex(b"\n", 0, at)
        return start + at + 1
    return 0


def open_regular(path: str) -> int:
    """Open a file for reading; a FIFO of that name must not stop us.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return fd


def moved(path: str, inode: int) -> Optional[str]:
    """Return where in its folder the file with that inode lies under another name."""
    folder, own = os.path.split(path)
    for _ in range(2):  # one that is renamed while we look may be missed
        try:
            names = os.listdir(folder)
        except OSError:
            return None
        for name in names:
            other = os.path.join(folder, name)
            try:
                if name != own and os.lstat(other).st_ino == inode:
                    return other
            except OSError:
                continue
    return None


def on_network(path: str) -> bool:
    """Return whether a path may be written from elsewhere; also where that cannot be told."""
    best, kind = "", ""
    path = os.path.realpath(path)
    try:
        with open("/proc/self/mountinfo", "rb") as mounts:
            for line in mounts:
                words = line.decode("utf-8", "surrogateescape").split()
                point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), words[4])
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, words[words.index("-") + 1]
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
        """List the folder if it may have changed, or after so many seconds; return whether that was done."""
        try:
            mtime = os.stat(self.path).st_mtime_ns
            if mtime == self.mtime and not self.racy and now - self.at < longest:
                return False
            with os.scandir(self.path) as entries:
                self.found = {entry.name: entry.inode() for entry in entries}
        except OSError:
            return False
        # A file made within the clock's grain of the listing would leave the time of change as it is.
        self.racy = abs(time.time() - mtime / 1e9) < 2
        self.at, self.mtime = now, mtime
        return True


class AttemptsFolder:
    """Where attempts of the run, or of one task of it, appear; ``first`` is the first one wanted."""

    __slots__ = ("attempts", "first", "folder", "logs", "task")

    def __init__(self, folder: str, task: Optional[str], first: Optional[int]) -> None:
        self.folder, self.task, self.first = folder, task, first
        self.logs = WatchedFolder(os.path.join(folder, "logs"))
        self.attempts: Dict[int, WatchedFolder] = {}


class Finder:
    """Knows the layout of a run's folder, and finds its log files as they appear."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.network = on_network(request.run)
        self.top = WatchedFolder(os.path.join(request.run, "logs"))
        self.tasks = WatchedFolder(os.path.join(request.run, "tasks"))
        self.places: Dict[Optional[str], AttemptsFolder] = {}
        self.logs: Dict[str, GrowingFile] = {}
        self.hosts: Dict[str, str] = {}
        if not request.array:
            self.places[None] = self.place(request.run, None)

    def place(self, folder: str, task: Optional[str]) -> AttemptsFolder:
        """Return a new place."""
        since = self.request.since
        return AttemptsFolder(folder, task, None if since is None else since.get(task or "", 0))

    def look_again(self) -> None:
        """See that the next scan lists every folder."""
        for folder in [self.top, self.tasks]:
            folder.racy = True
        for place in self.places.values():
            for folder in [place.logs, *place.attempts.values()]:
                folder.racy = True

    def scan(self, now: float) -> List[GrowingFile]:
        """Return the logs found for the first time; mark those whose name another file has now."""
        new: List[GrowingFile] = []
        longest = 10.0 if self.network else 30.0
        if self.request.array and self.tasks.changed(now, longest):
            for task in sorted(filter(str.isdigit, self.tasks.found), key=int):
                if task not in self.places and self.request.task in (None, task):
                    self.places[task] = self.place(os.path.join(self.tasks.path, task), task)
        if "batch" in self.request.kinds and self.top.changed(now, longest):
            new += self.batch_logs()
        for place in self.places.values():
            new += self.own_file(place, "events", 0, "events.jsonl")
            if place.logs.changed(now, longest):
                self.find_attempts(place)
            for attempt, folder in place.attempts.items():
                if folder.changed(now, longest):
                    new += self.attempt_logs(place, attempt, folder)
                new += self.own_file(place, "metrics", attempt, "metrics/" + str(attempt) + "/train.jsonl")
        return new

    def pause(self) -> float:
        """Return seconds between two scans: each looks at every folder."""
        return max(
            2.0 if self.network else 0.5,
            0.001 * sum(1 + len(place.attempts) for place in self.places.values()),
        )

    def find_attempts(self, place: AttemptsFolder) -> None:
        """Begin to look into the attempts that are wanted."""
        found = sorted(int(name) for name in place.logs.found if name.isdigit())
        if place.first is None:
            place.first = found[-1] if found else 0
        wanted = self.request.attempt
        for attempt in found:
            if attempt not in place.attempts and (
                attempt == wanted or (wanted is None and attempt >= place.first)
            ):
                place.attempts[attempt] = WatchedFolder(os.path.join(place.logs.path, str(attempt)))

    def batch_logs(self) -> Iterator[GrowingFile]:
        """Yield new logs of the batch script itself."""
        for name, inode in sorted(self.top.found.items()):
            found = BATCH_NAME.fullmatch(name)
            if found and (found.group(1) is not None) == self.request.array:
                task = found.group(1)
                if self.request.task in (None, task):
                    yield from self.add(
                        os.path.join(self.top.path, name), inode, ("batch", 0, 0), found.group(1)
                    )

    def own_file(self, place: AttemptsFolder, kind: str, attempt: int, name: str) -> Iterator[GrowingFile]:
        """Yield a file of records once it is there."""
        path = os.path.join(place.folder, name)
        if kind in self.request.kinds and path not in self.logs and os.path.exists(path):
            yield from self.add(path, 0, (kind, 0, attempt), place.task)

    def attempt_logs(
        self, place: AttemptsFolder, attempt: int, folder: WatchedFolder
    ) -> Iterator[GrowingFile]:
        """Yield new logs of launchers and ranks, in order."""
        found = []
        for name, inode in folder.found.items():
            match = NAME.fullmatch(name)
            if match and match.group(1) in self.request.kinds:
                found.append((match.group(1), int(match.group(2)), name, inode))
        for kind, number, name, inode in sorted(found):
            path = os.path.join(folder.path, name)
            if kind == "rank" and path not in self.logs:
                if not within(self.request.ranks, number):
                    continue
                if not self.on_node(place, attempt, number):
                    folder.racy = True  # its record may come later
                    continue
            yield from self.add(path, inode, (kind, number, attempt), place.task)

    def add(
        self, path: str, inode: int, what: Tuple[str, int, int], task: Optional[str]
    ) -> Iterator[GrowingFile]:
        """Yield the log if it is new; look whether it was replaced if it is not."""
        log = self.logs.get(path)
        if log is None:
            name = path[len(self.request.run.rstrip("/")) + 1 :]
            log = self.logs[path] = GrowingFile(len(self.logs) + 1, path, name, *what)
            log.task = task
            yield log
            return
        log.lost = False
        if log.inode and inode not in (0, log.inode):
            try:  # some overlays list other inode numbers than they tell
                log.replaced = os.stat(path).st_ino != log.inode
            except OSError:
                return

    def on_node(self, place: AttemptsFolder, attempt: int, rank: int) -> bool:
        """Return whether a rank is known to run on one of the wanted hosts."""
        if self.request.nodes is None:
            return True
        path = os.path.join(place.folder, "ranks", str(attempt), str(rank) + ".json")
        if path not in self.hosts:
            try:
                with open(path, "rb") as file:
                    self.hosts[path] = str(json.loads(file.read().decode("utf-8", "replace"))["host"])
            except (OSError, ValueError, KeyError, TypeError):
                return False
        host = self.hosts[path]
        return host in self.request.nodes or host.partition(".")[0] in self.request.nodes
