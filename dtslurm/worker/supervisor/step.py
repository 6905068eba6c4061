"""One attempt's step: starts ``step.sh``, or finds the one that a killed supervisor had started; ends it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

from . import agents, lease
from .files import json_of, text_of
from .node import environment_of

KILL_AFTER_S = 8.0
LAST_WORDS_S = 6.0  # within which the runner of step.sh ends after it
RUNNER_STARTS_S = 10.0
RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "step_runner.py")


class RunningStep:
    """A running ``step.sh ATTEMPT NODES``.

    Attributes:
        process: what runs it; None where that is a child of an earlier supervisor.
    """

    def __init__(self, run_dir: str, attempt: int, nodes: List[str], *, resume: bool = False) -> None:
        self.run_dir, self.attempt = run_dir, attempt
        self.ranks = os.path.join(run_dir, "ranks", str(attempt))
        self.logs = os.path.join(run_dir, "logs", str(attempt))
        self.process: Any = None
        self._agents: List[Any] = []
        if resume:
            self._await_runner()
            return
        os.makedirs(self.ranks, exist_ok=True)
        words = [sys.executable, RUNNER, run_dir, str(attempt), ",".join(nodes)]
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)

    def _await_runner(self) -> None:
        """Wait until the runner has noted itself: it may be starting just as its supervisor was killed."""
        end = time.monotonic() + RUNNER_STARTS_S
        while not self._note() and time.monotonic() < end:
            time.sleep(0.1)

    def start_agent(self, program: str, node: str, log: str) -> None:
        """Start an agent on a node beside the ranks there, whose own one is silent."""
        words, env = agents.step_on(program, node)
        command = ["sh", "-c", 'echo {} && exec python3 "$0" node restarted'.format(agents.STARTED), program]
        with contextlib.suppress(OSError), open(log, "wb") as output:
            self._agents.append(
                subprocess.Popen(
                    [*words, *command],
                    env=dict(env, DTSLURM_ATTEMPT=str(self.attempt)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def _note(self) -> Dict[str, Any]:
        return json_of(os.path.join(self.ranks, "step.json"))

    def code(self) -> Optional[int]:
        """Return the exit code, None while it runs; 137 of one that was killed before it could tell."""
        if self.process is not None:
            code: Optional[int] = self.process.poll()
            return code if code is None or code >= 0 else 128 - code
        runs = self._runs(self._note().get("runner")) or self._launches(self.launcher())
        found = self._note().get("exit_code")
        if isinstance(found, int):
            return found
        return None if runs else 128 + signal.SIGKILL

    def _runs(self, pid: Any) -> bool:
        """Tell whether a process is the runner of this step, and no later one with its number."""
        words = (text_of("/proc/{}/cmdline".format(pid)) or "").split("\0")
        return self.run_dir in words and str(self.attempt) in words

    def _launches(self, pid: Optional[int]) -> bool:
        """Tell whether a process is the launcher of this step, which may outlive the runner of step.sh."""
        env = environment_of(pid) if pid is not None else {}
        return (env.get("DTSLURM_RUN_DIR"), env.get("DTSLURM_ATTEMPT")) == (self.run_dir, str(self.attempt))

    def came_too_early(self) -> bool:
        """Tell of a step that has ended whether Slurm refused it, for the one before still had its memory."""
        return self.code() != 0 and self._note().get("too_early") is True

    def came_too_late(self) -> bool:
        """Tell of a step that has ended whether Slurm refused it, for the time of its job is over."""
        return self.code() != 0 and self._note().get("job_over") is True

    def launcher(self) -> Optional[int]:
        """Return the process id of srun (or of what starts the ranks), as step.sh notes it."""
        text = (text_of(os.path.join(self.ranks, "launcher.pid")) or "").strip()
        return int(text) if text.isdigit() else None

    def signal(self, number: int) -> None:
        """Signal the launcher; srun passes it on to every process of the step, TERM as KILL."""
        _send(self.launcher() or self._note().get("pid") or getattr(self.process, "pid", None), number)

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
            _send(self._note().get("pid"), signal.SIGKILL)
            self.gone_within(LAST_WORDS_S)
        if self.code() is None:
            _send(self._note().get("runner") or getattr(self.process, "pid", None), signal.SIGKILL)
            self.gone_within(1.0)
        return self.finish()

    def gone_within(self, patience_s: float) -> None:
        """Wait for the step to end by itself, but no longer than that."""
        end = time.monotonic() + patience_s
        while self.code() is None and time.monotonic() < end:
            time.sleep(0.1)

    def finish(self) -> int:
        """Return the exit code of a step that has ended."""
        sys.stdout.flush()
        for agent in self._agents:
            # At TERM srun ends the step of that number, of a new start too. Agents end by themselves.
            agent.kill()
            agent.wait()
        code = self.code()
        return 1 if code is None else code


def _send(pid: Any, number: int) -> None:
    """Send a signal to a process that may be gone."""
    if not isinstance(pid, int):
        return
    try:
        os.kill(pid, number)
    except OSError:
        return
