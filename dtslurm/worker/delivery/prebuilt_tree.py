"""A code folder made ahead of time, so that the next submission of a large tree only changes what differs.

After a run was placed, and nobody waits any more, its tree is linked together once more beside the objects::

    <objects>/spare/<name>/tree     folders, links to objects
    <objects>/spare/<name>/list     what they are: the request's ``tree``, JSON packed by zlib

The next run of the same name takes it by a rename, which only one can do, and makes it its own ``code/``.
It is a convenience: without one, or where it is not what it should be, the tree is laid out anew.
"""

import contextlib
import json
import os
import re
import zlib
from typing import Any, Callable, Dict, List, Optional, Sequence

from ..lib.disk import WorkerError, create, make_folders, raw, remove_tree, write_all
from .install_run import Entry, Layer, folders_of, lay_all
from .objects import Objects, lack_of_room

LEAST = 2000  # files and links: fewer are laid out as fast
NAME = re.compile(r"[0-9a-f]{32}\Z")
NICE = 10

Known = Dict[str, Entry]


def folder_of(request: Dict[str, Any]) -> Optional[bytes]:
    """Return where a request's spare tree lies; None if it wants none."""
    name = request.get("spare")
    if not isinstance(name, str) or not NAME.match(name) or len(request["tree"] or ()) < LEAST:
        return None
    return os.path.join(raw(request["objects"]), b"spare", name.encode())


def take_spare(request: Dict[str, Any], objects: Objects, staging: bytes, code: bytes) -> bool:
    """Make ``code`` out of the spare tree; whether that was done. If not, nothing of it is there.

    Raises:
        Outcome: contents are missing; the spare tree is back in its place.
    """
    place = folder_of(request)
    if place is None:
        return False
    taken = os.path.join(staging, b"spare")
    try:
        os.rename(place, taken)
        with open(os.path.join(taken, b"list"), "rb") as file:
            listed = json.loads(zlib.decompress(file.read()).decode("ascii"))
        had = {entry[0]: entry for entry in listed}  # type: Known
        changed = changes(had, request["tree"], os.path.join(taken, b"tree"), objects)
        missing = {key: size for _, key, size in changed if key is not None and not objects.has(key, size)}
        if missing:
            with contextlib.suppress(OSError):
                os.rename(taken, place)
            lack_of_room(objects, missing)
            raise WorkerError("missing", sorted(missing))
        os.rename(os.path.join(taken, b"tree"), code)
    except (OSError, ValueError, TypeError, AttributeError, zlib.error):
        return False
    try:
        if revise(request, objects, had, changed, code):
            return True
    except OSError:
        pass
    remove_tree(code)
    return False


def changes(had: Known, tree: Sequence[Entry], folder: bytes, objects: Objects) -> List[Entry]:
    """Return the entries that the spare tree does not have, or not as they were linked."""
    changed = []
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # short paths are found sooner
    try:
        for entry in tree:
            path, key, detail = entry
            if had.get(path) != entry:
                changed.append(entry)
            elif key is not None:
                try:
                    found = os.stat(raw(path), dir_fd=top, follow_symlinks=False)
                    if objects.is_genuine(key, detail, found, raw(path), top):
                        continue
                except OSError:
                    pass
                changed.append(entry)
    finally:
        os.close(top)
    return changed


def revise(
    request: Dict[str, Any], objects: Objects, had: Known, changed: Sequence[Entry], code: bytes
) -> bool:
    """Make a tree what the request wants; whether all of it is there now."""
    wanted = {path for path, _, _ in request["tree"]}
    gone = had.keys() - wanted
    for path in [*gone, *(path for path, _, _ in changed)]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(os.path.join(code, raw(path)))
    if gone or len(wanted) > len(had):
        before, after = folders_of(list(had)), folders_of(list(wanted))
        for folder in sorted(before - after, reverse=True):
            os.rmdir(os.path.join(code, raw(folder)))
        for folder in sorted(after - before):
            os.mkdir(os.path.join(code, raw(folder)), 0o700)
    make_folders(os.path.join(code, raw(request["inside"])).rstrip(b"/"))
    layer = Layer(objects, code, os.path.join(raw(request["run_dir"]), b"code"))
    for entry in changed:
        layer.lay(entry)
    objects.write_seals()
    return not layer.missing


def make_spare(request: Dict[str, Any]) -> None:
    """Lay a spare tree of the request's files out, unless there is one."""
    place = folder_of(request)
    if place is None or os.path.lexists(place):
        return
    objects = Objects(raw(request["objects"]))
    root = os.path.dirname(raw(request["run_dir"]))
    # Named as deliveries' own: what is left by one that was killed goes with theirs.
    staging = os.path.join(root, ".dtslurm-{}-{}".format(os.geteuid(), os.urandom(6).hex()).encode())
    os.mkdir(staging, 0o700)
    try:
        layer = lay_all(request, objects, os.path.join(staging, b"tree"))
        if layer.missing or not layer.linking:
            return
        fd = create(os.path.join(staging, b"list"))
        try:
            write_all(fd, zlib.compress(json.dumps(request["tree"]).encode("ascii"), 1))
        finally:
            os.close(fd)
        make_folders(os.path.dirname(place))
        os.rename(staging, place)
    except (OSError, WorkerError):
        pass  # another was faster, or the disk is full: the next run is laid out anew
    finally:
        remove_tree(staging)


def detached(act: Callable[[], None]) -> None:
    """Do something in a process of its own, for which nobody waits."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.nice(NICE)
            act()
    finally:
        os._exit(0)
