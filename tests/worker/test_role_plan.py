"""The nodes, ports, load and causes of the roles of a run, without a supervisor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.jobs.roles import Readiness, RoleOptions, Roles, RoleSpec
from dtslurm.render.roles import roles_plan
from dtslurm.worker.supervisor import verdict
from dtslurm.worker.supervisor.roles import cause, probes
from dtslurm.worker.supervisor.roles.plan import (
    FIRST_PORT,
    LAST_PORT,
    RolePlan,
    RolesPlan,
    assign_nodes,
    first_port,
    read_plan,
)

METRICS = """\
# HELP vllm:num_requests_waiting Number of requests waiting.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 5
vllm:request_success_total{finished_reason="stop"} 1e2
vllm:num_requests_swapped nan-ish
garbage
"""
LAYOUT = TaskLayout(nodes=2, ranks_per_node=6, gpus_per_node=8, cpus_per_rank=None, mem=None, time=None)


def role(name: str, **values: object) -> RoleSpec:
    options = RoleOptions(command=("serve",), ready=Readiness(http="/health"))
    defaults = {"nodes": 1, "on": "", "instances": 1, "ports": ("http",), "restart": "alone"}
    return RoleSpec(**{"name": name, "options": options, **defaults, **values})  # type: ignore[arg-type]


def plan_of(folder: Path, *others: RoleSpec) -> RolesPlan:
    """Return the plan that the supervisor reads, from the file that a submission writes."""
    spec = JobSpec(
        name="train",
        script="train.py",
        work_dir="/w",
        launcher="srun",
        roles=Roles(main="trainer", after=(("rollout", "ready"),), others=others),
    )
    document = roles_plan(spec, ClusterProfile(name="c"), LAYOUT)
    (folder / "roles.json").write_text(json.dumps(document))
    plan = read_plan(str(folder))
    assert plan is not None
    return plan


def test_plan_of_a_submission_is_read_by_the_supervisor(tmp_path: Path) -> None:
    assert read_plan(str(tmp_path)) is None
    plan = plan_of(tmp_path, role("rollout", nodes=2, instances=2), role("judge", nodes=0, on="trainer"))
    assert (plan.main, plan.main_after) == ("trainer", [("rollout", "ready")])
    assert [item.gpus_per_node for item in plan.roles] == [8, 8]
    rollout, judge = plan.roles
    assert (rollout.http, rollout.ready_port, rollout.within_s, rollout.silence_s) == (
        "/health",
        "http",
        600,
        30,
    )
    assert (rollout.per_node, judge.per_node, judge.on) == (True, False, "trainer")
    assert rollout.is_server
    assert rollout.prefix == "DTSLURM_ROLE_ROLLOUT"


def test_server_is_a_role_whose_check_connects_to_a_port(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, role("roll-out"))
    checks: tuple[dict[str, Any], ...] = (
        {},
        {"http": "/"},
        {"tcp": True},
        {"line": "ready"},
        {"file": "ready"},
    )
    roles = [replace_check(plan, **check) for check in checks]
    assert [item.is_server for item in roles] == [False, True, True, False, False]
    assert roles[0].prefix == "DTSLURM_ROLE_ROLL_OUT"


def test_main_role_gets_the_first_healthy_nodes_and_other_roles_the_next(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, role("rollout", nodes=2, instances=2), role("judge", nodes=0, on="trainer"))
    nodes = ["n1", "n2", "n3", "n4", "n5"]
    assert assign_nodes(plan, [nodes], nodes, 2) == {
        "trainer": ["n1", "n2"],
        "rollout": ["n3", "n4"],
        "judge": ["n1", "n2"],
    }
    several = plan_of(tmp_path, role("rollout", nodes=2), role("judge", nodes=1), role("report", nodes=2))
    assert assign_nodes(several, [[*nodes, "n6"]], [*nodes, "n6"], 1) == {
        "trainer": ["n1"],
        "rollout": ["n2", "n3"],
        "judge": ["n4"],
        "report": ["n5", "n6"],
    }
    healthy = ["n1", "n3", "n4", "n5"]
    assert assign_nodes(plan, [nodes], healthy, 2)["rollout"] == ["n4", "n5"]
    assert assign_nodes(plan, [nodes[:4]], ["n1", "n3", "n4"], 2)["rollout"] == ["n4", "n2"]


def test_instances_of_a_job_try_different_ports_first() -> None:
    ports = [first_port("1234567", slot) for slot in range(64)]
    assert len(set(ports)) == 64
    assert all(FIRST_PORT <= port <= LAST_PORT for port in ports)
    assert first_port("", 3) == FIRST_PORT + 3


@pytest.mark.parametrize(
    ("job_id", "slot", "port"),
    [
        ("0", 0, FIRST_PORT),
        ("5", 0, FIRST_PORT + 80),
        ("6", 0, FIRST_PORT + 96),  # jobs that follow each other begin 16 ports apart
        ("5", 20, FIRST_PORT + 100),
        ("168", 11, FIRST_PORT + 2699),
        ("168", 12, FIRST_PORT),  # the last 67 ports are left for further attempts
        ("12_3", 4, FIRST_PORT + 4),
    ],
)
def test_first_port_follows_from_the_job_and_the_slot(job_id: str, slot: int, port: int) -> None:
    assert first_port(job_id, slot) == port


def test_load_is_the_sum_over_the_engines_of_a_server() -> None:
    assert probes.parse_load(METRICS) == {"running": 3.0, "waiting": 7.0, "requests": 100.0}
    assert probes.parse_load('sglang:num_queue_reqs{tp="0"} 4\n') == {"waiting": 4.0}
    assert probes.parse_load("\0\n{}\n") == {}


def test_line_and_file_in_the_run_directory_are_checks_of_readiness(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, role("rollout"))
    log = tmp_path / "log"
    by_line = replace_check(plan, line="^ready (now|soon)$")
    assert not probes.is_ready(by_line, "h", {}, str(log), str(tmp_path))
    log.write_text("not ready now\nready soon\n")
    assert probes.is_ready(by_line, "h", {}, str(log), str(tmp_path))
    by_file = replace_check(plan, file="ready")
    assert not probes.is_ready(by_file, "h", {}, str(log), str(tmp_path))
    (tmp_path / "ready").touch()
    assert probes.is_ready(by_file, "h", {}, str(log), str(tmp_path))
    assert probes.is_ready(replace_check(plan), "h", {}, str(log), str(tmp_path))


def replace_check(plan: RolesPlan, **check: Any) -> RolePlan:
    return plan.roles[0]._replace(**{"http": None, **check})


@pytest.mark.parametrize(
    ("code", "log", "slug", "hopeless"),
    [
        (127, "role-a-task.sh: line 9: exec: serve: not found\n", "command-not-found", True),
        (2, "usage: serve [-h]\nserve: error: unrecognized arguments: --prot\n", "bad-arguments", True),
        (2, "No such option\n", "exit-code", False),
        (1, "usage: serve [-h]\nIt failed later.\n", "exit-code", False),
        (3, "usage: serve [-h]\nIt failed later.\n", "exit-code", False),
        (126, "role-a-task.sh: line 9: ./serve: Permission denied\n", "command-not-found", True),
        (137, "loading\n", "killed", False),
    ],
)
def test_cause_of_an_end_follows_from_exit_code_and_log(
    tmp_path: Path, code: int, log: str, slug: str, hopeless: bool
) -> None:
    (tmp_path / "logs/0").mkdir(parents=True)
    (tmp_path / "ranks/0").mkdir(parents=True)
    (tmp_path / "logs/0/rank-0.log").write_text(log)
    cause.record_end(str(tmp_path), 0, "n1", 1000.0, code)
    assert json.loads((tmp_path / "ranks/0/0.json").read_text())["exit_code"] == code
    findings = cause.find_cause(str(tmp_path / "no rules"), str(tmp_path), 0, code, [])
    assert (findings["cause"], findings["hopeless"]) == (slug, hopeless)
    assert cause.read_last_lines(str(tmp_path), 0) == log.splitlines()


@pytest.mark.parametrize(
    ("slug", "blame", "hopeless"),
    [
        ("import-error", "user", True),
        ("disk-full", "user", True),
        ("disk-full", "site", False),
        ("gpu-out-of-memory", "node", False),
        ("python-exception", "user", False),  # a server that has worked may work again
        ("nan-loss", "user", False),
        ("killed", "unknown", False),
    ],
)
def test_restart_is_hopeless_if_the_cause_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slug: str, blame: str, hopeless: bool
) -> None:
    asked: list[tuple[object, ...]] = []

    def find(*arguments: object) -> dict[str, Any]:
        asked.append(arguments)
        return {"cause": slug, "blame": blame, "summary": "rank 0 failed"}

    monkeypatch.setattr(verdict, "verdict_on", find)
    findings = cause.find_cause("/top", str(tmp_path), 3, 9, ["python3"])
    assert findings == {"cause": slug, "summary": "it failed", "hopeless": hopeless}
    assert asked == [("/top", str(tmp_path), 3, 1, 9, ["python3"])]


def test_end_without_a_known_cause_may_be_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "verdict_on", lambda *_: {})
    findings = cause.find_cause("/top", str(tmp_path), 0, 9, [])
    assert findings == {"cause": "unknown", "summary": "", "hopeless": False}


@pytest.mark.parametrize(
    ("code", "number"), [(0, None), (1, None), (127, None), (128, None), (129, 1), (137, 9), (143, 15)]
)
def test_end_of_an_instance_is_recorded_like_that_of_a_rank(
    tmp_path: Path, code: int, number: int | None
) -> None:
    ranks = tmp_path / "ranks/2"
    ranks.mkdir(parents=True)
    cause.record_end(str(tmp_path), 2, "n1", 1000.2, code)
    document = json.loads((ranks / "0.json").read_text())
    assert document.pop("ended") > 1000
    assert document == {
        "schema": 1, "rank": 0, "local_rank": 0, "node_rank": 0, "host": "n1", "pid": 0, "started": 1000,
        "exit_code": code, "signal": number,
    }  # fmt: skip
    failure = ranks / "first-failure"
    assert (failure.read_text() if failure.exists() else "") == (f"0 {code}\n" if code else "")


def test_last_lines_of_a_log_are_few_and_short(tmp_path: Path) -> None:
    assert cause.read_last_lines(str(tmp_path), 0) == []
    log = tmp_path / "logs/0/rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"{number}{'x' * 400}\n\n  \n" for number in range(9)))
    assert cause.read_last_lines(str(tmp_path), 0) == [f"{number}{'x' * 299}" for number in range(4, 9)]
    log.write_text("first" + "x" * 65530 + "\nlast\n")
    assert cause.read_last_lines(str(tmp_path), 0) == ["x" * 300, "last"]


def test_roles_count_as_nodes_of_the_allocation() -> None:
    roles = Roles(main="trainer", others=(role("rollout", nodes=2), role("judge", nodes=0, on="trainer")))
    spec = JobSpec(name="t", script="t.py", work_dir="/w", launcher="srun", spare_nodes=1, roles=roles)
    assert spec.extra_nodes == 3
    assert spec.supervised
    assert not replace(spec, spare_nodes=0).restarted
    shared = Roles(main="trainer", others=(role("rollout", restart="with main"),))
    assert replace(spec, spare_nodes=0, roles=shared).restarted
