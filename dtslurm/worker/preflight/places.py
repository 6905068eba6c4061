"""Where this node can write: its own disk, its shared memory, and the run directory."""

import errno
import os
import tempfile
from typing import Any, List, Mapping

from .findings import BAD, OK, UNKNOWN, WARN, Finding, finding

MIB, GIB = 2.0**20, 2.0**30
TEST_BYTES = 1 << 20
LITTLE = {"disk": (64 * MIB, GIB), "shm": (32 * MIB, GIB)}  # below, bad and worth a word
FAULTS = (errno.EIO, errno.EROFS, errno.ENOSPC, errno.ESTALE, errno.ENOTCONN, errno.EDQUOT, errno.ENODEV)


def disk(wanted: Mapping[str, Any], env: Mapping[str, str]) -> List[Finding]:
    """Look at the node's own disk: the profile's, else where temporary files go."""
    named = os.path.expandvars(os.path.expanduser(str(wanted.get("local_disk") or "")))
    path = named or env.get("TMPDIR") or "/tmp"  # noqa: S108
    if "$" in path or not os.path.isdir(path):
        return [finding("disk", UNKNOWN, "there is no folder {}".format(path))]
    return [writable("disk", path)]


def shm(path: str = "/dev/shm") -> List[Finding]:  # noqa: S108
    """Look at shared memory, by which the ranks of a node and their data loaders talk."""
    if not os.path.isdir(path):
        return [finding("shm", UNKNOWN, "there is no {}".format(path))]
    return [writable("shm", path)]


def run_dir(path: str) -> List[Finding]:
    """See that this node can write where the run keeps its files."""
    return [writable("run-dir", path)]


def writable(check: str, path: str) -> Finding:
    """Write a little and read it again, and tell how much room there is."""
    try:
        status = os.statvfs(path)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".dtslurm-health-") as file:
            data = os.urandom(TEST_BYTES)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            same = file.read() == data
    except OSError as error:
        # That we may not write there is how the node is made; that the device fails is not.
        level = BAD if error.errno in FAULTS or check != "disk" else UNKNOWN
        return finding(check, level, "cannot write to {}: {}".format(path, error.strerror or error))
    if not same:
        return finding(check, BAD, "{} gives back other bytes than were written".format(path))
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = "{} has {:.1f} of {:.1f} GiB free".format(path, free / GIB, total / GIB)
    bad, little = LITTLE.get(check, (0.0, 0.0))
    level = BAD if total and free < bad else WARN if total and free < little else OK
    return finding(check, level, text)
