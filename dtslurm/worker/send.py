"""Sends files of run directories: what is new since the reader last looked, in frames on stdout.

The request is one line of JSON on stdin::

    {"runs": [{"path": DIR, "patterns": ["*.json", …], "skip": ["code"],
               "have": {FILE: [SIZE, MTIME_NS, CRC]}}], "digests": false}

A pattern is matched against the path below DIR, and its ``*`` matches slashes too. A file that the reader has
is sent from where its copy ends, if it only grew (CRC is of the copy's last bytes), else from its start. Each
frame is one line of JSON, followed by ``length`` bytes::

    {"run": 0, "path": FILE, "offset": 0, "length": 17, "size": 17, "mtime_ns": …, "mode": 384}
    {"run": 0, "path": FILE, "sha256": …}     after a whole file, if digests were asked for
    {"run": 0, "gone": "reason"}              the directory cannot be read
    {"end": true}

Runs on the far side as it is, on Python 3.6 or later.
"""

import fnmatch
import hashlib
import json
import os
import stat
import sys
import zlib
from typing import IO, Any, Dict, Iterator, List, Optional

CHUNK = 1 << 20
TAIL = 256  # bytes before the end of the reader's copy that must be the same


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
        for path in sorted(files(run)):
            try:
                send(out, number, run, path, bool(request.get("digests")))
            except OSError as error:
                frame(out, {"run": number, "path": path, "gone": error.strerror})
    frame(out, {"end": True})
    out.flush()


def files(run: Dict[str, Any]) -> Iterator[str]:
    """Yield the paths, below the run directory, of the regular files that are wanted."""
    top = run["path"]
    skip = set(run.get("skip", ()))
    for folder, below, names in os.walk(top):
        inside = os.path.relpath(folder, top)
        if inside == ".":
            inside = ""
            below[:] = [name for name in below if name not in skip]
            names[:] = [name for name in names if name not in skip]
        for name in names:
            path = os.path.join(inside, name)
            wanted = any(fnmatch.fnmatchcase(path, pattern) for pattern in run["patterns"])
            if wanted and stat.S_ISREG(os.lstat(os.path.join(top, path)).st_mode):
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


if __name__ == "__main__":
    main()
