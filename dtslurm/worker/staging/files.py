"""Trees of files, small records and events."""

import contextlib
import hashlib
import json
import os
import stat
import threading
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from ..supervisor import slurm

CHUNK = 1 << 22
BLOCK = 4096
Listed = Tuple[str, int, int]  # path below the source ("" for the source itself), bytes, mtime in seconds
# On these every node would write the same files.
SHARED = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "panfs",
    "wekafs",
    "glusterfs",
    "afs",
    "pvfs2",
    "orangefs",
)


class Failed(Exception):
    """Staging cannot go on; each argument is one line for people."""


def put(path: str, value: Any) -> None:
    """Write JSON whole: under another name, then renamed."""
    draft = "{}.{}".format(path, os.getpid())
    with open(draft, "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def load(path: str) -> Dict[str, Any]:
    """Return a JSON object, empty where there is none."""
    try:
        with open(path) as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def event(name: str, **values: Any) -> None:
    """Append a line to the run's ``events.jsonl``, in one write; a disk that refuses it stops nothing."""
    attempt = os.environ.get("DTSLURM_ATTEMPT", "0")
    record = {
        "time": round(time.time(), 3),
        "event": name,
        "attempt": int(attempt) if attempt.isdigit() else 0,
    }
    record.update(values)
    line = json.dumps(record).encode() + b"\n"
    append(os.path.join(os.environ["DTSLURM_RUN_DIR"], "events.jsonl"), line)


def append(path: str, line: bytes) -> None:
    """Append in one write."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError:
        return


def is_own(path: str) -> bool:
    """Tell whether a file or folder is this user's: no link, and not another user's."""
    found = os.lstat(path)
    return found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)


def is_closed(path: str) -> bool:
    """Tell whether nobody else can write to a file or folder of this user's."""
    return is_own(path) and not os.lstat(path).st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def tree(source: str) -> List[Listed]:
    """Return the regular files of a source, links followed, sorted by path.

    Raises:
        OSError: it cannot be read.
    """
    found = os.stat(source)
    if not stat.S_ISDIR(found.st_mode):
        return [("", found.st_size, int(found.st_mtime))]
    return sorted(_below(source, "", ()))


def _below(folder: str, prefix: str, above: Tuple[Tuple[int, int], ...]) -> Iterator[Listed]:
    own = os.stat(folder)
    if (own.st_dev, own.st_ino) in above:  # a link that goes in a circle
        return
    above += ((own.st_dev, own.st_ino),)
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # programs remove files while we look
                if entry.is_dir():
                    for one in _below(entry.path, prefix + entry.name + "/", above):
                        yield one
                elif entry.is_file():
                    found = entry.stat()
                    yield prefix + entry.name, found.st_size, int(found.st_mtime)


def fingerprint(files: Sequence[Listed]) -> str:
    """Return what tells one state of a source from another: of all paths, sizes and times."""
    return hashlib.sha256(json.dumps([list(one) for one in files]).encode()).hexdigest()


def total(files: Sequence[Listed]) -> int:
    """Return the bytes of all files."""
    return sum(size for _, size, _ in files)


def on_disk(files: Sequence[Listed]) -> int:
    """Return the bytes that all files take on a disk."""
    return sum(-(-size // BLOCK) * BLOCK for _, size, _ in files)


def at(folder: str, relative: str) -> str:
    """Return a listed file's path; the source itself may be the file."""
    return os.path.join(folder, relative) if relative else folder


def existing(path: str) -> str:
    """Return the nearest folder above a path that is there."""
    path = os.path.dirname(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def file_system(path: str) -> str:
    """Return the kind of the file system that a path is on."""
    path = os.path.realpath(path)
    best, kind = "", ""
    try:
        with open("/proc/self/mounts") as file:
            for line in file:
                words = line.split()
                point = words[1].replace("\\040", " ")
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, words[2]
    except (OSError, IndexError):
        return ""
    return kind


def is_shared(kind: str) -> bool:
    """Whether a kind of file system is one that all nodes see alike."""
    return any(kind == one or kind.startswith(one) or kind == "fuse." + one for one in SHARED)


def human(size: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return "{:.0f} {}".format(size, unit) if unit == "B" else "{:.1f} {}".format(size, unit)
        size /= 1024.0
    return ""


def clock(seconds: float) -> str:
    """Return a duration as H:MM:SS."""
    whole = max(0, int(seconds))
    return "{}:{:02}:{:02}".format(whole // 3600, whole // 60 % 60, whole % 60)


class Progress:
    """Tells in ``events.jsonl`` how far one node is with one source, every few seconds.

    Args:
        nodes: how many bring it.
    """

    def __init__(self, node: str, source: str, size: int, nodes: int = 1) -> None:
        self.values = {"node": node, "source": source, "nodes": nodes}
        self.total, self.bytes = size, 0
        self.every = max(2.0, nodes / 20.0)  # so that a thousand nodes write some twenty lines a second
        self.next = time.monotonic() + self.every
        self.lock = threading.Lock()

    def add(self, size: int) -> None:
        """Count bytes that are there now."""
        with self.lock:
            self.bytes += size
            if time.monotonic() < self.next:
                return
            self.next = time.monotonic() + self.every
        self.tell(False)

    def tell(self, done: bool) -> None:
        """Write how far it is."""
        event("staging", bytes=self.bytes, total=self.total, done=done, **self.values)


def remaining(now: Optional[float] = None) -> Optional[float]:
    """Return the seconds that are left of the job's time limit, None where nothing tells."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    if now is None:
        slurm.measure_clock()
    end = float(text) if text.isdigit() else slurm.seconds_of(slurm.show_job().get("EndTime", ""))
    return None if end is None else end - (slurm.now() if now is None else now)
