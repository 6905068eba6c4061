"""Install a run directory: build it under a temporary name, and rename it as the last step."""

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

TRIAL, SLOW_S = 64, 0.0003  # number of files created to measure whether one takes longer than this

AWRY = re.compile(r"(?:^|[/\0])\.{0,2}(?:[/\0]|\Z)")  # an empty, "." or ".." component of a path

Entry = Tuple[str, Optional[str], Any]


def check(request: Dict[str, Any]) -> None:
    """Reject a request that would write outside its run directory and its objects folder."""
    for key in ("run_dir", "objects"):
        path = request[key]
        if not path.startswith("/") or "\0" in path or os.path.normpath(path) != path or path in ("/", "//"):
            raise WorkerError("refused", "{} {!r} is not an absolute, normalized path".format(key, path))
    check_paths(request)
    tree = request["tree"] or ()
    names = [entry[1] + "\n" for entry in tree if entry[1] is not None]
    joined = "".join(names)
    if joined.count("\n") != len(names) or not NAMES.match(joined):
        invalid = next(entry for entry in tree if entry[1] is not None and not NAME.match(entry[1]))
        raise WorkerError("refused", "{!r} is not an object ({!r})".format(invalid[1], invalid[0]))


def check_paths(request: Dict[str, Any]) -> None:
    """Reject paths that leave the run directory, or that conflict with each other."""
    file_paths = [LIST] + [entry[0] for entry in request["files"]]
    file_paths += ["code/" + entry[0] for entry in request["tree"] or ()]
    paths = file_paths + (["code/" + request["inside"]] if request["inside"] else [])
    joined = "\0".join(paths)  # one search for all paths: separate searches are slow for ten thousand paths
    if joined.count("\0") >= len(paths) > 0 or AWRY.search(joined):
        for path in paths:
            if "\0" in path or AWRY.search(path):
                raise WorkerError("refused", "{!r} is not a path below the run directory".format(path))
    folders: Set[str] = set()
    for folder in {path.rpartition("/")[0] for path in paths}:
        folders.update([folder] if folder else [], parents(folder))
    if request["inside"]:
        folders.add("code/" + request["inside"])
    if len(set(file_paths)) != len(file_paths):
        raise WorkerError("refused", "a path occurs twice")
    for path in sorted(folders.intersection(file_paths)):
        raise WorkerError("refused", "{!r} cannot be a folder and a file or link at once".format(path))


def parents(path: str) -> Iterator[str]:
    """Yield the parent folders of a path, the nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def place(
    request: Dict[str, Any],
    objects: Objects,
    build_code: Optional[Callable[[bytes, bytes], bool]] = None,
) -> None:
    """Build the run directory under a temporary name, and rename it as the last step.

    ``build_code`` is an optional faster way to build the code folder: it takes (staging folder, code folder),
    and returns whether it has built the code folder.
    """
    run_dir = raw(request["run_dir"])
    root = os.path.dirname(run_dir)
    with doing("make", root):
        make_folders(root)
        problem = swappable(root)
    if problem:
        raise WorkerError("unsafe", problem)
    if os.path.lexists(run_dir):
        raise WorkerError("exists", text(run_dir))
    # Two levels deep: a search for */job.json in the run root must not find an unfinished run.
    staging = os.path.join(root, ".dtslurm-{}-{}".format(os.geteuid(), os.urandom(6).hex()).encode())
    with doing("make", run_dir):
        os.mkdir(staging, 0o700)
    try:
        build = os.path.join(staging, b"run")
        with doing("make", run_dir):
            os.mkdir(build, 0o700)
        code = os.path.join(build, b"code")
        if request["tree"] is not None and not (build_code and build_code(staging, code)):
            materialize(request, objects, code)
        files = list(request["files"])
        if request["tree"] is not None:
            files.append([LIST, 0o600, encode_list(request["tree"]).decode("latin-1")])
        folders = {os.path.dirname(os.path.join(build, raw(name))) for name, _, _ in files}
        with doing("make", run_dir):
            for folder in sorted(folders):
                make_folders(folder)
        do_in_parallel(files, lambda file: small_file(build, run_dir, *file))
        # Journaling file systems keep the order of folder changes, and file servers apply them at once: when
        # the last of them is on disk, those of code/ are too. The files of code/ were on disk before.
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
    """Create ``code/`` with links to the objects, or with copies if the file system rejects links."""
    layer = build_code_folder(request, objects, code)
    if layer.missing:
        lack_of_room(objects, layer.missing)
        raise WorkerError("missing", sorted(layer.missing))


def build_code_folder(request: Dict[str, Any], objects: Objects, code: bytes) -> "CodeFolderWriter":
    """Create a code folder from the available objects."""
    tree: List[Entry] = request["tree"]
    final = os.path.join(raw(request["run_dir"]), b"code")
    make_code_folders([entry[0] for entry in tree] + [request["inside"] + "/."], code, final)
    layer = CodeFolderWriter(objects, code, final)
    started_at = time.monotonic()
    for entry in tree[:TRIAL]:
        layer.lay(entry)
    # Slow, probably a file server: parallel requests hide its latency.
    if time.monotonic() - started_at > SLOW_S * TRIAL:
        do_in_parallel(tree[TRIAL:], layer.lay)
    else:
        for entry in tree[TRIAL:]:
            layer.lay(entry)
    objects.write_seals()
    return layer


class CodeFolderWriter:
    """A writer of the files and links of a code folder.

    Attributes:
        missing: sizes of the missing objects, by name.
        linking: False after the file system has rejected a link.
    """

    def __init__(self, objects: Objects, code: bytes, final: bytes) -> None:
        self.missing: Dict[str, int] = {}
        self._objects, self._code, self._final = objects, code + b"/", final + b"/"
        self.linking = True

    def lay(self, entry: Entry) -> None:
        """Create one file or link."""
        path, key, detail = entry
        relative_path = raw(path)
        target, final_path = self._code + relative_path, self._final + relative_path
        if key is None:
            with doing("make", final_path):
                os.symlink(raw(detail), target)
        elif self.missing:  # the run cannot be installed: only collect the other missing objects
            if key not in self.missing and not self._objects.has(key, detail):
                self.missing[key] = detail
        else:
            linked = self._objects.link(key, target, detail, final_path) if self.linking else None
            if linked is None:
                self.linking = False
            if not linked and not copy(self._objects, key, detail, target, final_path):
                self.missing[key] = detail


def folders_of(paths: Sequence[str]) -> Set[str]:
    """Return all folders that contain these paths, "" for the top."""
    folders = {""}
    for path in {path.rpartition("/")[0] for path in paths}:
        folders.update([path], parents(path))
    return folders


def make_code_folders(paths: Sequence[str], code: bytes, final: bytes) -> None:
    """Create the folders that contain these paths."""
    for folder in sorted(folders_of(paths)):
        with doing("make", os.path.join(final, raw(folder))):
            os.mkdir(os.path.join(code, raw(folder)) if folder else code, 0o700)
