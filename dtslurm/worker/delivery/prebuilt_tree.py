"""A prebuilt code folder, so that the next submission of a large tree only has to change the differing files.

After a run has been installed and answered, its tree is linked a second time in the objects folder::

    <objects>/spare/<name>/tree     folders, links to objects
    <objects>/spare/<name>/list     their description: the request's ``tree``, JSON compressed by zlib

The next run of the same name acquires the prebuilt tree by a rename, which only one process can do, and turns
it into its own ``code/``. The prebuilt tree is only an optimization: if it is missing or damaged, the code
folder is built from scratch.
"""

import contextlib
import json
import os
import re
import zlib
from typing import Any, Callable, Dict, List, Optional, Sequence

from ..lib.disk import WorkerError, create, make_folders, raw, remove_tree, write_all
from .install_run import CodeFolderWriter, Entry, build_code_folder, folders_of
from .objects import Objects, lack_of_room

LEAST = 2000  # files and links; smaller trees are built from scratch as fast
NAME = re.compile(r"[0-9a-f]{32}\Z")
NICE = 10

Known = Dict[str, Entry]


def folder_of(request: Dict[str, Any]) -> Optional[bytes]:
    """Return the folder of a request's prebuilt tree; None if the request has none."""
    name = request.get("spare")
    if not isinstance(name, str) or not NAME.match(name) or len(request["tree"] or ()) < LEAST:
        return None
    return os.path.join(raw(request["objects"]), b"spare", name.encode())


def take_spare(request: Dict[str, Any], objects: Objects, staging: bytes, code: bytes) -> bool:
    """Turn the prebuilt tree into ``code``; return whether this succeeded.

    On failure ``code`` does not exist.

    Raises:
        WorkerError: objects are missing; the prebuilt tree has been put back.
    """
    prebuilt = folder_of(request)
    if prebuilt is None:
        return False
    acquired = os.path.join(staging, b"spare")
    try:
        os.rename(prebuilt, acquired)
        with open(os.path.join(acquired, b"list"), "rb") as file:
            entries = json.loads(zlib.decompress(file.read()).decode("ascii"))
        old_entries = {entry[0]: entry for entry in entries}  # type: Known
        changed = changes(old_entries, request["tree"], os.path.join(acquired, b"tree"), objects)
        missing = {key: size for _, key, size in changed if key is not None and not objects.has(key, size)}
        if missing:
            with contextlib.suppress(OSError):
                os.rename(acquired, prebuilt)
            lack_of_room(objects, missing)
            raise WorkerError("missing", sorted(missing))
        os.rename(os.path.join(acquired, b"tree"), code)
    except (OSError, ValueError, TypeError, AttributeError, zlib.error):
        return False
    try:
        if revise(request, objects, old_entries, changed, code):
            return True
    except OSError:
        pass
    remove_tree(code)
    return False


def changes(had: Known, tree: Sequence[Entry], folder: bytes, objects: Objects) -> List[Entry]:
    """Return the entries that the prebuilt tree lacks, or whose links have changed."""
    changed = []
    # Paths relative to a folder descriptor are resolved faster.
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in tree:
            path, key, detail = entry
            if had.get(path) != entry:
                changed.append(entry)
            elif key is not None:
                try:
                    status = os.stat(raw(path), dir_fd=top, follow_symlinks=False)
                    if objects.is_genuine(key, detail, status, raw(path), top):
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
    """Change a tree to match the request; return whether it is complete."""
    new_paths = {path for path, _, _ in request["tree"]}
    removed_paths = had.keys() - new_paths
    for path in [*removed_paths, *(path for path, _, _ in changed)]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(os.path.join(code, raw(path)))
    if removed_paths or len(new_paths) > len(had):
        old_folders, new_folders = folders_of(list(had)), folders_of(list(new_paths))
        for folder in sorted(old_folders - new_folders, reverse=True):
            os.rmdir(os.path.join(code, raw(folder)))
        for folder in sorted(new_folders - old_folders):
            os.mkdir(os.path.join(code, raw(folder)), 0o700)
    make_folders(os.path.join(code, raw(request["inside"])).rstrip(b"/"))
    layer = CodeFolderWriter(objects, code, os.path.join(raw(request["run_dir"]), b"code"))
    for entry in changed:
        layer.lay(entry)
    objects.write_seals()
    return not layer.missing


def make_spare(request: Dict[str, Any]) -> None:
    """Build a prebuilt tree of the request's files, unless one exists."""
    prebuilt = folder_of(request)
    if prebuilt is None or os.path.lexists(prebuilt):
        return
    objects = Objects(raw(request["objects"]))
    root = os.path.dirname(raw(request["run_dir"]))
    # The name is that of a delivery's staging folder: leftovers of a killed process are cleaned up with
    # those.
    staging = os.path.join(root, ".dtslurm-{}-{}".format(os.geteuid(), os.urandom(6).hex()).encode())
    os.mkdir(staging, 0o700)
    try:
        layer = build_code_folder(request, objects, os.path.join(staging, b"tree"))
        if layer.missing or not layer.linking:
            return
        fd = create(os.path.join(staging, b"list"))
        try:
            write_all(fd, zlib.compress(json.dumps(request["tree"]).encode("ascii"), 1))
        finally:
            os.close(fd)
        make_folders(os.path.dirname(prebuilt))
        os.rename(staging, prebuilt)
    except (OSError, WorkerError):
        pass  # another process was faster, or the disk is full: the next run builds its code folder
    finally:
        remove_tree(staging)


def run_detached(function: Callable[[], None]) -> None:
    """Run a function in a detached background process."""
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
            function()
    finally:
        os._exit(0)
