"""Variables of the environment that are the job's own: its script, Slurm or its launcher sets them."""

from __future__ import annotations

import re
from collections.abc import Collection

_OF_SCRIPT = {
    "DTSLURM_ARTIFACTS",
    "DTSLURM_ATTEMPT",
    "DTSLURM_METRICS",
    "DTSLURM_RUN_DIR",
    "DTSLURM_TRIALS",
    "SRUN_CPUS_PER_TASK",
}
# What describes the allocation and a task's place in it. The rest of SLURM_* is srun's input: SLURM_WAIT,
# SLURM_CPU_BIND, SLURM_STEP_GRES; so is SLURM_JOB_NAME, by which frameworks know an interactive shell.
_OF_SLURM = re.compile(
    r"SLURM_(?:JOB_(?!NAME$)\w+|JOBID|ARRAY_\w+|HET_\w+|RESTART_COUNT"
    r"|STEP_(?:ID|NODELIST|NUM_NODES|NUM_TASKS|TASKS_PER_NODE|LAUNCHER_PORT|GPUS)|STEPID"
    r"|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|NODELIST|NNODES|NTASKS|NPROCS|TASKS_PER_NODE|NTASKS_PER_NODE"
    r"|CPUS_PER_TASK|CPUS_ON_NODE|GPUS_ON_NODE)|SLURMD_NODENAME"
)
_INSTEAD = {
    "MASTER_ADDR": "; slurm.head_address or slurm.host_suffix of the cluster's profile names another address",
    "MASTER_PORT": "; each attempt gets a port that is free",
}


def own_variable(name: str, launcher: str = "", sets: Collection[str] = ()) -> str | None:
    """Return why a variable cannot be set by anybody else, None where it can.

    Args:
        launcher: what starts the ranks, where that is known.
        sets: the variables that it, or the script for it, sets.
    """
    if name in _OF_SCRIPT:
        return "is set by the job's own script, which is built on it; leave it out"
    if _OF_SLURM.fullmatch(name):
        return "is how Slurm tells a job and its ranks what they have; leave it out"
    if name in sets:
        return f"is set for launcher {launcher}, over any other value; leave it out{_INSTEAD.get(name, '')}"
    return None
