"""Receive a run on the login node; the run directory appears only when it is complete.

Standard input::

    4 bytes   length of the request, big-endian
    ...       the request: JSON, compressed by zlib
    blobs     "r" (raw) or "z" (zlib); 1 byte length and name of the object; parts of 4 bytes length and data,
              an empty part last
    "."       the end. Without it the connection was cut, and nothing is installed.

The request: ``run_dir``, ``objects`` (absolute folders), ``files`` ([name, mode, content as latin-1], ...),
``tree`` ([path below code/, object or null, size or link target], ...; null for no code), ``inside`` (the
job's folder below code/), ``then`` (a command), ``limit`` (the command's timeout in seconds), ``event`` (more
fields for the event in events.jsonl), ``spare`` (the name of the prebuilt tree, null for none).

The answer is one line on standard output: the mark (the program's second argument) and a JSON object with one
of the keys ``done``, ``missing``, ``exists``, ``refused``, ``disk``, ``cut``; `CODES` maps the keys to exit
codes.

With ``keep`` as the third argument, the server handles requests one after another until standard input ends,
no request arrives for `IDLE_S` seconds, or a request is invalid. A request of length 0 is a liveness check.
"""

import contextlib
import json
import os
import re
import select
import signal
import struct
import sys
import time
import zlib
from typing import IO, Any, Dict, Iterator, Optional, Tuple

from ..lib.disk import WorkerError, doing, raw, text
from .install_run import check, place
from .objects import Objects, choose_objects_folder
from .prebuilt_tree import folder_of, make_spare, run_detached, take_spare

IDLE_S = 900.0
QUIET_S = 1.0  # the client is idle after this time: prebuild a tree
CODES = {"done": 0, "exists": 73, "missing": 74, "disk": 75, "refused": 76, "cut": 77}

_JOB_ID = re.compile(r"([1-9][0-9]*(?:\.[0-9]+)?)(;\S*)?\Z")


def note_event(run_dir: bytes, output: str, more: Dict[str, Any]) -> None:
    """Record the submission in events.jsonl, if ``sbatch --parsable`` printed a job id."""
    matches = [match for match in map(_JOB_ID.match, (line.strip() for line in output.split("\n"))) if match]
    if not matches:
        return
    event = {"time": int(time.time()), "event": "submitted", "job_id": matches[-1].group(1)}
    event.update(more)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError):  # the job is queued, even if the event cannot be written
        fd = os.open(os.path.join(run_dir, b"events.jsonl"), flags, 0o600)
        try:
            os.write(fd, (json.dumps(event) + "\n").encode())
        finally:
            os.close(fd)


def run_then(request: Dict[str, Any]) -> Dict[str, Any]:
    """Run the request's command and return its exit code and output."""
    import subprocess

    command = [raw(word) for word in request["then"]]
    pipe, devnull = subprocess.PIPE, subprocess.DEVNULL
    with doing("run", command[0]):
        process = subprocess.Popen(command, stdin=devnull, stdout=pipe, stderr=pipe, start_new_session=True)
    timed_out = False
    try:
        stdout, stderr = process.communicate(timeout=request["limit"])
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        timed_out = True
    if process.returncode == 0:
        note_event(raw(request["run_dir"]), text(stdout), request["event"])
    return {"code": process.returncode, "stdout": text(stdout), "stderr": text(stderr), "late": timed_out}


class InputStream:
    """Standard input, with errors for a premature end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def take(self, count: int) -> bytes:
        """Return exactly ``count`` bytes."""
        chunk = self._file.read(count)
        if len(chunk) < count:
            raise WorkerError("cut", "the connection was closed in the middle of the request")
        return chunk

    def length(self) -> int:
        """Return the next length field."""
        return int(struct.unpack(">I", self.take(4))[0])

    def more(self, limit: float) -> bool:
        """Wait up to ``limit`` seconds for another request; return whether one arrived."""
        if not select.select([self._file], [], [], limit)[0]:
            return False
        return bool(self._file.peek(1))  # type: ignore[attr-defined]

    def request(self) -> Dict[str, Any]:
        """Return the request; an empty one for a length of 0."""
        length = self.length()
        if not length:
            return {}
        request = json.loads(zlib.decompress(self.take(length)).decode("ascii"))
        if not isinstance(request, dict):
            raise WorkerError("refused", "the request is not an object")
        return request

    def parts(self, is_compressed: bool) -> Iterator[bytes]:
        """Yield the content of a blob in parts."""
        decompressor = zlib.decompressobj()
        while True:
            length = self.length()
            if not length:
                break
            chunk = self.take(length)
            yield decompressor.decompress(chunk) if is_compressed else chunk
        if is_compressed:
            yield decompressor.flush()


def store_objects(stream: InputStream, objects: Objects, problems: Optional[WorkerError]) -> None:
    """Store all received objects, to the end of the input: the sender does not read an answer before."""
    try:
        while True:
            kind = stream.take(1)
            if kind == b".":
                break
            key = stream.take(ord(stream.take(1))).decode("ascii")
            parts = stream.parts(kind == b"z")
            try:
                if problems is None:
                    objects.add(key, parts)
            except WorkerError as outcome:
                if outcome.key == "cut":
                    raise
                problems = outcome
            for _ in parts:
                pass
    finally:
        objects.settle()
    if problems is not None:
        raise problems


def receive(stream: InputStream, request: Dict[str, Any]) -> Dict[str, Any]:
    """Store the received objects, install the run, and run its command."""
    if not request:
        return {}
    check(request)
    command_missing = request["then"] and not which(request["then"][0])
    request["objects"] = text(choose_objects_folder(raw(request["objects"])))
    objects, trouble = Objects(raw(request["objects"])), None
    try:
        if request["tree"] is not None:
            objects.prepare()
    except WorkerError as outcome:
        trouble = outcome
    store_objects(stream, objects, trouble)
    if command_missing:
        return {"absent": request["then"][0]}
    place(request, objects, lambda staging, code: take_spare(request, objects, staging, code))
    if not request["then"]:
        return {}
    # Ignore a cut connection between sbatch and its output.
    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        return run_then(request)
    finally:
        signal.signal(signal.SIGHUP, previous_handler)


def which(program: str) -> bool:
    """Return whether a program exists."""
    folders = [""] if "/" in program else os.get_exec_path()
    return any(os.access(os.path.join(folder, program), os.X_OK) for folder in folders)


def serve(stream: InputStream) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Handle one request; return its answer, and the request if it succeeded."""
    try:
        request = stream.request()
        return {"done": receive(stream, request)}, request
    except WorkerError as outcome:
        return {outcome.key: outcome.value}, {}
    except OSError as error:
        return {"disk": {"errno": error.errno, "verb": "use", "path": str(error.filename)}}, {}
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        return {"refused": "the request is invalid: {!r}".format(error)}, {}


def main() -> int:
    """Handle one request, or all that arrive with ``keep``."""
    os.umask(0o077)
    stream = InputStream(sys.stdin.buffer)
    keep = sys.argv[3:] == ["keep"]
    last_installed = {}  # type: Dict[str, Any]
    while True:
        answer, request = serve(stream)
        last_installed = request or last_installed
        sys.stdout.write("\n{}{}\n".format(sys.argv[2], json.dumps(answer)))
        sys.stdout.flush()
        code = max(CODES[key] for key in answer)
        # After an invalid request, the start of the next one is unknown.
        is_last = not keep or not {"refused", "cut"}.isdisjoint(answer)
        if is_last or not stream.more(QUIET_S):
            if last_installed and folder_of(last_installed):
                request, last_installed = last_installed, {}
                run_detached(lambda: make_spare(request))  # noqa: B023  called at once
            if is_last or not stream.more(IDLE_S):
                return code
