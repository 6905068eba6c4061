"""Values of a profile compared with live evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtslurm.discover import claims, from_probe, from_slurm
from dtslurm.discover.facts import DiscoveredCluster
from dtslurm.discover.kinds import kinds
from dtslurm.model.cluster import (
    ClusterProfile,
    ContainerRuntime,
    EnvironmentSetup,
    Fabric,
    Gpus,
    IntraNode,
    LocalDisk,
    Nics,
    NodeType,
    Partition,
    SlurmCustoms,
)
from dtslurm.model.units import Memory, Walltime
from dtslurm.slurm import survey
from tests.discover.answers import node_line, survey_output

GPU = {"index": 0, "name": "NVIDIA A100-SXM4-80GB", "memory_mib": 81920, "vendor": "nvidia", "numa": 0}
SEEN: dict[str, Any] = {
    "node": "n1", "gpus": [GPU] * 4, "gpu_tools": ["nvidia-smi"], "links": {"kind": "nvlink"},
    "numa_nodes": 2,
    "hcas": [
        {"name": f"mlx5_{i}", "layer": "InfiniBand", "state": "ACTIVE", "rate_gbps": 200.0} for i in range(4)
    ],
    "interfaces": [{"name": "eth0"}, {"name": "ib0"}],
    "route": {"interface": "ib0", "peer": "n2"},
    "disks": [{"path": "/local", "kind": "xfs", "shared": False, "size_mib": 3_000_000, "free_mib": 1}],
    "online": {"pypi.org": False}, "runtimes": ["apptainer"], "limits": {"memlock": "unlimited"},
}  # fmt: skip
NODES = node_line("n1", "gpu:a100:4", ActiveFeatures="hbm80g,ib") + node_line(
    "n2", "gpu:a100:4", ActiveFeatures="hbm80g,ib"
)

GOOD = ClusterProfile(
    name="site",
    slurm=SlurmCustoms(
        version="22.05", partition="main", max_array_size=10001, mpi="pmix", constraint="ib&hbm80g",
        partitions={"main": Partition(max_time=Walltime(3600), max_nodes=2, node_type="gpu-a100x4")},
    ),
    node_types={
        "gpu-a100x4": NodeType(
            gpus=Gpus(model="A100-SXM4-80GB", count=4, memory=Memory.parse("80G"), slurm_type="a100"),
            sockets=2, cores_per_socket=32, memory=Memory.parse("490G"), partition="main",
            constraint="hbm80g",
            numa_nodes=2, nics=Nics(count=4), intra_node=IntraNode(kind="nvlink"),
            local_disk=LocalDisk(path="/local", size=Memory.parse("2.8T")),
        )
    },
    fabric=Fabric(kind="infiniband", rate_gbps=200, hcas=("mlx5_0", "mlx5_3"), interfaces=("ib0",)),
    environment=EnvironmentSetup(modules=("cuda/12.4", "nccl"), offline=True),
    container=ContainerRuntime(runtime="apptainer"),
)  # fmt: skip


def judge_profile(
    profile: ClusterProfile, node_facts: dict[str, Any] | None = None, nodes: str = NODES
) -> dict[str, str]:
    answer = survey.read(survey_output("22.05.8", nodes=nodes))
    groups = kinds(answer.nodes)
    names = from_slurm.names_of(groups, profile)
    looked = {"gpu-a100x4": SEEN if node_facts is None else node_facts}
    result = from_slurm.facts_from_survey(answer, groups, profile)
    for name, item in looked.items():
        result += from_probe.facts_from_probe(name, item)
    evidence = claims.Evidence(survey=answer, kinds=groups, names=names, found=result, seen=looked)
    return {row.what: row.verdict for row in claims.judge(profile, evidence)}


@pytest.mark.parametrize(
    ("claimed", "live", "holds"),
    [
        ("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("MI250X-GCD", "AMD Instinct MI250X", True),
        ("Max-1550", "Intel(R) Data Center GPU Max 1550", True),
        ("RTX2080Ti", "NVIDIA GeForce RTX 2080 Ti", True),
        ("RTX 6000", "NVIDIA RTX A6000", False),
        ("L4", "NVIDIA L40S", False),
        ("H20", "NVIDIA H200", False),
        ("A10", "NVIDIA A100-SXM4-80GB", False),
        ("H200-SXM-141GB", "NVIDIA GH200 480GB", False),
    ],
)
def test_gpu_models_are_compared_by_whole_words(claimed: str, live: str, holds: bool) -> None:
    profile = replace(
        GOOD,
        node_types={
            name: replace(node_type, gpus=Gpus(model=claimed, count=4))
            for name, node_type in GOOD.node_types.items()
        },
    )
    verdict = judge_profile(profile, {**SEEN, "gpus": [{**GPU, "name": live}] * 4})[
        "node type gpu-a100x4, GPU"
    ]
    assert verdict == ("ok" if holds else "differs")


def test_a_correct_profile_is_confirmed() -> None:
    rows = judge_profile(GOOD)
    assert set(rows.values()) == {"ok"}, rows
    assert len(rows) >= 25


@pytest.mark.parametrize(
    ("node_facts", "wrong"),
    [
        ({"gpus": [GPU] * 3}, {"GPUs in a job"}),
        ({"gpus": [{**GPU, "name": "NVIDIA H100"}] * 4}, {"GPU"}),
        ({"gpus": [{**GPU, "memory_mib": 40960}] * 4}, {"GPU memory"}),
        ({"links": {"kind": "pcie"}}, {"link between GPUs"}),
        ({"numa_nodes": 8}, {"NUMA nodes"}),
        ({"hcas": SEEN["hcas"][:3]}, {"network adapters", "fabric.hcas"}),
        ({"hcas": []}, {"fabric.kind", "fabric.hcas"}),
        ({"interfaces": [{"name": "eth0"}]}, {"fabric.interfaces"}),
        ({"disks": [{**SEEN["disks"][0], "size_mib": 900_000}]}, {"local disk"}),
        ({"disks": [{**SEEN["disks"][0], "shared": True, "kind": "nfs"}]}, {"local disk"}),
        ({"online": {"pypi.org": True}}, {"environment.offline"}),
        ({"runtimes": ["podman"]}, {"container.runtime"}),
    ],
)
def test_values_that_a_probe_contradicts_differ(node_facts: dict[str, Any], wrong: set[str]) -> None:
    rows = judge_profile(GOOD, {**SEEN, **node_facts})
    differing = {what.rpartition(", ")[2] for what, verdict in rows.items() if verdict == "differs"}
    assert differing == wrong


@pytest.mark.parametrize(
    ("nodes", "wrong"),
    [
        (NODES.replace("a100:4", "a100:8"), {"GPUs"}),
        (NODES.replace("CoresPerSocket=32", "CoresPerSocket=24"), {"cores_per_socket"}),
        (NODES.replace("RealMemory=512000", "RealMemory=250000"), {"memory"}),
        (NODES.replace("hbm80g", "hbm81g"), {"slurm.constraint", "constraint"}),
    ],
)
def test_values_that_slurm_contradicts_differ(nodes: str, wrong: set[str]) -> None:
    rows = judge_profile(GOOD, {}, nodes)
    differing = {what.rpartition(", ")[2] for what, verdict in rows.items() if verdict == "differs"}
    assert wrong <= differing


def test_values_without_evidence_are_unknown() -> None:
    rows = judge_profile(GOOD, {**SEEN, "gpus": [], "gpu_tools": [], "links": {}})
    assert rows["node type gpu-a100x4, GPUs in a job"] == "unknown"
    assert rows["node type gpu-a100x4, link between GPUs"] == "unknown"
    profile = ClusterProfile(name="x", slurm=SlurmCustoms(account="ml"), node_types={"v": NodeType(cpus=3)})
    rows = judge_profile(profile, nodes=node_line("c1", CPUTot="128") + node_line("c2", CPUTot="32"))
    assert (rows["slurm.account"], rows["node type v"]) == ("unknown", "unknown")


def test_missing_and_smaller_partitions_differ() -> None:
    partitions = {"main": Partition(max_time=Walltime(999_999), max_nodes=3), "old": Partition()}
    rows = judge_profile(ClusterProfile(name="x", slurm=SlurmCustoms(partitions=partitions)))
    assert rows["partition old"] == "differs"
    assert (rows["partition main, max_time"], rows["partition main, max_nodes"]) == ("differs", "differs")


def test_dry_runs_and_bandwidth_are_judged() -> None:
    assert claims.dry_run("partition p", ["srun"], "", is_refused=False).verdict == "ok"
    assert claims.dry_run("partition p", ["srun"], "busy", is_refused=None).verdict == "unknown"
    assert claims.dry_run("partition p", ["srun"], "invalid account", is_refused=True).verdict == "differs"
    assert claims.bandwidth(100, 60, "").verdict == "ok"
    assert claims.bandwidth(100, 40, "").verdict == "differs"
    assert claims.bandwidth(None, 40, "NCCL goes over TCP").verdict == "differs"
    assert claims.bandwidth(None, None, "no torch").verdict == "unknown"


def test_adding_clusters_keeps_notices() -> None:
    assert (DiscoveredCluster() + DiscoveredCluster(notices=("x",))).notices == ("x",)
