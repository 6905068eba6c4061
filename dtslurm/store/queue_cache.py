"""The latest answer of a cluster's scheduler about the user's jobs, in a file shared by the user's processes.

This is a cache: if the files are damaged, foreign, of another version or on a full disk, the only consequence
is another query of the scheduler.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any

from dtslurm.model.own_files import make_own_folder
from dtslurm.model.runs.queue import QueueMemory
from dtslurm.model.runs.state import JobStatus
from dtslurm.model.values import dataclass
from dtslurm.store.codec import plain, status_from
from dtslurm.transport.deletion import remove

_SCHEMA = 1
_STALE_LOCK_S = 60.0  # longer than any query: the lock's holder is stopped, and its lock is ignored
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class SharedQueue:
    """The queue state that the user's processes share, and the limits on queries of the scheduler.

    Attributes:
        generation: the value of `QueueCache.generation` at the time of the query.
        tokens: the number of queries allowed now, as of ``tokens_at``.
        slowness: factor of the time between queries: 1, doubled with each slow answer.
        jitter: another factor of that time, so that the queries of many users do not coincide.
        failures: consecutive failed queries, the last at ``failed_at`` with the error ``trouble``.
    """

    memory: QueueMemory = field(default_factory=QueueMemory)
    generation: str = ""
    tokens: float = 0.0
    tokens_at: float = 0.0
    slowness: float = 1.0
    jitter: float = 1.0
    failures: int = 0
    failed_at: float = 0.0
    trouble: str = ""


class QueueCache:
    """The files of one cluster: the cache, its lock, and a generation file that changes when dtslurm changes
    jobs.

    The constructor does not touch the file system.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self.name = folder, name
        self._path = folder / f"{name}.json"
        self._lock = folder / f"{name}.lock"
        self._generation_path = folder / f"{name}.changed"

    def read(self) -> SharedQueue:
        """Return the cached state; an empty one if the file is missing or invalid."""
        try:
            document = json.loads(_read_own_file(self._path))
            if not isinstance(document, dict) or document.pop("schema") != _SCHEMA:
                return SharedQueue()
            memory = _parse_memory(document.pop("memory"))
            queue = SharedQueue(memory=memory, **document)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return SharedQueue()
        numbers = [getattr(queue, key) for key in ("tokens", "tokens_at", "slowness", "jitter", "failed_at")]
        has_numbers = all(
            isinstance(value, int | float) for value in [*numbers, memory.asked_at, memory.took_s]
        )
        return queue if has_numbers and isinstance(queue.failures, int) else SharedQueue()

    def write(self, queue: SharedQueue) -> None:
        """Replace the cached state; if that fails, other processes query the scheduler themselves."""
        values = {key: value for key, value in vars(queue).items() if key != "memory"}
        memory = plain(replace(queue.memory, jobs=(), ended=()))
        memory |= {
            key: [_encode_status(job) for job in getattr(queue.memory, key)] for key in ("jobs", "ended")
        }
        document = {"schema": _SCHEMA, "memory": memory, **values}
        with contextlib.suppress(OSError):
            _replace_file(self._path, json.dumps(document).encode("ascii"))

    def generation(self) -> str:
        """Return a string that differs after each `change`."""
        try:
            return _read_own_file(self._generation_path).decode("ascii", "replace")
        except OSError:
            return ""

    def change(self) -> bool:
        """Invalidate the cache, because jobs were changed; return whether that succeeded."""
        try:
            _replace_file(self._generation_path, os.urandom(8).hex().encode())
        except OSError:  # a full or read-only home
            try:
                return remove(self._path, within=self._folder)
            except OSError:
                return False
        return True

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Try once to lock the right to query the scheduler; yield whether the lock was acquired.

        On a file system without locks every caller acquires it. The kernel releases the lock of a process
        that ends; the lock of a stopped process expires after `_STALE_LOCK_S` seconds.
        """
        try:
            lock_fd = self._acquire_lock()
        except BlockingIOError:
            yield False
            return
        except OSError:
            yield True
            return
        try:
            yield True
        finally:
            os.close(lock_fd)

    def _acquire_lock(self) -> int:
        _make_private_folder(self._folder)
        while True:
            lock_fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_lock_file(lock_fd):
                    os.utime(lock_fd)
                    return lock_fd
            except BlockingIOError:
                if time.time() - os.fstat(lock_fd).st_mtime < _STALE_LOCK_S:
                    os.close(lock_fd)
                    raise
                if self._is_lock_file(lock_fd):
                    remove(self._lock, within=self._folder)
            except OSError:
                os.close(lock_fd)
                raise
            os.close(lock_fd)

    def _is_lock_file(self, descriptor: int) -> bool:
        """Whether the opened file is still the lock file."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._lock.stat())
        except OSError:
            return False


def _parse_memory(document: Mapping[str, Any]) -> QueueMemory:
    values = dict(document)
    for key in ("jobs", "ended"):
        values[key] = tuple(_parse_status(item) for item in values.get(key, ()))
    values["looked"] = {str(key): (float(at), int(times)) for key, (at, times) in values["looked"].items()}
    values["columns"] = tuple(str(item) for item in values["columns"])
    return QueueMemory(**values)


_DEFAULTS = {item.name: item.default for item in fields(JobStatus)}


def _encode_status(status: JobStatus) -> dict[str, Any]:
    """Return a status as JSON-serializable data without default values, because there may be 100,000 jobs."""
    values = {name: value for name, value in vars(status).items() if value != _DEFAULTS[name]}
    return {**values, "state": status.state.name, "flags": sorted(flag.name for flag in status.flags)}


_FIELD_TYPES = {item.name: str(item.type) for item in fields(JobStatus)}


def _parse_status(document: Mapping[str, Any]) -> JobStatus:
    status = status_from(document)
    for name, kind in _FIELD_TYPES.items():
        value = getattr(status, name)
        if (kind == "str" and not isinstance(value, str)) or (
            kind == "int | None" and not (value is None or isinstance(value, int))
        ):
            raise TypeError(f"{name} is {value!r}")
    return status


def _read_own_file(path: Path) -> bytes:
    """Return the content of a regular file that belongs to this user and that no other user can write."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise OSError(f"{path} belongs to another user")
        return file.read(_MAX_BYTES)


def _make_private_folder(folder: Path) -> None:
    make_own_folder(folder)
    folder.chmod(0o700)


def _replace_file(path: Path, data: bytes) -> None:
    _make_private_folder(path.parent)
    temp_path = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(temp_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temp_path.replace(path)
    except OSError:
        remove(temp_path, within=path.parent)
        raise
