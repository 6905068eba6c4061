"""Starts a rank's training code below nsys: ``nsys SIGNAL COMMAND...``.

nsys starts this program again, with ``begin DESCRIPTOR SIGNAL COMMAND...``, and it becomes the training code.
nsys may fail at its start. Then the training code starts without it, because a profile must not end a run.
"""

import os
import select
import signal
import socket
import subprocess
import sys
from typing import List, Optional

PID_DESCRIPTOR = 9  # where `rank.sh` reads the process id of the training code
SESSION = "DTSLURM_NSYS_SESSION"
TRIES = 2
LOOK_S = 0.2


def main(words: List[str]) -> None:
    """Start the training code, and end with its exit code.

    Args:
        words: the early signal, such as ``USR1`` or ``10``, or ``-``; then the command. Or what nsys starts.
    """
    if words[0] == "begin":
        begin(int(words[1]), words[2], words[3:])
    signal_name, command = words[0], words[1:]
    # Slurm signals all processes of a step. The early signal would kill nsys, and TERM this process.
    for number in signals_of(signal_name):
        signal.signal(number, signal.SIG_IGN)
    names = ("SLURM_JOB_ID", "DTSLURM_ATTEMPT", "RANK")
    session = "-".join(["dtslurm", *(os.environ.get(name, "") for name in names)])
    for number in range(1, TRIES + 1):
        os.environ[SESSION] = "{}-{}".format(session, number)
        code = run(signal_name, command)
        if code is not None:
            sys.exit(code)
    sys.stderr.write("dtslurm: nsys has failed, so the training code starts without it\n")
    del os.environ[SESSION]
    begin(PID_DESCRIPTOR, signal_name, command)


def run(signal_name: str, command: List[str]) -> Optional[int]:
    """Return the exit code of the training code; None if nsys ended before that began."""
    ours, theirs = socket.socketpair()
    words = ["nsys", "launch", "--session-new=" + os.environ[SESSION], "--trace=cuda,nvtx"]
    words += [sys.executable, sys.argv[0], "nsys", "begin", str(theirs.fileno()), signal_name]
    with ours:
        with theirs:
            nsys = subprocess.Popen([*words, *command], pass_fds=[theirs.fileno()])
        while not select.select([ours], [], [], LOOK_S)[0] and nsys.poll() is None:
            pass
        ours.shutdown(socket.SHUT_RD)  # from now on the training code cannot begin
        pid = ours.recv(32)
    if pid:
        os.write(PID_DESCRIPTOR, pid)
        os.close(PID_DESCRIPTOR)
    code = nsys.wait()
    return (code if code >= 0 else 128 - code) if pid else None


def begin(descriptor: int, signal_name: str, command: List[str]) -> None:
    """Write this process's id, restore signals, and become the training code."""
    os.write(descriptor, b"%d\n" % os.getpid())  # fails if the other end has given up
    os.close(descriptor)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, *signals_of(signal_name)):  # Python ignores the first two
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)  # noqa: S606 - this process becomes the training code


def signals_of(name: str) -> List[int]:
    """Return the signals that end training, or announce its end."""
    if name == "-":
        return [signal.SIGTERM]
    early = int(name) if name.isdigit() else getattr(signal, "SIG" + name.replace("SIG", "", 1))
    return [signal.SIGTERM, early]
