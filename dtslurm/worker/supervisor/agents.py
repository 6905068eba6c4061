"""Steps beside the ranks: restarts silent agents, and probes which nodes can still start a process.

A node that starts a new agent is not lost.
"""

import contextlib
import os
import subprocess
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ..lib.json_records import read_object
from . import slurm
from .files import text_of
from .heartbeats import Heartbeats

KEPT = ("SLURM_CONF", "SLURM_JOB_ID")  # variables of the batch script that the steps keep

MISSED_S = 5.0  # an agent that is silent for longer has missed a heartbeat
ANSWER_S = 5.0  # for a node to start a new agent, and until a silent node counts as lost
FIRST_SIGN_S = 60.0  # until the first heartbeat of a restarted agent; the file system may be slow
AT_ONCE = 4  # srun processes at once, so that the loss of a rack causes no burst of requests
STARTED = "started"  # printed on the node before the agent itself starts


class Agents:
    """The restarted agents that have not written a heartbeat yet.

    Args:
        start: starts an agent on a node.
    """

    def __init__(self, beats: Heartbeats, start: Callable[[str], Any]) -> None:
        self.beats, self.start = beats, start
        self.started: Dict[str, float] = {}

    def look(self) -> List[str]:
        """Restart silent agents; return the nodes whose restarted agent wrote its first heartbeat."""
        beats, now = self.beats, self.beats.clock()
        silent = beats.silent(MISSED_S)
        recovered = [
            name for name in self.started if beats.last[name].get("restarted") and name not in silent
        ]
        self.started = {
            name: at for name, at in self.started.items() if name in silent and now - at < FIRST_SIGN_S
        }
        for name in silent:
            if name not in self.started and len(self.started) < AT_ONCE:
                self.start(name)
                self.started[name] = now
        return recovered

    def lost(self) -> Optional[str]:
        """Return a node that is silent and did not start an agent in time, None if there is none."""
        now = self.beats.clock()
        for name in self.beats.silent(self.beats.silent_s):
            is_overdue = now - self.started.get(name, now) >= ANSWER_S
            if is_overdue and name != self.beats.own and not self._has_started(name):
                return name
        return None

    def _has_started(self, name: str) -> bool:
        return STARTED in (text_of(self.beats.log_of(name)) or "").split()

    def words(self, name: str) -> str:
        """Return srun's last error about an agent that it could not start, empty if it printed none."""
        lines = (text_of(self.beats.log_of(name)) or "").splitlines()
        return ([""] + [line.strip()[:200] for line in lines if "error: " in line])[-1]


def step_on(top: str, node: str) -> Tuple[List[str], Dict[str, str]]:
    """Return the command prefix that starts a step on a node beside its ranks, and its environment.

    The step takes no resources of the ranks. The batch script's own variables would request the job's
    resources, and some exclude others.

    Args:
        top: the path of the supervisor's own files.
    """
    hidden_prefixes = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_")
    env = {
        key: value for key, value in os.environ.items() if key in KEPT or not key.startswith(hidden_prefixes)
    }
    srun_command = ["srun", "--nodes=1", "--ntasks=1", "--nodelist=" + node, "--overlap", "--mpi=none"]
    srun_command += ["--mem=0", "--gres=none", "--cpu-bind=none"]
    component = slurm.component_of(node)
    srun_command += ["--het-group={}".format(component)] if component else []
    profile_options = read_object(os.path.join(top, "health.json")).get("srun_options") or []
    return [*srun_command, *map(str, profile_options)], env


def answering(top: str, nodes: Sequence[str], patience: float = 10.0) -> List[str]:
    """Return the nodes on which Slurm can still start a process."""
    processes = {}
    for node in nodes:
        srun_command, env = step_on(top, node)
        with contextlib.suppress(OSError):
            processes[node] = subprocess.Popen(
                [*srun_command, "true"], env=env, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
    end = time.monotonic() + patience
    while any(process.poll() is None for process in processes.values()) and time.monotonic() < end:
        time.sleep(0.1)
    for process in processes.values():
        if process.poll() is None:
            process.kill()
        process.wait()
    return [node for node, process in processes.items() if process.returncode == 0]
