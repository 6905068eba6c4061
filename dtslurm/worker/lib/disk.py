"""Files on a disk that may refuse: whole or not at all, and never through somebody else's link."""

import contextlib
import errno
import os
import stat
import threading
from typing import Any, Callable, Dict, Iterator, List, Sequence, TypeVar

WORKERS = 16

Item = TypeVar("Item")


class WorkerError(Exception):
    """What is answered instead of ``done``."""

    def __init__(self, key: str, value: Any) -> None:
        Exception.__init__(self, key, value)
        self.key, self.value = key, value


@contextlib.contextmanager
def doing(verb: str, path: bytes) -> Iterator[None]:
    """Turn a refusal of the disk into an answer that says what was being done, and where."""
    try:
        yield
    except OSError as error:
        value: Dict[str, Any] = {"errno": error.errno, "verb": verb, "path": text(path)}
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            value["room"] = room(path)
        raise WorkerError("disk", value) from error


def room(path: bytes) -> Dict[str, Any]:
    """Return the mount point of the file system that ``path`` is or would be on, and what is left there."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        folder = os.path.realpath(folder)
        while not os.path.ismount(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        found = os.statvfs(folder)
    except OSError as error:
        return {"trouble": str(error)}
    return {
        "mount": text(folder),
        "free": found.f_bavail * found.f_frsize,
        "total": found.f_blocks * found.f_frsize,
        "files_free": found.f_favail,
        "files": found.f_files,
    }


def text(path: bytes) -> str:
    """Return a path as text; bytes that are not UTF-8 are surrogate-escaped, whatever the locale."""
    return path.decode("utf-8", "surrogateescape")


def raw(path: str) -> bytes:
    """Return a path's bytes."""
    return path.encode("utf-8", "surrogateescape")


def make_folders(folder: bytes) -> None:
    """Make a folder and those above it, each 0700."""
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for made in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(made, 0o700)


def swappable(folder: bytes) -> str:
    """Return why others could put something in place of what is in a folder, empty if they cannot.

    The owners of the folders above it could, too: they are trusted, as the head of a project is.
    """
    place = os.path.realpath(folder)
    if os.stat(place).st_uid not in (0, os.geteuid()):
        return "{} belongs to another user, who may swap the files of your runs".format(text(place))
    while True:
        mode = os.stat(place).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            why = "every user there may swap the files of runs: {} is writable by all, without the sticky bit"
            return why.format(text(place))
        if place == os.path.dirname(place):
            return ""
        place = os.path.dirname(place)


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def create(path: bytes) -> int:
    """Open a new file for writing; never an old one, never through a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def sync_folder(folder: bytes) -> None:
    """Bring a folder's entries to the disk; some network file systems cannot, and need not."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def do_in_parallel(items: Sequence[Item], act: Callable[[Item], None]) -> None:
    """Do the same to many files at once: a journal or a file server then commits them together.

    The first error is raised when all are done.
    """
    queue = list(items)
    failed: List[BaseException] = []

    def work() -> None:
        while True:
            try:
                item = queue.pop()
            except IndexError:
                return
            try:
                act(item)
            except (OSError, WorkerError) as error:
                failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(min(WORKERS, len(queue)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def remove_tree(folder: bytes) -> None:
    """Remove a folder of ours as far as the disk lets us."""
    for place, folders, files in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            for name in files:
                os.unlink(os.path.join(place, name))
            for name in folders:
                inner = os.path.join(place, name)
                if os.path.islink(inner):
                    os.unlink(inner)
                else:
                    os.rmdir(inner)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
