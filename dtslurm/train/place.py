"""The rank of a process and related numbers, read from the environment variables of its launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dtslurm.errors import RequestInvalid

# Each row: launcher, and its variables for rank, world size, local rank and local world size. The first row
# whose rank variable is set determines the launcher. Rows below it supply the variables that it lacks.
_NAMES: tuple[tuple[str, str, str, str, str], ...] = (
    ("torch", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "mpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "mpi",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("mpi", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("mpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("mpi", "PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


@dataclass(frozen=True)
class RankInfo:
    """The rank of a process in a job, and related numbers.

    Attributes:
        rank: global rank over all nodes, 0 to ``world_size - 1``.
        local_rank: rank among the processes of the same node.
        node_rank: index of the process's node.
        launcher: kind of variables that were read: ``torch`` (torch's own variables, which torchrun,
            accelerate, deepspeed and dtslurm's scripts set), ``mpi``, ``srun``, or ``none``.
        master: host and port of the rendezvous of all processes, None for a single process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    launcher: str = "none"
    master: tuple[str, int] | None = None


def find_place(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Return the rank information in an environment, by default that of this process.

    Raises:
        RequestInvalid: the variables contradict each other, or the address of the rendezvous is unknown.
    """
    env = os.environ if environ is None else environ
    # the batch script is not a rank
    rows = [row for row in _NAMES if row[0] != "srun" or "SLURM_STEP_ID" in env]
    first_index = next((index for index, row in enumerate(rows) if env.get(row[1])), None)
    if first_index is None:
        return RankInfo()
    rows = rows[first_index:]
    rank, world_size = (
        _read_number(env, [row[1] for row in rows], 0),
        _read_number(env, [row[2] for row in rows], 1),
    )
    rank_info = RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=_read_number(env, [row[3] for row in rows], rank if world_size == 1 else None),
        local_world_size=_read_number(env, [row[4] for row in rows], 1),
        node_rank=_read_number(env, ["GROUP_RANK", "NODE_RANK", "SLURM_NODEID"], 0),
        launcher=rows[0][0],
    )
    if not 0 <= rank < world_size:
        raise RequestInvalid(
            [f"{rows[0][1]}={rank}, but there are {world_size} processes"],
            hint="check whether one launcher starts another, so that each sets the variables",
        )
    return rank_info if world_size == 1 else _add_master(rank_info, env)


def _add_master(place: RankInfo, env: Mapping[str, str]) -> RankInfo:
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not host and place.local_world_size == place.world_size:
        host = "127.0.0.1"
    if not port and (job_id := env.get("SLURM_JOB_ID", "")).isdigit():
        port = str(10000 + int(job_id) * 8 % 20000)
    if not host or not (port or "").isdigit():
        missing_name = "MASTER_ADDR" if not host else "MASTER_PORT"
        raise RequestInvalid(
            [f"{missing_name} is not set to the rendezvous address of the {place.world_size} processes"],
            hint="start the script with dtslurm submit or torchrun, or export MASTER_ADDR (the first node) "
            "and MASTER_PORT before srun or mpirun",
        )
    return RankInfo(**{**vars(place), "master": (host, int(port or 0))})


def _read_number(env: Mapping[str, str], names: list[str], default: int | None) -> int:
    """Return the integer in the first variable that is set; Slurm's ``4(x2)`` counts as 4."""
    for name in names:
        text = env.get(name, "").partition("(")[0].partition(",")[0]
        if text:
            try:
                return int(text)
            except ValueError:
                raise RequestInvalid([f"{name}={env[name]!r} is not a number"]) from None
    if default is None:
        raise RequestInvalid(
            [f"none of {', '.join(names)} is set, so the local rank is unknown"],
            hint="start the script with dtslurm submit or torchrun, or set LOCAL_RANK",
        )
    return default
