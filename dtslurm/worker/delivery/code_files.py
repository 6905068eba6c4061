"""Which files in the ``code/`` of a run its snapshot delivered, and which the job wrote there.

``snapshot.list`` in the run directory names the delivered files: JSON packed by zlib, an object that has the
size of each file and the target of each link by its path below ``code/``. A delivered file that was changed
since counts as written by the job; byte code is neither. Without a readable list no file counts as delivered.
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
    """A file or link: its path below ``code/``, and what lstat returned."""

    path: bytes
    state: os.stat_result


class CodeFiles:
    """The files and links in the ``code/`` of a run.

    Attributes:
        folder: the path of ``code/``.
        is_there: whether it is a folder, and no link to one.
        delivered: files and links as the snapshot delivered them.
        byte_code: what Python compiled.
        outputs: all others: the job wrote or changed them.
    """

    def __init__(self, run: bytes) -> None:
        self.folder = os.path.join(run, b"code")
        self.is_there = os.path.isdir(self.folder) and not os.path.islink(self.folder)
        self.delivered: List[CodeFile] = []
        self.byte_code: List[CodeFile] = []
        self.outputs: List[CodeFile] = []
        if self.is_there:
            known = read_list(run)
            for file in sorted(walk(self.folder)):
                self._group(file, known).append(file)

    def _group(self, file: CodeFile, known: Dict[bytes, Any]) -> List[CodeFile]:
        if is_delivered(os.path.join(self.folder, file.path), file.state, known.get(file.path)):
            return self.delivered
        return self.byte_code if is_byte_code(file.path) else self.outputs


def is_file(file: CodeFile) -> bool:
    """Whether it is a file, and no link or pipe."""
    return stat.S_ISREG(file.state.st_mode)


def encode_list(tree: Sequence[Tuple[str, Any, Any]]) -> bytes:
    """Return the content of ``snapshot.list`` for a tree of [path, object or None, size or link target]."""
    return zlib.compress(json.dumps({path: detail for path, _, detail in tree}).encode("ascii"), 1)


def read_list(run: bytes) -> Dict[bytes, Any]:
    """Return size or link target of what was delivered by its path; empty if the list cannot be read."""
    try:
        with open(os.path.join(run, LIST.encode()), "rb") as file:
            entries = json.loads(zlib.decompress(file.read()).decode("ascii"))
        return {raw(path): detail for path, detail in entries.items()}
    except (OSError, ValueError, AttributeError, zlib.error):
        return {}


def walk(folder: bytes) -> Iterator[CodeFile]:
    """Yield the files and links below a folder; links are not followed."""
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in names + links:
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):
                yield CodeFile(path[len(folder) + 1 :], os.lstat(path))


def is_delivered(path: bytes, state: os.stat_result, detail: Any) -> bool:
    """Whether a file or link is as the snapshot delivered it, of this size or with this target."""
    if isinstance(detail, str):
        return stat.S_ISLNK(state.st_mode) and os.readlink(path) == raw(detail)
    return detail is not None and is_whole(state, detail)


def is_byte_code(path: bytes) -> bool:
    """Whether a file is what Python compiled, or a copy of it that was not finished."""
    return b"__pycache__" in path.split(b"/") or path.endswith((b".pyc", b".pyo"))
