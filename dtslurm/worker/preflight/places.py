"""Checks of this node's storage: its local disk, its shared memory, and the run directory."""

import errno
import os
import tempfile
import time
from typing import Any, List, Mapping

from .findings import BAD, OK, UNKNOWN, WARN, Finding, finding

MIB, GIB = 2.0**20, 2.0**30
TEST_BYTES = 1 << 20
# Free bytes below which the level is bad, and below which it is a warning.
LITTLE = {"disk": (64 * MIB, GIB), "shm": (32 * MIB, GIB)}
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_S = 20.0  # to wait for space; the check has 30 s
FAULTS = (errno.EIO, errno.EROFS, errno.ENOSPC, errno.ESTALE, errno.ENOTCONN, errno.EDQUOT, errno.ENODEV)


def disk(requirements: Mapping[str, Any], env: Mapping[str, str]) -> List[Finding]:
    """Check the node's local disk: the profile's, else the folder for temporary files."""
    profile_path = os.path.expandvars(os.path.expanduser(str(requirements.get("local_disk") or "")))
    path = profile_path or env.get("TMPDIR") or "/tmp"  # noqa: S108
    if "$" in path or not os.path.isdir(path):
        return [finding("disk", UNKNOWN, "there is no folder {}".format(path))]
    return [writable("disk", path)]


def shm(path: str = "/dev/shm") -> List[Finding]:  # noqa: S108
    """Check the shared memory, which a node's ranks and data loaders use to exchange data."""
    if not os.path.isdir(path):
        return [finding("shm", UNKNOWN, "there is no {}".format(path))]
    return [writable("shm", path)]


def run_dir(path: str, patience_s: float = FULL_S) -> List[Finding]:
    """Check that this node can write to the run directory.

    A file system that is full for all nodes is no fault of this one: it may have space again soon, and else
    training fails with a message of its own.
    """
    end = time.monotonic() + patience_s
    while True:
        result = writable("run-dir", path)
        if result["level"] != WARN or time.monotonic() > end:
            return [result]
        time.sleep(1)


def writable(check: str, path: str) -> Finding:
    """Write a small file, read it back, and report the free space."""
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
        # A missing permission is by the node's configuration; a failing device is a fault.
        level = BAD if error.errno in FAULTS or check != "disk" else UNKNOWN
        if check == "run-dir" and error.errno in FULL:
            level = WARN
        return finding(check, level, "cannot write to {}: {}".format(path, error.strerror or error))
    if not same:
        return finding(check, BAD, "{} returned other bytes than were written".format(path))
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = "{} has {:.1f} of {:.1f} GiB free".format(path, free / GIB, total / GIB)
    bad, warn = LITTLE.get(check, (0.0, 0.0))
    level = BAD if total and free < bad else WARN if total and free < warn else OK
    return finding(check, level, text)
