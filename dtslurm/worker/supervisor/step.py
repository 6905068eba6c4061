"""One attempt's step: starts ``step.sh`` or finds that of a killed supervisor, and ends it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

from ..lib.json_records import read_object
from . import agents, lease, slurm
from .files import text_of
from .node import environment_of

KILL_AFTER_S = 8.0
LAST_WORDS_S = 6.0  # how long the runner of step.sh may outlive step.sh
RUNNER_STARTS_S = 10.0
RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "step_runner.py")


class RunningStep:
    """A running ``step.sh ATTEMPT NODES``.

    Attributes:
        process: the step runner; None if it is a child of an earlier supervisor.
    """

    def __init__(self, run_dir: str, attempt: int, nodes: List[str], *, resume: bool = False) -> None:
        self.run_dir, self.attempt = run_dir, attempt
        self.ranks = os.path.join(run_dir, "ranks", str(attempt))
        self.logs = os.path.join(run_dir, "logs", str(attempt))
        self._record_path = os.path.join(self.ranks, "step.json")
        self.process: Any = None
        self._agents: List[Any] = []
        if resume:
            self._await_runner()
            return
        os.makedirs(self.ranks, exist_ok=True)
        command = [sys.executable, RUNNER, self._record_path, os.path.join(self.logs, "step.log")]
        command += [os.path.join(run_dir, "step.sh"), str(attempt), slurm.join_hostnames(nodes)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)

    def _await_runner(self) -> None:
        """Wait until the step runner has recorded itself: it may start just as its supervisor was killed."""
        end = time.monotonic() + RUNNER_STARTS_S
        while not self._read_record() and time.monotonic() < end:
            time.sleep(0.1)

    def start_agent(self, program: str, node: str, log: str) -> None:
        """Start another agent on a node beside the ranks whose own agent is silent."""
        srun_command, env = agents.step_on(program, node)
        command = ["sh", "-c", 'echo {} && exec python3 "$0" node restarted'.format(agents.STARTED), program]
        with contextlib.suppress(OSError), open(log, "wb") as output:
            self._agents.append(
                subprocess.Popen(
                    [*srun_command, *command],
                    env=dict(env, DTSLURM_ATTEMPT=str(self.attempt)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def _read_record(self) -> Dict[str, Any]:
        return read_object(self._record_path)

    def code(self) -> Optional[int]:
        """Return the exit code, None while the step runs; 137 if it was killed before it recorded a code."""
        if self.process is not None:
            code: Optional[int] = self.process.poll()
            return code if code is None or code >= 0 else 128 - code
        is_running = self._is_runner(self._read_record().get("runner")) or self._is_launcher(self.launcher())
        exit_code = self._read_record().get("exit_code")
        if isinstance(exit_code, int):
            return exit_code
        return None if is_running else 128 + signal.SIGKILL

    def _is_runner(self, pid: Any) -> bool:
        """Return whether a process is the runner of this step, not a later process with the same id."""
        return self._record_path in (text_of("/proc/{}/cmdline".format(pid)) or "").split("\0")

    def _is_launcher(self, pid: Optional[int]) -> bool:
        """Return whether a process is the launcher of this step, which may outlive the runner of step.sh."""
        env = environment_of(pid) if pid is not None else {}
        return (env.get("DTSLURM_RUN_DIR"), env.get("DTSLURM_ATTEMPT")) == (self.run_dir, str(self.attempt))

    def came_too_early(self) -> bool:
        """Return whether Slurm refused the ended step because the previous one still held its memory."""
        return self.code() != 0 and self._read_record().get("too_early") is True

    def came_too_late(self) -> bool:
        """Return whether Slurm refused the ended step because its job was over."""
        return self.code() != 0 and self._read_record().get("job_over") is True

    def launcher(self) -> Optional[int]:
        """Return the process id of srun or another launcher of the ranks, as recorded by step.sh."""
        text = (text_of(os.path.join(self.ranks, "launcher.pid")) or "").strip()
        return int(text) if text.isdigit() else None

    def signal(self, number: int) -> None:
        """Signal the launcher; srun forwards the signal to every process of the step, TERM as KILL."""
        _send(self.launcher() or self._read_record().get("pid") or getattr(self.process, "pid", None), number)

    def end(self, patience_s: float) -> int:
        """End the step, by force if needed, and return its exit code.

        On TERM srun asks Slurm to end the step with its number: after a restart of the job, that is a step of
        the new start. The agents on the nodes end what remains of this step then.
        """
        if lease.holds(self.run_dir, self.attempt):
            self.signal(signal.SIGTERM)
            self.gone_within(patience_s)
        if self.code() is None:
            self.signal(signal.SIGKILL)
            self.gone_within(1.0)
        if self.code() is None:
            _send(self._read_record().get("pid"), signal.SIGKILL)
            self.gone_within(LAST_WORDS_S)
        if self.code() is None:
            _send(self._read_record().get("runner") or getattr(self.process, "pid", None), signal.SIGKILL)
            self.gone_within(1.0)
        return self.finish()

    def gone_within(self, patience_s: float) -> None:
        """Wait for the step to end by itself, at most this long."""
        end = time.monotonic() + patience_s
        while self.code() is None and time.monotonic() < end:
            time.sleep(0.1)

    def finish(self) -> int:
        """Return the exit code of a step that has ended."""
        for agent in self._agents:
            # On TERM srun would end the step of that number, also in a new start. Agents end by themselves.
            agent.kill()
            agent.wait()
        code = self.code()
        return 1 if code is None else code


def _send(pid: Any, number: int) -> None:
    """Send a signal to a process that may no longer exist."""
    if not isinstance(pid, int):
        return
    try:
        os.kill(pid, number)
    except OSError:
        return
