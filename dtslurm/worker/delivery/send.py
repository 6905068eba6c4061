"""Send the files of run directories that are new since the reader's last request, as frames on stdout.

The request is one line of JSON on stdin::

    {"runs": [{"path": DIR, "patterns": ["*.json", …], "skip": ["code"], "outputs_only": false,
               "hidden": true, "have": {FILE: [SIZE, MTIME_NS, CRC]}}], "digests": false}

A pattern is matched against the path below DIR, and its ``*`` also matches slashes. If the reader has a copy
of a file and the file has only grown (CRC is that of the copy's last bytes), the rest is sent; otherwise the
whole file. With ``outputs_only``, only those files in ``code/`` are sent that the job wrote. Without
``hidden``, files whose path has a component that begins with a dot are not sent; a file in ``.git`` is never
sent. Each frame is one line of JSON, followed by ``length`` bytes::

    {"run": 0, "path": FILE, "offset": 0, "length": 17, "size": 17, "mtime_ns": …, "mode": 384}
    {"run": 0, "path": FILE, "sha256": …}     after a whole file, if digests were requested
    {"run": 0, "gone": "reason"}              the directory cannot be read
    {"run": 0, "left": {"snapshot": 3, …}}    matching files that are not sent: see `WithheldFiles`
    {"end": true}

Runs on the login node, on Python 3.6 or later.
"""

import fnmatch
import hashlib
import json
import os
import stat
import sys
import zlib
from typing import IO, Any, Dict, Iterator, List, Optional, Sequence

from .code_files import CodeFiles, is_file

CHUNK = 1 << 20
MOST_NAMES = 100
TAIL = 256  # bytes at the end of the reader's copy that must be unchanged
_NAME_KEYS = {"not_files": "names", "hidden": "hidden_names"}


def main() -> None:
    """Serve one request."""
    request = json.loads(sys.stdin.buffer.readline().decode("ascii"))
    out = sys.stdout.buffer
    for number, run in enumerate(request["runs"]):
        try:
            os.listdir(run["path"])
        except OSError as error:
            frame(out, {"run": number, "gone": error.strerror})
            continue
        withheld = WithheldFiles(run)
        for path in sorted(files(run, withheld)):
            try:
                send(out, number, run, path, bool(request.get("digests")))
            except OSError as error:
                frame(out, {"run": number, "path": path, "gone": error.strerror})
        frame(out, {"run": number, "left": withheld.counts})
    frame(out, {"end": True})
    out.flush()


class WithheldFiles:
    """The files of a run that match a pattern and are not sent.

    Attributes:
        counts: ``snapshot`` and ``byte_code``: number of such files in ``code/``; ``not_files``: number of
            links, pipes and sockets, ``names``: the first of them; ``skipped``: matching names of the
            request's ``skip``; ``outputs``: number of the job's files in ``code/`` that match no pattern;
            ``hidden``: number of files that `is_withheld` holds back, ``hidden_names``: the first of them.
    """

    def __init__(self, run: Dict[str, Any]) -> None:
        self.counts: Dict[str, Any] = {"snapshot": 0, "byte_code": 0, "not_files": 0, "outputs": 0}
        self.counts.update(hidden=0, names=[], skipped=[], hidden_names=[])
        self._hidden = bool(run.get("hidden", True))
        self._patterns = run["patterns"]
        self._kinds: Dict[str, str] = {}
        if run.get("outputs_only"):
            code = CodeFiles(os.fsencode(run["path"]))
            groups = {"snapshot": code.delivered, "byte_code": code.byte_code}
            for kind, group in groups.items():
                self._kinds.update((os.path.join("code", os.fsdecode(file.path)), kind) for file in group)
            paths = (os.path.join("code", os.fsdecode(file.path)) for file in code.outputs if is_file(file))
            self.counts["outputs"] = sum(not self.matches(path) for path in paths)

    def matches(self, path: str) -> bool:
        """Return whether a path matches one of the patterns."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self._patterns)

    def takes(self, path: str, mode: int) -> bool:
        """Return whether a file with a matching path is sent; otherwise count it."""
        kind = self._kinds.get(path)
        if kind is None and not stat.S_ISREG(mode):
            kind = "not_files"
        if kind is None and is_withheld(path.split("/"), sends_hidden=self._hidden):
            kind = "hidden"
        if kind is None:
            return True
        self.counts[kind] += 1
        if kind in _NAME_KEYS and len(self.counts[_NAME_KEYS[kind]]) < MOST_NAMES:
            self.counts[_NAME_KEYS[kind]].append(path)
        return False


RAY_FILE = "ray-token"  # the token of ray_node.py, which stays on the cluster
SESSION_FOLDER = "session"  # the token or the keys of session.py, which stay there as well


def is_withheld(names: Sequence[str], sends_hidden: bool) -> bool:
    """Return whether a path with these components is not sent: files in a ``.git`` can run commands."""
    return any(name.lower() == ".git" or (name.startswith(".") and not sends_hidden) for name in names)


def files(run: Dict[str, Any], unsent_files: WithheldFiles) -> Iterator[str]:
    """Yield the paths, relative to the run directory, of the regular files that match."""
    top = run["path"]
    skip = set(run.get("skip", ()))
    for folder, subfolders, names in os.walk(top):
        relative_folder = os.path.relpath(folder, top)
        if relative_folder == ".":
            relative_folder = ""
            unsent_files.counts["skipped"] = sorted(
                name for name in subfolders + names if name in skip and unsent_files.matches(name)
            )
            subfolders[:] = [name for name in subfolders if name not in skip]
            names[:] = [name for name in names if name not in skip]
        if relative_folder == "" or os.path.dirname(relative_folder) == "tasks":
            names[:] = [name for name in names if name != RAY_FILE]
            subfolders[:] = [name for name in subfolders if name != SESSION_FOLDER]
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        for name in names + links:
            path = os.path.join(relative_folder, name)
            if unsent_files.matches(path) and unsent_files.takes(
                path, os.lstat(os.path.join(top, path)).st_mode
            ):
                yield path


def send(out: IO[bytes], number: int, run: Dict[str, Any], path: str, digests: bool) -> None:
    """Send the part of one file that the reader lacks."""
    with open(os.path.join(run["path"], path), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        offset = start(file, status, run.get("have", {}).get(path))
        if offset is None and not digests:
            return
        digest = hashlib.sha256()
        offset = status.st_size if offset is None else offset
        if digests:
            skip_to(file, offset, digest)
        else:
            file.seek(offset)
        header = {"run": number, "path": path, "size": status.st_size, "mtime_ns": status.st_mtime_ns}  # type: Dict[str, Any]
        header["mode"] = stat.S_IMODE(status.st_mode)
        sent = False
        while offset < status.st_size or not sent:
            chunk = file.read(min(CHUNK, status.st_size - offset))
            frame(out, dict(header, offset=offset, length=len(chunk)), chunk)
            digest.update(chunk)
            offset += len(chunk)
            sent = True
            if not chunk:  # the file is empty, up to date, or was truncated during the transfer
                break
        if digests:
            frame(out, {"run": number, "path": path, "sha256": digest.hexdigest()})


def start(file: IO[bytes], now: os.stat_result, have: Optional[List[int]]) -> Optional[int]:
    """Return the offset to send from: the copy's end if the file only grew, None if it is unchanged."""
    if have is None:
        return 0
    copy_size, copy_mtime, tail_crc = have
    if copy_size == now.st_size and copy_mtime == now.st_mtime_ns:
        return None
    if copy_size > now.st_size:
        return 0
    file.seek(max(0, copy_size - TAIL))
    return copy_size if zlib.crc32(file.read(min(TAIL, copy_size))) == tail_crc else 0


def skip_to(file: IO[bytes], offset: int, digest: "hashlib._Hash") -> None:
    """Read up to the offset to update the digest."""
    file.seek(0)
    remaining = offset
    while remaining:
        chunk = file.read(min(CHUNK, remaining))
        if not chunk:
            break
        digest.update(chunk)
        remaining -= len(chunk)
    file.seek(offset)


def frame(out: IO[bytes], head: Dict[str, Any], data: bytes = b"") -> None:
    """Write one frame."""
    out.write(json.dumps(head).encode("ascii") + b"\n" + data)
