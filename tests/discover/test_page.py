"""The text of a profile, and the amendment of an existing profile."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtslurm.config import profiles, strict_yaml
from dtslurm.discover import page, sites
from dtslurm.discover.amend import amend, iterate_leaves
from dtslurm.discover.facts import DiscoveredCluster, Fact
from dtslurm.errors import ProfileInvalid
from dtslurm.model.cluster import ClusterProfile, Login
from tests.discover.answers import survey_output
from tests.discover.test_survey import survey_facts
from tests.slurm.recorded import VERSIONS


def read_leaves(text: str) -> dict[tuple[str, ...], str]:
    root, problems = strict_yaml.parse(text.encode(), "x.yaml")
    assert problems == []
    return dict(iterate_leaves(root))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_text_is_a_profile_with_all_facts_and_their_certainty(version: str, tmp_path: Path) -> None:
    result = survey_facts(survey_output(version))
    text = page.text(result, head=["Written by a test."])
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    profile = profiles.load(str(path), cwd=tmp_path, env={}).profile
    assert profile.slurm.partition == "main"
    assert profile.node_types["gpu-a100x8"].gpu_count == 8
    assert read_leaves(text) == {fact.key: fact.text for fact in result.facts}
    for fact in result.facts:
        assert f"; {fact.sure}" in text
    assert all(len(line) <= 120 for line in text.splitlines())


NAMES = st.text(min_size=1, max_size=12).filter(
    lambda name: name.isprintable() and name.strip() == name and "." not in name
)


@settings(deadline=None)
@given(
    st.dictionaries(
        NAMES, st.text(max_size=30) | st.integers() | st.booleans() | st.tuples(NAMES, NAMES), max_size=6
    )
)
def test_any_value_is_read_back_unchanged(values: dict[str, str | int | bool | tuple[str, ...]]) -> None:
    facts = tuple(Fact(("slurm", name), value, "seen") for name, value in values.items())
    text = page.text(DiscoveredCluster(facts), head=[])
    wanted = {fact.key: page._clean(fact.text) for fact in facts}
    assert read_leaves(text) == wanted


def cluster_of(**values: str | int) -> DiscoveredCluster:
    return DiscoveredCluster(
        tuple(Fact(("slurm", *name.split("__")), value, "seen") for name, value in values.items())
    )


def amend_profile(old: str, **values: str | int) -> tuple[str, list[str], list[str], list[str]]:
    new = amend(old, cluster_of(**values), "x.yaml")
    return new.text, [row[0] for row in new.changed], list(new.added), [row[0] for row in new.yours]


def test_without_new_values_the_text_is_unchanged() -> None:
    first = page.text(cluster_of(partition="gpu", max_array_size=1001), head=["Hello."])
    text, changed, added, yours = amend_profile(first, partition="gpu", max_array_size=1001)
    assert (changed, added, yours) == ([], [], [])
    assert text == first


def test_unchanged_values_are_updated_and_edited_values_are_kept() -> None:
    first = page.text(cluster_of(partition="gpu", version="22.05", account="a", qos="q"), head=["Hello."])
    edited = first.replace("partition: gpu  ", "partition: mine ").replace(
        "# Hello.", "# Hello.\n# My own remark."
    )
    edited = "\n".join(line for line in edited.splitlines() if not line.startswith("  qos:")) + "\n"
    second, changed, added, yours = amend_profile(
        edited, partition="other", version="24.11", account="a", qos="q", mpi="pmix"
    )
    assert (changed, added, yours) == (["slurm.version"], ["slurm.mpi"], ["slurm.partition", "slurm.qos"])
    assert read_leaves(second) == {
        ("slurm", "partition"): "mine",
        ("slurm", "version"): "24.11",
        ("slurm", "account"): "a",
        ("slurm", "mpi"): "pmix",
    }
    assert "# My own remark." in second
    third, changed, added, yours = amend_profile(
        second, partition="third", version="24.11", account="a", qos="q", mpi="pmix"
    )
    assert (changed, added, yours) == ([], [], ["slurm.partition", "slurm.qos"])
    assert third == second


@pytest.mark.parametrize(("before", "after"), [("x" * 90, "y" * 90), ("x" * 90, "y"), ("x", "y" * 90)])
def test_the_evidence_of_an_updated_value_is_replaced(before: str, after: str) -> None:
    def told(value: int, evidence: str) -> DiscoveredCluster:
        other = Fact(("slurm", "partition"), "gpu", "z" * 90, "likely")
        return DiscoveredCluster((other, Fact(("slurm", "max_array_size"), value, evidence)))

    first = page.text(told(1, before), head=["Hello."])
    assert amend(first, told(2, after), "x.yaml").text == page.text(told(2, after), head=["Hello."])


def test_a_comment_above_a_value_is_kept() -> None:
    old = page.text(cluster_of(partition="gpu", version="22.05"), head=["Hello."])
    old = old.replace("  version: ", "  # Ask Ada first; really\n  version: ").replace(" # seen; sure", "")
    text = amend_profile(old, partition="gpu", version="24.11")[0]
    assert '\n  # Ask Ada first; really\n  version: "24.11"' in text


def test_a_handwritten_file_only_gets_additional_values() -> None:
    own = "extends: h100x8-ib\nslurm: {partition: a}\nnode_types:\n    h100x8:\n        cpus: 4\n"
    new = amend(own, cluster_of(partition="b", account="c"), "x.yaml")
    assert new.text == own
    assert [row[0] for row in new.yours] == ["slurm.partition"]
    assert new.missed == ("slurm.account",)  # the mapping is on one line
    facts = (
        Fact(("node_types", "h100x8", "gpus", "count"), 8, "seen"),
        Fact(("fabric", "kind"), "roce", "seen"),
    )
    new = amend(own, DiscoveredCluster(facts), "x.yaml")
    assert new.added == ("node_types.h100x8.gpus.count", "fabric.kind")
    assert read_leaves(new.text)["node_types", "h100x8", "gpus", "count"] == "8"


EDITS = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from(["", "  note: x", "# y", "a: b", "  c:", "\t", "  - 1"])),
    max_size=3,
)


@settings(deadline=None)
@given(EDITS)
def test_amending_an_edited_file_keeps_the_file_readable(edits: list[tuple[int, str]]) -> None:
    lines = page.text(survey_facts(survey_output("22.05.8")), head=["Hello."]).splitlines()
    for at, line in edits:
        lines[min(at, len(lines)) : at + 1] = [line]
    old = "\n".join(lines) + "\n"
    try:
        before, problems = strict_yaml.parse(old.encode(), "x.yaml")
    except ProfileInvalid:
        return
    if problems:
        return
    result = survey_facts(survey_output("24.11.5"))
    new = amend(old, result, "x.yaml")
    after = read_leaves(new.text)
    changed = {tuple(row[0].split(".")) for row in new.changed}
    for key, value in iterate_leaves(before):
        assert after[key] == value or key in changed or tuple(".".join(key).split(".")) in changed
    assert amend(new.text, result, "x.yaml").text == new.text


# ---- Known sites ----

SITES = {
    "narval": ClusterProfile(name="narval", login=Login(host="narval.alliancecan.ca")),
    "tacc-vista": ClusterProfile(name="tacc-vista", login=Login(host="vista.tacc.utexas.edu")),
    "jean-zay-a100": ClusterProfile(name="jean-zay-a100", recognise=("jean-zay*.idris.fr",)),
    "jean-zay-h100": ClusterProfile(name="jean-zay-h100", recognise=("jean-zay*.idris.fr",)),
    "delta": ClusterProfile(name="delta", login=Login(host="login.delta.ncsa.illinois.edu")),
    "cloud": ClusterProfile(name="cloud", recognise=("*-dy-p5-*",)),
    "slurm": ClusterProfile(name="slurm"),
}


@pytest.mark.parametrize(
    ("cluster", "hosts", "nodes", "known"),
    [
        ("narval", ["login1"], [], ["narval"]),
        ("c1", ["login2.vista.tacc.utexas.edu"], [], ["tacc-vista"]),
        ("c1", ["vista.tacc.utexas.edu"], [], ["tacc-vista"]),
        ("c1", ["dt-login03.delta.ncsa.illinois.edu"], [], ["delta"]),
        ("x", ["jean-zay3.idris.fr"], [], ["jean-zay-a100", "jean-zay-h100"]),
        ("parallelcluster", ["ip-10-0-0-1"], ["queue1-dy-p5-17"], ["cloud"]),
        ("slurm", ["slurm.example.org"], ["n1"], []),
        ("other", ["delta.example.org"], [], ["delta"]),
        ("", [], [], []),
    ],
)
def test_known_clusters_are_recognised_by_their_names(
    cluster: str, hosts: list[str], nodes: list[str], known: list[str]
) -> None:
    assert [name for name, _ in sites.find_matching_profiles(SITES, cluster, hosts, nodes)] == known


@pytest.mark.parametrize(
    ("cluster", "host", "name"),
    [("My Lab!", None, "my-lab"), ("", "login.x.org", "login"), ("slurm", None, "mycluster")],
)
def test_a_discovered_profile_gets_a_name(cluster: str, host: str | None, name: str) -> None:
    assert sites.profile_name(cluster, host) == name
