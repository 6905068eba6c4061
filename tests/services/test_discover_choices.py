"""Where probes go and what they ask for, and which found values are news to a known site's profile."""

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
from dtslurm.services.clusters.discover import DiscoverOptions, flat, python_of, same, seen_by, targets_of
from dtslurm.services.clusters.probing import Probe
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.parse_scontrol import NodeInfo, PartitionInfo
from dtslurm.slurm.survey import Survey


def kind(
    name: str, *states: str, gpus: int = 0, partitions: tuple[str, ...] = ("main",), **values: Any
) -> Kind:
    own = NodeType(gpus=Gpus(model="A100", count=gpus, slurm_type="a100") if gpus else None, **values)
    nodes = tuple(
        NodeInfo(name=f"{name}{number}", partitions=partitions, state=state, address=f"10.0.0.{number}")
        for number, state in enumerate(states)
    )
    return Kind(name, own, nodes)


def chosen(
    groups: list[Kind],
    wanted: DiscoverOptions | None = None,
    customs: SlurmCustoms | None = None,
    partitions: tuple[PartitionInfo, ...] = (),
) -> tuple[dict[str, list[str]], list[str]]:
    profile = ClusterProfile(name="lab", slurm=customs or SlurmCustoms())
    names = {one.name: one.name for one in groups}
    targets, notices = targets_of(
        groups, names, wanted or DiscoverOptions(), profile, Survey(partitions=partitions)
    )
    return {one.name: list(one.options) for one in targets}, notices


def test_nodes_with_gpus_are_looked_at_and_others_only_where_there_are_none() -> None:
    cpu, gpu = kind("c", "IDLE", cpus=2, memory=Memory(1000)), kind("g", "IDLE", gpus=4, cpus=64)
    assert list(chosen([gpu, cpu])[0]) == ["g"]
    found, _ = chosen([cpu])
    assert found["c"] == [
        "--time=00:05:00", "--partition=main", "--nodelist=c0", "--cpus-per-task=2", "--mem=500M",
    ]  # fmt: skip


def test_a_job_asks_as_the_site_wants_it() -> None:
    customs = SlurmCustoms(
        account="proj", qos="normal", constraint="gpu", mem="forbidden", extra_options=("--licenses=scratch",)
    )
    group = kind("g", "MIXED", gpus=4, cpus=64, memory=Memory(512_000))
    found, _ = chosen([group], DiscoverOptions(account="mine"), customs)
    assert found["g"] == [
        "--time=00:05:00", "--partition=main", "--account=mine", "--qos=normal", "--constraint=gpu",
        "--gres=gpu:a100:4", "--cpus-per-task=4", "--licenses=scratch",
    ]  # fmt: skip
    customs = SlurmCustoms(qos="normal", partitions={"main": Partition(qos="mainq")})
    assert "--qos=mainq" in chosen([group], None, customs)[0]["g"]
    assert "--qos=mine" in chosen([group], DiscoverOptions(qos="mine"), customs)[0]["g"]
    bare, _ = chosen([group], None, SlurmCustoms(gpu_request="none"))
    assert not any(option.startswith("--gres") for option in bare["g"])
    assert "--mem=4096M" in bare["g"]


@pytest.mark.parametrize(
    ("wanted", "customs", "live", "partition"),
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
def test_the_partition_of_a_probe(
    wanted: tuple[str, ...], customs: str | None, live: tuple[PartitionInfo, ...], partition: str
) -> None:
    group = kind("g", "IDLE", gpus=1, partitions=("a", "b"))
    found, _ = chosen([group], DiscoverOptions(partitions=wanted), SlurmCustoms(partition=customs), live)
    assert f"--partition={partition}" in found["g"]


def test_a_node_in_no_partition_is_asked_for_by_its_name_alone() -> None:
    found, _ = chosen([kind("g", "IDLE", gpus=1, partitions=())])
    assert not any(option.startswith("--partition") for option in found["g"])


def test_what_is_not_probed_is_told() -> None:
    groups = [kind(name, "IDLE", gpus=1) for name in "abcd"] + [kind("e", "IDLE", gpus=1, partitions=("x",))]
    found, notices = chosen(groups)
    assert list(found) == ["a", "b", "c"]
    assert notices == ["not probed: d, e; select other partitions with --partition"]
    found, notices = chosen(groups, DiscoverOptions(partitions=("x",)))
    assert (list(found), notices) == (["e"], [])
    found, notices = chosen([kind("z", "DOWN", gpus=1)])
    assert (found, notices) == ({}, ["not probed: z, because none of its nodes can be used now"])


# ---- What is news ----


@pytest.mark.parametrize(
    ("key", "there", "found", "equal"),
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
def test_equal_as_people_mean_it(key: str, there: str, found: str, equal: bool) -> None:
    assert same(there, Fact(("node_types", "a", key), found, "x")) is equal


def test_only_what_the_profile_does_not_say_or_says_otherwise_is_kept() -> None:
    parent = ClusterProfile(name="site", title="Site", slurm=SlurmCustoms(partition="gpu", account="x"))
    facts = (
        Fact(("title",), "Site", "ClusterName"),
        Fact(("slurm", "partition"), "main", "scontrol"),
        Fact(("slurm", "account"), "y", "sacctmgr", "guess"),
        Fact(("slurm", "qos"), "normal", "sacctmgr", "likely"),
    )
    kept = service._news(DiscoveredCluster(facts), parent).facts
    assert [(fact.name, fact.evidence) for fact in kept] == [
        ("slurm.partition", "scontrol (profile site: gpu)"), ("slurm.qos", "sacctmgr"),
    ]  # fmt: skip


def test_values_of_a_profile_as_texts() -> None:
    values = {"a": {"b": 1, "c": None, "d": ["x", "y"], "e": []}, "f": True, "g": 1.50}
    assert dict(flat(values)) == {("a", "b"): "1", ("a", "d"): "x, y", ("f",): "true", ("g",): "1.5"}


def test_what_a_probe_saw_and_why_one_saw_nothing() -> None:
    group = kind("g", "IDLE", gpus=1)
    probes = [Probe(name="g", problem="it never started"), Probe(name="g", seen={"schema": 1})]
    found = seen_by(probes, [group], {"g": "g"}, pyxis=True)
    assert "the probe of g failed: it never started" in found.notices
    assert not any(fact.key[0] == "container" for fact in found.facts)


def test_the_login_node_is_told_as_it_was_reached() -> None:
    survey = Survey(host="login1", python="/usr/libexec/platform-python")
    known = service._login("login1", survey, None)
    assert [(fact.name, fact.value) for fact in known.facts] == [
        ("login.host", "login1"), ("login.python", "/usr/libexec/platform-python"),
    ]  # fmt: skip
    parent = ClusterProfile(name="site", login=Login(host="login1"))
    assert service._login("login1", Survey(python="python3"), parent).facts == ()


def test_the_files_head_names_what_fits(tmp_path: Path) -> None:
    context = Context(cwd=tmp_path, clock=lambda: 0.0)
    one = service._comments(context, Survey(), "login1", [("site", "its name")], "site")
    assert one[0] == "Written by dtslurm cluster discover login1 on 1970-01-01, Slurm ?."
    assert one[-1] == "Recognised as site by its name: values of that profile are not repeated here."
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
def test_the_interpreter_whose_torch_is_tried(
    own: str | None, parent: str | None, remote: bool, env: dict[str, str], python: str
) -> None:
    def profile(path: str | None) -> ClusterProfile:
        return ClusterProfile(name="x", environment=EnvironmentSetup(python=path))

    cluster: Any = SimpleNamespace(profile=profile(own), remote=remote)
    assert python_of(Context(env=env), cluster, profile(parent) if parent else None) == python
