"""The embedded scheduler's state folder: job records, the lock, the counter.

::

    lock          flock: held by every process that writes, or reads in order to decide
    counter       the latest job id
    queue/ID      empty; the jobs that have not ended
    jobs/ID/      job.json, script, keeper.lock (held while the job's keeper is alive), keeper.log, steps/
    bin/VERSION/  srun and scontrol for the jobs' PATH

Every file is written under a temporary name in the same folder and then renamed.
"""

import contextlib
import errno
import json
import os
from typing import IO, Any, Dict, Iterator, List, Optional

from ..lib.json_records import read_object, write_atomically
from ..lib.locks import acquire_lock

Record = Dict[str, Any]

LOCK_PATIENCE = 30.0  # seconds; the lock is normally held for milliseconds


class LockTimeout(OSError):
    """Another process holds the state folder's lock and does not release it."""


def write_file(path: str, text: str, mode: int = 0o600) -> None:
    """Write a file atomically; only this user can read it."""
    write_atomically(path, text, mode)


def read_file(path: str) -> str:
    """Return a file's text; bytes that are not UTF-8 are surrogate-escaped."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return file.read()


def try_lock(path: str, patience_s: float = 0.0) -> Optional[IO[str]]:
    """Acquire an exclusive lock; return None if another process still holds it after ``patience_s``.

    Closing the file releases the lock.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "a"))
        os.chmod(path, 0o600)
        if not acquire_lock(file, patience_s):
            return None
        stack.pop_all()  # the caller keeps the file open as long as it needs the lock
        return file


def is_locked(path: str) -> bool:
    """Return whether a process holds an exclusive lock."""
    try:
        file = open(path)  # noqa: SIM115
    except OSError:
        return False
    with file:
        # A shared lock, so that two concurrent checks do not mistake each other for the owner.
        return not acquire_lock(file, 0.0, shared=True)


class State(object):
    """A state folder. The constructor does not access the file system."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)

    def path(self, *names: str) -> str:
        """Return the path of a file or folder in the state folder."""
        return os.path.join(self.root, *names)

    def job_dir(self, job: int, *names: str) -> str:
        """Return a job's folder, or a path in it."""
        return self.path("jobs", str(job), *names)

    def prepare(self) -> None:
        """Create the folders, accessible to this user only."""
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        os.chmod(self.root, 0o700)
        for name in ("jobs", "queue", "bin"):
            os.makedirs(self.path(name), mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the state's lock.

        Raises:
            LockTimeout: another process held the lock for too long.
        """
        self.prepare()
        lock = try_lock(self.path("lock"), LOCK_PATIENCE)
        if lock is None:
            raise LockTimeout(errno.EWOULDBLOCK, "the lock is held by another process", self.path("lock"))
        with lock:
            yield

    def new_ids(self, count: int) -> int:
        """Reserve ``count`` job ids and return the first. The caller must hold the lock."""
        try:
            last_id = int(read_file(self.path("counter")))
        except (OSError, ValueError):
            last_id = max(self.all_ids() or [0])
        write_file(self.path("counter"), str(last_id + count))
        return last_id + 1

    def load(self, job: int) -> Optional[Record]:
        """Return a job's record, None if the job does not exist."""
        return read_object(self.job_dir(job, "job.json")) or None

    def save(self, record: Record) -> None:
        """Write a job's record. The caller must hold the lock."""
        write_file(self.job_dir(record["id"], "job.json"), json.dumps(record, sort_keys=True, indent=1))

    def _list_ids(self, folder: str) -> List[int]:
        try:
            return sorted(int(name) for name in os.listdir(self.path(folder)) if name.isdecimal())
        except OSError:
            return []

    def all_ids(self) -> List[int]:
        """Return the ids of all jobs ever submitted, oldest first."""
        return self._list_ids("jobs")

    def active(self) -> List[Record]:
        """Return the records of all jobs that have not ended, oldest first."""
        records = [self.load(job) for job in self._list_ids("queue")]
        return [record for record in records if record is not None]

    def enqueue(self, job: int) -> None:
        """Record that a job has not ended. The caller must hold the lock."""
        os.close(os.open(self.path("queue", str(job)), os.O_WRONLY | os.O_CREAT, 0o600))

    def dequeue(self, job: int) -> None:
        """Record that a job has ended. The caller must hold the lock."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path("queue", str(job)))

    def keeper_alive(self, job: int) -> bool:
        """Return whether the job's keeper is alive: the kernel releases its lock when it dies."""
        return is_locked(self.job_dir(job, "keeper.lock"))

    def read_ask(self, job: int) -> str:
        """Return the pending request to a running job: ``cancel``, ``requeue``, ``signal NAME...`` or ""."""
        try:
            return read_file(self.job_dir(job, "ask")).strip()
        except OSError:
            return ""

    def write_request(self, job: int, request: str) -> None:
        """Write a request to a running job's keeper. The caller must hold the lock."""
        write_file(self.job_dir(job, "ask"), request)
