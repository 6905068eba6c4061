"""Processes of a job: started so that they can be found again, signalled and ended to the last one."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Dict, Iterable, List, NamedTuple, NoReturn, Optional, Sequence, Set

PR_SET_CHILD_SUBREAPER = 36
KEEPER_MARK = "DTSLURM_LOCAL_KEEPER=1"

# Signals that a keeper or srun acts on; children start with all of them at their default.
HANDLED = [
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
    signal.SIGCHLD,
    signal.SIGPIPE,
]

Environment = Dict[str, str]


class Files(NamedTuple):
    """File descriptors for a child's standard streams."""

    stdin: int
    stdout: int
    stderr: int


def become_subreaper() -> None:
    """Have orphans among this process's descendants handed to it, so that none gets lost (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def parents() -> Dict[int, int]:
    """Return every process's parent."""
    found: Dict[int, int] = {}
    if os.path.isdir("/proc/self"):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                with open("/proc/" + name + "/stat", "rb") as file:
                    words = file.read().rpartition(b")")[2].split()  # the command name may hold anything
            except OSError:
                continue
            if len(words) > 1:
                found[int(name)] = int(words[1])
        return found
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for line in subprocess.check_output(["/bin/ps", "-A", "-o", "pid=,ppid="]).decode().splitlines():
            pid, parent = line.split()
            found[int(pid)] = int(parent)
    return found


def is_keeper(pid: int) -> bool:
    """Return whether a process keeps a job of its own, even if it was started from within another."""
    return KEEPER_MARK.encode() in environment_of(pid)


def descendants(roots: Iterable[int], table: Optional[Dict[int, int]] = None) -> Set[int]:
    """Return all processes below these, without themselves and without other jobs' keepers."""
    children: Dict[int, List[int]] = {}
    for pid, parent in (parents() if table is None else table).items():
        children.setdefault(parent, []).append(pid)
    found: Set[int] = set()
    waiting = list(roots)
    while waiting:
        for pid in children.get(waiting.pop(), []):
            if pid not in found and not is_keeper(pid):
                found.add(pid)
                waiting.append(pid)
    return found


def environment_of(pid: int) -> Set[bytes]:
    """Return the variables a process was started with, as ``NAME=value``; empty where that cannot be told."""
    try:
        with open("/proc/{}/environ".format(pid), "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:
        return set()


def in_step(pid: int) -> bool:
    """Return whether a process was started by a task of a step."""
    return any(variable.startswith(b"SLURM_STEP_ID=") for variable in environment_of(pid))


def direct_children(pid: int) -> List[int]:
    """Return a single-threaded process's children, cheaply; empty where the kernel does not list them."""
    try:
        with open("/proc/{0}/task/{0}/children".format(pid)) as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def send(pids: Iterable[int], *numbers: int) -> None:
    """Send signals to processes, the oldest first; those that are gone are passed over.

    A shell thus gets the signal before it sees its command die of it, and ends by the signal itself.
    """
    for pid in sorted(pids):
        for number in numbers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def end(pids: Iterable[int], number: int = signal.SIGTERM) -> None:
    """Ask processes to end, stopped ones too: woken last, they have nothing to do before they obey."""
    send(pids, number, signal.SIGCONT)


def kill_strays(root: str, job: int) -> int:
    """Kill what is left of a job whose keeper died, found by environment; return how many there were."""
    marks = {("DTSLURM_LOCAL_STATE=" + root).encode(errors="surrogateescape"), b"SLURM_JOB_ID=%d" % job}
    table = parents()
    mine = {os.getpid()}
    pid = os.getppid()
    while pid > 1 and pid not in mine:
        mine.add(pid)
        pid = table.get(pid, 0)
    marked = {pid for pid in table if pid not in mine and marks <= environment_of(pid)}
    strays = (marked | descendants(marked, table)) - mine
    send(strays, signal.SIGKILL)
    return len(strays)


def _find_program(program: str, environment: Environment) -> List[str]:
    if "/" in program:
        return [program]
    # Without a PATH nothing is found, as in a Slurm step with --export=NONE.
    return [os.path.join(folder, program) for folder in environment.get("PATH", "").split(":") if folder]


def _become(argv: Sequence[str], environment: Environment, files: Files, node: str) -> NoReturn:
    """Turn a freshly forked child into the program; say so and exit with errno if that fails."""
    os.setsid()
    # All three at once may be each other's sources.
    copies = [os.dup(fd) for fd in files]
    for target, fd in enumerate(copies):
        os.dup2(fd, target)
    os.closerange(3, 4096)
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    environment["SLURM_TASK_PID"] = str(os.getpid())
    failure = OSError(2, os.strerror(2))
    for path in _find_program(argv[0], environment):
        try:
            os.execve(path, list(argv), environment)  # noqa: S606
        except OSError as error:
            if error.errno != 2 or failure.errno == 2:
                failure = error
    message = "slurmstepd-{}: error: execve(): {}: {}\n".format(
        node, argv[0], os.strerror(failure.errno or 2)
    )
    os.write(2, message.encode(errors="surrogateescape"))
    os._exit(failure.errno or 1)


def start(argv: Sequence[str], environment: Environment, cwd: str, files: Files, node: str) -> int:
    """Start a program in a session of its own and return its process id.

    A program that cannot be started says so on its standard error and exits with the error's number.
    The calling process must have one thread only.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    pid = os.fork()
    if pid == 0:
        try:
            try:
                os.chdir(cwd)
            except OSError as error:
                text = "slurmstepd-{}: error: couldn't chdir to `{}': {}: going to /tmp instead\n"
                os.write(
                    files.stderr, text.format(node, cwd, error.strerror).encode(errors="surrogateescape")
                )
                os.chdir("/tmp")  # noqa: S108  where Slurm goes
            _become(argv, environment, files, node)
        finally:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def reap() -> Dict[int, int]:
    """Collect all children that ended: process id and wait status."""
    ended: Dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def kill_below(keep: Iterable[int] = (), patience: float = 5.0) -> Dict[int, int]:
    """Kill every descendant of this process except those to keep; return what was reaped meanwhile."""
    ended: Dict[int, int] = {}
    give_up = time.monotonic() + patience
    while True:
        ended.update(reap())
        left = descendants([os.getpid()]) - set(keep)
        if not left or time.monotonic() > give_up:
            return ended
        send(left, signal.SIGKILL)
        time.sleep(0.005)


_DETACH = """
import os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
pid = os.fork()
if pid:
    print(pid, flush=True)
    os._exit(0)
os.setsid()
null = os.open(os.devnull, os.O_RDONLY)
for source, target in ((null, 0), (log, 1), (log, 2)):
    os.dup2(source, target)
os.execv(sys.argv[2], sys.argv[2:])
"""


def spawn_keeper(
    argv: Sequence[str], cwd: str, env: Environment, log_path: str, pass_fds: Sequence[int] = ()
) -> int:
    """Start a keeper, which outlives this process and its terminal, and return its process id.

    It has a session of its own, no terminal, stdin from /dev/null, and both outputs appended to a file.
    A helper process forks it: this process may have threads, and gets no child to wait for.

    Raises:
        OSError: it could not be started.
    """
    helper = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _DETACH, log_path, *argv],
        cwd=cwd,
        env=dict(env, **dict([KEEPER_MARK.split("=")])),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=tuple(pass_fds),
        check=False,
    )
    if helper.returncode:
        raise OSError(
            helper.returncode, helper.stderr.decode("utf-8", "replace").strip() or "cannot be started"
        )
    return int(helper.stdout)
