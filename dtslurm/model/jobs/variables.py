"""Environment variables that only the job's script, Slurm or the launcher may set."""

from __future__ import annotations

import re
from collections.abc import Collection

_SCRIPT_VARIABLES = {
    "DTSLURM_ARTIFACTS",
    "DTSLURM_ATTEMPT",
    "DTSLURM_METRICS",
    "DTSLURM_NODE_FILES",
    "DTSLURM_RUN_DIR",
    "DTSLURM_TRIALS",
    "SRUN_CPUS_PER_TASK",
}
# Variables that describe the allocation and a task's position in it. The other SLURM_* variables are input to
# srun (SLURM_WAIT, SLURM_CPU_BIND, SLURM_STEP_GRES). SLURM_JOB_NAME may be set, too: frameworks use it to
# detect an interactive shell.
_SLURM_VARIABLE = re.compile(
    r"SLURM_(?:JOB_(?!NAME$)\w+|JOBID|ARRAY_\w+|HET_\w+|RESTART_COUNT"
    r"|STEP_(?:ID|NODELIST|NUM_NODES|NUM_TASKS|TASKS_PER_NODE|LAUNCHER_PORT|GPUS)|STEPID"
    r"|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|NODELIST|NNODES|NTASKS|NPROCS|TASKS_PER_NODE|NTASKS_PER_NODE"
    r"|CPUS_PER_TASK|CPUS_ON_NODE|GPUS_ON_NODE)|SLURMD_NODENAME"
)
_ALTERNATIVE = {
    "MASTER_ADDR": "; slurm.head_address or slurm.host_suffix of the cluster's profile names another address",
    "MASTER_PORT": "; each attempt gets a port that is free",
}


def own_variable(name: str, launcher: str = "", launcher_variables: Collection[str] = ()) -> str | None:
    """Return why users may not set a variable, None if others may.

    Args:
        launcher: the launcher that starts the ranks, empty if unknown.
        launcher_variables: the variables that the launcher, or the script on its behalf, sets.
    """
    if name in _SCRIPT_VARIABLES:
        return "is set by the job script, which depends on it; remove it"
    if _SLURM_VARIABLE.fullmatch(name):
        return "is set by Slurm, and the ranks read it; remove it"
    if name in launcher_variables:
        return (
            f"is set for launcher {launcher}, which overrides any other value; remove "
            f"it{_ALTERNATIVE.get(name, '')}"
        )
    return None
