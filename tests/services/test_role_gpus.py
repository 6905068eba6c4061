"""Roles that do not fit their job: GPUs that their nodes do not have, secrets that the job does not have."""

from __future__ import annotations

import pytest

from dtslurm.checks.role_checks import find_gpu_conflicts, find_unknown_secrets
from dtslurm.model.jobs.job import JobSpec
from dtslurm.model.jobs.roles import RoleOptions, Roles, RoleSpec
from tests.worker.test_role_monitor import with_gpus, with_instances
from tests.worker.test_role_plan import LAYOUT, role


def conflicts_of(*others: RoleSpec) -> list[str]:
    """Return the conflicts of roles beside a trainer of two nodes with eight GPUs and six ranks each."""
    roles = Roles(main="trainer", others=others)
    spec = JobSpec(name="t", script="t.py", work_dir="/w", launcher="srun", roles=roles)
    return list(find_gpu_conflicts(spec, LAYOUT))


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
