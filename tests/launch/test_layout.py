from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtslurm.launch.layout import resolve
from dtslurm.model.cluster import ClusterProfile, Gpus, NodeType, Partition, SlurmCustoms
from dtslurm.model.jobs.job import Resources
from dtslurm.model.units import Memory

NODE = NodeType(sockets=2, cores_per_socket=64, gpus=Gpus(model="A100", count=8), memory=Memory.parse("1T"))
PROFILE = ClusterProfile(name="site", node_types={"a100x8": NODE}, default_node_type="a100x8")


def test_default_layout_uses_whole_nodes_of_the_default_type() -> None:
    layout = resolve(Resources(nodes=2), PROFILE).layout
    assert layout is not None
    assert (layout.gpus_per_node, layout.ranks_per_node, layout.cpus_per_rank, layout.world_size) == (
        8,
        8,
        16,
        16,
    )


def test_partial_node_gets_a_proportional_share_of_cpus() -> None:
    layout = resolve(Resources(gpus_per_node=2), PROFILE).layout
    assert layout is not None
    assert (layout.ranks_per_node, layout.cpus_per_rank) == (2, 16)


def test_layout_without_a_node_type_has_a_single_rank_and_no_gpu() -> None:
    layout = resolve(Resources(), ClusterProfile(name="bare")).layout
    assert layout is not None
    assert (layout.gpus_per_node, layout.ranks_per_node, layout.cpus_per_rank) == (0, 1, None)


@pytest.mark.parametrize(("gpus", "notice_count"), [(None, 1), (0, 0), (8, 0)])
def test_unrequested_gpus_give_a_notice(gpus: int | None, notice_count: int) -> None:
    result = resolve(Resources(gpus_per_node=gpus), ClusterProfile(name="live", node_types={"a100x8": NODE}))
    assert result.layout is not None
    assert result.layout.gpus_per_node == (gpus or 0)
    notice = "no GPUs requested: a100x8 nodes have 8; request GPUs with --gpus-per-node"
    assert result.notices == [notice] * notice_count


def test_single_process_layout_has_all_gpus_and_cpus() -> None:
    layout = resolve(Resources(), PROFILE, one_process=True).layout
    assert layout is not None
    assert (layout.gpus_per_node, layout.ranks_per_node, layout.cpus_per_rank) == (8, 1, 128)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"nodes": 0}, "--nodes must be at least 1, not 0"),
        ({"nodes": -3}, "--nodes must be at least 1, not -3"),
        ({"gpus_per_node": 9}, "--gpus-per-node 9: a a100x8 node has 8"),
        ({"gpus_per_node": -1}, "--gpus-per-node must be at least 0"),
        ({"ntasks_per_node": 0}, "--ntasks-per-node must be at least 1"),
        ({"cpus_per_task": 0}, "--cpus-per-task must be at least 1"),
        ({"cpus_per_task": 20}, "8 ranks x 20 CPUs = 160 CPUs per node: a a100x8 node has 128"),
        ({"mem": Memory.parse("2T")}, "--mem 2T: a a100x8 node has 1T"),
        ({"node_type": "h100"}, "no such type (a100x8)"),
    ],
)
def test_request_beyond_a_node_is_a_problem(values: dict[str, Any], problem: str) -> None:
    result = resolve(Resources(**values), PROFILE)
    assert result.layout is None
    assert any(problem in line for line in result.problems), result.problems


@pytest.mark.parametrize(
    ("customs", "gpus", "mem", "notice_count"),
    [
        ({"default_mem": Memory(0)}, None, "0", 0),
        ({"default_mem": Memory(0)}, 2, "None", 1),
        ({"default_mem": Memory(0), "exclusive": True}, 2, "0", 0),
        ({"default_mem": Memory.parse("64G")}, 2, "64G", 0),
        ({}, None, "None", 0),
    ],
)
def test_all_node_memory_is_requested_only_with_all_gpus(
    customs: dict[str, Any], gpus: int | None, mem: str, notice_count: int
) -> None:
    site = replace(PROFILE, slurm=SlurmCustoms(**customs))
    result = resolve(Resources(gpus_per_node=gpus), site)
    assert result.layout is not None
    assert str(result.layout.mem) == mem
    assert sum("--mem" in line for line in result.notices) == notice_count


@pytest.mark.parametrize(("exclusive", "notice_count"), [(False, 1), (True, 0)])
def test_unknown_cpu_count_gives_a_notice(exclusive: bool, notice_count: int) -> None:
    node = NodeType(gpus=Gpus(model="A100", count=8))
    site = replace(PROFILE, node_types={"a100x8": node}, slurm=SlurmCustoms(exclusive=exclusive))
    result = resolve(Resources(), site)
    assert sum("CPUs of a100x8 nodes is not known" in line for line in result.notices) == notice_count
    assert not any("CPUs" in line for line in resolve(Resources(cpus_per_task=4), site).notices)


@pytest.mark.parametrize(
    ("count", "beginning"), [(1, "the GPU of each gh200 node"), (4, "all 4 GPUs of each gh200 node")]
)
def test_number_words_match_the_gpu_count(count: int, beginning: str) -> None:
    node = NodeType(sockets=1, cores_per_socket=72, gpus=Gpus(model="GH200", count=count))
    profile = ClusterProfile(name="one", node_types={"gh200": node}, default_node_type="gh200")
    [notice] = resolve(Resources(), profile).notices
    assert notice.startswith(beginning)
    [problem] = resolve(Resources(ntasks_per_node=1, cpus_per_task=100), profile).problems
    assert "1 rank x 100 CPUs = 100 CPUs per node" in problem


def test_local_cluster_accepts_more_ranks_and_cpus_than_the_machine_has() -> None:
    local = replace(PROFILE, scheduler="local")
    assert resolve(Resources(ntasks_per_node=8, cpus_per_task=20), local).layout is not None


def test_all_layout_problems_are_reported_together() -> None:
    result = resolve(Resources(nodes=0, gpus_per_node=9, mem=Memory.parse("2T")), PROFILE)
    assert len(result.problems) == 3


def test_messages_name_the_node_type_of_the_partition() -> None:
    small = NodeType(sockets=1, cores_per_socket=16, gpus=Gpus(model="T4", count=2))
    customs = SlurmCustoms(
        partition="debug", partitions={"debug": Partition(node_type="t4x2"), "any": Partition()}
    )
    profile = ClusterProfile(name="site", node_types={"a100x8": NODE, "t4x2": small}, slurm=customs)
    result = resolve(Resources(gpus_per_node=4), profile)
    assert result.problems == ["--gpus-per-node 4: a t4x2 node has 2"]
    assert resolve(Resources(), profile).notices == [
        "no GPUs requested: t4x2 nodes have 2; request GPUs with --gpus-per-node"
    ]
    assert resolve(Resources(gpus_per_node=4, partition="any"), profile).layout is not None


def test_ranks_that_share_gpus_give_a_notice() -> None:
    result = resolve(Resources(gpus_per_node=2, ntasks_per_node=6), PROFILE)
    assert result.layout is not None
    assert result.layout.cpus_per_rank == 5
    assert result.notices == ["6 ranks share 2 GPUs on each node"]
