"""One user's jobs as one Slurm told them last, kept in a file for every process of that user.

A cache: whatever is wrong with the files (cut, foreign, of another version, on a full disk), the only loss is
that the scheduler is asked again.
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
_HELD_TOO_LONG_S = 60.0  # no question takes that long: who holds the lock was stopped, and is passed over
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class SharedQueue:
    """What all processes know, and how the scheduler may be asked.

    Attributes:
        generation: what `QueueCache.generation` was when the scheduler was asked.
        tokens: requests that may be made now, as of ``tokens_at``.
        slowness: what the time between questions is multiplied by: 1, doubled with each slow answer.
        jitter: the same, so that many users' questions do not fall together.
        failures: questions in a row without an answer, the last at ``failed_at`` with ``trouble``.
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
    """The files of one Slurm: the cache, its lock, and a mark that changes when we change jobs.

    Making one touches nothing.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self.name = folder, name
        self._path = folder / f"{name}.json"
        self._lock = folder / f"{name}.lock"
        self._mark = folder / f"{name}.changed"

    def read(self) -> SharedQueue:
        """Return what is there; an empty value if there is nothing that makes sense."""
        try:
            document = json.loads(_own_bytes(self._path))
            if not isinstance(document, dict) or document.pop("schema") != _SCHEMA:
                return SharedQueue()
            memory = _memory(document.pop("memory"))
            shared = SharedQueue(memory=memory, **document)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return SharedQueue()
        numbers = [getattr(shared, key) for key in ("tokens", "tokens_at", "slowness", "jitter", "failed_at")]
        sound = all(isinstance(value, int | float) for value in [*numbers, memory.asked_at, memory.took_s])
        return shared if sound and isinstance(shared.failures, int) else SharedQueue()

    def write(self, shared: SharedQueue) -> None:
        """Replace what is there; where that cannot be done, other processes will ask for themselves."""
        values = {key: value for key, value in vars(shared).items() if key != "memory"}
        memory = plain(replace(shared.memory, jobs=(), ended=()))
        memory |= {key: [_brief(job) for job in getattr(shared.memory, key)] for key in ("jobs", "ended")}
        document = {"schema": _SCHEMA, "memory": memory, **values}
        with contextlib.suppress(OSError):
            _replace(self._path, json.dumps(document).encode("ascii"))

    def generation(self) -> str:
        """Return a word that is another one after each `change`."""
        try:
            return _own_bytes(self._mark).decode("ascii", "replace")
        except OSError:
            return ""

    def change(self) -> bool:
        """Say that jobs were changed: what was heard is not true any more. Return whether that was said."""
        try:
            _replace(self._mark, os.urandom(8).hex().encode())
        except OSError:  # a full or read-only home
            try:
                return remove(self._path, within=self._folder)
            except OSError:
                return False
        return True

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Try once to be the one who asks; give whether we are. Where there are no locks, everybody is.

        The kernel frees the lock of a process that ends. That of one that was stopped is passed over.
        """
        try:
            descriptor = self._take()
        except BlockingIOError:
            yield False
            return
        except OSError:
            yield True
            return
        try:
            yield True
        finally:
            os.close(descriptor)

    def _take(self) -> int:
        _make(self._folder)
        while True:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is(descriptor):
                    os.utime(descriptor)
                    return descriptor
            except BlockingIOError:
                if time.time() - os.fstat(descriptor).st_mtime < _HELD_TOO_LONG_S:
                    os.close(descriptor)
                    raise
                if self._is(descriptor):
                    remove(self._lock, within=self._folder)
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _is(self, descriptor: int) -> bool:
        """Whether the lock's file is (still) the one that was opened."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._lock.stat())
        except OSError:
            return False


def _memory(document: Mapping[str, Any]) -> QueueMemory:
    values = dict(document)
    for key in ("jobs", "ended"):
        values[key] = tuple(_status(item) for item in values.get(key, ()))
    values["looked"] = {str(key): (float(at), int(times)) for key, (at, times) in values["looked"].items()}
    values["columns"] = tuple(str(item) for item in values["columns"])
    return QueueMemory(**values)


_USUAL = {item.name: item.default for item in fields(JobStatus)}


def _brief(status: JobStatus) -> dict[str, Any]:
    """Return what is not as usual: a hundred thousand jobs must find room."""
    values = {name: value for name, value in vars(status).items() if value != _USUAL[name]}
    return {**values, "state": status.state.name, "flags": sorted(flag.name for flag in status.flags)}


_KINDS = {item.name: str(item.type) for item in fields(JobStatus)}


def _status(document: Mapping[str, Any]) -> JobStatus:
    status = status_from(document)
    for name, kind in _KINDS.items():
        value = getattr(status, name)
        if (kind == "str" and not isinstance(value, str)) or (
            kind == "int | None" and not (value is None or isinstance(value, int))
        ):
            raise TypeError(f"{name} is {value!r}")
    return status


def _own_bytes(path: Path) -> bytes:
    """Return a file's content if it is a plain file of this user's."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise OSError(f"{path} is not ours")
        return file.read(_MOST_BYTES)


def _make(folder: Path) -> None:
    make_own_folder(folder)
    folder.chmod(0o700)


def _replace(path: Path, data: bytes) -> None:
    _make(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        remove(draft, within=path.parent)
        raise
