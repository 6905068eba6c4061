"""One attempt's step: starts ``step.sh``, keeps its words, ends it."""

import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Deque, List, Optional

from . import lease
from .files import text_of

KILL_AFTER_S = 8.0
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_TOO_EARLY = re.compile(rb"Unable to create step for job .*(?:not available|busy)")


class Step:
    """A running ``step.sh ATTEMPT NODES``."""

    def __init__(self, run_dir: str, attempt: int, nodes: List[str]) -> None:
        self.run_dir, self.attempt = run_dir, attempt
        self.ranks = os.path.join(run_dir, "ranks", str(attempt))
        self.logs = os.path.join(run_dir, "logs", str(attempt))
        os.makedirs(self.ranks, exist_ok=True)
        self.process: Any = subprocess.Popen(
            ["bash", os.path.join(run_dir, "step.sh"), str(attempt), ",".join(nodes)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._words: Deque[bytes] = collections.deque(maxlen=20)
        self._copier = threading.Thread(target=self._copy, daemon=True)
        self._copier.start()

    def _copy(self) -> None:
        """Pass on what the launcher says: to the job's output, and to this attempt's own log."""
        places = [1]
        with self.process.stdout:  # to the end, whatever cannot be written: a launcher dies of a broken pipe
            with contextlib.suppress(OSError):
                places.append(os.open(os.path.join(self.logs, "step.log"), _APPEND, 0o600))
            for line in self.process.stdout:
                self._words.append(line)
                for place in places:
                    with contextlib.suppress(OSError):
                        os.write(place, line)
        for place in places[1:]:
            os.close(place)

    def code(self) -> Optional[int]:
        """Return the exit code, None while it runs."""
        code: Optional[int] = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def came_too_early(self) -> bool:
        """Tell of a step that has ended whether Slurm refused it, for the one before still had its memory."""
        self._copier.join(5.0)
        return self.code() != 0 and any(_TOO_EARLY.search(line) for line in self._words)

    def launcher(self) -> Optional[int]:
        """Return the process id of srun (or of what starts the ranks), as step.sh notes it."""
        text = (text_of(os.path.join(self.ranks, "launcher.pid")) or "").strip()
        return int(text) if text.isdigit() else None

    def signal(self, number: int) -> None:
        """Signal the launcher; srun passes it on to every process of the step, TERM as KILL."""
        pid = self.launcher()
        if pid is None:
            self.process.send_signal(number)
            return
        try:
            os.kill(pid, number)
        except OSError:
            return

    def end(self, patience_s: float) -> int:
        """End the step, by force if need be, and return its exit code.

        At TERM srun has Slurm end the step of its number: once the job has started anew, the new one's. What
        is left of this one is ended by its watchers.
        """
        if lease.holds(self.run_dir, self.attempt):
            self.signal(signal.SIGTERM)
            self.gone_within(patience_s)
        if self.code() is None:
            self.signal(signal.SIGKILL)
            self.gone_within(1.0)
        if self.code() is None:
            self.process.kill()
        self.process.wait()
        return self.finish()

    def gone_within(self, patience_s: float) -> None:
        """Wait for the step to end by itself, but no longer than that."""
        end = time.monotonic() + patience_s
        while self.code() is None and time.monotonic() < end:
            time.sleep(0.1)

    def finish(self) -> int:
        """Wait for the last words and return the exit code."""
        self._copier.join(5.0)
        sys.stdout.flush()
        code = self.code()
        return 1 if code is None else code
