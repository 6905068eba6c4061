"""Steps beside the ranks: restarts silent agents, and asks which nodes can still start something.

A node that starts a new agent is not lost.
"""

import contextlib
import os
import subprocess
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from .files import json_of, text_of
from .heartbeats import Beats

KEPT = ("SLURM_CONF", "SLURM_JOB_ID")  # of the batch script's variables

MISSED_S = 5.0  # an agent that is silent for longer has missed a sign
ANSWER_S = 5.0  # for a node to start a new agent, and until a silence is that of a lost node
FIRST_SIGN_S = 60.0  # of an agent that a node has started; the file system may be slow
AT_ONCE = 4  # srun processes: the silence of a rack is no reason for a hundred requests
STARTED = "started"  # what an agent's node prints before the agent itself starts


class Agents:
    """The agents that were started anew and have given no sign yet.

    Args:
        start: starts an agent on a node.
    """

    def __init__(self, beats: Beats, start: Callable[[str], Any]) -> None:
        self.beats, self.start = beats, start
        self.started: Dict[str, float] = {}

    def look(self) -> List[str]:
        """Start agents where they are silent; return the nodes whose new one has given its first sign."""
        beats, now = self.beats, self.beats.clock()
        silent = beats.silent(MISSED_S)
        back = [name for name in self.started if beats.last[name].get("restarted") and name not in silent]
        self.started = {
            name: at for name, at in self.started.items() if name in silent and now - at < FIRST_SIGN_S
        }
        for name in silent:
            if name not in self.started and len(self.started) < AT_ONCE:
                self.start(name)
                self.started[name] = now
        return back

    def lost(self) -> Optional[str]:
        """Return a node that is silent and did not start an agent in time, None while there is none."""
        now = self.beats.clock()
        for name in self.beats.silent(self.beats.silent_s):
            late = now - self.started.get(name, now) >= ANSWER_S
            if late and name != self.beats.own and not self._answered(name):
                return name
        return None

    def _answered(self, name: str) -> bool:
        return STARTED in (text_of(self.beats.log_of(name)) or "").split()

    def words(self, name: str) -> str:
        """Return srun's last error about an agent that it could not start, empty if it printed none."""
        lines = (text_of(self.beats.log_of(name)) or "").splitlines()
        return ([""] + [line.strip()[:200] for line in lines if "error: " in line])[-1]


def step_on(top: str, node: str) -> Tuple[List[str], Dict[str, str]]:
    """Return what runs a command on a node beside its ranks, without their resources; and the environment.

    The batch script's own variables would ask for the job's resources, and some exclude others.

    Args:
        top: where the supervisor's own files are.
    """
    hiding = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_")
    env = {key: value for key, value in os.environ.items() if key in KEPT or not key.startswith(hiding)}
    words = ["srun", "--nodes=1", "--ntasks=1", "--nodelist=" + node, "--overlap", "--mpi=none"]
    words += ["--mem=0", "--gres=none", "--cpu-bind=none"]
    more = json_of(os.path.join(top, "health.json")).get("srun_options") or []
    return [*words, *map(str, more)], env


def answering(top: str, nodes: Sequence[str], patience: float = 10.0) -> List[str]:
    """Return the nodes on which Slurm can still start something."""
    processes = {}
    for node in nodes:
        words, env = step_on(top, node)
        with contextlib.suppress(OSError):
            processes[node] = subprocess.Popen(
                [*words, "true"], env=env, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
    end = time.monotonic() + patience
    while any(one.poll() is None for one in processes.values()) and time.monotonic() < end:
        time.sleep(0.1)
    for one in processes.values():
        if one.poll() is None:
            one.kill()
        one.wait()
    return [node for node, one in processes.items() if one.returncode == 0]
