"""Places a run directory: built beside its place, and moved there as the last act."""

import errno
import os
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from .disk import (
    Outcome,
    create,
    doing,
    make_folders,
    raw,
    remove_tree,
    side_by_side,
    sync_folder,
    text,
    write_all,
)
from .objects import NAME, Objects, copy, lack_of_room, link

TRIAL, SLOW_S = 64, 0.0003  # files laid out to see whether one takes that many seconds

Entry = Tuple[str, Optional[str], Any]


def check(request: Dict[str, Any]) -> None:
    """Refuse a request that would write anywhere but below its run directory and its objects."""
    for key in ("run_dir", "objects"):
        path = request[key]
        if not path.startswith("/") or "\0" in path or os.path.normpath(path) != path or path in ("/", "//"):
            raise Outcome("refused", "{} {!r} is not a full, plain path".format(key, path))
    leaves = [entry[0] for entry in request["files"]]
    leaves += ["code/" + entry[0] for entry in request["tree"] or ()]
    folders: Set[str] = set()
    for path in leaves + (["code/" + request["inside"]] if request["inside"] else []):
        if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
            raise Outcome("refused", "{!r} is not a path below the run directory".format(path))
        folders.update(parents(path))
    if request["inside"]:
        folders.add("code/" + request["inside"])
    if len(set(leaves)) != len(leaves):
        raise Outcome("refused", "a path is named twice")
    for path in sorted(folders.intersection(leaves)):
        raise Outcome("refused", "{!r} cannot be a folder and a file or link at once".format(path))
    for path, key, _ in request["tree"] or ():
        if key is not None and not NAME.match(key):
            raise Outcome("refused", "{!r} is no object ({!r})".format(key, path))


def parents(path: str) -> Iterator[str]:
    """Yield the folders above a path, the nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def place(request: Dict[str, Any], objects: Objects) -> None:
    """Build the run directory beside its place and move it there as the last act."""
    run_dir = raw(request["run_dir"])
    root = os.path.dirname(run_dir)
    with doing("make", root):
        make_folders(root)
    if os.path.lexists(run_dir):
        raise Outcome("exists", text(run_dir))
    # Two levels deep: a search for */job.json in the run root does not take an unfinished one for a run.
    staging = os.path.join(root, ".dtslurm-{}-{}".format(os.geteuid(), os.urandom(6).hex()).encode())
    with doing("make", run_dir):
        os.mkdir(staging, 0o700)
    try:
        build = os.path.join(staging, b"run")
        with doing("make", run_dir):
            os.mkdir(build, 0o700)
        if request["tree"] is not None:
            lay_out(request, objects, build)
        for name, mode, content in request["files"]:
            small_file(build, run_dir, raw(name), mode, content.encode("latin-1"))
        side_by_side([folder for folder, _, _ in os.walk(build)], sync_folder)
        with doing("make", run_dir):
            try:
                os.rename(build, run_dir)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and os.path.lexists(run_dir):
                    raise Outcome("exists", text(run_dir)) from None
                raise
    finally:
        remove_tree(staging)
    sync_folder(root)


def small_file(build: bytes, run_dir: bytes, name: bytes, mode: int, content: bytes) -> None:
    """Write one of the run's own files."""
    with doing("write", os.path.join(run_dir, name)):
        path = os.path.join(build, name)
        make_folders(os.path.dirname(path))
        fd = create(path)
        try:
            write_all(fd, content)
            os.fchmod(fd, mode & 0o700)
            os.fsync(fd)
        finally:
            os.close(fd)


def lay_out(request: Dict[str, Any], objects: Objects, build: bytes) -> None:
    """Make ``code/``: links to the objects, or copies where the file system refuses links."""
    tree: List[Entry] = request["tree"]
    code = os.path.join(build, b"code")
    final = os.path.join(raw(request["run_dir"]), b"code")
    make_code_folders([entry[0] for entry in tree] + [request["inside"] + "/."], code, final)
    layer = Layer(objects, code, final)
    begin = time.monotonic()
    for entry in tree[:TRIAL]:
        layer.lay(entry)
    if time.monotonic() - begin > SLOW_S * TRIAL:  # a file server: many answers can be waited for at once
        side_by_side(tree[TRIAL:], layer.lay)
    else:
        for entry in tree[TRIAL:]:
            layer.lay(entry)
    if layer.missing:
        lack_of_room(objects, layer.missing)
        raise Outcome("missing", sorted(layer.missing))


class Layer:
    """Puts files and links into a code folder; ``missing`` gathers the objects that are not there."""

    def __init__(self, objects: Objects, code: bytes, final: bytes) -> None:
        self.missing: Dict[str, int] = {}
        self._objects, self._code, self._final = objects, code + b"/", final + b"/"
        self._linking = True

    def lay(self, entry: Entry) -> None:
        """Put one file or link in its place."""
        path, key, detail = entry
        name = raw(path)
        target, shown = self._code + name, self._final + name
        if key is None:
            with doing("make", shown):
                os.symlink(raw(detail), target)
        elif self.missing:  # nothing will be placed: only see what else is missing
            if key not in self.missing and not self._objects.has(key, detail):
                self.missing[key] = detail
        else:
            linked = link(self._objects.path(key), target, detail, shown) if self._linking else None
            if linked is None:
                self._linking = False
            if not linked and not copy(self._objects, key, detail, target, shown):
                self.missing[key] = detail


def make_code_folders(paths: Sequence[str], code: bytes, final: bytes) -> None:
    """Make the folders that these paths lie in."""
    folders = {""}
    for path in paths:
        for folder in parents(path):
            if folder in folders:
                break
            folders.add(folder)
    for folder in sorted(folders):
        with doing("make", os.path.join(final, raw(folder))):
            os.mkdir(os.path.join(code, raw(folder)) if folder else code, 0o700)
