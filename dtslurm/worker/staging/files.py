"""File trees, small JSON records, events and file systems."""

import contextlib
import hashlib
import json
import os
import stat
import threading
import time
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from ..lib.json_records import write_atomically
from ..supervisor import slurm

CHUNK = 1 << 22
BLOCK = 4096
# Path below the source ("" for the source itself), size in bytes, mtime in seconds.
Listed = Tuple[str, int, int]
# Shared file systems: every node would write the same files there.
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
    """Staging cannot continue; each argument is one line of an error message."""


def put(path: str, value: Any) -> None:
    """Write JSON atomically."""
    write_atomically(path, json.dumps(value))


def event(name: str, **values: Any) -> None:
    """Append a line to the run's ``events.jsonl`` with a single write; a failed write is ignored."""
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
    """Append a line with a single write; a failure is ignored."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError:
        return


def is_own(path: str) -> bool:
    """Return whether a file or folder belongs to this user and is not a link."""
    status = os.lstat(path)
    return status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)


def is_closed(path: str) -> bool:
    """Return whether a file or folder belongs to this user and no other user can write to it."""
    return is_own(path) and not os.lstat(path).st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def tree(source: str) -> List[Listed]:
    """Return the regular files of a source, following links, sorted by path.

    Raises:
        OSError: the source cannot be read.
    """
    status = os.stat(source)
    if not stat.S_ISDIR(status.st_mode):
        return [("", status.st_size, int(status.st_mtime))]
    return sorted(_list_below(source, "", ()))


def _list_below(folder: str, prefix: str, base: Tuple[Tuple[int, int], ...]) -> Iterator[Listed]:
    folder_status = os.stat(folder)
    # A link to a parent folder: do not recurse forever.
    if (folder_status.st_dev, folder_status.st_ino) in base:
        return
    base += ((folder_status.st_dev, folder_status.st_ino),)
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # programs may remove files during the walk
                if entry.is_dir():
                    for listed in _list_below(entry.path, prefix + entry.name + "/", base):
                        yield listed
                elif entry.is_file():
                    status = entry.stat()
                    yield prefix + entry.name, status.st_size, int(status.st_mtime)


def fingerprint(files: Sequence[Listed]) -> str:
    """Return a hash of all paths, sizes and times, which identifies one state of a source."""
    return hashlib.sha256(json.dumps([list(listed) for listed in files]).encode()).hexdigest()


def total(files: Sequence[Listed]) -> int:
    """Return the total size of the files in bytes."""
    return sum(size for _, size, _ in files)


def on_disk(files: Sequence[Listed]) -> int:
    """Return the bytes that the files occupy on a disk."""
    return sum(-(-size // BLOCK) * BLOCK for _, size, _ in files)


def at(folder: str, relative: str) -> str:
    """Return a listed file's path, which is the source itself if the source is a file."""
    return os.path.join(folder, relative) if relative else folder


def existing(path: str) -> str:
    """Return the nearest existing parent folder of a path."""
    path = os.path.dirname(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def file_system(path: str) -> str:
    """Return the type of the file system that a path is on, empty if unknown."""
    path = os.path.realpath(path)
    best, file_system_type = "", ""
    try:
        with open("/proc/self/mounts") as file:
            for line in file:
                fields = line.split()
                point = fields[1].replace("\\040", " ")
                is_inside = path == point or path.startswith(point.rstrip("/") + "/")
                if is_inside and len(point) >= len(best):
                    best, file_system_type = point, fields[2]
    except (OSError, IndexError):
        return ""
    return file_system_type


def is_shared(kind: str) -> bool:
    """Return whether a file system type is shared by all nodes."""
    return any(
        kind == shared_type or kind.startswith(shared_type) or kind == "fuse." + shared_type
        for shared_type in SHARED
    )


def human(size: float) -> str:
    """Return a size in bytes as text with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return "{:.0f} {}".format(size, unit) if unit == "B" else "{:.1f} {}".format(size, unit)
        size /= 1024.0
    return ""


def clock(seconds: float) -> str:
    """Return a duration as H:MM:SS."""
    whole_seconds = max(0, int(seconds))
    return "{}:{:02}:{:02}".format(whole_seconds // 3600, whole_seconds // 60 % 60, whole_seconds % 60)


class Progress:
    """A reporter of one node's progress with one source in ``events.jsonl``, every few seconds.

    Args:
        nodes: number of nodes that copy the source.
    """

    def __init__(self, node: str, source: str, size: int, nodes: int = 1) -> None:
        self.values = {"node": node, "source": source, "nodes": nodes}
        self.total, self.bytes = size, 0
        self.every = max(2.0, nodes / 20.0)  # a thousand nodes write about twenty lines per second
        self.next = time.monotonic() + self.every
        self.lock = threading.Lock()

    def add(self, size: int) -> None:
        """Add bytes that have been copied."""
        with self.lock:
            self.bytes += size
            if time.monotonic() < self.next:
                return
            self.next = time.monotonic() + self.every
        self.tell(False)

    def tell(self, is_done: bool) -> None:
        """Write a progress event."""
        event("staging", bytes=self.bytes, total=self.total, done=is_done, **self.values)


def remaining() -> Optional[float]:
    """Return the remaining seconds of the job's time limit, None if unknown."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    slurm.measure_clock()
    end_time = float(text) if text.isdigit() else slurm.seconds_of(slurm.show_job().get("EndTime", ""))
    return None if end_time is None else end_time - slurm.now()
