"""Start, find, signal and kill all processes of a job."""

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

# Signals that a keeper or srun handles; child processes start with the default handlers.
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
    """Adopt orphaned descendants of this process, so that none gets lost (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def parents() -> Dict[int, int]:
    """Return the parent pid of every process, by pid."""
    parent_by_pid: Dict[int, int] = {}
    if os.path.isdir("/proc/self"):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                with open("/proc/" + name + "/stat", "rb") as file:
                    # The command name may contain spaces and parentheses.
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if len(fields) > 1:
                parent_by_pid[int(name)] = int(fields[1])
        return parent_by_pid
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for line in subprocess.check_output(["/bin/ps", "-A", "-o", "pid=,ppid="]).decode().splitlines():
            pid, parent = line.split()
            parent_by_pid[int(pid)] = int(parent)
    return parent_by_pid


def is_keeper(pid: int) -> bool:
    """Return whether a process is a keeper of a job, even if a process of another job started it."""
    return KEEPER_MARK.encode() in environment_of(pid)


def descendants(roots: Iterable[int], table: Optional[Dict[int, int]] = None) -> Set[int]:
    """Return all descendants of the roots, without the roots and without the keepers of other jobs."""
    children: Dict[int, List[int]] = {}
    for pid, parent in (parents() if table is None else table).items():
        children.setdefault(parent, []).append(pid)
    descendant_pids: Set[int] = set()
    pending = list(roots)
    while pending:
        for pid in children.get(pending.pop(), []):
            if pid not in descendant_pids and not is_keeper(pid):
                descendant_pids.add(pid)
                pending.append(pid)
    return descendant_pids


def environment_of(pid: int) -> Set[bytes]:
    """Return a process's initial environment as ``NAME=value``; empty if it cannot be read."""
    try:
        with open("/proc/{}/environ".format(pid), "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:
        return set()


def in_step(pid: int) -> bool:
    """Return whether a process was started by a task of a step."""
    return any(variable.startswith(b"SLURM_STEP_ID=") for variable in environment_of(pid))


def direct_children(pid: int) -> List[int]:
    """Return the children of a single-threaded process, cheaply; empty if the kernel does not list them."""
    try:
        with open("/proc/{0}/task/{0}/children".format(pid)) as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def send(pids: Iterable[int], *numbers: int) -> None:
    """Send signals to processes, oldest first, ignoring processes that have exited.

    So a shell receives the signal before it sees its command die of the signal, and is ended by the signal
    itself.
    """
    for pid in sorted(pids):
        for number in numbers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def end(pids: Iterable[int], number: int = signal.SIGTERM) -> None:
    """Terminate processes, including stopped ones.

    SIGCONT is sent last, so a stopped process wakes up with the signal pending.
    """
    send(pids, number, signal.SIGCONT)


def kill_strays(root: str, job: int) -> int:
    """Kill the remaining processes of a job whose keeper died; return how many there were.

    The processes are found by their environment.
    """
    job_variables = {
        ("DTSLURM_LOCAL_STATE=" + root).encode(errors="surrogateescape"),
        b"SLURM_JOB_ID=%d" % job,
    }
    table = parents()
    own_pids = {os.getpid()}
    pid = os.getppid()
    while pid > 1 and pid not in own_pids:
        own_pids.add(pid)
        pid = table.get(pid, 0)
    job_pids = {pid for pid in table if pid not in own_pids and job_variables <= environment_of(pid)}
    strays = (job_pids | descendants(job_pids, table)) - own_pids
    send(strays, signal.SIGKILL)
    return len(strays)


def _list_program_paths(program: str, environment: Environment) -> List[str]:
    if "/" in program:
        return [program]
    # Without a PATH no program is found, as in a Slurm step with --export=NONE.
    return [os.path.join(folder, program) for folder in environment.get("PATH", "").split(":") if folder]


def _exec_program(argv: Sequence[str], environment: Environment, files: Files, node: str) -> NoReturn:
    """Execute the program in a freshly forked child; on failure write an error and exit with errno."""
    os.setsid()
    # Duplicate all three first: a source descriptor may be another stream's target.
    copies = [os.dup(fd) for fd in files]
    for target, fd in enumerate(copies):
        os.dup2(fd, target)
    os.closerange(3, 4096)
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    environment["SLURM_TASK_PID"] = str(os.getpid())
    failure = OSError(2, os.strerror(2))
    for path in _list_program_paths(argv[0], environment):
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
    """Start a program in its own session and return its process id.

    A program that cannot be started writes the reason to its standard error and exits with the error's
    number. The calling process must be single-threaded.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
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
                os.chdir("/tmp")  # noqa: S108 - as Slurm does
            _exec_program(argv, environment, files, node)
        finally:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    return pid


def reap() -> Dict[int, int]:
    """Collect all exited children; return their wait statuses by process id."""
    status_by_pid: Dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status_by_pid
        if pid == 0:
            return status_by_pid
        status_by_pid[pid] = status


def kill_below(kept_pids: Iterable[int] = (), timeout_s: float = 5.0) -> Dict[int, int]:
    """Kill every descendant of this process except ``kept_pids``; return their wait statuses."""
    status_by_pid: Dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while True:
        status_by_pid.update(reap())
        remaining = descendants([os.getpid()]) - set(kept_pids)
        if not remaining or time.monotonic() > deadline:
            return status_by_pid
        send(remaining, signal.SIGKILL)
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
    """Start a keeper that outlives this process and its terminal, and return its process id.

    The keeper has its own session, no terminal, stdin from /dev/null, and both outputs appended to the log
    file. A helper process forks the keeper: this process may have threads, and must not get a child to wait
    for.

    Raises:
        OSError: the keeper could not be started.
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
