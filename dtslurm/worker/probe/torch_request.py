"""Let PyTorch record steps of a process: ``python -c PROGRAM PID STEPS SECONDS``.

The process was started with KINETO_USE_DAEMON=1, and asks the socket ``dynolog`` in KINETO_IPC_SOCKET_DIR for
requests every five seconds. This program is at that socket until the trace is complete, and prints it,
packed and in short lines. The format of the datagrams: libkineto/src/IpcFabricConfigClient.cpp in the source
of Kineto, ipcfabric/FabricManager.h in the source of Dynolog.
"""

import base64
import contextlib
import errno
import fcntl
import glob
import gzip
import json
import os
import socket
import stat
import struct
import sys
import time
from typing import Any, Iterator, List, Optional

HEADER = struct.Struct("@N32s")  # the length of the content, and its kind
REQUEST = struct.Struct("@iiq")  # type of the request, number of process ids, job id; then the process ids
PID = struct.Struct("@i")
KIND = b"req"
FIRST_WINDOW_MS, LONGEST_WINDOW_MS = 1000, 30000
WRITE_S = 120.0  # for the trace to be written after its window
LOOK_S = 0.2
MAX_DATAGRAM = 1 << 16
NOT_TAKEN = 4
PIECE = 700  # bytes in one line; srun mixes lines of several nodes that are longer than 1024 bytes


class RecordingFailed(Exception):
    """There is no trace; the message states why."""


def read_environ(pid: int) -> "dict[bytes, bytes]":
    """Return the variables that a process was started with."""
    with open("/proc/{}/environ".format(pid), "rb") as file:
        pairs = [entry.partition(b"=") for entry in file.read().split(b"\0")]
    return {name: value for name, _, value in pairs}


def check_folder(folder: str) -> None:
    """Refuse a folder that other users can enter: they could answer in the place of this program.

    Raises:
        RecordingFailed: it is another user's, or open to others.
    """
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise RecordingFailed("{} belongs to another user, or others can enter it".format(folder))


class Daemon:
    """The socket at which one process asks for requests."""

    def __init__(self, folder: str, pid: int) -> None:
        self.folder, self.pid = folder, pid
        self.trace = os.path.join(folder, "trace.json")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._path = os.path.join(folder, "dynolog")
        with contextlib.suppress(OSError):  # of a killed program
            os.unlink(self._path)
        self._socket.bind(self._path)
        self._socket.settimeout(LOOK_S)

    def close(self) -> None:
        """Remove the socket."""
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def record(self, window_ms: int, taken_by: float) -> bytes:
        """Return the trace of the next milliseconds of the process.

        Args:
            taken_by: until when the process must have taken the request (monotonic clock).

        Raises:
            RecordingFailed: the process has ended, or writes no trace.
            TimeoutError: it has not taken the request.
        """
        for path in self._find_traces():
            os.unlink(path)
        request = "ACTIVITIES_LOG_FILE={}\nACTIVITIES_DURATION_MSECS={}\n".format(self.trace, window_ms)
        pending = request.encode()  # type: Optional[bytes]
        end = taken_by
        while time.monotonic() < end:
            if self._answer(pending or b""):
                end = time.monotonic() + window_ms / 1000 + WRITE_S if pending else end
                pending = None
            trace = None if pending else self._read_complete()
            if trace is not None:
                return trace
            if not os.path.exists("/proc/{}".format(self.pid)):
                raise RecordingFailed("the rank has ended")
        if pending:
            raise TimeoutError
        raise RecordingFailed("PyTorch took the request, and wrote no trace within {:.0f} s".format(WRITE_S))

    def _answer(self, content: bytes) -> bool:
        """Answer the next question; return whether it was one of the process itself, not of its children."""
        try:
            data, _, _, address = self._socket.recvmsg(MAX_DATAGRAM)
        except socket.timeout:
            return False
        if not address:  # of a socket without a name, which gets no answer
            return False
        is_own = self._is_of_process(data)
        answer = content if is_own else b""
        try:
            self._socket.sendto(HEADER.pack(len(answer), KIND) + answer, address)
        except OSError:  # it has ended
            return False
        return is_own

    def _is_of_process(self, data: bytes) -> bool:
        """Return whether a datagram is a question of the process itself."""
        start = HEADER.size + REQUEST.size
        if len(data) < start + PID.size or HEADER.unpack_from(data)[1].rstrip(b"\0") != KIND:
            return False
        pid = PID.unpack_from(data, start)[0]  # the others are those of its ancestors
        return bool(pid == self.pid)

    def _find_traces(self) -> List[str]:
        """Return the traces in the folder; Kineto adds the process id to the name."""
        return glob.glob(glob.escape(self.trace[: -len(".json")]) + "*.json")

    def _read_complete(self) -> Optional[bytes]:
        """Return the trace if it is complete: it is written in place."""
        for path in self._find_traces():
            with open(path, "rb") as file:
                trace = file.read()
            if trace.rstrip().endswith(b"}"):
                with contextlib.suppress(ValueError):
                    json.loads(trace.decode("utf-8", "replace"))
                    os.unlink(path)
                    return trace
        return None


def count_steps(trace: bytes) -> int:
    """Return the number of whole steps in a trace: those between two ends of an optimizer's step."""
    events = json.loads(trace.decode("utf-8", "replace")).get("traceEvents", [])
    return max(0, sum(is_optimizer_step(event) for event in events) - 1)


def is_optimizer_step(event: Any) -> bool:
    """Return whether an event of a trace is a step of an optimizer of PyTorch."""
    name = event.get("name")
    return event.get("cat") == "user_annotation" and str(name).startswith("Optimizer.step#")


def record_steps(daemon: Daemon, steps: int, taken_by: float) -> bytes:
    """Return a trace with this number of steps, as far as the longest window has them.

    Raises:
        RecordingFailed, TimeoutError: see `Daemon.record`.
    """
    window_ms = FIRST_WINDOW_MS
    while True:
        trace = daemon.record(window_ms, taken_by)
        count = count_steps(trace)
        if count >= steps or window_ms == LONGEST_WINDOW_MS:
            return trace
        window_ms = min(LONGEST_WINDOW_MS, 2 * window_ms * (steps + 1) // (count + 1))
        taken_by = time.monotonic() + WRITE_S


@contextlib.contextmanager
def hold_lock(folder: str, deadline: float) -> Iterator[None]:
    """Exclude another program at the same socket.

    Raises:
        TimeoutError: it is still there at the given time (monotonic clock).
    """
    descriptor = os.open(os.path.join(folder, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK:
                    raise
                if time.monotonic() > deadline:
                    raise TimeoutError from error
                time.sleep(LOOK_S)
        yield
    finally:
        os.close(descriptor)


def main(pid: int, steps: int, seconds: float) -> int:
    """Print the packed trace of a process, and return the exit code."""
    os.umask(0o077)
    try:
        folder = os.fsdecode(read_environ(pid)[b"KINETO_IPC_SOCKET_DIR"])
        check_folder(folder)
        deadline = time.monotonic() + seconds
        with hold_lock(folder, deadline), contextlib.closing(Daemon(folder, pid)) as daemon:
            trace = record_steps(daemon, steps, deadline)
    except TimeoutError:
        return NOT_TAKEN
    except (OSError, RecordingFailed) as error:
        sys.stderr.write("{}\n".format(error))
        return 1
    text = base64.b64encode(gzip.compress(trace)).decode()
    for start in range(0, len(text), PIECE):
        sys.stdout.write(text[start : start + PIECE] + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
