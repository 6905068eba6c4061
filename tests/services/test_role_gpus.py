"""Roles that do not fit their job or the cluster: GPUs, secrets, partitions and node types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtslurm.checks.role_checks import find_component_conflicts, find_gpu_conflicts, find_unknown_secrets
from dtslurm.model.cluster import ClusterProfile, Gpus, NodeType, Partition, SlurmCustoms
from dtslurm.model.jobs.job import Allocation, JobSpec, Resources
from dtslurm.model.jobs.roles import RoleOptions, Roles, RoleSpec
from dtslurm.model.units import Walltime
from tests.worker.test_role_monitor import with_gpus, with_instances
from tests.worker.test_role_plan import LAYOUT, role


def conflicts_of(*others: RoleSpec) -> list[str]:
    """Return the conflicts of roles beside a trainer of two nodes with eight GPUs and six ranks each."""
    roles = Roles(main="trainer", others=others)
    spec = JobSpec(name="t", script="t.py", work_dir="/w", launcher="srun", roles=roles)
    return list(find_gpu_conflicts(spec, LAYOUT, ClusterProfile(name="c")))


def judge(gpus: int, on: str = "trainer", instances: int = 1) -> RoleSpec:
    return with_gpus("judge", gpus, nodes=0, on=on, instances=instances)


@pytest.mark.parametrize(
    "others",
    [
        [role("rollout", nodes=2, instances=2)],
        [with_instances("rollout", 8)],
        [with_gpus("rollout", 0, instances=20)],
        [judge(2), with_gpus("rollout", 8)],
        [judge(2, instances=2)],
        [with_gpus("rollout", 6, nodes=1), judge(2, on="rollout")],
        [role("rollout"), role("judge", nodes=0, on="rollout")],
        [judge(1), with_gpus("reward", 1, nodes=0, on="trainer")],
    ],
)
def test_roles_that_fit_have_no_conflict(others: list[RoleSpec]) -> None:
    assert conflicts_of(*others) == []


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([judge(3)], "roles.judge: 3 of the 8 GPUs of a node of trainer are requested, which runs 6 ranks"),
        ([judge(3)], "ntasks_per_node of trainer to 5, or use nodes of its own"),
        ([judge(8)], "runs 6 ranks there; use nodes of its own"),
        ([judge(2, instances=3)], "4 of the 8 GPUs"),
        ([judge(2), with_gpus("reward", 1, nodes=0, on="trainer")], "roles.judge and reward: 3 of the 8"),
        ([role("rollout"), judge(1, on="rollout")], "which uses all of them; set gpus of rollout to 7"),
        ([role("rollout"), judge(8, on="rollout")], "which uses all of them; request fewer"),
        ([with_gpus("rollout", 7), judge(2, on="rollout")], "on a node that has 8, and judge requests 2"),
        ([with_gpus("rollout", 9)], "roles.rollout: its instances need 9 GPUs on a node that has 8"),
        ([with_instances("rollout", 9)], "9 instances share the 8 GPUs of a node; set gpus to 0"),
    ],
)  # fmt: skip
def test_roles_that_do_not_fit_are_a_conflict(others: list[RoleSpec], message: str) -> None:
    [conflict] = conflicts_of(*others)
    assert message in conflict


def test_secret_of_a_role_must_be_one_of_the_job() -> None:
    judge = role("judge", options=RoleOptions(command=("x",), secrets=("HUB_KEY", "JUDGE_KEI")))
    roles = Roles(main="trainer", others=(judge,))
    names = ("HUB_KEY", "JUDGE_KEY")
    spec = JobSpec(name="t", script="t.py", work_dir="/w", launcher="srun", roles=roles, secrets=names)
    assert list(find_unknown_secrets(spec)) == [
        "roles.judge.secrets: the job has no secret JUDGE_KEI; did you mean 'JUDGE_KEY'?"
    ]


SITE = ClusterProfile(
    name="site",
    node_types={
        "a100": NodeType(gpus=Gpus(model="A100", count=8), partition="gpu"),
        "cpu": NodeType(partition="cpu"),
    },
    slurm=SlurmCustoms(
        partitions={
            "gpu": Partition(node_type="a100"),
            "cpu": Partition(node_type="cpu", max_nodes=2, max_time=Walltime.parse("1:00:00")),
            "mixed": Partition(),
        }
    ),
)


def component_conflicts_of(role_spec: RoleSpec, profile: ClusterProfile = SITE, **values: Any) -> list[str]:
    spec = JobSpec(
        name="t", script="t.py", work_dir="/w", launcher="srun",
        roles=Roles(main="trainer", others=(role_spec,)), **values,
    )  # fmt: skip
    return list(find_component_conflicts(spec, profile))


@pytest.mark.parametrize(
    ("options", "nodes", "expected"),
    [
        ({}, 9, None),
        ({"partition": "cpu"}, 2, None),
        ({"node_type": "cpu"}, 1, None),
        ({"partition": "mixed", "gpus": 0}, 1, None),
        ({"partition": "mixed", "node_type": "a100"}, 1, None),
        ({"partition": "cqu"}, 1, "partition 'cqu': cluster site has no such partition; did you mean 'cpu'?"),
        ({"node_type": "a10"}, 1, "roles.rollout.node_type a10: cluster site has no such type"),
        ({"partition": "cpu", "node_type": "a100"}, 1, "has no a100 nodes; give partition: gpu"),
        ({"partition": "mixed"}, 1, "roles.rollout.gpus: the profile does not state the GPUs"),
        ({"partition": "mixed", "nodes_per_instance": 2}, 2, "roles.rollout.node_type: the profile does not"),
        ({"partition": "cpu"}, 3, "roles.rollout.nodes 3: partition cpu allows at most 2"),
    ],
)  # fmt: skip
def test_role_in_a_component_must_fit_the_cluster(
    options: dict[str, Any], nodes: int, expected: str | None
) -> None:
    spec = role("rollout", nodes=nodes)
    conflicts = component_conflicts_of(replace(spec, options=replace(spec.options, **options)))
    assert len(conflicts) == (expected is not None)
    assert expected is None or expected in conflicts[0]


def test_time_limit_of_the_job_must_fit_the_partition_of_each_role() -> None:
    spec = role("rollout")
    spec = replace(spec, options=replace(spec.options, partition="cpu"))
    two_hours = Resources(time=Walltime.parse("2:00:00"))
    [conflict] = component_conflicts_of(spec, resources=two_hours)
    assert conflict == "--time 02:00:00: partition cpu of the role rollout allows at most 01:00:00"


def test_arrays_allocations_and_the_cluster_local_have_no_components() -> None:
    spec = role("rollout")
    spec = replace(spec, options=replace(spec.options, partition="cpu"))
    [conflict] = component_conflicts_of(spec, array="0-3")
    assert "Slurm has no arrays of heterogeneous jobs" in conflict
    [conflict] = component_conflicts_of(spec, allocation=Allocation(job_id="17", nodes=("n1",)))
    assert "has only the nodes of this allocation" in conflict
    [conflict] = component_conflicts_of(spec, replace(SITE, scheduler="local"))
    assert conflict == "roles.rollout.partition: cluster site has no partitions; remove partition"


def test_gpus_of_a_component_are_those_of_its_node_type() -> None:
    rollout = with_gpus("rollout", 4, instances=3)
    rollout = replace(rollout, options=replace(rollout.options, node_type="a100"))
    spec = JobSpec(
        name="t",
        script="t.py",
        work_dir="/w",
        launcher="srun",
        roles=Roles(main="trainer", others=(rollout,)),
    )
    layout = replace(LAYOUT, gpus_per_node=0)
    assert list(find_gpu_conflicts(spec, layout, SITE)) == [
        "roles.rollout: its instances need 12 GPUs on a node that has 8"
    ]
