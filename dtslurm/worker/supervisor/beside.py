"""Steps of the job beside its ranks, on one node each."""

import contextlib
import os
import subprocess
import time
from typing import Dict, List, Sequence, Tuple

from .files import json_of

KEPT = ("SLURM_CONF", "SLURM_JOB_ID")  # of the batch script


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
