"""What processes on this node are doing: the stack of each thread, and what the kernel says it waits for.

By py-spy where there is one (in the program's own environment, on its PATH or on ours); else by the stacks
that a program writes itself when it gets ``SIGNAL``, if it listens to that; else by what /proc tells of each
thread. Nothing is changed in the processes looked at: they are not stopped, and no signal is sent to one that
does not catch it.

`look` returns plain values, `text` puts them in words. Frames come innermost first.
"""

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .readers import PROC, Look, read, stacks_of

SHOWN_THREADS = 64  # of one process
TICK = float(os.sysconf("SC_CLK_TCK"))
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device or file system",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
    "I": "idle",
}
# Calls in which programs wait, by number; those with a file descriptor first are marked by a trailing "*".
_X86_64 = {
    0: "read*", 1: "write*", 5: "fstat*", 7: "poll", 16: "ioctl*", 17: "pread*", 18: "pwrite*", 19: "readv*",
    20: "writev*", 23: "select", 35: "nanosleep", 42: "connect*", 43: "accept*", 44: "sendto*",
    45: "recvfrom*", 46: "sendmsg*", 47: "recvmsg*", 61: "wait4", 72: "fcntl*", 73: "flock*", 74: "fsync*",
    75: "fdatasync*", 77: "ftruncate*", 202: "futex", 217: "getdents*", 230: "nanosleep", 232: "epoll_wait*",
    247: "waitid", 257: "openat", 262: "stat", 270: "select", 271: "poll", 281: "epoll_wait*", 288: "accept*",
}  # fmt: skip
_AARCH64 = {
    22: "epoll_wait*", 25: "fcntl*", 29: "ioctl*", 32: "flock*", 46: "ftruncate*", 56: "openat",
    61: "getdents*", 63: "read*", 64: "write*", 65: "readv*", 66: "writev*", 67: "pread*", 68: "pwrite*",
    72: "select", 73: "poll", 79: "stat", 80: "fstat*", 82: "fsync*", 83: "fdatasync*", 95: "waitid",
    98: "futex", 101: "nanosleep", 115: "nanosleep", 202: "accept*", 203: "connect*", 206: "sendto*",
    207: "recvfrom*", 211: "sendmsg*", 212: "recvmsg*", 242: "accept*", 260: "wait4",
}  # fmt: skip
CALLS = {"x86_64": _X86_64, "aarch64": _AARCH64}.get(os.uname().machine, {})


def look(
    pids: Sequence[int],
    interval: float = 1.0,
    limit: float = 20.0,
    dumps: Optional[Dict[int, str]] = None,
) -> Dict[int, Look]:
    """Return for each process what it does.

    Keys of a process: ``pid`` (of the Python in it), ``state`` (a letter of /proc), ``cpu`` (cores it kept
    busy during ``interval``), ``moved`` (whether its main thread's stack was another one at the end, None
    where that is not known), ``by`` (``py-spy``, ``signal``, ``proc`` or ``none``), ``why`` (why not by
    something better, for people), ``threads``: the main one first, each with ``tid``, ``name``, ``state``,
    ``cpu``, ``waits`` (the kernel's word) and ``frames`` ({"function", "file", "line"}, innermost first).
    A process that is gone has ``by`` "none" and no threads.

    Args:
        pids: the ranks' processes; of one that is no Python, the first Python below it is looked at.
        interval: seconds between two looks, to see what moves.
        limit: seconds after which no more stacks are asked for.
        dumps: where a process writes its stacks on ``SIGNAL``, if not to its standard error.
    """
    until = time.monotonic() + limit
    children = _children()
    chosen = {pid: python_below(pid, children) for pid in pids}
    before = {pid: _ticks(real) for pid, real in chosen.items()}
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=4) as pool:
        files = [(dumps or {}).get(pid) for pid in pids]
        first = list(pool.map(lambda pid, file: stacks_of(chosen[pid], until, file), pids, files))
        time.sleep(max(0.0, min(began + interval, until) - time.monotonic()))
        passed = max(time.monotonic() - began, 1e-3)
        found = {
            pid: _process(chosen[pid], before[pid], passed, stacks)
            for pid, stacks in zip(pids, first)  # noqa: B905 - strict is new in Python 3.10
        }
        seen = {pid: stacks[1] for pid, stacks in zip(pids, first) if stacks[0] == "py-spy"}  # noqa: B905
        for pid, second in zip(seen, pool.map(lambda pid: stacks_of(chosen[pid], until, None), list(seen))):  # noqa: B905
            if second[0] == "py-spy":
                _merge(found[pid], second, moved=_main(seen[pid]) != _main(second[1]))
    return found


def dump(pids: Sequence[int], interval: float = 1.0, limit: float = 20.0) -> str:
    """Return the stacks of processes on this node as text for people: `text` of `look`."""
    return text(look(pids, interval, limit))


def text(looks: Dict[int, Look]) -> str:
    """Return what `look` found in words, a paragraph for each process."""
    lines = []
    for pid, found in looks.items():
        state = STATES.get(found["state"], found["state"] or "gone")
        lines.append(
            "process {}: {}, {:.1f} cores busy (by {})".format(pid, state, found["cpu"], found["by"])
        )
        lines += ["  {}".format(why) for why in found["why"]]
        for thread in found["threads"]:
            waits = ", waits in {}".format(thread["waits"]) if thread["waits"] else ""
            state = STATES.get(thread["state"], thread["state"])
            lines.append("  thread {} {}: {}{}".format(thread["tid"], thread["name"], state, waits))
            for frame in thread["frames"]:
                lines.append("    {function} ({file}:{line})".format(**frame))
    return "\n".join(lines) + "\n"


def _process(
    pid: int, before: Dict[int, float], passed: float, stacks: Tuple[str, List[Look], List[str]]
) -> Look:
    """Return what is known of a process after the first look."""
    found: Look = {"pid": pid, "state": "", "cpu": 0.0, "moved": None, "by": "none", "why": [], "threads": []}
    ticks = _ticks(pid)
    if not ticks:
        found["why"] = ["there is no process {} on this node any more".format(pid)]
        return found
    state = _stat(os.path.join(PROC, str(pid), "stat"))
    found["state"] = state[1] if state else ""
    found["cpu"] = round(sum(max(0.0, ticks[tid] - before.get(tid, ticks[tid])) for tid in ticks) / passed, 2)
    for tid in sorted(ticks, key=lambda tid: (tid != pid, before.get(tid, 0) - ticks[tid], tid))[
        :SHOWN_THREADS
    ]:
        busy = max(0.0, ticks[tid] - before.get(tid, ticks[tid])) / passed
        thread = _thread(pid, tid)
        if thread:
            found["threads"].append(dict(thread, cpu=round(busy, 2)))
    found["by"], found["why"] = "proc", stacks[2]
    _merge(found, stacks, None)
    return found


def _merge(found: Look, stacks: Tuple[str, List[Look], List[str]], moved: Optional[bool]) -> None:
    """Put the frames of stacks to the threads they are of."""
    by, threads, _ = stacks
    if not threads:
        return
    found["by"] = by
    found["moved"] = moved if moved is not None else found["moved"]
    known = {thread["tid"]: thread for thread in found["threads"]}
    for number, stack in enumerate(threads):
        tid = stack["tid"] or (found["pid"] if stack.get("main") else -number)
        thread = known.get(tid)
        if thread is None:
            thread = {"tid": tid, "name": "", "state": "", "cpu": 0.0, "waits": "", "frames": []}
            found["threads"].append(thread)
        thread["frames"] = stack["frames"]
        thread["name"] = stack["name"] or thread["name"]
    found["threads"].sort(key=lambda thread: (thread["tid"] != found["pid"], not thread["frames"]))


def _main(threads: List[Look]) -> Any:
    """Return the main thread's frames."""
    for thread in threads:
        if thread.get("main"):
            return thread["frames"]
    return threads[:1] and threads[0]["frames"]


# ---- /proc ----


def _stat(path: str) -> Tuple[str, ...]:
    """Return (name, state, parent, seconds of CPU) of a process or thread, nothing where it is gone."""
    try:
        with open(path, "rb") as file:
            data = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    name, _, rest = data.partition("(")[2].rpartition(")")
    fields = rest.split()
    if len(fields) < 13:
        return ()
    return name, fields[0], fields[1], str((int(fields[11]) + int(fields[12])) / TICK)


def _ticks(pid: int) -> Dict[int, float]:
    """Return the CPU seconds of each thread of a process."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(os.path.join(PROC, str(pid), "task")):
            fields = _stat(os.path.join(PROC, str(pid), "task", name, "stat"))
            if fields:
                found[int(name)] = float(fields[3])
    return found


def _children() -> Dict[int, List[int]]:
    """Return the children of every process of this node that can be seen."""
    found: Dict[int, List[int]] = {}
    for name in os.listdir(PROC):
        if name.isdigit():
            fields = _stat(os.path.join(PROC, name, "stat"))
            if fields:
                found.setdefault(int(fields[2]), []).append(int(name))
    return found


def python_below(pid: int, children: Dict[int, List[int]]) -> int:
    """Return the process itself if it is a Python, else the first below it that is, else itself."""
    waiting = [pid]
    while waiting:
        one = waiting.pop(0)
        if is_python(one):
            return one
        waiting += sorted(children.get(one, []))
    return pid


def children_of(pid: int) -> List[int]:
    """Return the numbers of the Pythons right below a process."""
    return [child for child in sorted(_children().get(pid, [])) if is_python(child)]


def started_at(pid: int) -> float:
    """Return when a process was started, for comparing; one that is gone is the last."""
    fields = read(str(pid), "stat").rpartition(")")[2].split()
    return float(fields[19]) if len(fields) > 19 else float("inf")


def is_python(pid: int) -> bool:
    """Tell whether a process is a Python, by its program or its libraries."""
    try:
        program = os.path.basename(os.readlink(os.path.join(PROC, str(pid), "exe")))
    except OSError:  # another user's, or one in a container that hides it
        program = read(str(pid), "comm")
    return program.startswith(("python", "pypy")) or "libpython" in read(str(pid), "maps")


def _thread(pid: int, tid: int) -> Optional[Look]:
    """Return what the kernel says of a thread."""
    place = (str(pid), "task", str(tid))
    fields = _stat(os.path.join(PROC, *place, "stat"))
    if not fields:
        return None
    return {"tid": tid, "name": fields[0], "state": fields[1], "waits": _waits(place), "frames": []}


def _waits(place: Tuple[str, ...]) -> str:
    """Return the system call a thread is in, with the file it is about, and where in the kernel it sleeps."""
    words = []
    call = read(*place, "syscall").split()
    if call and call[0].isdigit():
        name = CALLS.get(int(call[0]), "system call {}".format(call[0]))
        words.append(name.rstrip("*"))
        if name.endswith("*") and len(call) > 1:
            with contextlib.suppress(OSError, ValueError):
                words.append("of " + os.readlink(os.path.join(PROC, place[0], "fd", str(int(call[1], 16)))))
    channel = read(*place, "wchan").strip()
    if channel not in ("", "0"):
        words.append("({})".format(channel))
    return " ".join(words)
