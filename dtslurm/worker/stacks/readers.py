"""Sources of a Python process's stacks on this node: py-spy, or the program itself on a signal."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from typing import Any, BinaryIO, Dict, Iterable, Iterator, List, Optional, Tuple

SIGNAL = 60  # SIGRTMAX-4: with faulthandler.register(signal.SIGRTMAX - 4) a program writes its stacks
DEEPEST = 60  # frames of one thread that are read
PROC = "/proc"
_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>[^\]]*)\])? \(most recent call first\)"
)
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_OUTERMOST = (" in <module>", " in _run_module_as_main")  # frames in which a main thread begins

Look = Dict[str, Any]


def read(*path: str) -> str:
    """Return the text of a file of /proc, empty if it cannot be read."""
    try:
        with open(os.path.join(PROC, *path), "rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return ""


def stacks_of(pid: int, deadline: float, file: Optional[str]) -> Tuple[str, List[Look], List[str]]:
    """Return the source of a Python process's stacks, its threads, and why no better source was used."""
    reasons: List[str] = []
    if not os.path.exists(os.path.join(PROC, str(pid))):
        return "none", [], reasons
    program = py_spy(pid)
    if program is None:
        reasons.append("no py-spy in the program's environment or on PATH (pip install py-spy)")
    else:
        threads, reason = read_with_py_spy(program, pid, deadline)
        if threads:
            return "py-spy", threads, reasons
        reasons.append(reason)
    threads, reason = read_by_signal(pid, deadline, file)
    if threads:
        return "signal", threads, reasons
    reasons.append(reason)
    return "proc", [], reasons


def environment_of(pid: int) -> Dict[str, str]:
    """Return the environment that a process was started with, empty if it cannot be read."""
    pairs = (item.partition("=") for item in read(str(pid), "environ").split("\0"))
    return {name: value for name, separator, value in pairs if separator}


def is_of_run(env: Dict[str, str], run_dir: str) -> bool:
    """Return whether an environment belongs to a run, or to a task of an array run.

    The folder of all runs may have another path on this node.
    """
    return _own_path(env.get("DTSLURM_RUN_DIR", "")) == _own_path(run_dir)


def _own_path(run_dir: str) -> List[str]:
    """Return the end of a run directory's path that no other run has: NAME, or NAME/tasks/NUMBER."""
    names = run_dir.rstrip("/").split("/")
    return names[-3:] if names[-2:-1] == ["tasks"] else names[-1:]


def py_spy(pid: int) -> Optional[str]:
    """Return the path of a py-spy for this process, the one in the process's own environment first."""
    env = environment_of(pid)
    command = read(str(pid), "cmdline").split("\0")
    folders = [os.path.dirname(command[0])] if command[0].startswith("/") else []
    folders += [os.path.join(env[name], "bin") for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if env.get(name)]
    folders += env.get("PATH", "").split(":")
    folders += [os.path.dirname(sys.executable or ""), os.path.expanduser("~/.local/bin")]
    folders += os.environ.get("PATH", "").split(":")
    container_root = os.path.join(PROC, str(pid), "root")
    for folder in dict.fromkeys(folders):
        if folder.startswith("/"):
            for path in (os.path.join(folder, "py-spy"), container_root + os.path.join(folder, "py-spy")):
                if os.access(path, os.X_OK):
                    return path
    return None


def read_with_py_spy(program: str, pid: int, deadline: float) -> Tuple[List[Look], str]:
    """Return the threads read by py-spy without stopping the process, or the reason of a failure."""
    reason = ""
    for _ in range(3):  # reading can fail while the stack changes
        patience = min(10.0, deadline - time.monotonic())
        if patience <= 0:
            return [], reason or "no time was left for py-spy"
        argv = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
        code, output, errors = _run(argv, patience)
        if code == 0:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                threads = [_convert_thread(pid, thread) for thread in json.loads(output)]
                return sorted(threads, key=lambda thread: not thread["main"]), ""
        reason = _explain_failure(errors, code)
        if "ermission" in errors:
            break
    return [], reason


def _convert_thread(pid: int, item: Dict[str, Any]) -> Look:
    frames = [
        {
            "function": str(frame["name"]),
            "file": str(frame.get("filename") or frame.get("short_filename") or ""),
            "line": int(frame.get("line") or 0),
        }
        for frame in item["frames"][:DEEPEST]
    ]
    tid = item.get("os_thread_id")
    name = str(item.get("thread_name") or "")
    return {"tid": tid, "name": name, "main": tid == pid or name == "MainThread", "frames": frames}


def _explain_failure(errors: str, code: int) -> str:
    if "ermission" in errors:
        scope = read("sys", "kernel", "yama", "ptrace_scope").strip()
        if scope not in ("", "0"):
            return "this node does not let a process inspect another (kernel.yama.ptrace_scope = {})".format(
                scope
            )
        return "py-spy may not inspect the process: permission denied"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last_line = lines[-1][:200] if lines else "no message"
    return "py-spy returned no stack (exit code {}): {}".format(code, last_line)


def _run(argv: List[str], timeout_s: float) -> Tuple[int, str, str]:
    """Run a program and kill it when its time is up."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return 127, "", str(error)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return 124, "", "it did not end within {:.0f} s".format(timeout_s)
    return process.returncode, output.decode("utf-8", "replace"), errors.decode("utf-8", "replace")


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler of its own for a signal."""
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)", read(str(pid), "status"), re.MULTILINE)
    return match is not None and bool(int(match.group(1), 16) >> (number - 1) & 1)


def read_by_signal(pid: int, deadline: float, file: Optional[str] = None) -> Tuple[List[Look], str]:
    """Return the threads as the program writes them on ``SIGNAL``, or the reason of a failure."""
    if not catches(pid, SIGNAL):
        return (
            [],
            "the program has no handler that writes its stacks (faulthandler.register(signal.SIGRTMAX - 4))",
        )
    path = file if file and os.path.exists(file) else os.path.join(PROC, str(pid), "fd", "2")
    try:
        if not os.path.isfile(path):
            return [], "the program's standard error is not a file, so its stacks cannot be read"
        with open(path, "rb") as log:
            log.seek(0, os.SEEK_END)
            os.kill(pid, SIGNAL)
            written = _read_dump(log, deadline)
    except OSError as error:
        return [], "the stacks could not be read: {}".format(error.strerror)
    threads = list(_written_threads(written.decode("utf-8", "replace").splitlines()))
    if not threads:
        return [], "the process did not write its stacks after the signal (a stopped process cannot)"
    threads[-1]["main"] = True  # faulthandler writes the newest thread first
    return threads[::-1], ""


def _read_dump(log: BinaryIO, deadline: float) -> bytes:
    """Return what is appended to a file until faulthandler's output in it is complete.

    It ends with the outermost frame of the main thread. A program can be preempted before that, so output
    that ends otherwise (faulthandler leaves out frames of a deep stack) is complete after 2 s of silence.
    """
    written = b""
    stack_lines: List[str] = []
    end = time.monotonic() + 3  # the program may be unable to write
    while True:
        time.sleep(0.05)
        written += log.read(1 << 20)
        lines = written.decode("utf-8", "replace").splitlines()
        lines = [line for line in lines if _THREAD.match(line) or _FRAME.match(line)]
        if lines != stack_lines:  # the program may also write other lines
            stack_lines = lines
            end = time.monotonic() + (0.2 if lines[-1].endswith(_OUTERMOST) else 2)
        if time.monotonic() > min(end, deadline):
            return written


def _written_threads(lines: Iterable[str]) -> Iterator[Look]:
    """Yield the threads in faulthandler's output; skip other lines in between."""
    thread: Optional[Look] = None
    for line in lines:
        header = _THREAD.match(line)
        if header:
            if thread is not None:
                yield thread
            thread = {"tid": None, "name": header.group("name") or "", "main": False, "frames": []}
            continue
        frame = _FRAME.match(line)
        if frame and thread is not None and len(thread["frames"]) < DEEPEST:
            line_number = frame.group("line")
            thread["frames"].append(
                {
                    "function": frame.group("function"),
                    "file": frame.group("file"),
                    "line": int(line_number) if line_number.isdigit() else 0,
                }
            )
    if thread is not None:
        yield thread
