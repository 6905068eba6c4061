"""Runs the script that starts a step in a process of its own, which outlives a supervisor that is killed.

Run as ``step_runner.py RECORD LOG SCRIPT ARGUMENT...``. It copies the script's output to its own output and
to LOG. In RECORD it writes its process id, that of the script, and the exit code. It imports no module of the
supervisor, because it is run by its path.
"""

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from typing import Any, Deque, Dict, List

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_TOO_EARLY = re.compile(rb"Unable to create step for job .*(?:not available|busy)")
_JOB_OVER = re.compile(rb"Unable to create step for job .*already completing or completed")
_IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def copy(source: Any, log: str, words: Deque[bytes]) -> None:
    """Copy the launcher's output to the job's output and to this attempt's own log."""
    descriptors = [1]
    with source:  # read to the end despite write errors: a broken pipe would kill the launcher
        with contextlib.suppress(OSError):
            descriptors.append(os.open(log, _APPEND, 0o600))
        for line in source:
            words.append(line)
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    os.write(descriptor, line)


def note(path: str, record: Dict[str, Any]) -> None:
    """Write a small file atomically; ignore errors."""
    draft = "{}.{}".format(path, os.getpid())
    with contextlib.suppress(OSError):
        with open(draft, "w") as file:
            json.dump(record, file)
        os.replace(draft, path)


def main() -> int:
    """Run the script and return its exit code; 128 + N where signal N ended it."""
    path, log, *command = sys.argv[1:]
    # Slurm sends these signals to every process of the job. Child processes would inherit SIG_IGN.
    for number in _IGNORED_SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    term_signals: List[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: term_signals.append(number))
    process: Any = subprocess.Popen(
        ["bash", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    signal.signal(signal.SIGTERM, lambda _number, _frame: process.terminate())
    if term_signals:
        process.terminate()
    record: Dict[str, Any] = {"runner": os.getpid(), "pid": process.pid}
    note(path, record)
    last_lines: Deque[bytes] = collections.deque(maxlen=20)
    copier = threading.Thread(target=copy, args=(process.stdout, log, last_lines), daemon=True)
    copier.start()
    code: int = process.wait()
    copier.join(5.0)  # a background process of the script may keep the pipe open
    code = 128 - code if code < 0 else code
    refusals = {
        "too_early": code != 0 and any(_TOO_EARLY.search(line) for line in last_lines),
        "job_over": code != 0 and any(_JOB_OVER.search(line) for line in last_lines),
    }
    note(path, dict(record, exit_code=code, **refusals))
    return code


if __name__ == "__main__":
    sys.exit(main())
