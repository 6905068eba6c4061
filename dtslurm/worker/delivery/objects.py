"""A store of file contents by digest, shared by all runs of one user.

An object is named by its digest; a final x marks an executable. Objects are read-only and have the
modification time ``STAMP``, so an object that was written to is detected and replaced. Runs contain hard
links to objects, so a job could modify an object and reset its modification time. Programs cannot set the
change time (ctime). The file ``seals`` has the ctime of each object at which its content was last verified.
If the ctime differs, the content is hashed again.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from ..lib.disk import (
    WorkerError,
    create,
    do_in_parallel,
    doing,
    make_folders,
    room,
    sync_folder,
    text,
    write_all,
)
from ..lib.json_records import read_object

STAMP = 1000000000  # 2001-09-09: older than any build product (make), valid in zip (from 1980 on)
DIGEST_LENGTH = 32  # hex digits of SHA-256: 128 bits
NAME = re.compile(r"[0-9a-f]{32}x?\Z")
NAMES = re.compile(r"(?:[0-9a-f]{32}x?\n)*\Z")  # matches all names in a single search
BATCH_FILES, BATCH_BYTES = 256, 32 << 20
SEALS, MOST_SEALS = b"seals", 200_000

Waiting = Tuple[int, bytes, str]  # open descriptor, temporary path, object name

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class Objects:
    """A folder of file contents by digest, shared by the runs of one user."""

    def __init__(self, folder: bytes) -> None:
        self.folder = folder
        self._temp = os.path.join(folder, b"tmp")
        self._seals: Optional[Dict[str, int]] = None
        self._new_seals: Dict[str, int] = {}
        self._waiting: List[Waiting] = []
        self._waiting_bytes = 0

    def prepare(self) -> None:
        """Create the folder.

        Raises:
            WorkerError: other users could write to the folder.
        """
        with doing("make", self.folder):
            make_folders(self._temp)
            status = os.stat(self.folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise WorkerError("refused", "other users can write to {}".format(text(self.folder)))

    def path(self, key: str) -> bytes:
        """Return the path of an object."""
        return self.folder + b"/" + key[:2].encode() + b"/" + key[2:].encode()

    def has(self, key: str, size: int) -> bool:
        """Return whether an object exists, complete and unmodified."""
        path = self.path(key)
        try:
            status = os.lstat(path)
        except OSError:
            return False
        return self.is_genuine(key, size, status, path)

    def is_genuine(
        self, key: str, size: int, status: os.stat_result, path: bytes, folder: Optional[int] = None
    ) -> bool:
        """Return whether the content of an object, or of a hard link to it, matches its digest.

        Args:
            status: the file's status.
            folder: descriptor of the folder that ``path`` is relative to.
        """
        if not is_whole(status, size):
            return False
        if self._read_seal(key) == status.st_ctime_ns:
            return True
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            return False
        digest = hashlib.sha256()
        with open(fd, "rb", buffering=0) as file:
            for part in iter(lambda: file.read(1 << 20), b""):
                digest.update(part)
        if digest.hexdigest()[:DIGEST_LENGTH] != key[:DIGEST_LENGTH]:
            return False
        self._new_seals[key] = status.st_ctime_ns
        return True

    def _read_seal(self, key: str) -> Optional[int]:
        if self._seals is None:
            self._seals = read_object(os.path.join(self.folder, SEALS))
        return self._new_seals.get(key, self._seals.get(key))

    def write_seals(self) -> None:
        """Save the ctimes of verified objects. If this fails, the next submission hashes them again."""
        if not self._new_seals:
            return
        seals = {**(self._seals or {}), **self._new_seals}
        if len(seals) > MOST_SEALS:
            seals = self._new_seals
        temp = os.path.join(self._temp, os.urandom(12).hex().encode())
        with contextlib.suppress(OSError):
            fd = create(temp)
            try:
                write_all(fd, json.dumps(seals).encode("ascii"))
                os.fchmod(fd, 0o400)
                os.rename(temp, os.path.join(self.folder, SEALS))
            except OSError:
                os.unlink(temp)
            finally:
                os.close(fd)

    def link(self, key: str, target: bytes, size: int, final: bytes) -> Optional[bool]:
        """Link an object into the run.

        Return False if this object cannot be linked, None if no object can.
        """
        if not self.has(key, size):
            return False
        try:
            os.link(self.path(key), target, follow_symlinks=False)
            status = os.lstat(target)
            if is_whole(status, size):
                self._new_seals[key] = status.st_ctime_ns
                return True
            os.unlink(target)
        except OSError as error:
            if error.errno in _NO_LINKS:
                return None
            if error.errno not in (errno.EMLINK, errno.ENOENT, errno.ENOTDIR):
                with doing("write", final):
                    raise
        return False

    def add(self, key: str, parts: Iterable[bytes]) -> None:
        """Write an object under a temporary name; `settle` syncs it to disk and gives it its name."""
        if not NAME.match(key):
            raise WorkerError("refused", "{!r} is not an object".format(key))
        temp = os.path.join(self._temp, os.urandom(12).hex().encode())
        with doing("write", self.path(key)):
            fd = create(temp)
            try:
                digest, length = hashlib.sha256(), 0
                for part in parts:
                    digest.update(part)
                    write_all(fd, part)
                    length += len(part)
                require_same(digest.hexdigest(), key)
                os.fchmod(fd, 0o500 if key.endswith("x") else 0o400)
                os.utime(fd, (STAMP, STAMP))
            except BaseException:
                os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(temp)
                raise
        self._waiting.append((fd, temp, key))
        self._waiting_bytes += length
        if len(self._waiting) >= BATCH_FILES or self._waiting_bytes >= BATCH_BYTES:
            self.settle()

    def settle(self) -> None:
        """Sync the added objects to disk and give them their names.

        If one object of a batch cannot be written, the batch is lost; earlier batches are kept.
        """
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0

        def sync(waiting_file: Waiting) -> None:
            with doing("write", self.path(waiting_file[2])):
                os.fsync(waiting_file[0])

        try:
            do_in_parallel(waiting, sync)
            self._publish(waiting)
        finally:
            for fd, temp, _ in waiting:
                os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(temp)

    def _publish(self, waiting: Sequence[Waiting]) -> None:
        made_folders = set()
        for fd, temp, key in waiting:
            path = self.path(key)
            if self.has(key, os.fstat(fd).st_size):
                continue  # another process was faster, or the object existed: all runs share the first one
            with doing("write", path):
                folder = os.path.dirname(path)
                if folder not in made_folders:
                    make_folders(folder)
                    made_folders.add(folder)
                os.rename(temp, path)
            self._new_seals[key] = os.fstat(fd).st_ctime_ns
        do_in_parallel(sorted(made_folders), sync_folder)


def choose_objects_folder(folder: bytes) -> bytes:
    """Return ``folder``, or ``folder`` with the user id as a suffix if another user owns it."""
    own_folder = folder + "-{}".format(os.geteuid()).encode()
    if os.path.lexists(own_folder):
        return own_folder
    try:
        return folder if os.lstat(folder).st_uid == os.geteuid() else own_folder
    except OSError:
        return folder


def require_same(digest: str, key: str) -> None:
    """Reject content that does not match the object's name."""
    if digest[:DIGEST_LENGTH] != key[:DIGEST_LENGTH]:
        raise WorkerError("refused", "the content of object {} does not match its checksum".format(key))


def is_whole(status: os.stat_result, size: int) -> bool:
    """Return whether an object's file has the right size, and has not been written to since its creation."""
    return status.st_size == size and status.st_mtime == STAMP and stat.S_ISREG(status.st_mode)


def lack_of_room(objects: Objects, missing: Dict[str, int]) -> None:
    """Report a full disk before the missing objects are sent.

    Raises:
        WorkerError: the disk has less free space than the missing objects need.
    """
    free_space = room(objects.folder + b"/.")
    if "trouble" not in free_space and sum(missing.values()) > free_space["free"]:
        with doing("write", objects.folder + b"/."):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def copy(objects: Objects, key: str, size: int, target: bytes, final: bytes) -> bool:
    """Copy an object into the run; return False if the object is missing or damaged."""
    if not objects.has(key, size):
        return False
    with doing("write", final):
        source = os.open(objects.path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fd = create(target)
            try:
                for part in iter(lambda: os.read(source, 1 << 20), b""):
                    write_all(fd, part)
                os.fchmod(fd, 0o500 if key.endswith("x") else 0o400)
                os.utime(fd, (STAMP, STAMP))
                os.fsync(fd)
            finally:
                os.close(fd)
        finally:
            os.close(source)
    return True
