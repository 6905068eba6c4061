"""Where a process stands among the others, read out of what its launcher left in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dtslurm.errors import RequestInvalid

# What launchers call a process's number, how many there are, and the same on its node; the first of a row
# whose number is set is believed. Numbers that a row lacks are looked for in the rows below it.
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
    """A process's place in a job.

    Attributes:
        rank: 0 to ``world_size - 1``, over all nodes.
        local_rank: the same among the processes of its node.
        node_rank: number of its node.
        launcher: how its place was told: ``torch`` (torch's own variables, which torchrun, accelerate,
            deepspeed and dtslurm's scripts set), ``mpi``, ``srun``, or ``none``.
        master: host and port at which all meet, None for a process alone.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    launcher: str = "none"
    master: tuple[str, int] | None = None


def find_place(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Return the place of the process that has this environment (its own, if none is given).

    Raises:
        RequestInvalid: the variables contradict each other, or several processes cannot meet.
    """
    env = os.environ if environ is None else environ
    rows = [
        row for row in _NAMES if row[0] != "srun" or "SLURM_STEP_ID" in env
    ]  # the batch script is no rank
    first = next((index for index, row in enumerate(rows) if env.get(row[1])), None)
    if first is None:
        return RankInfo()
    rows = rows[first:]
    rank, world_size = _number(env, [row[1] for row in rows], 0), _number(env, [row[2] for row in rows], 1)
    place = RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, [row[3] for row in rows], rank if world_size == 1 else None),
        local_world_size=_number(env, [row[4] for row in rows], 1),
        node_rank=_number(env, ["GROUP_RANK", "NODE_RANK", "SLURM_NODEID"], 0),
        launcher=rows[0][0],
    )
    if not 0 <= rank < world_size:
        raise RequestInvalid(
            [f"{rows[0][1]}={rank}, but there are {world_size} processes"],
            hint="is the script started by one launcher inside another?",
        )
    return place if world_size == 1 else _with_master(place, env)


def _with_master(place: RankInfo, env: Mapping[str, str]) -> RankInfo:
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not host and place.local_world_size == place.world_size:
        host = "127.0.0.1"
    if not port and (job := env.get("SLURM_JOB_ID", "")).isdigit():
        port = str(10000 + int(job) * 8 % 20000)
    if not host or not (port or "").isdigit():
        lacks = "MASTER_ADDR" if not host else "MASTER_PORT"
        raise RequestInvalid(
            [f"{lacks} does not say where the {place.world_size} processes meet"],
            hint="start them by dtslurm submit or torchrun, or export MASTER_ADDR (the first node) and "
            "MASTER_PORT before srun or mpirun",
        )
    return RankInfo(**{**vars(place), "master": (host, int(port or 0))})


def _number(env: Mapping[str, str], names: list[str], default: int | None) -> int:
    """Return the first of some variables that is set; ``4(x2)`` counts as 4, as Slurm writes it."""
    for name in names:
        text = env.get(name, "").partition("(")[0].partition(",")[0]
        if text:
            try:
                return int(text)
            except ValueError:
                raise RequestInvalid([f"{name}={env[name]!r} is not a number"]) from None
    if default is None:
        raise RequestInvalid(
            [f"none of {', '.join(names)} tells which process of its node this is"],
            hint="start it by dtslurm submit or torchrun, or set LOCAL_RANK",
        )
    return default
