"""Runs one attempt's ``step.sh`` in a process of its own, which outlives a supervisor that is killed.

Run as ``step_runner.py RUN_DIR ATTEMPT NODES``. It writes what step.sh prints to its own output and to the
attempt's ``step.log``. In ``ranks/ATTEMPT/step.json`` it notes its process id, that of step.sh, and the exit
code. It imports nothing of the supervisor, as it is run by its path.
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
_FOR_OTHERS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def copy(source: Any, log: str, words: Deque[bytes]) -> None:
    """Pass on what the launcher says: to the job's output, and to this attempt's own log."""
    places = [1]
    with source:  # to the end, whatever cannot be written: a launcher dies of a broken pipe
        with contextlib.suppress(OSError):
            places.append(os.open(log, _APPEND, 0o600))
        for line in source:
            words.append(line)
            for place in places:
                with contextlib.suppress(OSError):
                    os.write(place, line)


def note(path: str, record: Dict[str, Any]) -> None:
    """Write a small file whole, if the disk takes it."""
    draft = "{}.{}".format(path, os.getpid())
    with contextlib.suppress(OSError):
        with open(draft, "w") as file:
            json.dump(record, file)
        os.replace(draft, path)


def main() -> int:
    """Run step.sh and return its exit code; 128 + N where signal N ended it."""
    run_dir, attempt, nodes = sys.argv[1:]
    path = os.path.join(run_dir, "ranks", attempt, "step.json")
    for number in _FOR_OTHERS:  # Slurm sends them to every process of the job; SIG_IGN would be inherited
        signal.signal(number, lambda _number, _frame: None)
    told: List[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
    process: Any = subprocess.Popen(
        ["bash", os.path.join(run_dir, "step.sh"), attempt, nodes],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    signal.signal(signal.SIGTERM, lambda _number, _frame: process.terminate())
    if told:
        process.terminate()
    record: Dict[str, Any] = {"runner": os.getpid(), "pid": process.pid}
    note(path, record)
    words: Deque[bytes] = collections.deque(maxlen=20)
    log = os.path.join(run_dir, "logs", attempt, "step.log")
    copier = threading.Thread(target=copy, args=(process.stdout, log, words), daemon=True)
    copier.start()
    code: int = process.wait()
    copier.join(5.0)  # a process that step.sh left behind may keep the pipe open
    code = 128 - code if code < 0 else code
    why = {
        "too_early": code != 0 and any(_TOO_EARLY.search(line) for line in words),
        "job_over": code != 0 and any(_JOB_OVER.search(line) for line in words),
    }
    note(path, dict(record, exit_code=code, **why))
    return code


if __name__ == "__main__":
    sys.exit(main())
