"""The answer of a login node, parsed and converted to facts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtslurm.discover import from_slurm
from dtslurm.discover.facts import DiscoveredCluster
from dtslurm.discover.kinds import gpu_memory, kinds
from dtslurm.model.cluster import ClusterProfile, Gpus, NodeType
from dtslurm.model.units import Memory
from dtslurm.slurm import survey
from tests.discover.answers import join_parts, node_line, survey_output
from tests.slurm.recorded import VERSIONS


def survey_facts(output: str, parent: ClusterProfile | None = None) -> DiscoveredCluster:
    result = survey.read(output)
    return from_slurm.facts_from_survey(result, kinds(result.nodes), parent)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_answers_of_every_slurm_version_give_facts(version: str) -> None:
    answer = survey.read(survey_output(version))
    assert (answer.cluster, answer.version, answer.host) == ("lab", version, "login1.lab.example.org")
    result = from_slurm.facts_from_survey(answer, kinds(answer.nodes))
    known = {fact.name: fact.value for fact in result.facts}
    assert known["slurm.version"] == version
    assert known["slurm.partition"] == "main"
    assert known["slurm.gpu_request"] == "gpus-per-node"
    assert known["slurm.partitions.main.max_time"] == "1-00:00:00"
    assert known["slurm.partitions.main.node_type"] == "gpu-a100x8"
    assert known["node_types.gpu-a100x8.gpus.count"] == 8
    assert known["node_types.gpu-a100x8.memory"] == "4000M"
    assert known["paths.scratch"] == "$SCRATCH"
    assert known["slurm.mpi"] == "pmix"
    assert "cuda/12.4" in result.remarks["environment"][0]
    assert "1 of them were unavailable" in result.remarks["node_types.gpu-a100x8"][1]  # n2 is drained
    assert [line for line in result.notices if line.startswith("accounting did not answer")]


def test_sinfo_is_used_if_scontrol_lists_no_nodes() -> None:
    row = "8|1|8|1|4000|idle|gpu:a100:4(S:0-1)|hbm40g,ib\n"
    rows = f"n1|main|{row}n1|debug|{row}"
    result = survey.read(
        survey_output(
            "24.11.5",
            nodes="slurm_load_node error: Access denied",
            sinfo=rows + "n2|main|8|1|8|1|4000+|futurestate$|(null)|\n",
        )
    )
    assert result.by == "sinfo"
    first, second = result.nodes
    assert (first.name, first.partitions, first.gpus) == ("n1", ("main", "debug"), (("a100", 4),))
    assert (second.gpus, second.memory, second.state) == ((), Memory(4000), "FUTURESTATE$")


def test_private_data_and_missing_answers_are_reported() -> None:
    config = "ClusterName = quiet\nPrivateData = jobs,nodes\nSelectType = select/cons_res\n"
    result = survey_facts(
        join_parts(
            config=config, nodes=node_line("n1", "gpu:4"), partitions="", associations="sacctmgr: error"
        )
    )
    assert any("PrivateData=jobs,nodes" in line for line in result.notices)
    assert any("partitions" in line for line in result.notices)
    assert result.value("slurm", "gpu_request") == "gres"  # cons_res has no --gpus-per-node


def test_different_nodes_of_a_partition_become_several_node_types() -> None:
    nodes = (
        node_line("a1", "gpu:a100:4(S:0-1)", ActiveFeatures="amd,hbm40g")
        + node_line("a2", "gpu:a100:4(S:0-1)", ActiveFeatures="amd,hbm40g", RealMemory="511000")
        + node_line("b1", "gpu:a100:4(S:0,1)", ActiveFeatures="amd,hbm80g")
        + node_line("h1", "gpu:h100:8,shard:16", CPUTot="96", CoresPerSocket="48", State="MIXED+PLANNED")
        + node_line("c1", CPUTot="128", State="SOMETHING_NEW+DRAIN")
    )
    result = survey_facts(survey_output("22.05.8", nodes=nodes))
    names = {fact.key[1] for fact in result.below("node_types")}
    assert names == {"gpu-a100x4-40G", "gpu-a100x4-80G", "gpu-h100x8", "cpu-128"}
    assert result.value("node_types", "gpu-a100x4-40G", "memory") == "511000M"
    assert result.value("node_types", "gpu-a100x4-80G", "constraint") == "hbm80g"
    assert result.value("slurm", "partitions", "main", "node_type") is None
    assert "several node types" in result.value("slurm", "partitions", "main", "note")
    assert result.value("slurm", "gpu_request") == "gpus-per-node-typed"
    assert any("cpu-128 is available" in line for line in result.notices)


def test_the_default_node_type_comes_from_a_default_partition_with_nodes() -> None:
    elsewhere = node_line("a1", "gpu:a100:4", Partitions="old") + node_line(
        "h1", "gpu:h100:8", Partitions="old"
    )
    for nodes, evidence in (
        (elsewhere, "most of the GPU nodes"),
        (elsewhere + node_line("c1", CPUTot="128"), "most of the nodes of partition main"),
    ):
        result = survey_facts(survey_output("22.05.8", nodes=nodes))
        [fact] = [fact for fact in result.facts if fact.key == ("default_node_type",)]
        assert fact.evidence == evidence


@pytest.mark.parametrize(
    ("gres", "model", "count"),
    [
        ("gpu:a100:1,gpu:1g.10gb:3", "a100", 1),
        ("gpu:a100_1g.5gb:14,gpu:a100:2(S:0-1)", "a100", 2),
        ("gpu:1g.10gb:2,gpu:3g.40gb:4", "3g.40gb", 4),
        ("gpu:a40:2,gpu:h100:4", "h100", 4),
    ],
)
def test_among_several_gpu_types_of_a_node_the_largest_whole_type_is_a_guess(
    gres: str, model: str, count: int
) -> None:
    result = survey_facts(
        survey_output("22.05.8", nodes=node_line("m1", gres) + node_line("a1", "gpu:4", Partitions="old"))
    )
    above = ("node_types", f"gpu-{model}x{count}", "gpus")
    facts = {fact.key[-1]: (fact.value, fact.sure) for fact in result.below(*above)}
    assert facts["model"] == (model, "guess")
    assert facts["count"] == (count, "guess")
    assert facts["slurm_type"] == (model, "sure")
    assert result.value("slurm", "gpu_request") == "gpus-per-node-typed"
    [notice] = [line for line in result.notices if "several types" in line]
    assert notice.startswith(f"gpu-{model}x{count}: a node has GPUs of several types (")
    assert notice.endswith(f"{count} {model} is a guess")


def test_a_node_without_a_gpu_type_does_not_change_the_gpu_request_form() -> None:
    nodes = node_line("a1", "gpu:a100:4") + node_line("h1", "gpu:h100:8") + node_line("x1", "gpu:2")
    assert (
        survey_facts(survey_output("22.05.8", nodes=nodes)).value("slurm", "gpu_request")
        == "gpus-per-node-typed"
    )


def test_node_types_are_named_as_in_the_parent_profile() -> None:
    own = NodeType(gpus=Gpus(model="A100-SXM4-80GB", count=4, memory=Memory.parse("80G")))
    other = NodeType(gpus=Gpus(model="A100-SXM4-40GB", count=4, memory=Memory.parse("40G")))
    parent = ClusterProfile(name="site", node_types={"big": own, "small": other})
    result = survey_facts(
        survey_output("22.05.8", nodes=node_line("a1", "gpu:a100:4", ActiveFeatures="hbm80g")), parent
    )
    assert {fact.key[1] for fact in result.below("node_types")} == {"big"}
    result = survey_facts(
        survey_output("22.05.8", nodes=node_line("a1", "gpu:a100:4")), parent
    )  # it may be either
    assert {fact.key[1] for fact in result.below("node_types")} == {"gpu-a100x4"}


@pytest.mark.parametrize(
    ("features", "size"),
    [(["hbm80g"], "80G"), (["GPU_MEM:32GB", "x"], "32G"), (["a100-40gb"], "40G"), (["100g", "ib"], None),
     (["rack12g"], None), (["hbm40g", "hbm80g"], None), ([], None)],
)  # fmt: skip
def test_the_gpu_memory_is_derived_from_node_features(features: list[str], size: str | None) -> None:
    assert gpu_memory(features) == (Memory.parse(size) if size else None)


WORDS = st.sampled_from(
    [
        "NodeName=n1 ", "Gres=gpu:", "a100:4(S:0-1)", "\n", "\x1enodes\n", "\x1econfig\n",
        "ClusterName = x\n", "|", "a",
        "\x1epartitions\n", "PartitionName=p ", "MaxTime=9-99:99 ", "RealMemory=99 ", "CPUTot=0 ",
        "Sockets=-1 ", "\udcff",
        "\x1efolders\n", "df=/x y z 1 2 3 4%", "HOME=/", "\x1emodules\n", "\x1esinfo\n",
        "\x1eassociations\n", "RequeueExit = 1,x\n",
    ]
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(WORDS | st.text(max_size=8), max_size=40).map("".join))
def test_arbitrary_answers_do_not_break_the_survey_parser(output: str) -> None:
    answer = survey.read(output)
    result = from_slurm.facts_from_survey(answer, kinds(answer.nodes))
    assert all(fact.evidence for fact in result.facts)


NODES = st.lists(
    st.tuples(
        st.sampled_from(["gpu:a100:4", "gpu:8", "(null)", "gpu:a100:4,gpu:v100:2"]),
        st.integers(1, 3), st.integers(1000, 1200) | st.integers(4000, 9000),
        st.sampled_from(["hbm40g", "hbm80g", "x"]),
    ),
    max_size=30,
)  # fmt: skip


@settings(deadline=None)
@given(NODES)
def test_every_node_belongs_to_one_kind_with_its_guaranteed_values(
    rows: list[tuple[str, int, int, str]],
) -> None:
    text = "".join(
        node_line(f"n{i}", gres, CPUTot=str(cpus), RealMemory=str(memory), ActiveFeatures=feature)
        for i, (gres, cpus, memory, feature) in enumerate(rows)
    )
    nodes = survey.read(survey_output("22.05.8", nodes=text)).nodes
    groups = kinds(nodes)
    assert sorted(node.name for kind in groups for node in kind.nodes) == sorted(node.name for node in nodes)
    assert len({kind.name for kind in groups}) == len(groups)
    real = {node.name: node for node in nodes}
    for kind in groups:
        for member in kind.nodes:
            assert kind.node_type.memory is not None
            memory = real[member.name].memory
            assert memory is not None
            assert 0.9 * memory.mib < kind.node_type.memory.mib <= memory.mib
            assert real[member.name].gpus == member.gpus
