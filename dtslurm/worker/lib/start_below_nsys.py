"""Starts a rank's training code below nsys: ``exec SIGNAL COMMAND...``."""

import os
import signal
from typing import List

PID_DESCRIPTOR = 9


def main(words: List[str]) -> None:
    """Write this process's id to descriptor 9, restore signals, and become the command.

    Args:
        words: a signal that nsys must ignore and the command must not, such as ``USR1`` or ``10``, or ``-``;
            then the command.
    """
    name, command = words[0], words[1:]
    os.write(PID_DESCRIPTOR, b"%d\n" % os.getpid())
    os.close(PID_DESCRIPTOR)
    ignored = [signal.SIGPIPE, signal.SIGXFSZ]  # by Python itself
    if name != "-":
        number = int(name) if name.isdigit() else getattr(signal, "SIG" + name.replace("SIG", "", 1))
        ignored.append(signal.Signals(number))
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)  # noqa: S606 - this process becomes the training code
