"""The partition and options of probes, and the values that differ from a known profile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.discover.facts import DiscoveredCluster, Fact
from dtslurm.discover.kinds import Kind
from dtslurm.model.cluster import (
    ClusterProfile,
    EnvironmentSetup,
    Gpus,
    Login,
    NodeType,
    Partition,
    SlurmCustoms,
)
from dtslurm.model.units import Memory
from dtslurm.services.clusters import discover as service
from dtslurm.services.clusters.discover import (
    DiscoverOptions,
    choose_targets,
    iterate_values,
    means_same,
    python_of,
    seen_by,
)
from dtslurm.services.clusters.probing import Probe
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.parse_scontrol import NodeInfo, PartitionInfo
from dtslurm.slurm.survey import Survey


def node_kind(
    name: str, *states: str, gpus: int = 0, partitions: tuple[str, ...] = ("main",), **values: Any
) -> Kind:
    own = NodeType(gpus=Gpus(model="A100", count=gpus, slurm_type="a100") if gpus else None, **values)
    nodes = tuple(
        NodeInfo(name=f"{name}{number}", partitions=partitions, state=state, address=f"10.0.0.{number}")
        for number, state in enumerate(states)
    )
    return Kind(name, own, nodes)


def probe_options(
    groups: list[Kind],
    options: DiscoverOptions | None = None,
    customs: SlurmCustoms | None = None,
    partitions: tuple[PartitionInfo, ...] = (),
) -> tuple[dict[str, list[str]], list[str]]:
    profile = ClusterProfile(name="lab", slurm=customs or SlurmCustoms())
    names = {group.name: group.name for group in groups}
    targets, notices = choose_targets(
        groups, names, options or DiscoverOptions(), profile, Survey(partitions=partitions)
    )
    return {target.name: list(target.options) for target in targets}, notices


def test_probes_run_on_gpu_nodes_and_on_cpu_nodes_only_without_gpu_nodes() -> None:
    cpu, gpu = node_kind("c", "IDLE", cpus=2, memory=Memory(1000)), node_kind("g", "IDLE", gpus=4, cpus=64)
    assert list(probe_options([gpu, cpu])[0]) == ["g"]
    result, _ = probe_options([cpu])
    assert result["c"] == [
        "--time=00:05:00", "--partition=main", "--nodelist=c0", "--cpus-per-task=2", "--mem=500M",
    ]  # fmt: skip


def test_a_probe_job_uses_the_options_that_the_profile_requires() -> None:
    customs = SlurmCustoms(
        account="proj", qos="normal", constraint="gpu", mem="forbidden", extra_options=("--licenses=scratch",)
    )
    group = node_kind("g", "MIXED", gpus=4, cpus=64, memory=Memory(512_000))
    result, _ = probe_options([group], DiscoverOptions(account="mine"), customs)
    assert result["g"] == [
        "--time=00:05:00", "--partition=main", "--account=mine", "--qos=normal", "--constraint=gpu",
        "--gres=gpu:a100:4", "--cpus-per-task=4", "--licenses=scratch",
    ]  # fmt: skip
    customs = SlurmCustoms(qos="normal", partitions={"main": Partition(qos="mainq")})
    assert "--qos=mainq" in probe_options([group], None, customs)[0]["g"]
    assert "--qos=mine" in probe_options([group], DiscoverOptions(qos="mine"), customs)[0]["g"]
    bare, _ = probe_options([group], None, SlurmCustoms(gpu_request="none"))
    assert not any(option.startswith("--gres") for option in bare["g"])
    assert "--mem=4096M" in bare["g"]


@pytest.mark.parametrize(
    ("partitions", "customs", "live", "partition"),
    [
        (("b",), "a", (), "b"),
        ((), "b", (), "b"),
        ((), "c,b", (), "b"),
        ((), None, (PartitionInfo(name="b", default=True),), "b"),
        ((), None, (PartitionInfo(name="a", state="DOWN"), PartitionInfo(name="b", state="UP")), "b"),
        (
            (), None,
            (PartitionInfo(name="a", state="UP", allow_accounts=("x",)), PartitionInfo(name="b", state="UP")),
            "b",
        ),
        ((), None, (), "a"),
    ],
)  # fmt: skip
def test_a_probe_chooses_its_partition_by_option_profile_and_live_state(
    partitions: tuple[str, ...], customs: str | None, live: tuple[PartitionInfo, ...], partition: str
) -> None:
    group = node_kind("g", "IDLE", gpus=1, partitions=("a", "b"))
    result, _ = probe_options(
        [group], DiscoverOptions(partitions=partitions), SlurmCustoms(partition=customs), live
    )
    assert f"--partition={partition}" in result["g"]


def test_a_probe_of_a_node_without_partitions_names_only_the_node() -> None:
    result, _ = probe_options([node_kind("g", "IDLE", gpus=1, partitions=())])
    assert not any(option.startswith("--partition") for option in result["g"])


def test_nodes_that_are_not_probed_are_listed() -> None:
    groups = [node_kind(name, "IDLE", gpus=1) for name in "abcd"] + [
        node_kind("e", "IDLE", gpus=1, partitions=("x",))
    ]
    result, notices = probe_options(groups)
    assert list(result) == ["a", "b", "c"]
    assert notices == ["not probed: d, e; select other partitions with --partition"]
    result, notices = probe_options(groups, DiscoverOptions(partitions=("x",)))
    assert (list(result), notices) == (["e"], [])
    result, notices = probe_options([node_kind("z", "DOWN", gpus=1)])
    assert (result, notices) == ({}, ["not probed: z, because none of its nodes can be used now"])


# ---- What is news ----


@pytest.mark.parametrize(
    ("key", "there", "measured_value", "equal"),
    [
        ("title", "Lab ", "lab", True),
        ("memory", "500G", "480G", True),
        ("memory", "500G", "256G", False),
        ("memory", "plenty", "256G", False),
        ("model", "A100-SXM4-80GB", "A100", True),
        ("model", "H100", "A100", False),
        ("count", "8", "8.0", True),
        ("count", "8", "4", False),
    ],
)
def test_same_compares_profile_values_with_tolerance(
    key: str, there: str, measured_value: str, equal: bool
) -> None:
    assert means_same(there, Fact(("node_types", "a", key), measured_value, "x")) is equal


def test_only_values_that_differ_from_the_parent_profile_are_kept() -> None:
    parent = ClusterProfile(name="site", title="Site", slurm=SlurmCustoms(partition="gpu", account="x"))
    facts = (
        Fact(("title",), "Site", "ClusterName"),
        Fact(("slurm", "partition"), "main", "scontrol"),
        Fact(("slurm", "account"), "y", "sacctmgr", "guess"),
        Fact(("slurm", "qos"), "normal", "sacctmgr", "likely"),
    )
    kept = service._select_new_facts(DiscoveredCluster(facts), parent).facts
    assert [(fact.name, fact.evidence) for fact in kept] == [
        ("slurm.partition", "scontrol (profile site: gpu)"), ("slurm.qos", "sacctmgr"),
    ]  # fmt: skip


def test_flat_converts_profile_values_to_text() -> None:
    values = {"a": {"b": 1, "c": None, "d": ["x", "y"], "e": []}, "f": True, "g": 1.50}
    assert dict(iterate_values(values)) == {
        ("a", "b"): "1",
        ("a", "d"): "x, y",
        ("f",): "true",
        ("g",): "1.5",
    }


def test_a_failed_probe_is_reported_and_adds_no_facts() -> None:
    group = node_kind("g", "IDLE", gpus=1)
    probes = [Probe(name="g", problem="it never started"), Probe(name="g", seen={"schema": 1})]
    result = seen_by(probes, [group], {"g": "g"}, pyxis=True)
    assert "the probe of g failed: it never started" in result.notices
    assert not any(fact.key[0] == "container" for fact in result.facts)


def test_the_login_facts_contain_only_values_missing_in_the_parent() -> None:
    survey = Survey(host="login1", python="/usr/libexec/platform-python")
    known = service._login("login1", survey, None)
    assert [(fact.name, fact.value) for fact in known.facts] == [
        ("login.host", "login1"), ("login.python", "/usr/libexec/platform-python"),
    ]  # fmt: skip
    parent = ClusterProfile(name="site", login=Login(host="login1"))
    assert service._login("login1", Survey(python="python3"), parent).facts == ()


def test_the_head_of_the_profile_file_names_matching_profiles(tmp_path: Path) -> None:
    context = Context(cwd=tmp_path, clock=lambda: 0.0)
    result = service._comments(context, Survey(), "login1", [("site", "its name")], "site")
    assert result[0] == "Written by dtslurm cluster discover login1 on 1970-01-01, Slurm ?."
    assert result[-1] == "Recognized as site by its name: values of that profile are not repeated here."
    many = service._comments(context, Survey(), None, [("a", "x"), ("b", "y")], None)
    assert (
        many[-1]
        == "Known profiles that may match: a, b; write 'extends: NAME' with the name of the right profile."
    )
    assert len(service._comments(context, Survey(), None, [], None)) == 3
    assert service._head(Survey(), context).facts[0].value == "A cluster"


@pytest.mark.parametrize(
    ("own", "parent", "remote", "env", "python"),
    [
        ("/own/python", "/site/python", False, {}, "/own/python"),
        (None, "/site/python", False, {"VIRTUAL_ENV": "/venv"}, "/site/python"),
        (None, None, False, {"VIRTUAL_ENV": "/venv"}, "/venv/bin/python"),
        (None, None, False, {"CONDA_PREFIX": "/conda"}, "/conda/bin/python"),
        (None, None, True, {"VIRTUAL_ENV": "/venv"}, "python3"),
        (None, None, False, {}, "python3"),
    ],
)
def test_the_probed_interpreter_follows_profile_parent_and_environment(
    own: str | None, parent: str | None, remote: bool, env: dict[str, str], python: str
) -> None:
    def profile(path: str | None) -> ClusterProfile:
        return ClusterProfile(name="x", environment=EnvironmentSetup(python=path))

    cluster: Any = SimpleNamespace(profile=profile(own), remote=remote)
    assert python_of(Context(env=env), cluster, profile(parent) if parent else None) == python
