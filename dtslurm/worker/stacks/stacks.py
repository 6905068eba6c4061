"""Stacks of processes on this node: the stack of each thread, and what the thread waits for in the kernel.

Sources, best first: py-spy if it is installed (in the program's own environment, or on either PATH);
the stacks that a program writes itself on ``SIGNAL``, if it handles that signal; what /proc shows of each
thread. The processes are not changed: they are not stopped, and a process that does not catch the signal gets
none.

`look` returns plain values, `text` formats them. Frames come innermost first.
"""

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .readers import PROC, Look, read, stacks_of

SHOWN_THREADS = 64  # threads of one process that are returned
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
# System calls in which programs wait, by number; "*" marks those whose first argument is a file descriptor.
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
    """Return the state and the stacks of each process.

    Keys of a process: ``pid`` (of its Python process), ``state`` (a letter of /proc), ``cpu`` (cores it kept
    busy during ``interval``), ``moved`` (whether its main thread's stack changed during the interval, None if
    unknown), ``by`` (``py-spy``, ``signal``, ``proc`` or ``none``), ``why`` (why no better source was used,
    for people), ``threads``: the main one first, each with ``tid``, ``name``, ``state``, ``cpu``, ``waits``
    (its system call and the kernel's wait channel) and ``frames`` ({"function", "file", "line"}, innermost
    first). A process that has ended has ``by`` "none" and no threads.

    Args:
        pids: the ranks' processes; for a process that is no Python, its first Python descendant is used.
        interval: seconds between two readings, to see whether the stack changes.
        limit: seconds after which no more stacks are read.
        dumps: the file to which a process writes its stacks on ``SIGNAL``, if not to its standard error.
    """
    deadline = time.monotonic() + limit
    children = _list_children()
    chosen = {pid: python_below(pid, children) for pid in pids}
    ticks_before = {pid: _read_cpu_seconds(real) for pid, real in chosen.items()}
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=4) as pool:
        dump_files = [(dumps or {}).get(pid) for pid in pids]
        readings = list(pool.map(lambda pid, file: stacks_of(chosen[pid], deadline, file), pids, dump_files))
        time.sleep(max(0.0, min(began + interval, deadline) - time.monotonic()))
        elapsed_s = max(time.monotonic() - began, 1e-3)
        processes = {
            pid: _describe_process(chosen[pid], ticks_before[pid], elapsed_s, stacks)
            for pid, stacks in zip(pids, readings)  # noqa: B905 - strict is new in Python 3.10
        }
        threads_by_pid = {pid: stacks[1] for pid, stacks in zip(pids, readings) if stacks[0] == "py-spy"}  # noqa: B905
        for pid, second in zip(  # noqa: B905
            threads_by_pid, pool.map(lambda pid: stacks_of(chosen[pid], deadline, None), list(threads_by_pid))
        ):
            if second[0] == "py-spy":
                _add_stacks(
                    processes[pid],
                    second,
                    has_moved=_main_frames(threads_by_pid[pid]) != _main_frames(second[1]),
                )
    return processes


def dump(pids: Sequence[int], interval: float = 1.0, limit: float = 20.0) -> str:
    """Return the stacks of processes on this node as text for people, see `text`."""
    return text(look(pids, interval, limit))


def text(reports: Dict[int, Look]) -> str:
    """Format the answer of `look`, a paragraph for each process."""
    lines = []
    for pid, process in reports.items():
        state = STATES.get(process["state"], process["state"] or "gone")
        lines.append(
            "process {}: {}, {:.1f} cores busy (by {})".format(pid, state, process["cpu"], process["by"])
        )
        lines += ["  {}".format(why) for why in process["why"]]
        for thread in process["threads"]:
            wait_text = ", waits in {}".format(thread["waits"]) if thread["waits"] else ""
            state = STATES.get(thread["state"], thread["state"])
            lines.append("  thread {} {}: {}{}".format(thread["tid"], thread["name"], state, wait_text))
            for frame in thread["frames"]:
                lines.append("    {function} ({file}:{line})".format(**frame))
    return "\n".join(lines) + "\n"


def _describe_process(
    pid: int, cpu_times: Dict[int, float], elapsed_s: float, stacks: Tuple[str, List[Look], List[str]]
) -> Look:
    """Return a process with its threads after the first reading of stacks."""
    process: Look = {
        "pid": pid,
        "state": "",
        "cpu": 0.0,
        "moved": None,
        "by": "none",
        "why": [],
        "threads": [],
    }
    seconds = _read_cpu_seconds(pid)
    if not seconds:
        process["why"] = ["process {} no longer exists on this node".format(pid)]
        return process
    fields = _read_stat(os.path.join(PROC, str(pid), "stat"))
    process["state"] = fields[1] if fields else ""
    process["cpu"] = round(
        sum(max(0.0, seconds[tid] - cpu_times.get(tid, seconds[tid])) for tid in seconds) / elapsed_s, 2
    )
    for tid in sorted(seconds, key=lambda tid: (tid != pid, cpu_times.get(tid, 0) - seconds[tid], tid))[
        :SHOWN_THREADS
    ]:
        cores = max(0.0, seconds[tid] - cpu_times.get(tid, seconds[tid])) / elapsed_s
        thread = _read_thread(pid, tid)
        if thread:
            process["threads"].append(dict(thread, cpu=round(cores, 2)))
    process["by"], process["why"] = "proc", stacks[2]
    _add_stacks(process, stacks, None)
    return process


def _add_stacks(process: Look, stacks: Tuple[str, List[Look], List[str]], has_moved: Optional[bool]) -> None:
    """Add the frames of stacks to the threads that they belong to."""
    by, threads, _ = stacks
    if not threads:
        return
    process["by"] = by
    process["moved"] = has_moved if has_moved is not None else process["moved"]
    thread_by_tid = {thread["tid"]: thread for thread in process["threads"]}
    for number, stack in enumerate(threads):
        tid = stack["tid"] or (process["pid"] if stack.get("main") else -number)
        thread = thread_by_tid.get(tid)
        if thread is None:
            thread = {"tid": tid, "name": "", "state": "", "cpu": 0.0, "waits": "", "frames": []}
            process["threads"].append(thread)
        thread["frames"] = stack["frames"]
        thread["name"] = stack["name"] or thread["name"]
    process["threads"].sort(key=lambda thread: (thread["tid"] != process["pid"], not thread["frames"]))


def _main_frames(threads: List[Look]) -> Any:
    """Return the frames of the main thread."""
    for thread in threads:
        if thread.get("main"):
            return thread["frames"]
    return threads[:1] and threads[0]["frames"]


# ---- /proc ----


def _read_stat(path: str) -> Tuple[str, ...]:
    """Return (name, state, parent, CPU seconds) of a process or thread, empty if it has ended."""
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


def _read_cpu_seconds(pid: int) -> Dict[int, float]:
    """Return the CPU seconds of each thread of a process."""
    cpu_seconds = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(os.path.join(PROC, str(pid), "task")):
            fields = _read_stat(os.path.join(PROC, str(pid), "task", name, "stat"))
            if fields:
                cpu_seconds[int(name)] = float(fields[3])
    return cpu_seconds


def _list_children() -> Dict[int, List[int]]:
    """Return the children of every visible process of this node."""
    children: Dict[int, List[int]] = {}
    for name in os.listdir(PROC):
        if name.isdigit():
            fields = _read_stat(os.path.join(PROC, name, "stat"))
            if fields:
                children.setdefault(int(fields[2]), []).append(int(name))
    return children


def python_below(pid: int, children: Dict[int, List[int]]) -> int:
    """Return the process itself if it is a Python, else its first Python descendant, else itself."""
    queue = [pid]
    while queue:
        candidate = queue.pop(0)
        if is_python(candidate):
            return candidate
        queue += sorted(children.get(candidate, []))
    return pid


def children_of(pid: int) -> List[int]:
    """Return the ids of a process's Python child processes."""
    return [child for child in sorted(_list_children().get(pid, [])) if is_python(child)]


def started_at(pid: int) -> float:
    """Return a process's start time, for comparisons; infinite if the process has ended."""
    fields = read(str(pid), "stat").rpartition(")")[2].split()
    return float(fields[19]) if len(fields) > 19 else float("inf")


def is_python(pid: int) -> bool:
    """Return whether a process is a Python interpreter, by its program or its libraries."""
    try:
        program = os.path.basename(os.readlink(os.path.join(PROC, str(pid), "exe")))
    except OSError:  # another user's process, or a process in a container that hides its program
        program = read(str(pid), "comm")
    return program.startswith(("python", "pypy")) or "libpython" in read(str(pid), "maps")


def _read_thread(pid: int, tid: int) -> Optional[Look]:
    """Return the name, the state and the wait of a thread."""
    path = (str(pid), "task", str(tid))
    fields = _read_stat(os.path.join(PROC, *path, "stat"))
    if not fields:
        return None
    return {"tid": tid, "name": fields[0], "state": fields[1], "waits": _describe_wait(path), "frames": []}


def _describe_wait(proc_path: Tuple[str, ...]) -> str:
    """Return the thread's system call with the file it acts on, and its wait channel in the kernel."""
    parts = []
    syscall_fields = read(*proc_path, "syscall").split()
    if syscall_fields and syscall_fields[0].isdigit():
        name = CALLS.get(int(syscall_fields[0]), "system call {}".format(syscall_fields[0]))
        parts.append(name.rstrip("*"))
        if name.endswith("*") and len(syscall_fields) > 1:
            with contextlib.suppress(OSError, ValueError):
                parts.append(
                    "of "
                    + os.readlink(os.path.join(PROC, proc_path[0], "fd", str(int(syscall_fields[1], 16))))
                )
    channel = read(*proc_path, "wchan").strip()
    if channel not in ("", "0"):
        parts.append("({})".format(channel))
    return " ".join(parts)
