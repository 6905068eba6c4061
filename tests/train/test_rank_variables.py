"""The rank and world size of a process, from each launcher's variables."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dtslurm.errors import RequestInvalid

pytest.importorskip("torch")

from dtslurm.train.place import RankInfo, find_place

MEET = {"MASTER_ADDR": "n1", "MASTER_PORT": "12345"}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "x",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
INTEL = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("env", "launcher", "node"),
    [
        ({**TORCHRUN, **MEET}, "torch", 1),
        ({**TORCHRUN, **SLURM, **MEET}, "torch", 1),
        ({**SLURM, **MEET}, "srun", 1),
        ({**OPEN_MPI, **MEET}, "mpi", 0),
        ({**OPEN_MPI, **SLURM, **MEET}, "mpi", 1),
        ({**INTEL, **MEET}, "mpi", 0),
        ({"PMIX_RANK": "3", **SLURM, **MEET}, "mpi", 1),
        (
            {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", **SLURM, **MEET},
            "torch",
            1,
        ),  # as for Lightning
    ],
)
def test_rank_info_is_read_from_the_variables_of_each_launcher(
    env: Mapping[str, str], launcher: str, node: int
) -> None:
    assert find_place(env) == RankInfo(
        rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=node, launcher=launcher,
        master=("n1", 12345),
    )  # fmt: skip


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # the batch script, outside a step
        {"RANK": "", "WORLD_SIZE": ""},
    ],
)
def test_process_without_launcher_variables_is_a_single_rank(env: Mapping[str, str]) -> None:
    assert find_place(env) == RankInfo()


def test_single_srun_task_needs_no_master_address() -> None:
    env = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_place(env).master is None


def test_srun_tasks_on_a_single_node_use_localhost_as_master() -> None:
    result = find_place({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4"})
    assert result.master == ("127.0.0.1", 10136)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({**TORCHRUN, **MEET, "RANK": "4"}, "RANK=4, but there are 4 processes"),
        ({**TORCHRUN, **MEET, "RANK": "x"}, "RANK='x' is not a number"),
        (SLURM, "MASTER_ADDR is not set to the rendezvous address of the 4 processes"),
        ({**TORCHRUN, "MASTER_ADDR": "n1"}, "MASTER_PORT is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", **MEET}, "none of LOCAL_RANK"),
    ],
)
def test_contradictory_launcher_variables_are_refused(env: Mapping[str, str], words: str) -> None:
    with pytest.raises(RequestInvalid, match=words.replace("(", r"\(")):
        find_place(env)
