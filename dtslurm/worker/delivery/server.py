"""Receives a run on the machine that will queue it: nothing of it is seen before all of it is there.

Standard input::

    4 bytes   length of the request, big-endian
    ...       the request: JSON, compressed by zlib
    blobs     "r" (raw) or "z" (zlib); 1 byte length and name of the object; parts of 4 bytes length and data,
              an empty one last
    "."       the end. Without it the link was cut, and nothing is placed.

The request: ``run_dir``, ``objects`` (absolute folders), ``files`` ([name, mode, content as latin-1], ...),
``tree`` ([path below code/, object or null, size or link target], ...; null for no code), ``inside`` (the
job's folder below code/), ``then`` (a command), ``limit`` (its seconds), ``event`` (more for events.jsonl),
``spare`` (what a tree made ahead is called, null for none).

The answer is one line on standard output: the mark (our second argument) and a JSON object with one of the
keys ``done``, ``missing``, ``exists``, ``refused``, ``disk``, ``cut``; exit codes `CODES` go with them.

With ``keep`` as the third argument more requests are taken, one after another, until standard input ends,
nothing comes for `IDLE_S` seconds, or one is not understood. A length of 0 asks whether we live.
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
from .prebuilt_tree import detached, folder_of, make_spare, take_spare

IDLE_S = 900.0
QUIET_S = 1.0  # nobody waits then
CODES = {"done": 0, "exists": 73, "missing": 74, "disk": 75, "refused": 76, "cut": 77}

_JOB_ID = re.compile(r"([1-9][0-9]*)(;\S*)?\Z")


def note_event(run_dir: bytes, output: str, more: Dict[str, Any]) -> None:
    """Write down that the run was submitted, if ``sbatch --parsable`` printed a job id."""
    found = [match for match in map(_JOB_ID.match, (line.strip() for line in output.split("\n"))) if match]
    if not found:
        return
    event = {"time": int(time.time()), "event": "submitted", "job_id": found[-1].group(1)}
    event.update(more)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError):  # the job is queued, whatever becomes of its diary
        fd = os.open(os.path.join(run_dir, b"events.jsonl"), flags, 0o600)
        try:
            os.write(fd, (json.dumps(event) + "\n").encode())
        finally:
            os.close(fd)


def run_then(request: Dict[str, Any]) -> Dict[str, Any]:
    """Run the request's command and return what it said."""
    import subprocess

    words = [raw(word) for word in request["then"]]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with doing("run", words[0]):
        process = subprocess.Popen(words, stdin=null, stdout=pipe, stderr=pipe, start_new_session=True)
    late = False
    try:
        out, err = process.communicate(timeout=request["limit"])
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        late = True
    if process.returncode == 0:
        note_event(raw(request["run_dir"]), text(out), request["event"])
    return {"code": process.returncode, "stdout": text(out), "stderr": text(err), "late": late}


class InputStream:
    """Standard input, which may end too early."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def take(self, count: int) -> bytes:
        """Return exactly that many bytes."""
        data = self._file.read(count)
        if len(data) < count:
            raise WorkerError("cut", "the link was cut in the middle of the request")
        return data

    def length(self) -> int:
        """Return the next length."""
        return int(struct.unpack(">I", self.take(4))[0])

    def more(self, limit: float) -> bool:
        """Wait for another request, which comes after our answer; whether there is one."""
        if not select.select([self._file], [], [], limit)[0]:
            return False
        return bool(self._file.peek(1))  # type: ignore[attr-defined]

    def request(self) -> Dict[str, Any]:
        """Return the request; an empty one for a length of 0."""
        length = self.length()
        if not length:
            return {}
        found = json.loads(zlib.decompress(self.take(length)).decode("ascii"))
        if not isinstance(found, dict):
            raise WorkerError("refused", "the request is not an object")
        return found

    def parts(self, packed: bool) -> Iterator[bytes]:
        """Yield a blob's content."""
        unpack = zlib.decompressobj()
        while True:
            length = self.length()
            if not length:
                break
            data = self.take(length)
            yield unpack.decompress(data) if packed else data
        if packed:
            yield unpack.flush()


def take_in(stream: InputStream, objects: Objects, trouble: Optional[WorkerError]) -> None:
    """Store the contents that come, to their end: only then does the sender listen."""
    try:
        while True:
            kind = stream.take(1)
            if kind == b".":
                break
            key = stream.take(ord(stream.take(1))).decode("ascii")
            parts = stream.parts(kind == b"z")
            try:
                if trouble is None:
                    objects.add(key, parts)
            except WorkerError as outcome:
                if outcome.key == "cut":
                    raise
                trouble = outcome
            for _ in parts:
                pass
    finally:
        objects.settle()
    if trouble is not None:
        raise trouble


def receive(stream: InputStream, request: Dict[str, Any]) -> Dict[str, Any]:
    """Take in the objects that come, place the run, run its command."""
    if not request:
        return {}
    check(request)
    absent = request["then"] and not which(request["then"][0])
    request["objects"] = text(choose_objects_folder(raw(request["objects"])))
    objects, trouble = Objects(raw(request["objects"])), None
    try:
        if request["tree"] is not None:
            objects.prepare()
    except WorkerError as outcome:
        trouble = outcome
    take_in(stream, objects, trouble)
    if absent:
        return {"absent": request["then"][0]}
    place(request, objects, lambda staging, code: take_spare(request, objects, staging, code))
    if not request["then"]:
        return {}
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a cut link: not between sbatch and its answer
    try:
        return run_then(request)
    finally:
        signal.signal(signal.SIGHUP, before)


def which(program: str) -> bool:
    """Whether there is such a program."""
    folders = [""] if "/" in program else os.get_exec_path()
    return any(os.access(os.path.join(folder, program), os.X_OK) for folder in folders)


def serve(stream: InputStream) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Serve one request, return its answer, and the request if it was done."""
    try:
        request = stream.request()
        return {"done": receive(stream, request)}, request
    except WorkerError as outcome:
        return {outcome.key: outcome.value}, {}
    except OSError as error:
        return {"disk": {"errno": error.errno, "verb": "use", "path": str(error.filename)}}, {}
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        return {"refused": "the request cannot be understood: {!r}".format(error)}, {}


def main() -> int:
    """Serve one request, or all that come."""
    os.umask(0o077)
    stream = InputStream(sys.stdin.buffer)
    keep = sys.argv[3:] == ["keep"]
    placed = {}  # type: Dict[str, Any]
    while True:
        answer, request = serve(stream)
        placed = request or placed
        sys.stdout.write("\n{}{}\n".format(sys.argv[2], json.dumps(answer)))
        sys.stdout.flush()
        code = max(CODES[key] for key in answer)
        # What follows a request that was not understood cannot be told from the rest of it.
        last = not keep or not {"refused", "cut"}.isdisjoint(answer)
        if last or not stream.more(QUIET_S):
            if placed and folder_of(placed):
                request, placed = placed, {}
                detached(lambda: make_spare(request))  # noqa: B023  called at once
            if last or not stream.more(IDLE_S):
                return code
