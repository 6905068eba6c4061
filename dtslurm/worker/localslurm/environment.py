"""The environment variables that Slurm sets for a job's batch shell and for each task of a step."""

import os
import pwd
import socket
from typing import Dict, List, Mapping, Optional

from . import hostlist
from .state import Record, State

CLUSTER = "local"
YEAR = 365 * 86400

_LOGIN_VARIABLES = ("HOME", "USER", "LOGNAME", "SHELL", "LANG", "PATH", "TMPDIR", "XDG_RUNTIME_DIR")

Environment = Dict[str, str]


def login_environment(source: Mapping[str, str]) -> Environment:
    """Return the variables of the submitter's environment that a fresh login would have."""
    env = {
        name: value for name, value in source.items() if name in _LOGIN_VARIABLES or name.startswith("LC_")
    }
    try:
        user = pwd.getpwuid(os.getuid())
    except KeyError:
        user = None
    if user is not None:
        env.setdefault("HOME", user.pw_dir)
        env.setdefault("USER", user.pw_name)
        env.setdefault("LOGNAME", user.pw_name)
        env.setdefault("SHELL", user.pw_shell or "/bin/sh")
    env.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
    return env


def exported(export: Optional[str], source: Mapping[str, str]) -> Environment:
    """Return the variables that ``--export`` names: ``A=1`` sets A, ``B`` copies the submitter's value."""
    variables = {}
    for part in (export or "").split(","):
        name, equals, value = part.partition("=")
        if equals:
            variables[name] = value
        elif name in source and name not in ("ALL", "NONE", "NIL"):
            variables[name] = source[name]
    return variables


def _array_variables(record: Record) -> Environment:
    tasks: Optional[List[int]] = record["array_tasks"]
    if not tasks:
        return {}
    return {
        "SLURM_ARRAY_JOB_ID": str(record["array_id"]),
        "SLURM_ARRAY_TASK_ID": str(record["array_task"]),
        "SLURM_ARRAY_TASK_COUNT": str(len(tasks)),
        "SLURM_ARRAY_TASK_MIN": str(min(tasks)),
        "SLURM_ARRAY_TASK_MAX": str(max(tasks)),
        "SLURM_ARRAY_TASK_STEP": str(record["array_step"]),
    }


def gpu_variables(gpus: List[str]) -> Environment:
    """Return the variables that contain a process's GPUs."""
    if not gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "SLURM_GPUS_ON_NODE": str(len(gpus))}


def _option_variables(record: Record) -> Environment:
    """Return the variables that Slurm sets only if the script has the corresponding option."""
    variables = {}
    if record["ntasks_asked"]:
        variables["SLURM_NTASKS"] = variables["SLURM_NPROCS"] = str(record["ntasks"])
    for key, name in (
        ("ntasks_per_node", "SLURM_NTASKS_PER_NODE"),
        ("cpus_per_task", "SLURM_CPUS_PER_TASK"),
        ("gpus_per_node_asked", "SLURM_GPUS_PER_NODE"),
        ("export", "SLURM_EXPORT_ENV"),
    ):
        if record[key] is not None:
            variables[name] = str(record[key])
    if record["memory_mib"]:
        variables["SLURM_MEM_PER_NODE"] = str(record["memory_mib"])
    if record["restarts"]:
        variables["SLURM_RESTART_COUNT"] = str(record["restarts"])
    return variables


def batch_environment(state: State, record: Record, bin_dir: str) -> Environment:
    """Return the complete environment of a job's batch shell."""
    env: Environment = dict(record["login"], **record["exported"])
    nodes = hostlist.fold(range(1, record["nodes"] + 1))
    cpus = hostlist.repeat(record["cpus_per_node"])
    gpus = record["gpu_ids"][0]
    start = int(record["start_time"])
    env.update(
        PATH=bin_dir + ":" + env["PATH"],
        BASH_ENV=os.path.join(bin_dir, "profile"),
        DTSLURM_LOCAL_STATE=state.root,
        ENVIRONMENT="BATCH",
        HOSTNAME=socket.gethostname(),
        SLURM_CLUSTER_NAME=CLUSTER,
        SLURM_CPUS_ON_NODE=str(record["cpus_per_node"][0]),
        SLURM_GTIDS="0",
        SLURM_JOBID=str(record["id"]),
        SLURM_JOB_CPUS_PER_NODE=cpus,
        SLURM_JOB_END_TIME=str(start + (record["time_limit"] or YEAR)),
        SLURM_JOB_GID=str(os.getgid()),
        SLURM_JOB_ID=str(record["id"]),
        SLURM_JOB_NAME=record["name"],
        SLURM_JOB_NODELIST=nodes,
        SLURM_JOB_NUM_NODES=str(record["nodes"]),
        SLURM_JOB_PARTITION=record["partition"],
        SLURM_JOB_START_TIME=str(start),
        SLURM_JOB_UID=str(os.getuid()),
        SLURM_JOB_USER=env.get("USER", ""),
        SLURM_LOCALID="0",
        SLURM_NNODES=str(record["nodes"]),
        SLURM_NODEID="0",
        SLURM_NODELIST=nodes,
        SLURM_PROCID="0",
        SLURM_SUBMIT_DIR=record["submit_dir"],
        SLURM_SUBMIT_HOST=record["submit_host"],
        SLURM_TASKS_PER_NODE=hostlist.repeat(record["tasks_per_node"]),
        SLURMD_NODENAME=hostlist.name(1),
    )
    env.update(_option_variables(record))
    env.update(_array_variables(record))
    env.update(gpu_variables(gpus))
    if record["machine"]["gpus"] and not gpus:
        env["CUDA_VISIBLE_DEVICES"] = ""  # a job without GPUs must not use the machine's GPUs
    # Without a GPU, Accelerate would otherwise train each rank on its own.
    if gpus and not record["machine"]["gpus"]:
        env.setdefault("ACCELERATE_USE_CPU", "true")
    if gpus:
        env["SLURM_JOB_GPUS"] = ",".join(gpus)
    return env


def name_fields(record: Record) -> Dict[str, str]:
    """Return a job's fields for file name patterns."""
    return {
        "A": str(record["id"] if record["array_id"] is None else record["array_id"]),
        "a": str(4294967294 if record["array_task"] is None else record["array_task"]),
        "j": str(record["id"]),
        "J": str(record["id"]),
        "x": record["name"],
        "u": record["login"].get("USER", ""),
        "N": hostlist.name(1),
        "n": "0",
        "t": "0",
        "s": "4294967294",
    }
