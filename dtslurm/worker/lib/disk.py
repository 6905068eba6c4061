"""File operations that report errors: files are written whole or not at all, never through foreign links."""

import contextlib
import errno
import os
import stat
import threading
from typing import Any, Callable, Dict, Iterator, List, Sequence, TypeVar

WORKERS = 16

Item = TypeVar("Item")


class WorkerError(Exception):
    """An error that replaces the answer ``done``: its key in the answer, and its value."""

    def __init__(self, key: str, value: Any) -> None:
        Exception.__init__(self, key, value)
        self.key, self.value = key, value


@contextlib.contextmanager
def doing(verb: str, path: bytes) -> Iterator[None]:
    """Convert a disk error into a `WorkerError` with the operation and the path."""
    try:
        yield
    except OSError as error:
        value: Dict[str, Any] = {"errno": error.errno, "verb": verb, "path": text(path)}
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            value["room"] = room(path)
        raise WorkerError("disk", value) from error


def room(path: bytes) -> Dict[str, Any]:
    """Return the mount point of the file system that ``path`` belongs to, and the free space on it."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        folder = os.path.realpath(folder)
        while not os.path.ismount(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        status = os.statvfs(folder)
    except OSError as error:
        return {"trouble": str(error)}
    return {
        "mount": text(folder),
        "free": status.f_bavail * status.f_frsize,
        "total": status.f_blocks * status.f_frsize,
        "files_free": status.f_favail,
        "files": status.f_files,
    }


def text(path: bytes) -> str:
    """Return a path as text; bytes that are not UTF-8 are surrogate-escaped in every locale."""
    return path.decode("utf-8", "surrogateescape")


def raw(path: str) -> bytes:
    """Return the bytes of a path."""
    return path.encode("utf-8", "surrogateescape")


def make_folders(folder: bytes) -> None:
    """Create a folder and its missing parents, each with mode 0700."""
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(path, 0o700)


def swappable(folder: bytes) -> str:
    """Return why other users could replace files in a folder, empty if they cannot.

    The owners of the parent folders could do so too, but they are trusted, like the head of a project.
    """
    path = os.path.realpath(folder)
    if os.stat(path).st_uid not in (0, os.geteuid()):
        return "{} belongs to another user, who could replace the files of your runs".format(text(path))
    while True:
        mode = os.stat(path).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            message = (
                "every user could replace the files of your runs: {} is writable by all users and "
                "has no sticky bit"
            )
            return message.format(text(path))
        if path == os.path.dirname(path):
            return ""
        path = os.path.dirname(path)


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes of ``data``."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def create(path: bytes) -> int:
    """Open a new file for writing; fail if the path exists or is a symbolic link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def sync_folder(folder: bytes) -> None:
    """Flush a folder's entries to the disk; some network file systems cannot do so and need not."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def do_in_parallel(items: Sequence[Item], function: Callable[[Item], None]) -> None:
    """Call ``function`` for many files at once, so that a journal or a file server commits them together.

    Raises:
        OSError, WorkerError: the first error, after all calls have ended.
    """
    queue = list(items)
    errors: List[BaseException] = []

    def work() -> None:
        while True:
            try:
                item = queue.pop()
            except IndexError:
                return
            try:
                function(item)
            except (OSError, WorkerError) as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(min(WORKERS, len(queue)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def remove_tree(folder: bytes) -> None:
    """Remove one of dtslurm's folders as far as possible; ignore errors."""
    for parent, folders, files in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            for name in files:
                os.unlink(os.path.join(parent, name))
            for name in folders:
                subfolder = os.path.join(parent, name)
                if os.path.islink(subfolder):
                    os.unlink(subfolder)
                else:
                    os.rmdir(subfolder)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
