"""Where the instances of roles run, by a monitor whose loop does not run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.model.jobs.roles import RoleSpec
from dtslurm.worker.supervisor.roles import instance as instances
from dtslurm.worker.supervisor.roles.instance import Instance
from dtslurm.worker.supervisor.roles.monitor import MAX_INSTANCES, RoleMonitor
from dtslurm.worker.supervisor.roles.plan import RolePlan
from tests.worker.test_role_plan import plan_of, role

NODES = ["n1", "n2", "n3", "n4", "n5"]


class Site:
    """A supervisor of two nodes of training, whose roles get the next nodes."""

    def __init__(self, folder: Path, *others: RoleSpec, nodes: list[str] = NODES) -> None:
        self.healthy = list(nodes)
        self.events: list[dict[str, Any]] = []
        self.supervisor = SimpleNamespace(
            run_dir=str(folder), top=str(folder), nodes=nodes, components=[nodes],
            attempt_nodes=["n1", "n2"], term_at=None,
            settings=SimpleNamespace(nodes=2, python=""), ledger=SimpleNamespace(event=self.note),
            healthy=lambda: self.healthy, say=lambda _text: None,
        )  # fmt: skip
        self.monitor = RoleMonitor(self.supervisor, plan_of(folder, *others))
        self.monitor._run = lambda: None  # type: ignore[method-assign]
        self.monitor.begin(resume=False)

    def resume(self) -> RoleMonitor:
        """Return the monitor of a supervisor that takes over from a killed one."""
        second = RoleMonitor(self.supervisor, self.monitor.plan)
        second._run = lambda: None  # type: ignore[method-assign]
        add = second._add_instance

        def add_some(role: RolePlan) -> Instance:
            assert len(second._all()) < 2 * MAX_INSTANCES, "instances are added without end"
            return add(role)

        second._add_instance = add_some  # type: ignore[method-assign]
        second.begin(resume=True)
        return second

    def note(self, name: str, **values: Any) -> None:
        self.events.append({"event": name, **values})

    def place(self, name: str = "rollout") -> list[tuple[str, list[int] | None]]:
        """Let all instances of a role start; return their nodes and GPUs."""
        places = []
        for instance in self.monitor.instances[name]:
            instance.nodes = self.monitor.placement.choose_nodes(instance)
            instance.gpus = self.monitor.placement.choose_gpus(instance, instance.node)
            instance.set_state(instances.READY)
            places.append((instance.node, instance.gpus))
        return places


def with_gpus(name: str, gpus: int, **values: Any) -> RoleSpec:
    spec = role(name, **values)
    return replace(spec, options=replace(spec.options, gpus=gpus, instances=values.get("instances")))


def with_several_nodes(name: str, count: int, **values: Any) -> RoleSpec:
    spec = role(name, **values)
    return replace(spec, options=replace(spec.options, nodes_per_instance=count))


def with_instances(name: str, count: int, **values: Any) -> RoleSpec:
    spec = role(name, instances=count, **values)
    return replace(spec, options=replace(spec.options, instances=count))


def test_one_instance_on_each_node_has_all_its_gpus(tmp_path: Path) -> None:
    site = Site(tmp_path, role("rollout", nodes=2, instances=2))
    assert site.place() == [("n3", None), ("n4", None)]
    assert site.monitor.reserved_nodes() == ["n3", "n4"]


def test_instances_of_a_node_share_its_gpus(tmp_path: Path) -> None:
    assert Site(tmp_path, with_instances("rollout", 4, nodes=2)).place() == [
        ("n3", [0, 1, 2, 3]),
        ("n4", [0, 1, 2, 3]),
        ("n3", [4, 5, 6, 7]),
        ("n4", [4, 5, 6, 7]),
    ]


def test_instance_beside_ranks_gets_the_last_gpus(tmp_path: Path) -> None:
    site = Site(tmp_path, with_gpus("judge", 2, nodes=0, on="trainer", instances=2))
    assert site.place("judge") == [("n1", [6, 7]), ("n2", [6, 7])]


def test_instance_beside_another_role_gets_the_last_gpus(tmp_path: Path) -> None:
    judge = with_gpus("judge", 2, nodes=0, on="rollout")
    site = Site(tmp_path, with_gpus("rollout", 6), judge)
    assert site.place() == [("n3", [0, 1, 2, 3, 4, 5])]
    assert site.place("judge") == [("n3", [6, 7])]


def test_ranks_leave_the_nodes_of_other_roles_alone(tmp_path: Path) -> None:
    for name in ("rollout", "vllm"):
        (tmp_path / name).mkdir()
        site = Site(tmp_path / name, with_gpus(name, 4), with_gpus("judge", 4, nodes=0, on=name))
        assert site.place(name) == [("n3", [0, 1, 2, 3])]
        assert site.place("judge") == [("n3", [4, 5, 6, 7])]


def test_instances_without_gpus_run_beside_all_others(tmp_path: Path) -> None:
    site = Site(tmp_path, with_gpus("rollout", 0, instances=3))
    assert site.place() == [("n3", [])] * 3


def test_instances_taken_over_keep_their_gpus(tmp_path: Path) -> None:
    roles = with_gpus("rollout", 4, instances=2)
    site = Site(tmp_path, roles)
    site.place()
    for instance in site.monitor.instances["rollout"]:
        instance.start = 0
    site.monitor._write_state()
    second = site.resume()
    assert [instance.gpus for instance in second.instances["rollout"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert second.placement.choose_gpus(second.instances["rollout"][1], "n3") == [4, 5, 6, 7]


def test_instance_of_a_lost_node_moves_to_free_gpus_of_another_node_of_its_role(tmp_path: Path) -> None:
    site = Site(tmp_path, with_gpus("rollout", 4, nodes=3, instances=3))
    assert site.place() == [("n3", [0, 1, 2, 3]), ("n4", [0, 1, 2, 3]), ("n5", [0, 1, 2, 3])]
    site.healthy.remove("n5")
    assert site.place()[2] == ("n3", [4, 5, 6, 7])


def test_instance_follows_the_nodes_of_the_main_role(tmp_path: Path) -> None:
    site = Site(tmp_path, role("judge", nodes=0, on="trainer"))
    assert site.place("judge") == [("n1", None)]
    site.supervisor.attempt_nodes = ["n2", "n5"]
    site.healthy.remove("n1")
    assert site.place("judge") == [("n2", None)]


def test_instance_of_an_unhealthy_node_moves_to_a_spare_node(tmp_path: Path) -> None:
    site = Site(tmp_path, role("rollout", nodes=2, instances=2))
    site.place()
    site.healthy.remove("n3")
    assert site.place() == [("n5", None), ("n4", None)]
    assert site.monitor.reserved_nodes() == ["n4", "n5"]
    site.healthy.remove("n5")
    assert not site.monitor.placement.choose_nodes(site.monitor.instances["rollout"][0])  # n4 has no free GPU


def test_first_start_tries_the_unhealthy_nodes_of_the_role_and_a_restart_does_not(tmp_path: Path) -> None:
    for number, spec in enumerate((role("rollout", nodes=2), with_several_nodes("rollout", 2, nodes=2))):
        folder = tmp_path / str(number)
        folder.mkdir()
        site = Site(folder, spec)
        site.healthy = ["n1", "n2"]
        [instance] = site.monitor.instances["rollout"]
        instance.nodes = site.monitor.placement.choose_nodes(instance)
        assert instance.nodes == ["n3", "n4"][: number + 1]
        assert site.monitor.placement.choose_nodes(instance) == []


def test_instance_prefers_a_spare_node_to_the_gpus_beside_another_instance(tmp_path: Path) -> None:
    site = Site(tmp_path, with_gpus("rollout", 4, nodes=2, instances=2))
    assert site.place() == [("n3", [0, 1, 2, 3]), ("n4", [0, 1, 2, 3])]
    site.healthy.remove("n3")
    assert site.place() == [("n5", [0, 1, 2, 3]), ("n4", [0, 1, 2, 3])]
    assert site.monitor.placement.nodes["rollout"] == ["n4", "n5"]


def test_instance_beside_ranks_gets_no_spare_node(tmp_path: Path) -> None:
    site = Site(tmp_path, with_gpus("judge", 2, nodes=0, on="trainer", instances=2))
    site.place("judge")
    site.healthy.remove("n1")
    assert (
        site.monitor.placement.choose_nodes(site.monitor.instances["judge"][0]) == []
    )  # n2 has GPUs for one


def test_three_instances_are_divided_among_two_nodes(tmp_path: Path) -> None:
    site = Site(tmp_path, with_gpus("rollout", 2, nodes=2, instances=3))
    assert site.place() == [("n3", [0, 1]), ("n4", [0, 1]), ("n3", [2, 3])]
    assert site.monitor.placement.nodes["rollout"] == ["n3", "n4"]


def test_instances_share_a_node_without_gpus(tmp_path: Path) -> None:
    site = Site(tmp_path, role("rollout", instances=3))
    for instance in site.monitor.instances["rollout"]:
        instance.role = instance.role._replace(gpus=None, gpus_per_node=0)
    assert site.place() == [("n3", None)] * 3


def test_instances_with_several_nodes_share_none_and_move_to_spare_nodes(tmp_path: Path) -> None:
    names = [f"n{number}" for number in range(1, 8)]
    site = Site(tmp_path, with_several_nodes("rollout", 2, nodes=4, instances=2), nodes=names)
    assert site.place() == [("n3,n4", None), ("n5,n6", None)]
    site.healthy.remove("n4")
    assert site.place() == [("n3,n7", None), ("n5,n6", None)]
    assert site.monitor.reserved_nodes() == ["n3", "n5", "n6", "n7"]
    site.healthy.remove("n5")
    assert not site.monitor.placement.choose_nodes(
        site.monitor.instances["rollout"][1]
    )  # n6 alone is not enough


def test_instance_that_comes_back_gets_no_node_that_another_one_has_taken_meanwhile(tmp_path: Path) -> None:
    site = Site(tmp_path, with_several_nodes("rollout", 2, nodes=4, instances=2), nodes=[*NODES, "n6", "n7"])
    site.place()
    plan = site.monitor.plan.roles[0]
    first, second = site.monitor.instances["rollout"]
    second.set_state(instances.REMOVED)
    site.healthy.remove("n4")
    first.nodes = site.monitor.placement.choose_nodes(first)
    assert first.nodes == ["n3", "n5"]
    site.monitor._scale_role(plan, 2)
    assert site.place() == [("n3,n5", None), ("n6,n7", None)]


def test_scale_of_instances_with_several_nodes_counts_whole_instances(tmp_path: Path) -> None:
    names = [f"n{number}" for number in range(1, 8)]
    site = Site(tmp_path, with_several_nodes("rollout", 2, nodes=2, instances=1), nodes=names)
    assert site.place() == [("n3,n4", None)]
    site.monitor._scale_role(site.monitor.plan.roles[0], 3)  # three nodes are left, enough for one more
    assert site.monitor.placement.nodes["rollout"] == ["n3", "n4", "n5", "n6"]
    assert site.place() == [("n3,n4", None), ("n5,n6", None)]
    assert (site.events[0]["instances"], site.events[0]["requested"]) == (2, 3)


@pytest.mark.parametrize(("count", "reached", "nodes"), [(3, 3, 3), (4, 3, 3), (1, 1, 2), (2, 2, 2)])
def test_scale_is_limited_by_the_nodes_of_the_allocation(
    tmp_path: Path, count: int, reached: int, nodes: int
) -> None:
    site = Site(tmp_path, role("rollout", nodes=2, instances=2))
    site.place()
    plan = site.monitor.plan.roles[0]
    site.monitor._scale_role(plan, count)
    active = [item for item in site.monitor.instances["rollout"] if item.state != instances.REMOVED]
    assert len(active) == reached
    assert len(site.monitor.placement.nodes["rollout"]) == nodes
    if count == 2:
        assert site.events == []
        return
    [event] = site.events
    assert (event["instances"], event["requested"]) == (reached, count)
    assert bool(event["reason"]) is (count > reached)


@pytest.mark.parametrize(
    ("roles", "reached"),
    [
        ([with_gpus("rollout", 3, instances=2)], 2),
        ([with_gpus("rollout", 2, instances=2)], 4),
        ([with_gpus("rollout", 2, instances=2), with_gpus("judge", 3, nodes=0, on="rollout")], 2),
        (
            [
                with_gpus("rollout", 1, nodes=2, instances=2),
                with_gpus("judge", 3, nodes=0, on="rollout", instances=3),  # two of them on a node
            ],
            4,
        ),
        ([with_gpus("rollout", 0, instances=2)], 9),
        ([with_instances("rollout", 2)], 2),  # they share all GPUs
        ([with_gpus("rollout", 1, nodes=0, on="trainer", instances=2)], 4),  # two beside six ranks
        ([role("rollout", nodes=0, on="trainer", instances=2)], 9),
    ],
)
def test_scale_is_limited_by_the_gpus_of_the_nodes(
    tmp_path: Path, roles: list[RoleSpec], reached: int
) -> None:
    site = Site(tmp_path, *roles)
    site.monitor._scale_role(site.monitor.plan.roles[0], 9)
    assert len(site.monitor.instances["rollout"]) == reached
    placed = site.place()
    assert all(node for node, _gpus in placed)
    numbers = [(node, number) for node, gpus in placed for number in gpus or ()]
    assert len(numbers) == len(set(numbers))
    assert [bool(event["reason"]) for event in site.events] == [reached < 9]


def test_removed_instance_is_used_again_when_the_role_grows(tmp_path: Path) -> None:
    site = Site(tmp_path, role("rollout", nodes=2, instances=2))
    site.place()
    plan = site.monitor.plan.roles[0]
    site.monitor._scale_role(plan, 1)
    site.monitor._scale_role(plan, 2)
    assert [item.state for item in site.monitor.instances["rollout"]] == [instances.READY, instances.WAITING]
    assert site.place() == [("n3", None), ("n4", None)]


def test_each_role_is_scaled_by_its_own_request_once(tmp_path: Path) -> None:
    judge = with_gpus("judge", 0, nodes=0, on="trainer", instances=1)
    site = Site(tmp_path, with_gpus("rollout", 1, instances=1), judge)
    for name, count in (("rollout", 3), ("judge", 2)):  # the second request does not replace the first
        (tmp_path / f"scale-{name}.json").write_text(json.dumps({"instances": count}))
    for _ in range(2):
        site.monitor._scale()
    assert [(event["role"], event["instances"]) for event in site.events] == [("rollout", 3), ("judge", 2)]
    (tmp_path / "scale-rollout.json").write_text('{"instances": "x"}')
    (tmp_path / "scale-judge.json").write_text("[")
    site.monitor._scale()
    assert len(site.events) == 2


def test_numbers_of_starts_continue_after_a_requeue(tmp_path: Path) -> None:
    (tmp_path / "roles/rollout-0/ranks/3").mkdir(parents=True)
    site = Site(tmp_path, role("rollout"))
    assert site.monitor.instances["rollout"][0].start == 3  # the next one is 4
