"""Reads and appends notes on bad nodes, in files that several people or processes write.

Nothing in such a file is trusted. This module is used as it is here, by the supervisor of a run, and sent
over stdin with a call of :func:`answer` behind it where the file is another machine's. The request is
``{"path": …, "lines": […], "mode": 0o600}``, or ``{"run_roots": […]}`` for the notes of supervisors.
"""

import errno
import fcntl
import json
import os
import stat
import time
from typing import Any, Dict, List, Sequence

MOST = 1 << 20  # bytes that are read, from the end
PATIENCE_S = 5.0
HOLDS_S = 3 * 86400.0  # what a run noted; sites repair most nodes, or take them out, within days


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the file's lines, after some were appended; or why that could not be."""
    if "run_roots" in request:
        return {"schema": 1, "lines": read_supervisor_notes(request["run_roots"])}
    try:
        lines = exchange(request["path"], request["lines"], int(request.get("mode", 0o600)))
    except OSError as error:
        return {"schema": 1, "problem": error.strerror or str(error)}
    return {"schema": 1, "lines": lines}


def supervisor_file(run_root: str) -> str:
    """Return the file below a run root in which the supervisors of this user's runs note bad nodes."""
    return os.path.join(run_root, ".bad-nodes-{}.jsonl".format(os.geteuid()))


def read_supervisor_notes(run_roots: Sequence[str]) -> List[str]:
    """Return the lines that the user's own supervisors noted below these run roots."""
    lines: List[str] = []
    for root in run_roots:
        try:
            lines += exchange(supervisor_file(root), [], own=True)
        except OSError:  # a file that cannot be read, or that others can write to, excludes no node
            continue
    return lines


def note_line(cluster: str, node: str, reason: str, job: str, when: float) -> str:
    """Return a note that a run excluded a node, as `dtslurm.model.nodes.line` writes it."""
    note = {"schema": 1, "node": node, "cluster": cluster, "reason": reason, "evidence": "", "job": job}
    note.update(by="dtslurm", when=when, expires=when + HOLDS_S, removed=False)
    return json.dumps(note)


def exchange(path: str, lines: Sequence[str], mode: int = 0o600, own: bool = False) -> List[str]:
    """Append lines to a file, and return all in it; nothing where there is no file and nothing to append.

    Args:
        own: the file must belong to the user, and nobody else may be able to write to it.

    Raises:
        OSError: it cannot be read or written, is no plain file, or is not the user's own.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    flags |= os.O_RDWR | os.O_APPEND | os.O_CREAT if lines else os.O_RDONLY
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ENOENT and not lines:
            return []
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        if own and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
            raise OSError(errno.EPERM, "others can write to it")
        if lines:
            _append(descriptor, lines, mode)
        return _lines(descriptor)
    finally:
        os.close(descriptor)


def _append(descriptor: int, lines: Sequence[str], mode: int) -> None:
    """Write lines at the end in one go; one that a crash cut off stays alone on its line."""
    _lock(descriptor)
    size = os.fstat(descriptor).st_size
    if not size and os.fstat(descriptor).st_uid == os.geteuid():
        os.fchmod(descriptor, mode)  # whatever the umask: a team's file is for the team
    whole = not size or os.pread(descriptor, 1, size - 1) == b"\n"
    os.write(descriptor, (b"" if whole else b"\n") + "".join(one + "\n" for one in lines).encode())
    os.fsync(descriptor)


def _lock(descriptor: int) -> None:
    """Wait for the others a while; one append stays whole without the lock, too."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return
            time.sleep(0.05)
        except OSError:  # no locks on this file system
            return
        else:
            return


def _lines(descriptor: int) -> List[str]:
    size = os.fstat(descriptor).st_size
    start = max(0, size - MOST)
    data = os.pread(descriptor, MOST, start)
    if start:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", "replace").splitlines()
