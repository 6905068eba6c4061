"""The embedded scheduler's state folder: job records, the lock, the counter.

::

    lock          flock: whoever reads to decide, or writes, holds it
    counter       the last job id given
    queue/ID      empty; the jobs that are not over
    jobs/ID/      job.json, script, keeper.lock (held as long as the job's keeper lives), keeper.log, steps/
    bin/VERSION/  srun and scontrol as jobs see them

Every file is written whole beside its place and renamed into it.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from typing import IO, Any, Dict, Iterator, List, Optional

Record = Dict[str, Any]

LOCK_PATIENCE = 30.0  # seconds; decisions take milliseconds


class LockTimeout(OSError):
    """Another process holds the state folder's lock and does not let go."""


def write_file(path: str, text: str, mode: int = 0o600) -> None:
    """Write a file atomically."""
    beside = "{}.{}.new".format(path, os.getpid())
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, mode)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def read_file(path: str) -> str:
    """Return a file's text; bytes that are not UTF-8 are surrogate-escaped."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return file.read()


def try_lock(path: str) -> Optional[IO[str]]:
    """Take a lock for oneself; None if somebody has it. Closing the file gives it back."""
    file = open(path, "a")  # noqa: SIM115  the caller keeps it open as long as the lock is wanted
    os.chmod(path, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return file


def is_locked(path: str) -> bool:
    """Return whether some process holds that lock for itself."""
    try:
        file = open(path)  # noqa: SIM115
    except OSError:
        return False
    with file:
        try:
            # A shared lock, so that two who look at once do not mistake each other for the owner.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return True
            raise
    return False


class State(object):
    """One state folder. Nothing is touched until a method is called."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)

    def path(self, *names: str) -> str:
        """Return the path of something in the folder."""
        return os.path.join(self.root, *names)

    def job_dir(self, job: int, *names: str) -> str:
        """Return a job's own folder, or something in it."""
        return self.path("jobs", str(job), *names)

    def prepare(self) -> None:
        """Make the folders, for this user alone."""
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        os.chmod(self.root, 0o700)
        for name in ("jobs", "queue", "bin"):
            os.makedirs(self.path(name), mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the state's lock.

        Raises:
            LockTimeout: another process kept it for too long.
        """
        self.prepare()
        patience = time.monotonic() + LOCK_PATIENCE
        held = try_lock(self.path("lock"))
        while held is None:
            if time.monotonic() > patience:
                raise LockTimeout(errno.EWOULDBLOCK, "the lock is held by another process", self.path("lock"))
            time.sleep(0.005)
            held = try_lock(self.path("lock"))
        with held:
            yield

    def new_ids(self, count: int) -> int:
        """Reserve ``count`` ids and return the first. Needs the lock."""
        try:
            last = int(read_file(self.path("counter")))
        except (OSError, ValueError):
            last = max(self.all_ids() or [0])
        write_file(self.path("counter"), str(last + count))
        return last + 1

    def load(self, job: int) -> Optional[Record]:
        """Return a job's record, None if there is no such job."""
        try:
            record: Record = json.loads(read_file(self.job_dir(job, "job.json")))
        except (OSError, ValueError):
            return None
        return record

    def save(self, record: Record) -> None:
        """Write a job's record. Needs the lock."""
        write_file(self.job_dir(record["id"], "job.json"), json.dumps(record, sort_keys=True, indent=1))

    def _ids(self, folder: str) -> List[int]:
        try:
            return sorted(int(name) for name in os.listdir(self.path(folder)) if name.isdecimal())
        except OSError:
            return []

    def all_ids(self) -> List[int]:
        """Return every job there ever was, oldest first."""
        return self._ids("jobs")

    def active(self) -> List[Record]:
        """Return the records of all jobs that are not over, oldest first."""
        records = [self.load(job) for job in self._ids("queue")]
        return [record for record in records if record is not None]

    def enqueue(self, job: int) -> None:
        """Note that a job is not over. Needs the lock."""
        os.close(os.open(self.path("queue", str(job)), os.O_WRONLY | os.O_CREAT, 0o600))

    def dequeue(self, job: int) -> None:
        """Note that a job is over. Needs the lock."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path("queue", str(job)))

    def keeper_alive(self, job: int) -> bool:
        """Return whether the process that runs the job lives: it holds a lock that the kernel frees."""
        return is_locked(self.job_dir(job, "keeper.lock"))

    def read_ask(self, job: int) -> str:
        """Return what was asked of a running job: ``cancel``, ``requeue``, ``signal NAME...`` or nothing."""
        try:
            return read_file(self.job_dir(job, "ask")).strip()
        except OSError:
            return ""

    def write_ask(self, job: int, what: str) -> None:
        """Ask something of a running job's keeper. Needs the lock."""
        write_file(self.job_dir(job, "ask"), what)
