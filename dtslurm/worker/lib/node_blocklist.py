"""Reads and appends notes on bad nodes, in files that several people or processes write.

The content of these files is not trusted. The supervisor of a run imports this module; for a file on another
machine, it is sent over stdin with a call of :func:`answer` appended. The request is
``{"path": …, "lines": […], "mode": 0o600}``, or ``{"run_roots": […]}`` for the notes of supervisors.
"""

import contextlib
import errno
import json
import os
import stat
from typing import Any, Dict, List, Sequence

from .locks import acquire_lock

MOST = 1 << 20  # bytes that are read from the end of a file
PATIENCE_S = 5.0
HOLDS_S = 3 * 86400.0  # how long a run's note holds; sites repair most nodes, or take them out, within days


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the file's lines after appending the request's lines, or the problem that prevented it."""
    if "run_roots" in request:
        return {"schema": 1, "lines": read_supervisor_notes(request["run_roots"])}
    try:
        lines = exchange(request["path"], request["lines"], int(request.get("mode", 0o600)))
    except OSError as error:
        return {"schema": 1, "problem": error.strerror or str(error)}
    return {"schema": 1, "lines": lines}


def supervisor_file(run_root: str) -> str:
    """Return the path below a run root where the supervisors of this user's runs note bad nodes."""
    return os.path.join(run_root, ".bad-nodes-{}.jsonl".format(os.geteuid()))


def read_supervisor_notes(run_roots: Sequence[str]) -> List[str]:
    """Return the lines that the user's own supervisors noted below these run roots."""
    lines: List[str] = []
    for root in run_roots:
        try:
            lines += exchange(supervisor_file(root), [], is_own_file=True)
        except OSError:  # a file that cannot be read, or that others can write to, excludes no node
            continue
    return lines


def note_line(cluster: str, node: str, reason: str, job: str, noted_at: float) -> str:
    """Return a note that a run excluded a node, as `dtslurm.model.nodes.format_note` writes it."""
    note = {"schema": 1, "node": node, "cluster": cluster, "reason": reason, "evidence": "", "job": job}
    note.update(by="dtslurm", when=noted_at, expires=noted_at + HOLDS_S, removed=False)
    return json.dumps(note)


def exchange(path: str, lines: Sequence[str], mode: int = 0o600, is_own_file: bool = False) -> List[str]:
    """Append lines to a file, and return all its lines; none if there is no file and nothing to append.

    Args:
        is_own_file: the file must belong to the user, and no other user may be able to write to it.

    Raises:
        OSError: the file cannot be read or written, is no regular file, or does not belong to the user.
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
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if is_own_file and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
            raise OSError(errno.EPERM, "other users can write to it")
        if lines:
            _append_lines(descriptor, lines, mode)
        return _read_lines(descriptor)
    finally:
        os.close(descriptor)


def _append_lines(descriptor: int, lines: Sequence[str], mode: int) -> None:
    """Append lines with a single write; a line that a crash truncated stays alone on its line.

    A single append is atomic also without the lock, for which the file system may have no support.
    """
    with contextlib.suppress(OSError):
        acquire_lock(descriptor, PATIENCE_S)
    size = os.fstat(descriptor).st_size
    if not size and os.fstat(descriptor).st_uid == os.geteuid():
        os.fchmod(descriptor, mode)  # despite the umask: a team's file is for the team
    ends_with_newline = not size or os.pread(descriptor, 1, size - 1) == b"\n"
    os.write(
        descriptor, (b"" if ends_with_newline else b"\n") + "".join(line + "\n" for line in lines).encode()
    )
    os.fsync(descriptor)


def _read_lines(descriptor: int) -> List[str]:
    size = os.fstat(descriptor).st_size
    start = max(0, size - MOST)
    data = os.pread(descriptor, MOST, start)
    if start:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", "replace").splitlines()
