"""Checks before queuing and the completion of profiles, on plain values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtslurm.model.cluster import ClusterProfile, Gpus, NodeType, Partition, SlurmCustoms
from dtslurm.model.jobs.destination import choose_destination
from dtslurm.model.jobs.job import JobSpec, Submission, TaskLayout
from dtslurm.model.jobs.options import Placement
from dtslurm.model.units import Memory, Walltime
from dtslurm.scheduler.slurm_checks import check
from dtslurm.scheduler.slurm_profile import complete, node_types
from dtslurm.slurm.parse_scontrol import NodeInfo, PartitionInfo

GPU = PartitionInfo(
    name="gpu", default=True, max_nodes=4, total_nodes=8, max_time=Walltime(3600), allow_accounts=("ml",),
    deny_qos=("debug",),
)  # fmt: skip
CPU = PartitionInfo(name="cpu", total_nodes=2)
SHUT = PartitionInfo(name="shut", state="INACTIVE")
PARTITIONS = (GPU, CPU, SHUT)


def submission(nodes: int = 1, time: int | None = 600, array: str | None = None, **asked: str) -> Submission:
    lines = [f"#SBATCH --{name}={value}" for name, value in asked.items()]
    limit = Walltime(time) if time else None
    return Submission(
        token="t", cluster="c", run_dir="/r", script="\n".join(["#!/bin/bash", *lines, "true"]),
        spec=JobSpec(name="j", script="s", work_dir="/", launcher="single", array=array),
        layout=TaskLayout(
            nodes=nodes, ranks_per_node=1, gpus_per_node=0, cpus_per_rank=None, mem=None, time=limit
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("checked_submission", "problem"),
    [
        (submission(account="ml"), ""),
        (submission(nodes=5), "at most 4 (MaxNodes)"),
        (submission(nodes=3, partition="cpu"), "has: 2"),
        (submission(time=7200), "a time limit of 02:00:00 is more"),
        (submission(partition="gpuu"), "did you mean 'gpu'?"),
        (submission(partition="zzz"), "the partitions are: cpu, gpu, shut"),
        (submission(partition="shut"), "INACTIVE"),
        (submission(account="bio"), "account 'bio' is not allowed in"),
        (submission(qos="DEBUG"), "QOS 'DEBUG' is not allowed in"),
        (submission(nodes=5, partition="gpu,cpu"), "at most 4"),
        (submission(nodes=2, time=7200, partition="gpu,cpu"), ""),
        (submission(time=None), ""),
        (submission(array="0-1000:10%4"), "array index 1000 is too high"),
        (submission(array="0-999"), ""),
    ],
)
def test_submission_is_checked_against_partition_limits(checked_submission: Submission, problem: str) -> None:
    problems = check(checked_submission, PARTITIONS, {"MaxArraySize": "1000"})
    assert bool(problems) is bool(problem)
    assert problem in " ".join(problems)


def test_missing_default_partition_is_a_problem() -> None:
    assert "no default" in check(submission(), [CPU], {})[0]


def node(name: str, *, memory: int = 1000, **values: object) -> NodeInfo:
    base = NodeInfo(
        name=name, partitions=("gpu",), cpus=8, sockets=2, cores_per_socket=4, memory=Memory(memory)
    )
    return replace(base, **values)  # type: ignore[arg-type]


NODES = (
    node("a1", gpus=(("a100", 8),)),
    node("a2", gpus=(("a100", 8),)),
    node("a3", gpus=(("a100", 4),)),
    node("c1", partitions=("cpu",)),
    node("c2", partitions=("cpu",), memory=2048),
    node("c3", partitions=("cpu",), memory=2048),
    node("m1", gpus=(("mi250x", 8),), partitions=("shut",)),
)


def test_nodes_are_grouped_into_named_node_types() -> None:
    types, type_of = node_types(NODES)
    assert set(types) == {"gpu-a100x8", "gpu-a100x4", "cpu-8-1000M", "cpu-8-2G", "gpu-mi250xx8"}
    assert type_of["a2"] == "gpu-a100x8"
    assert types["gpu-a100x8"] == NodeType(
        gpus=Gpus(model="a100", count=8, slurm_type="a100"), cpus=8, sockets=2, cores_per_socket=4,
        memory=Memory(1000),
    )  # fmt: skip
    mixed = types["gpu-mi250xx8"].gpus
    assert mixed is not None
    assert mixed.vendor == "amd"


def test_bare_profile_is_completed_from_slurm() -> None:
    done = complete(
        ClusterProfile(name="slurm"), PARTITIONS, NODES,
        {"SelectType": "select/cons_tres", "MaxArraySize": "1001", "RequeueExit": "5-6,99"},
    )  # fmt: skip
    assert done.slurm.partition == "gpu"
    # The nodes of both partitions differ, so a limit per node would be a guess.
    assert done.slurm.partitions["gpu"] == Partition(max_time=Walltime(3600), max_nodes=4)
    assert done.slurm.partitions["cpu"].node_type is None
    assert done.slurm.gpu_request == "gpus-per-node"
    assert (done.slurm.max_array_size, done.slurm.requeue_exit_codes) == (1001, (5, 6, 99))
    alike = complete(ClusterProfile(name="slurm"), PARTITIONS, NODES[:2], {})
    kind = choose_destination(Placement(partition="gpu"), alike).node
    assert kind is not None
    assert kind.gpu_count == 8
    assert done.default_node_type is None  # nobody asked for whole nodes


def test_cons_res_selector_uses_gres_for_gpus() -> None:
    done = complete(ClusterProfile(name="slurm"), PARTITIONS, NODES, {"SelectType": "select/cons_res"})
    assert done.slurm.gpu_request == "gres"


def test_profile_values_have_precedence_over_slurm() -> None:
    own = ClusterProfile(
        name="x", slurm=SlurmCustoms(partition="cpu", max_array_size=5, gpu_request="constraint"),
        node_types={"mine": NodeType(cpus=4)},
    )  # fmt: skip
    done = complete(own, PARTITIONS, NODES, {"SelectType": "select/cons_tres", "MaxArraySize": "1001"})
    assert done.node_types == own.node_types
    assert (done.slurm.partition, done.slurm.max_array_size, done.slurm.gpu_request) == (
        "cpu",
        5,
        "constraint",
    )
    assert done.slurm.partitions["gpu"].node_type is None


def test_partition_of_the_default_node_type_has_precedence_over_the_slurm_default() -> None:
    own = ClusterProfile(name="x", node_types={"mine": NodeType(cpus=4, partition="cpu")})
    assert complete(own, PARTITIONS, NODES, {}).slurm.partition == "cpu"
