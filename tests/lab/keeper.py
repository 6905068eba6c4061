"""The process that owns every process of a test cluster, and ends them all when its own parent is gone.

It runs as a script of its own (`python keeper.py OWNER_PID TOKEN`), reads one JSON request a line on stdin
and answers each with one JSON line on stdout. Each service gets a small reaper process above it:

    owner (pytest) -> keeper -> reaper "n1" -> slurmd -> slurmstepd -> job ...

Keeper and reapers are child subreapers: whatever their descendants leave behind, detached or not, becomes
their child again. So "no child left" proves that nothing of the cluster is left. Beside descendants only
processes that carry the cluster's random token in their environment (its clients) are ever signalled.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TOKEN = "DTSLURM_LAB"  # in the environment of every process of a cluster and of its clients
PATIENCE = 20.0  # seconds until killed processes must be gone, on a machine that is not busy
USUAL_LOAD = 3.0  # as in tests/waiting.py: the lab also works in a copy of its folder alone


def stretched(seconds: float) -> float:
    """These seconds, or more while the machine is busy."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / USUAL_LOAD)


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def parents() -> dict[int, int]:
    """Every process with its parent's id."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text(errors="replace")
                table[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return table


def descendants(root: int) -> list[int]:
    table = parents()
    children: dict[int, list[int]] = {}
    for pid, parent in table.items():
        children.setdefault(parent, []).append(pid)
    result: list[int] = []
    queue = [root]
    while queue:
        kids = children.get(queue.pop(), [])
        result += kids
        queue += kids
    return result


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def reap() -> bool:
    """Collect the children that have ended; False when there is no child at all."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def kill_below() -> bool:
    """Kill every descendant of this process; True when none is left."""
    begin = time.monotonic()
    while reap():
        for pid in descendants(os.getpid()):
            send(pid, signal.SIGKILL)
        if time.monotonic() - begin > stretched(PATIENCE):
            return False
        time.sleep(0.005)
    return True


def marked(token: str) -> list[int]:
    """Processes that were started with this cluster's token: its daemons, jobs and clients."""
    needle = b"\0" + f"{TOKEN}={token}".encode() + b"\0"
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in b"\0" + (entry / "environ").read_bytes() + b"\0":
                    result.append(int(entry.name))
    return result


def sweep(token: str, spare: set[int]) -> bool:
    """Kill what carries the token, the `spare` processes excepted; True when none is left."""
    begin = time.monotonic()
    while left := set(marked(token)) - spare - {os.getpid()}:
        for pid in left:
            send(pid, signal.SIGKILL)
        if time.monotonic() - begin > stretched(PATIENCE):
            return False
        time.sleep(0.01)
    return True


def run_service(request: dict[str, Any]) -> NoReturn:
    """Become the program of a service. Python's own signal settings must not reach the jobs."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.closerange(3, 256)
    try:
        os.chdir(request["cwd"])
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as error:
        os.write(2, f"{request['argv'][0]}: {error}\n".encode())
    os._exit(127)


def run_reaper(request: dict[str, Any], keeper: int, report: int) -> NoReturn:
    """Start one service and stay as long as anything of it lives. SIGTERM ends all of it."""
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    os.setsid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != keeper:
        os._exit(1)
    pid = os.fork()
    if pid == 0:
        run_service(request)
    os.write(report, str(pid).encode())
    os.close(report)
    while reap():
        if signal.sigwait(awaited) == signal.SIGTERM:
            os._exit(0 if kill_below() else 1)
    os._exit(0)


class Keeper:
    """Answers the requests of one owner."""

    def __init__(self, owner: int, token: str) -> None:
        self.owner = owner
        self.token = token
        self.services: dict[str, tuple[int, int]] = {}  # name -> (reaper, daemon)

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        read_end, write_end = os.pipe()
        keeper = os.getpid()
        reaper = os.fork()
        if reaper == 0:
            os.close(read_end)
            run_reaper(request, keeper, write_end)
        os.close(write_end)
        answer = os.read(read_end, 32)
        os.close(read_end)
        if not answer:
            return {"error": f"{request['name']}: could not be started"}
        self.services[request["name"]] = (reaper, int(answer))
        return {"pid": int(answer)}

    def kill(self, request: dict[str, Any]) -> dict[str, Any]:
        reaper, _ = self.services.pop(request["name"], (0, 0))
        table = parents()
        if table.get(reaper) == os.getpid():
            send(reaper, signal.SIGTERM)
            begin = time.monotonic()
            while parents().get(reaper) == os.getpid():
                reap()
                if time.monotonic() - begin > stretched(PATIENCE):
                    return {"error": f"{request['name']}: does not end"}
                time.sleep(0.005)
        return {}

    def signal(self, request: dict[str, Any]) -> dict[str, Any]:
        reaper, daemon = self.services.get(request["name"], (0, 0))
        if not reaper or parents().get(daemon) != reaper:  # ended, and the id may be somebody else's by now
            return {"error": f"{request['name']}: not running"}
        for pid in [daemon, *(descendants(reaper) if request.get("all") else [])]:
            send(pid, request["signal"])
        return {}

    def down(self) -> dict[str, Any]:
        gone = kill_below()
        gone = sweep(self.token, {self.owner, os.getppid()}) and gone
        return {} if gone else {"error": "processes of the cluster do not end"}

    def requests(self) -> Iterator[dict[str, Any]]:
        """Requests, until the owner closes the pipe or dies (its other children may hold the pipe open)."""
        buffer = b""
        while os.getppid() == self.owner:
            ready, _, _ = select.select([0], [], [], 0.25)
            reap()
            if not ready:
                continue
            chunk = os.read(0, 65536)
            if not chunk:
                return
            buffer += chunk
            *complete, buffer = buffer.split(b"\n")
            for line in complete:
                yield json.loads(line)

    def serve(self) -> None:
        actions = {"start": self.start, "kill": self.kill, "signal": self.signal}
        for request in self.requests():
            if request["op"] == "down":
                os.write(1, json.dumps(self.down()).encode() + b"\n")
                return
            os.write(1, json.dumps(actions[request["op"]](request)).encode() + b"\n")


def stop(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    keeper = Keeper(int(sys.argv[1]), sys.argv[2])
    try:
        keeper.serve()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        keeper.down()


if __name__ == "__main__":
    main()
