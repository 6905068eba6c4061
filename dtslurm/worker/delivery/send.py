"""Sends files of run directories: what is new since the reader last looked, in frames on stdout.

The request is one line of JSON on stdin::

    {"runs": [{"path": DIR, "patterns": ["*.json", …], "skip": ["code"], "outputs_only": false,
               "hidden": true, "have": {FILE: [SIZE, MTIME_NS, CRC]}}], "digests": false}

A pattern is matched against the path below DIR, and its ``*`` matches slashes too. A file that the reader has
is sent from where its copy ends, if it only grew (CRC is of the copy's last bytes), else from its start. With
``outputs_only``, of the files in ``code/`` only those are sent that the job wrote there. Without ``hidden``,
no file is sent whose path has a name that begins with a dot; a file in ``.git`` never is. Each frame is one
line of JSON, followed by ``length`` bytes::

    {"run": 0, "path": FILE, "offset": 0, "length": 17, "size": 17, "mtime_ns": …, "mode": 384}
    {"run": 0, "path": FILE, "sha256": …}     after a whole file, if digests were asked for
    {"run": 0, "gone": "reason"}              the directory cannot be read
    {"run": 0, "left": {"snapshot": 3, …}}    files that match a pattern and are not sent: see `WithheldFiles`
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
TAIL = 256  # bytes before the end of the reader's copy that must be the same
_NAMES = {"not_files": "names", "hidden": "hidden_names"}


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.buffer.readline().decode("ascii"))
    out = sys.stdout.buffer
    for number, run in enumerate(request["runs"]):
        try:
            os.listdir(run["path"])
        except OSError as error:
            frame(out, {"run": number, "gone": error.strerror})
            continue
        left = WithheldFiles(run)
        for path in sorted(files(run, left)):
            try:
                send(out, number, run, path, bool(request.get("digests")))
            except OSError as error:
                frame(out, {"run": number, "path": path, "gone": error.strerror})
        frame(out, {"run": number, "left": left.counts})
    frame(out, {"end": True})
    out.flush()


class WithheldFiles:
    """The files of a run that match a pattern and are not sent.

    Attributes:
        counts: ``snapshot`` and ``byte_code``: how many in ``code/``; ``not_files``: how many links, pipes
            and sockets, ``names``: the first of them; ``skipped``: names of the request's ``skip``;
            ``outputs``: how many files of the job in ``code/`` match no pattern; ``hidden``: how many
            `is_withheld` holds back, ``hidden_names``: the first of them.
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
        """Whether a path is wanted by its name."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self._patterns)

    def takes(self, path: str, mode: int) -> bool:
        """Whether the file of a wanted name is sent; it is counted if not."""
        kind = self._kinds.get(path)
        if kind is None and not stat.S_ISREG(mode):
            kind = "not_files"
        if kind is None and is_withheld(path.split("/"), hidden=self._hidden):
            kind = "hidden"
        if kind is None:
            return True
        self.counts[kind] += 1
        if kind in _NAMES and len(self.counts[_NAMES[kind]]) < MOST_NAMES:
            self.counts[_NAMES[kind]].append(path)
        return False


def is_withheld(names: Sequence[str], hidden: bool) -> bool:
    """Whether a file with these names in its path stays: the configuration in a ``.git`` runs commands."""
    return any(name.lower() == ".git" or (name.startswith(".") and not hidden) for name in names)


def files(run: Dict[str, Any], left: WithheldFiles) -> Iterator[str]:
    """Yield the paths, below the run directory, of the regular files that are wanted."""
    top = run["path"]
    skip = set(run.get("skip", ()))
    for folder, below, names in os.walk(top):
        inside = os.path.relpath(folder, top)
        if inside == ".":
            inside = ""
            left.counts["skipped"] = sorted(
                name for name in below + names if name in skip and left.matches(name)
            )
            below[:] = [name for name in below if name not in skip]
            names[:] = [name for name in names if name not in skip]
        links = [name for name in below if os.path.islink(os.path.join(folder, name))]
        for name in names + links:
            path = os.path.join(inside, name)
            if left.matches(path) and left.takes(path, os.lstat(os.path.join(top, path)).st_mode):
                yield path


def send(out: IO[bytes], number: int, run: Dict[str, Any], path: str, digests: bool) -> None:
    """Send what the reader lacks of one file."""
    with open(os.path.join(run["path"], path), "rb", buffering=0) as file:
        now = os.fstat(file.fileno())
        offset = start(file, now, run.get("have", {}).get(path))
        if offset is None and not digests:
            return
        digest = hashlib.sha256()
        offset = now.st_size if offset is None else offset
        if digests:
            skip_to(file, offset, digest)
        else:
            file.seek(offset)
        head = {"run": number, "path": path, "size": now.st_size, "mtime_ns": now.st_mtime_ns}  # type: Dict[str, Any]
        head["mode"] = stat.S_IMODE(now.st_mode)
        sent = False
        while offset < now.st_size or not sent:
            data = file.read(min(CHUNK, now.st_size - offset))
            frame(out, dict(head, offset=offset, length=len(data)), data)
            digest.update(data)
            offset += len(data)
            sent = True
            if not data:  # empty, up to date, or cut off while we read
                break
        if digests:
            frame(out, {"run": number, "path": path, "sha256": digest.hexdigest()})


def start(file: IO[bytes], now: os.stat_result, have: Optional[List[int]]) -> Optional[int]:
    """Return where to start: where the reader's copy ends if the file only grew, None if there is no news."""
    if have is None:
        return 0
    size, mtime, crc = have
    if size == now.st_size and mtime == now.st_mtime_ns:
        return None
    if size > now.st_size:
        return 0
    file.seek(max(0, size - TAIL))
    return size if zlib.crc32(file.read(min(TAIL, size))) == crc else 0


def skip_to(file: IO[bytes], offset: int, digest: "hashlib._Hash") -> None:
    """Read up to the offset, for the digest."""
    file.seek(0)
    left = offset
    while left:
        data = file.read(min(CHUNK, left))
        if not data:
            break
        digest.update(data)
        left -= len(data)
    file.seek(offset)


def frame(out: IO[bytes], head: Dict[str, Any], data: bytes = b"") -> None:
    """Write one frame."""
    out.write(json.dumps(head).encode("ascii") + b"\n" + data)
