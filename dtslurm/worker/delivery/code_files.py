"""Classify the files in a run's ``code/``: delivered by the snapshot, or written by the job.

``snapshot.list`` in the run directory lists the delivered files: JSON compressed by zlib, an object with the
size of each file and the target of each link, keyed by the path below ``code/``. A delivered file that has
changed counts as written by the job; byte code counts as neither. Without a readable list, no file counts as
delivered.
"""

import contextlib
import json
import os
import stat
import zlib
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

from ..lib.disk import raw
from .objects import is_whole

LIST = "snapshot.list"


class CodeFile(NamedTuple):
    """A file or link: its path below ``code/``, and its lstat result."""

    path: bytes
    state: os.stat_result


class CodeFiles:
    """The files and links in the ``code/`` of a run.

    Attributes:
        folder: the path of ``code/``.
        is_there: whether ``code/`` is a folder, and not a link to one.
        delivered: files and links as the snapshot delivered them.
        byte_code: files that Python compiled.
        outputs: all others: files that the job wrote or changed.
    """

    def __init__(self, run: bytes) -> None:
        self.folder = os.path.join(run, b"code")
        self.is_there = os.path.isdir(self.folder) and not os.path.islink(self.folder)
        self.delivered: List[CodeFile] = []
        self.byte_code: List[CodeFile] = []
        self.outputs: List[CodeFile] = []
        if self.is_there:
            delivered_details = read_list(run)
            for file in sorted(walk(self.folder)):
                self._group_of(file, delivered_details).append(file)

    def _group_of(self, file: CodeFile, delivered_state: Dict[bytes, Any]) -> List[CodeFile]:
        if is_delivered(os.path.join(self.folder, file.path), file.state, delivered_state.get(file.path)):
            return self.delivered
        return self.byte_code if is_byte_code(file.path) else self.outputs


def is_file(file: CodeFile) -> bool:
    """Return whether an entry is a regular file, not a link or a pipe."""
    return stat.S_ISREG(file.state.st_mode)


def encode_list(tree: Sequence[Tuple[str, Any, Any]]) -> bytes:
    """Return the content of ``snapshot.list`` for a tree of [path, object or None, size or link target]."""
    return zlib.compress(json.dumps({path: detail for path, _, detail in tree}).encode("ascii"), 1)


def read_list(run: bytes) -> Dict[bytes, Any]:
    """Return the size or link target of each delivered file by path; empty if the list cannot be read."""
    try:
        with open(os.path.join(run, LIST.encode()), "rb") as file:
            entries = json.loads(zlib.decompress(file.read()).decode("ascii"))
        return {raw(path): detail for path, detail in entries.items()}
    except (OSError, ValueError, AttributeError, zlib.error):
        return {}


def walk(folder: bytes) -> Iterator[CodeFile]:
    """Yield the files and links below a folder; links are not followed."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in names + links:
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                yield CodeFile(path[len(folder) + 1 :], os.lstat(path))


def is_delivered(path: bytes, state: os.stat_result, detail: Any) -> bool:
    """Return whether a file or link still has the delivered size or target (``detail``)."""
    if isinstance(detail, str):
        return stat.S_ISLNK(state.st_mode) and os.readlink(path) == raw(detail)
    return detail is not None and is_whole(state, detail)


def is_byte_code(path: bytes) -> bool:
    """Return whether a file is Python byte code, or an unfinished copy of it."""
    return b"__pycache__" in path.split(b"/") or path.endswith((b".pyc", b".pyo"))
