"""Runs a command on a node of a running job in the place of a process of the job, in a step of its own.

The command gets the environment, the working directory and the container of that process; ``DTSLURM_PID`` is
its id. It ends when the input of this program ends, whose other end the caller holds: a killed caller leaves
no command behind. The command's own input comes in lines of base64.
"""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zlib
from typing import IO, Any, Dict, List, Optional, Tuple

from ..stacks import stacks
from ..stacks.readers import PROC, environment_of, is_of_run

GONE = 3  # exit code if the process has ended
GRACE_S = 5.0  # between TERM and KILL
_WRITING = threading.Lock()


def main() -> int:
    """Run the command of the request in the last argument; return its exit code."""
    request = json.loads(zlib.decompress(base64.b64decode(sys.argv[-1])).decode())
    wanted = [item for item in request["processes"] if is_here(item["node"], by_node=request["by_node"])]
    found = [(item["label"], find_process(item, request["run_dir"])) for item in wanted]
    missing = [label for label, pid in found if pid is None]
    if missing or not found:
        sys.stderr.write("dtslurm: {} no longer runs\n".format(", ".join(missing) or "this part"))
        return GONE
    targets = [(label, pid) for label, pid in found if pid is not None]
    if not request["command"]:
        return enter(targets[0][1])
    if not request["has_input"]:
        return run_all(request["command"], targets, with_labels=request["with_labels"])
    # The end of this program closes the file, because until then a thread may use it.
    spool = Spool(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
    return run_all(request["command"], targets, with_labels=request["with_labels"], spool=spool)


def is_here(node: str, *, by_node: bool) -> bool:
    """Return whether this is the node of that name; names of nodes may differ in their domain."""
    own = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    return not by_node or own.partition(".")[0] == node.partition(".")[0]


def find_process(target: Dict[str, Any], run_dir: str) -> Optional[int]:
    """Return the process id of a rank or of an instance of a role on this node, None if it has ended.

    A container may have its own process ids, and another process may have been given that id since, so the
    environment identifies the process. Of several that match, the others are children of the oldest.
    """
    pid = target["pid"]
    if pid is not None and matches(environment_of(pid), target["variables"], run_dir):
        return int(pid)
    pids = [int(name) for name in os.listdir(PROC) if name.isdigit() and int(name) != os.getpid()]
    found = [item for item in pids if matches(environment_of(item), target["variables"], run_dir)]
    return min(found, key=stacks.started_at) if found else None


def matches(env: Dict[str, str], variables: Dict[str, str], run_dir: str) -> bool:
    """Return whether an environment is that of a task of a run with these variables."""
    if not is_of_run(env, run_dir) or "SLURM_PROCID" not in env:
        return False
    # Launcher single exports no RANK.
    return all(dict({"RANK": "0"}, **env).get(name) == value for name, value in variables.items())


def find_way(pid: int, command: List[str]) -> Tuple[List[str], str]:
    """Return the words and the folder with which a command starts where a process is.

    Raises:
        OSError: the process is in a container that cannot be entered.
    """
    own, theirs = ([_namespace(item, kind) for kind in ("mnt", "user")] for item in ("self", str(pid)))
    if own == theirs and os.path.realpath(os.path.join(PROC, str(pid), "root")) == "/":
        return command, os.path.join(PROC, str(pid), "cwd")  # also if the folder was deleted or moved
    nsenter = shutil.which("nsenter")
    if nsenter is None:
        raise OSError("this node has no nsenter, which enters the container (package util-linux)")
    words = [nsenter, "--target", str(pid), "--mount", "--root", "--wd"]
    if own[1] != theirs[1]:
        words += ["--user", "--preserve-credentials"]
    return [*words, "--", *command], "/"


def _namespace(pid: str, kind: str) -> str:
    return os.readlink(os.path.join(PROC, pid, "ns", kind))


def enter(pid: int) -> int:
    """Become a shell in the place of a process."""
    env = dict(environment_of(pid), TERM=os.environ.get("TERM", "dumb"))
    shell = ["/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh"]
    words, folder = find_way(pid, shell)
    os.chdir(folder)
    os.execvpe(words[0], words, env)  # noqa: S606 - this process becomes the shell


class Spool:
    """The input of a command, in a file, so that a process which does not read does not stop the others.

    That also keeps the input of this program readable, whose end has to be noticed at once.
    """

    def __init__(self, file: Any) -> None:
        self._file = file  # without a buffer
        self._size = 0
        self._has_ended = False
        self._changed = threading.Condition()

    def append(self, data: bytes) -> None:
        """Add bytes."""
        rest = data
        while rest:
            rest = rest[self._file.write(rest) :]
        with self._changed:
            self._size += len(data)
            self._changed.notify_all()

    def close(self) -> None:
        """Let the readers come to an end."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def copy_to(self, pipe: IO[bytes]) -> None:
        """Copy the whole input to the input of a process, and close that."""
        offset = 0
        with contextlib.suppress(OSError), pipe:  # an error means that the process has ended
            while True:
                with self._changed:
                    while offset == self._size and not self._has_ended:
                        self._changed.wait()
                    counted = self._size
                if offset == counted:
                    return
                # The file may already hold more, which is read when it has been counted.
                data = os.pread(self._file.fileno(), min(1 << 16, counted - offset), offset)
                pipe.write(data)
                pipe.flush()
                offset += len(data)


def run_all(
    command: List[str], targets: List[Tuple[str, int]], *, with_labels: bool, spool: Optional[Spool] = None
) -> int:
    """Run a command in the place of each process; return the highest exit code, as srun does for nodes.

    Args:
        with_labels: whether each line of output begins with the label of its process.
        spool: the input of the commands; None for an empty one.
    """
    processes: List[Any] = []
    copies = []
    for label, pid in targets:
        try:
            process = start(command, pid, with_pipes=with_labels, has_input=spool is not None)
        except OSError as error:
            sys.stderr.write("dtslurm: {}: {}\n".format(command[0], error.strerror or error))
            end(processes)
            return 127 if isinstance(error, FileNotFoundError) else 126
        processes.append(process)
        if spool is not None:
            threading.Thread(target=spool.copy_to, args=(process.stdin,), daemon=True).start()
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                copies.append(threading.Thread(target=copy_lines, args=(source, target, label)))
    threading.Thread(target=read_input, args=(processes, spool), daemon=True).start()
    for copy in copies:
        copy.start()
    codes = [process.wait() for process in processes]
    for copy in copies:
        copy.join()
    return max((code if code >= 0 else 128 - code for code in codes), default=0)


def start(command: List[str], pid: int, *, with_pipes: bool, has_input: bool) -> Any:
    """Start a command in the place of a process.

    Raises:
        OSError: it cannot be started.
    """
    words, folder = find_way(pid, command)
    output = subprocess.PIPE if with_pipes else None
    return subprocess.Popen(
        words,
        env=dict(environment_of(pid), DTSLURM_PID=str(pid)),
        cwd=folder,
        stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def copy_lines(source: IO[bytes], target: IO[str], label: str) -> None:
    """Copy lines, each with the label of its process in front."""
    prefix = "[{}] ".format(label).encode()
    for line in source:
        with _WRITING:
            target.buffer.write(prefix + line.rstrip(b"\n") + b"\n")  # type: ignore[attr-defined]
            target.flush()


def read_input(processes: List[Any], spool: Optional[Spool]) -> None:
    """Read lines of base64, of which an empty one ends the input of the commands, then end the processes."""
    rest = b""
    try:
        while True:
            data = os.read(0, 1 << 16)  # a thread that waits in sys.stdin would make the end of Python fail
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if spool is None:
                    continue
                if line:
                    spool.append(base64.b64decode(line))
                else:
                    spool.close()
    except OSError as error:
        sys.stderr.write("dtslurm: cannot keep the input: {}\n".format(error.strerror or error))
    end(processes)


def end(processes: List[Any]) -> None:
    """End processes with their children: TERM first, then KILL."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        for process in processes:
            if process.poll() is None:
                try:
                    os.killpg(process.pid, number)
                except OSError:
                    continue
        for process in processes:
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
