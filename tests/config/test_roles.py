from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from dtslurm.config import schema
from dtslurm.config.job_files import jobs
from dtslurm.errors import ProfileInvalid
from dtslurm.model.jobs.roles import Roles

HEAD = "variables: {model: tiny}\n"
TRAINER = "  trainer: {script: train.py, nodes: 2, args: ['${role.rollout.urls}']}\n"
ROLLOUT = (
    "  rollout: {command: [serve, '${model}', --port, '${port.http}'], nodes: 2, per: node, "
    "ready: {http: /health, within: 10m}}\n"
)


def with_rollout(keys: str, more: str = "") -> str:
    return f"{TRAINER}  rollout: {{command: [x], {keys}}}\n{more}"


def load(folder: Path, text: str) -> jobs.LoadedJob:
    path = folder / "job.yaml"
    path.write_text(text)
    path.chmod(0o644)
    return jobs.load(path, {}, cwd=folder)


def read_roles(folder: Path, text: str) -> Roles:
    roles = load(folder, f"{HEAD}roles:\n{text}").stages[0].roles
    assert roles is not None
    return roles


def problems_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(ProfileInvalid) as caught:
        load(folder, text)
    return list(caught.value.problems)


def test_main_role_has_the_keys_of_the_job_and_other_roles_their_own(tmp_path: Path) -> None:
    judge = (
        "  judge: {command: [python, judge.py], gpus: 1, on: trainer, ready: {tcp: true}, after: rollout}\n"
    )
    loaded = load(
        tmp_path,
        f"{HEAD}time: 30\nroles:\n{TRAINER}{ROLLOUT}{judge.replace('after: rollout', 'after: [rollout]')}",
    )
    assert (loaded.job.script, loaded.job.nodes, str(loaded.job.time)) == ("train.py", 2, "00:30:00")
    assert loaded.job.args == ("${role.rollout.urls}",)
    roles = loaded.stages[0].roles
    assert roles is not None
    assert (roles.main, roles.after) == ("trainer", (("rollout", "ready"), ("judge", "ready")))
    rollout, judge_role = roles.others
    assert (rollout.nodes, rollout.instances, rollout.ports) == (2, 2, ("http",))
    assert rollout.options.command == ("serve", "tiny", "--port", "${port.http}")
    assert (rollout.ready.within_s, rollout.ready_port, rollout.restart) == (600, "http", "alone")
    assert (judge_role.nodes, judge_role.on, judge_role.instances) == (0, "trainer", 1)
    assert judge_role.after == (("rollout", "ready"),)


def test_file_with_the_main_role_alone_is_a_job_without_roles(tmp_path: Path) -> None:
    roles = load(tmp_path, "roles:\n  trainer: {script: train.py}\n").stages[0].roles
    assert roles is not None
    assert roles.others == ()


def test_ready_made_role_supplies_the_keys_that_a_role_lacks(tmp_path: Path) -> None:
    roles = read_roles(tmp_path, TRAINER + "  rollout: {extends: vllm, nodes: 1, args: [--dtype, float16]}\n")
    [rollout] = roles.others
    assert rollout.options.command[:3] == ("vllm", "serve", "tiny")
    assert rollout.options.args == ("--dtype", "float16")
    assert (rollout.ready.http, rollout.options.metrics) == ("/health", "/metrics")


def test_variables_of_the_main_role_may_refer_to_other_roles(tmp_path: Path) -> None:
    env = "env: {SERVERS: '${role.rollout.urls} ${DTSLURM_RUN_DIR}', TEXT: '$${role.rollout.urls}'}"
    loaded = load(tmp_path, f"roles:\n  trainer: {{script: train.py, {env}}}\n  rollout: {{command: [x]}}\n")
    assert loaded.job.env == {
        "SERVERS": "${role.rollout.urls} ${DTSLURM_RUN_DIR}",
        "TEXT": "$${role.rollout.urls}",
    }


def test_role_with_several_nodes_for_each_instance(tmp_path: Path) -> None:
    text = "  rollout: {command: [serve, '${node.rank}'], nodes: 4, nodes_per_instance: 2}\n"
    roles = read_roles(tmp_path, TRAINER + text)
    assert (roles.others[0].nodes, roles.others[0].instances, roles.nodes) == (4, 2, 4)
    assert roles.gpus_per_instance(roles.others[0], 2, 8) is None
    default = read_roles(tmp_path, TRAINER + text.replace("nodes: 4, ", ""))
    assert (default.others[0].nodes, default.others[0].instances) == (2, 1)


def test_escaped_reference_stays_for_the_job(tmp_path: Path) -> None:
    roles = read_roles(tmp_path, TRAINER + "  rollout: {command: [a, '$${port.http}', '$${HOME}']}\n")
    assert roles.others[0].options.command == ("a", "$${port.http}", "${HOME}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TRAINER, "${role.rollout.urls}: there is no role 'rollout' with addresses"),
        ("  a: {command: [x]}\n", "no role is the main role: one role needs a script"),
        ("  a: {script: a.py}\n  b: {script: b.py}\n", "a and b are main roles, as each has a script"),
        (TRAINER + ROLLOUT.replace("nodes: 2,", "nodes: 0,"), "is 0: name the role whose nodes"),
        (TRAINER + ROLLOUT.replace("per: node", "on: trainr"), "'trainr'; did you mean 'trainer'?"),
        (TRAINER + ROLLOUT.replace("per: node", "on: trainer"), "has none of its own; write 0"),
        (TRAINER + ROLLOUT.replace("per: node", "after: [trainr]"), "there is no role 'trainr'"),
        (
            f"{TRAINER}{ROLLOUT}".replace("per: node", "after: [trainer]").replace(
                "nodes: 2, args", "after: [rollout], args"
            ),
            "the roles wait for each other: ",
        ),
        (TRAINER + ROLLOUT.replace("per: node", "after: [trainer soon]"), "write NAME, NAME ready"),
        (TRAINER.replace("nodes: 2", "after: {rollout: ready}") + ROLLOUT, "roles.trainer.after: "),
        (TRAINER.replace("nodes: 2", "after: [[rollout]]") + ROLLOUT, "roles.trainer.after"),
        (TRAINER + ROLLOUT.replace("per: node", "ports: []"), "${port.http}: rollout has no port 'http'"),
        (with_rollout("ports: [], ready: {tcp: true}"), "tcp needs a port"),
        (with_rollout("ready: {tcp: grpc}"), "should be true or a port's name"),
        (with_rollout("ready: {http: health}"), "should be a path such as"),
        (with_rollout("ready: {http: /, tcp: true}"), "has http and tcp: give"),
        (with_rollout("ready: {within: 1m}"), "has no check: give one of"),
        (with_rollout("ready: {file: /tmp/x}"), "should be a path in the run directory"),
        (with_rollout("ready: {line: x, silence: 5s}"), "has no effect: line is not checked"),
        (with_rollout("metrics: metrics"), "should be a path such as /metrics"),
        (with_rollout("metrics: /metrics, ports: []"), "needs a port, and the role has none"),
        (with_rollout("instances: 1001"), "should be at most 1000"),
        (with_rollout("instances: 0"), "should be more than 0"),
        (with_rollout("nodes: 3, instances: 2"), "2 of 3 nodes are used: give nodes_per_instance"),
        (with_rollout("ready: {line: '('}"), "is not a regular expression"),
        (with_rollout("restart: sometimes"), "should be alone, with trainer or never"),
        (TRAINER + "  rollout: {ready: {tcp: true}}\n", "is missing: give a list"),
        (with_rollout("instances: 2, per: node"), "already gives the number of instances"),
        (with_rollout("qos: high"), "unknown key"),
        (with_rollout("nodes: 3, nodes_per_instance: 2"), "3 is no multiple of nodes_per_instance (2)"),
        (with_rollout("nodes: 1, nodes_per_instance: 2"), "1 is no multiple of nodes_per_instance (2)"),
        (with_rollout("nodes_per_instance: 0"), "should be more than 0"),
        (with_rollout("on: trainer, nodes_per_instance: 2"), "give nodes instead of on"),
        (with_rollout("per: node, nodes_per_instance: 2"), "give nodes instead of per"),
        (with_rollout("nodes: 4, nodes_per_instance: 2, instances: 3"), "follows from nodes and nodes_per_"),
        (with_rollout("nodes: 2, nodes_per_instance: 2, gpus: 1"), "has all GPUs of its nodes"),
        (with_rollout("args: ['${node.number}']"), "there are ${node.rank}, ${node.count}, ${node.head}"),
        (TRAINER.replace("role.rollout.urls", "node.rank"), "${node.rank}: the main role has the variables"),
        (TRAINER + "  rollout: {extends: vlm}\n", "there is no ready-made role 'vlm'; did you mean 'vllm'?"),
        (TRAINER + "  rollout: {command: ['${role.rollout.urls}']}\n", "cannot refer to its own addresses"),
        (TRAINER + "  rollout: {command: ['${role.trainer.urls}']}\n", "no role 'trainer' with addresses"),
        (
            TRAINER + "  rollout: {command: [x]}\n  judge: {command: ['${role.rollout.url}']}\n",
            "write role.rollout.hosts",
        ),
        (
            TRAINER + "  rollout: {command: [x]}\n  a-b: {command: [x]}\n  a_b: {command: [x]}\n",
            "is too similar to 'a-b'",
        ),
        (
            with_rollout("ports: [hosts]}\n  rollout_ports: {command: [x]"),
            "would set DTSLURM_ROLE_ROLLOUT_PORTS_HOSTS",
        ),
        (
            TRAINER.replace("args: [", "env: {A: ").replace("urls}']", "urls}'}"),
            "roles.trainer.env: ${role.rollout.urls}: there is no role 'rollout' with addresses",
        ),
        (TRAINER + ROLLOUT + "  nodes: {extends: ray-worker}\n", "there is no role 'ray'"),
        (TRAINER + "  1st: {command: [x]}\n", "a role name may contain only letters"),
        (TRAINER + "  rollout: serve\n", "should be a mapping of keys to values"),
    ],
)  # fmt: skip
def test_invalid_roles_are_reported_with_their_location(tmp_path: Path, text: str, message: str) -> None:
    problems = problems_of(tmp_path, f"{HEAD}roles:\n{text}")
    assert any(message in problem for problem in problems), problems
    assert all(problem.startswith("job.yaml:") for problem in problems)


def test_roles_and_stages_exclude_each_other(tmp_path: Path) -> None:
    text = "roles:\n  trainer: {script: train.py}\nstages:\n  a: {script: b.py}\n"
    assert any("one job and no stages" in problem for problem in problems_of(tmp_path, text))


def test_references_outside_of_roles_are_unknown_variables(tmp_path: Path) -> None:
    assert any(
        "no variable 'role.rollout.urls'" in problem
        for problem in problems_of(tmp_path, "script: train.py\nargs: ['${role.rollout.urls}']\n")
    )
    text = "roles:\n  trainer: {script: train.py, job_name: '${role.b.urls}'}\n  b: {command: [x]}\n"
    assert any("no variable 'role.b.urls'" in problem for problem in problems_of(tmp_path, text))


def test_the_documented_job_file_is_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "roles.md").read_text()
    [block] = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    loaded = load(tmp_path, block)
    roles = loaded.stages[0].roles
    assert roles is not None
    assert [(role.name, role.nodes, role.instances) for role in roles.others] == [
        ("rollout", 2, 2),
        ("judge", 0, 1),
    ]
    assert roles.others[0].options.metrics == "/metrics"


def test_the_job_schema_accepts_the_documented_file() -> None:
    text = (Path(__file__).parents[2] / "docs" / "roles.md").read_text()
    [block] = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    checker = jsonschema.Draft202012Validator(schema.job_schema())
    document = yaml.safe_load(block.replace(" on:", ' "on":'))  # PyYAML reads a bare on as true
    assert list(checker.iter_errors(document)) == []
    assert list(checker.iter_errors({"roles": {"a": {"comand": ["x"]}}}))


READY_MADE = ("evaluator", "http", "ray", "ray-worker", "sglang", "tensorboard", "torchrun", "vllm")


def test_every_ready_made_role_is_tested() -> None:
    files = (Path(__file__).parents[2] / "templates" / "roles").glob("*.yaml")
    assert sorted(path.stem for path in files) == list(READY_MADE)


@pytest.mark.parametrize("name", READY_MADE)
def test_ready_made_roles_are_documented_and_valid(name: str, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "roles.md").read_text()
    assert f"\n| `{name}` |" in text
    command = ", command: [serve]" if name == "http" else ""
    head = "  ray: {extends: ray}\n" if name == "ray-worker" else ""
    role = read_roles(
        tmp_path, f"  trainer: {{script: train.py}}\n{head}  server: {{extends: {name}{command}}}\n"
    ).others[-1]
    assert bool(role.ready.http) is (name not in {"evaluator", "ray", "ray-worker"})
