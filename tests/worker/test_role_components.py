"""Roles whose nodes are a component of a heterogeneous job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtslurm.model.jobs.roles import RoleSpec
from dtslurm.worker.supervisor import agents, health, requeue, slurm
from dtslurm.worker.supervisor import options as supervisor_options
from dtslurm.worker.supervisor.health import Report
from dtslurm.worker.supervisor.main import Supervisor
from dtslurm.worker.supervisor.roles.plan import assign_nodes
from tests.worker.conftest import slurm_requests
from tests.worker.test_role_monitor import Site
from tests.worker.test_role_plan import plan_of, role

COMPONENT = (
    "JobId={id} HetJobId=17 HetJobOffset={number} JobName=train\n   HetJobIdSet=17-18\n"
    "   JobState={state} Restarts=0 Partition={partition} ReqNodeList=(null) ExcNodeList=(null)\n"
    "   NumNodes=1\n   \n\n"
)


def with_component(name: str, partition: str = "cpu", **values: object) -> RoleSpec:
    spec = role(name, **values)
    return replace(spec, options=replace(spec.options, partition=partition))


def show_job(**states: str) -> str:
    """Return what scontrol shows of a job with one component in each partition."""
    return "".join(
        COMPONENT.format(id=17 + number, number=number, partition=partition, state=state)
        for number, (partition, state) in enumerate(states.items())
    )


@pytest.fixture
def job(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job with two nodes in partition main, and one in partition cpu."""
    for name, value in {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST": "n1,n2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n1,n2",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "c1",
        "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2",
        "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1",
        "SLURM_JOB_ID_HET_GROUP_1": "18",
    }.items():
        monkeypatch.setenv(name, value)
    (site / "state").write_text(show_job(main="RUNNING", cpu="RUNNING"))
    return site


def test_role_in_a_component_gets_its_nodes_and_other_roles_get_those_of_the_main_role(
    tmp_path: Path,
) -> None:
    judge = role("judge", nodes=0, on="rollout")
    plan = plan_of(tmp_path, with_component("rollout", nodes=2, instances=2), role("report"), judge)
    assert [(item.name, item.component) for item in plan.roles] == [
        ("rollout", 1), ("report", 0), ("judge", 1),
    ]  # fmt: skip
    assert assign_nodes(plan, [["n1", "n2", "n3"], ["c1", "c2"]], ["n1", "n2", "n3", "c2"], 2) == {
        "trainer": ["n1", "n2"],
        "rollout": ["c2", "c1"],
        "report": ["n3"],
        "judge": ["c2", "c1"],
    }


def test_spare_node_replaces_only_nodes_of_its_own_component(tmp_path: Path) -> None:
    site = Site(tmp_path, with_component("rollout"), role("report"))
    site.supervisor.components = [["n1", "n2", "n3", "n4"], ["c1"]]
    site.healthy += ["c1"]
    site.monitor.placement.assign()
    assert site.place() == [("c1", None)]
    assert site.place("report") == [("n3", None)]
    site.healthy = ["n1", "n2", "n4"]
    assert site.place("report") == [("n4", None)]
    assert not site.monitor.placement.choose_nodes(site.monitor.instances["rollout"][0])


def test_nodes_of_all_components_are_known(job: Path) -> None:
    assert slurm.component_nodelists() == ["n1,n2", "c1"]
    assert [slurm.component_of(node) for node in ("n1", "n2", "c1", "other")] == [0, 0, 1, 0]
    supervisor = Supervisor(["--nodes=2", "--world-size=2"])
    assert (supervisor.components, supervisor.nodes) == ([["n1", "n2"], ["c1"]], ["n1", "n2", "c1"])
    assert "--het-group=1" in agents.step_on(str(job), "c1")[0]
    assert "--het-group" not in " ".join(agents.step_on(str(job), "n1")[0])


def test_state_of_the_job_is_that_of_its_first_component(job: Path) -> None:
    (job / "state").write_text(show_job(main="RUNNING", cpu="COMPLETING"))
    assert slurm.show_job()["JobState"] == "RUNNING"
    (job / "state").write_text(show_job(main="COMPLETING", cpu="RUNNING"))
    assert slurm.show_job()["JobState"] == "COMPLETING"


@pytest.mark.parametrize(
    ("bad", "excluded", "message"),
    [
        (["n2"], "n2", ""),
        (["c1"], "c1", ""),
        (["c1", "c2"], "c2", "c1 is not excluded: the job needs 1 of 2 nodes"),
    ],
)
def test_requeue_excludes_the_nodes_that_each_component_can_spare(
    job: Path, monkeypatch: pytest.MonkeyPatch, bad: list[str], excluded: str, message: str
) -> None:
    nodes = {"main": {"n1", "n2", "n3"}, "cpu": {"c1", "c2"}}
    monkeypatch.setattr(slurm, "fitting_nodes", lambda fields: nodes[fields["Partition"]])
    done, words = requeue.continue_job(
        supervisor_options.read(["--nodes=2", "--world-size=2"]), str(job), bad, None
    )
    assert done
    assert slurm_requests(job) == ["requeue 17", f"update JobId=17 ExcNodeList={excluded}"]
    assert words == message


def test_components_in_one_partition_need_different_nodes(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "fitting_nodes", lambda _fields: {"n1", "n2", "n3"})
    assert slurm.exclusion(slurm.show_job(), ["n3"]) == (
        [], "n3 is not excluded: the job needs 3 of 3 nodes",
    )  # fmt: skip


def test_component_of_this_job_is_not_its_successor(job: Path) -> None:
    (job / "lost").write_text("sbatch: error: Socket timed out on send/recv operation")
    (job / "queue").write_text("17+0 dtslurm:abc:def\n17+1 dtslurm:abc:def\n21+1 dtslurm:abc:def\n")
    assert slurm.successor("run.sbatch", [], "dtslurm:abc:def")[0] is None
    with (job / "queue").open("a") as queue:
        queue.write("21+0 dtslurm:abc:def\n")
    assert slurm.successor("run.sbatch", [], "dtslurm:abc:def") == ("21", "")


def test_each_component_is_checked_by_a_step_of_its_own(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def look(argv: list[str], **_options: object) -> health.HealthReport:
        steps.append(argv)
        return health.HealthReport({}, [], [], [])

    monkeypatch.setattr(health, "look", look)
    supervisor = Supervisor(["--nodes=2", "--world-size=2"])
    assert health.before_training(supervisor) is None
    assert [("--nodelist=n1,n2" in argv, "--nodelist=c1" in argv) for argv in steps] == [
        (True, False), (False, True),
    ]  # fmt: skip
    assert "--het-group=1" not in steps[0]
    assert "--het-group=1" in steps[1]
    assert steps[1][-3].endswith("/health-1.json")


@pytest.mark.parametrize(
    ("bad", "suffices"), [([], True), (["n3"], True), (["n2", "n3"], False), (["c1"], False)]
)
def test_healthy_nodes_of_one_component_do_not_replace_those_of_another(
    bad: list[str], suffices: bool
) -> None:
    reports = [Report(name, name not in bad, []) for name in ("n1", "n2", "n3", "c1")]
    assert health.are_enough(reports, [["n1", "n2", "n3"], ["c1"]], [2, 1]) is suffices


def test_nodes_of_roles_do_not_count_as_nodes_for_another_attempt(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that has lost its node cannot go on on that of a server."""
    supervisor = Supervisor(["--nodes=2", "--world-size=2"])
    supervisor.nodes = ["n1", "n2", "n3"]
    supervisor.lost = ["n2"]
    roles = SimpleNamespace(reserved_nodes=lambda: ["n3"])
    monkeypatch.setattr(supervisor, "roles", roles)
    seen = []

    def decide(_end: object, _history: object, recovery: object) -> object:
        seen.append(recovery)
        return SimpleNamespace(
            action="stop", reason="", exclude=[], wait_s=0.0, counted=False, budget="", used=0, of=0
        )

    monkeypatch.setattr("dtslurm.worker.supervisor.main.restart_policy.decide", decide)
    end = SimpleNamespace(attempt=0, cause="node-failure", summary="")
    supervisor.judged(end, [])  # type: ignore[arg-type]
    assert seen[0].healthy == ["n1"]  # type: ignore[attr-defined]
