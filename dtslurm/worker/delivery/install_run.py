"""Places a run directory: built beside its place, and moved there as the last act."""

import errno
import os
import re
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from ..lib.disk import (
    WorkerError,
    create,
    do_in_parallel,
    doing,
    make_folders,
    raw,
    remove_tree,
    swappable,
    sync_folder,
    text,
    write_all,
)
from .code_files import LIST, encode_list
from .objects import NAME, NAMES, Objects, copy, lack_of_room

TRIAL, SLOW_S = 64, 0.0003  # files laid out to see whether one takes that many seconds

AWRY = re.compile(r"(?:^|[/\0])\.{0,2}(?:[/\0]|\Z)")  # an empty part of a path, or one that leads elsewhere

Entry = Tuple[str, Optional[str], Any]


def check(request: Dict[str, Any]) -> None:
    """Refuse a request that would write anywhere but below its run directory and its objects."""
    for key in ("run_dir", "objects"):
        path = request[key]
        if not path.startswith("/") or "\0" in path or os.path.normpath(path) != path or path in ("/", "//"):
            raise WorkerError("refused", "{} {!r} is not a full, plain path".format(key, path))
    check_paths(request)
    tree = request["tree"] or ()
    names = [entry[1] + "\n" for entry in tree if entry[1] is not None]
    together = "".join(names)
    if together.count("\n") != len(names) or not NAMES.match(together):
        odd = next(entry for entry in tree if entry[1] is not None and not NAME.match(entry[1]))
        raise WorkerError("refused", "{!r} is no object ({!r})".format(odd[1], odd[0]))


def check_paths(request: Dict[str, Any]) -> None:
    """Refuse paths that lead elsewhere, or stand in each other's way."""
    leaves = [LIST] + [entry[0] for entry in request["files"]]
    leaves += ["code/" + entry[0] for entry in request["tree"] or ()]
    paths = leaves + (["code/" + request["inside"]] if request["inside"] else [])
    together = "\0".join(paths)  # one search for all: ten thousand take a while
    if together.count("\0") >= len(paths) > 0 or AWRY.search(together):
        for path in paths:
            if "\0" in path or AWRY.search(path):
                raise WorkerError("refused", "{!r} is not a path below the run directory".format(path))
    folders: Set[str] = set()
    for folder in {path.rpartition("/")[0] for path in paths}:
        folders.update([folder] if folder else [], parents(folder))
    if request["inside"]:
        folders.add("code/" + request["inside"])
    if len(set(leaves)) != len(leaves):
        raise WorkerError("refused", "a path is named twice")
    for path in sorted(folders.intersection(leaves)):
        raise WorkerError("refused", "{!r} cannot be a folder and a file or link at once".format(path))


def parents(path: str) -> Iterator[str]:
    """Yield the folders above a path, the nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def place(
    request: Dict[str, Any], objects: Objects, made: Optional[Callable[[bytes, bytes], bool]] = None
) -> None:
    """Build the run directory beside its place and move it there as the last act.

    ``made`` may make the code folder faster than by laying it out: (staging folder, code folder) to whether
    it did.
    """
    run_dir = raw(request["run_dir"])
    root = os.path.dirname(run_dir)
    with doing("make", root):
        make_folders(root)
        why = swappable(root)
    if why:
        raise WorkerError("unsafe", why)
    if os.path.lexists(run_dir):
        raise WorkerError("exists", text(run_dir))
    # Two levels deep: a search for */job.json in the run root does not take an unfinished one for a run.
    staging = os.path.join(root, ".dtslurm-{}-{}".format(os.geteuid(), os.urandom(6).hex()).encode())
    with doing("make", run_dir):
        os.mkdir(staging, 0o700)
    try:
        build = os.path.join(staging, b"run")
        with doing("make", run_dir):
            os.mkdir(build, 0o700)
        code = os.path.join(build, b"code")
        if request["tree"] is not None and not (made and made(staging, code)):
            materialize(request, objects, code)
        files = list(request["files"])
        if request["tree"] is not None:
            files.append([LIST, 0o600, encode_list(request["tree"]).decode("latin-1")])
        folders = {os.path.dirname(os.path.join(build, raw(name))) for name, _, _ in files}
        with doing("make", run_dir):
            for folder in sorted(folders):
                make_folders(folder)
        do_in_parallel(files, lambda file: small_file(build, run_dir, *file))
        # Journals keep the order of what changes folders, and servers do it at once: with the last of them
        # on the disk, those of code/, whose files were there before, are there as well.
        do_in_parallel(sorted(folders | {build}), sync_folder)
        with doing("make", run_dir):
            try:
                os.rename(build, run_dir)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and os.path.lexists(run_dir):
                    raise WorkerError("exists", text(run_dir)) from None
                raise
    finally:
        remove_tree(staging)
    sync_folder(root)


def small_file(build: bytes, run_dir: bytes, name: str, mode: int, content: str) -> None:
    """Write one of the run's own files."""
    with doing("write", os.path.join(run_dir, raw(name))):
        fd = create(os.path.join(build, raw(name)))
        try:
            write_all(fd, content.encode("latin-1"))
            os.fchmod(fd, mode & 0o700)
            os.fsync(fd)
        finally:
            os.close(fd)


def materialize(request: Dict[str, Any], objects: Objects, code: bytes) -> None:
    """Make ``code/``: links to the objects, or copies where the file system refuses links."""
    layer = lay_all(request, objects, code)
    if layer.missing:
        lack_of_room(objects, layer.missing)
        raise WorkerError("missing", sorted(layer.missing))


def lay_all(request: Dict[str, Any], objects: Objects, code: bytes) -> "Layer":
    """Make a code folder as far as its contents are there."""
    tree: List[Entry] = request["tree"]
    final = os.path.join(raw(request["run_dir"]), b"code")
    make_code_folders([entry[0] for entry in tree] + [request["inside"] + "/."], code, final)
    layer = Layer(objects, code, final)
    begin = time.monotonic()
    for entry in tree[:TRIAL]:
        layer.lay(entry)
    if time.monotonic() - begin > SLOW_S * TRIAL:  # a file server: many answers can be waited for at once
        do_in_parallel(tree[TRIAL:], layer.lay)
    else:
        for entry in tree[TRIAL:]:
            layer.lay(entry)
    objects.write_seals()
    return layer


class Layer:
    """Puts files and links into a code folder.

    Attributes:
        missing: sizes of the objects that are not there, by name.
        linking: False once the file system refused a link.
    """

    def __init__(self, objects: Objects, code: bytes, final: bytes) -> None:
        self.missing: Dict[str, int] = {}
        self._objects, self._code, self._final = objects, code + b"/", final + b"/"
        self.linking = True

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
            linked = self._objects.link(key, target, detail, shown) if self.linking else None
            if linked is None:
                self.linking = False
            if not linked and not copy(self._objects, key, detail, target, shown):
                self.missing[key] = detail


def folders_of(paths: Sequence[str]) -> Set[str]:
    """Return the folders that these paths lie in, "" for the uppermost."""
    folders = {""}
    for path in {path.rpartition("/")[0] for path in paths}:
        folders.update([path], parents(path))
    return folders


def make_code_folders(paths: Sequence[str], code: bytes, final: bytes) -> None:
    """Make the folders that these paths lie in."""
    for folder in sorted(folders_of(paths)):
        with doing("make", os.path.join(final, raw(folder))):
            os.mkdir(os.path.join(code, raw(folder)) if folder else code, 0o700)
