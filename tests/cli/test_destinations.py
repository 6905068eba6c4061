"""The partition, node type and directives of a job on a cluster with several partitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run

TWO = """\
slurm:
  partition: cpu
  default_time: 5:00:00
  partitions:
    cpu: {node_type: c, max_time: 60}
    gpu: {node_type: g}
    mix: {max_time: 60, qos: mixq}
node_types:
  c: {cpus: 4, memory: 2G, partition: cpu}
  g:
    gpus: {model: A100, count: 4, slurm_type: a100}
    cpus: 64
    memory: 100G
    partition: gpu
    constraint: a100
default_node_type: c
"""


@pytest.fixture
def two_partition_cluster(folder: Path) -> Path:
    """A cluster called ``two`` in the folder."""
    return write_profile(folder, TWO)


def write_profile(folder: Path, text: str, name: str = "two") -> Path:
    path = folder / "cluster_profiles" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def render_directives(invoke: Run, *words: str, name: str = "two") -> tuple[dict[str, str], str]:
    """Return the directives of a rendered script, and stderr."""
    done = invoke("render", "--cluster", name, "-l", "srun", *words, "train.py", code=0)
    pairs = (line[10:].partition("=") for line in done.stdout.splitlines() if line.startswith("#SBATCH --"))
    return {option: value.strip('"') for option, _, value in pairs}, done.stderr


def render_error(invoke: Run, *words: str, name: str = "two") -> str:
    return invoke("render", "--cluster", name, "-l", "srun", *words, "train.py", code=2).stderr


@pytest.mark.parametrize(
    ("name", "node_type", "partition"),
    [
        ("two", "c", "cpu"),
        ("two", "g", "gpu"),
        ("pegasus", "h200x8", "H200"),
        ("delta", "a40x4", "gpuA40x4"),
        ("tacc-lonestar6", "h100x2", "gpu-h100"),  # its type names no partition, but one partition names it
        ("tacc-lonestar6", "a100x3", "gpu-a100"),
    ],
)
def test_a_requested_node_type_selects_its_partition(
    name: str, node_type: str, partition: str, invoke: Run, two_partition_cluster: Path
) -> None:
    assert (
        render_directives(invoke, "--node-type", node_type, "-A", "x", name=name)[0]["partition"] == partition
    )


def test_the_default_partition_with_the_requested_nodes_is_kept(invoke: Run, folder: Path) -> None:
    write_profile(folder, "extends: delta\nslurm: {partition: gpuA100x4-interactive}\n", "mine")
    options, _ = render_directives(invoke, "--node-type", "a100x4", "-A", "x", name="mine")
    assert options["partition"] == "gpuA100x4-interactive"


def test_a_partition_without_the_requested_node_type_is_refused(
    invoke: Run, two_partition_cluster: Path
) -> None:
    error = render_error(invoke, "-p", "cpu", "--node-type", "g")
    assert "--node-type g: partition cpu has c nodes; g nodes are in partition gpu: give -p gpu" in error


def test_a_partition_with_unknown_node_types_accepts_any_node_type(
    invoke: Run, two_partition_cluster: Path
) -> None:
    options, _ = render_directives(invoke, "-p", "mix", "--node-type", "g")
    assert (options["partition"], options["gpus-per-node"]) == ("mix", "4")


def test_a_partition_with_unknown_node_types_does_not_get_the_limits_of_another(
    invoke: Run, two_partition_cluster: Path
) -> None:
    options, _ = render_directives(invoke, "-p", "mix", "-c", "8", "--mem", "20G")
    assert (options["cpus-per-task"], options["mem"]) == ("8", "20G")
    assert "gpus-per-node" not in options


def test_a_partition_gets_the_node_type_that_names_this_partition(invoke: Run, folder: Path) -> None:
    write_profile(folder, TWO.replace("gpu: {node_type: g}", "gpu: {}"))
    options, result = render_directives(invoke, "-p", "gpu", "--mem", "3500M")
    assert (options["gpus-per-node"], options["constraint"]) == ("4", "a100")
    assert "all 4 GPUs of each g node" in result


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        (("-p", "gpu"), "no GPUs requested: the nodes of gpu differ; give --node-type g or h"),
        (
            ("-p", "new"),
            "no GPUs requested: the node types of new are not known; request GPUs with --gpus-per-node",
        ),
        (("-p", "gpu", "--gpus-per-node", "2"), ""),
        (("-p", "cpu"), ""),
    ],
)
def test_a_job_without_gpus_explains_why_no_gpus_are_requested(
    words: tuple[str, ...], notice: str, invoke: Run, folder: Path
) -> None:
    text = TWO.replace("gpu: {node_type: g}", "gpu: {}\n    new: {}").replace("default_time: 5:00:00", "")
    write_profile(
        folder,
        text.replace("default_node", "  h: {gpus: {model: H100, count: 8}, partition: gpu}\ndefault_node"),
    )
    directive = render_directives(invoke, "-t", "5", *words)[1]
    assert notice in directive
    assert ("no GPUs" in directive) == bool(notice)


LISTS = """\
slurm:
  partition: main,short
  partitions:
    main: {node_type: g, max_time: 60, max_nodes: 4}
    short: {node_type: g, max_time: 20, max_nodes: 8}
    other: {node_type: c, max_time: 20}
    long: {node_type: g}
node_types:
  c: {cpus: 4}
  g: {cpus: 8, gpus: {model: A100, count: 4}}
default_node_type: c
"""


@pytest.mark.parametrize(
    ("words", "gpus", "message"),
    [
        (("-t", "60", "-N", "8"), "4", ""),  # each limit is the widest of the two
        (("-t", "61"), None, "--time 01:01:00: partition main,short allows at most 01:00:00"),
        (("-N", "9"), None, "--nodes 9: partition main,short allows at most 8"),
        (("-p", "short,long", "-t", "600", "-N", "99"), "4", ""),
        (("-p", "main,,short,"), "4", ""),
        (("-p", "main,other", "-c", "8"), None, ""),
        (("-p", "main,other", "--node-type", "g"), "4", ""),
        (("-p", "main,short", "--node-type", "c"), None, "--node-type c: partition main,short has g nodes"),
        (
            ("-p", "main,shrt"),
            None,
            "--partition 'shrt': cluster two has no such partition; did you mean 'short'?",
        ),
    ],
)
def test_several_partitions_can_be_requested(
    words: tuple[str, ...], gpus: str | None, message: str, invoke: Run, folder: Path
) -> None:
    write_profile(folder, LISTS)
    if message:
        assert message in render_error(invoke, *words)
        return
    options, _ = render_directives(invoke, *words)
    assert options.get("gpus-per-node") == gpus
    assert options["partition"] == (words[1] if words[0] == "-p" else "main,short")


@pytest.mark.parametrize(
    ("words", "time", "notice"),
    [
        ((), "01:00:00", "--time 01:00:00: the maximum of partition cpu; the usual default is 05:00:00"),
        (("-t", "30"), "00:30:00", ""),
        (("-p", "gpu"), "05:00:00", ""),
    ],
)
def test_the_default_time_is_reduced_to_the_limit_of_the_partition(
    words: tuple[str, ...], time: str, notice: str, invoke: Run, two_partition_cluster: Path
) -> None:
    options, said = render_directives(invoke, *words)
    assert options["time"] == time
    assert notice in said
    assert ("usual default" in said) == bool(notice)


@pytest.mark.parametrize(
    ("words", "qos"),
    [
        (("-p", "mix"), "mixq"),
        (("-p", "mix", "-q", "mine"), "mine"),
        (("-p", "cpu"), "usual"),
        (("-p", "cpu,mix"), "usual"),
    ],
)
def test_the_qos_of_a_partition_takes_precedence_over_the_cluster_qos(
    words: tuple[str, ...], qos: str, invoke: Run, folder: Path
) -> None:
    write_profile(folder, TWO.replace("slurm:\n", "slurm:\n  qos: usual\n"))
    assert render_directives(invoke, *words)[0]["qos"] == qos


@pytest.mark.parametrize(
    ("words", "constraint", "notice"),
    [
        ((), "gpu&hbm80g", ""),
        (
            ("-C", "nvme"), "gpu&hbm80g&nvme",
            "--constraint gpu&hbm80g&nvme: nvme and what gpu-80g nodes or the cluster require",
        ),
        (("-C", "gpu&hbm80g"), "gpu&hbm80g", ""),
        (("-C", "a|b"), "gpu&hbm80g&(a|b)", "--constraint gpu&hbm80g&(a|b): a|b and what"),
        (
            ("-C", "[a|b]"), "[a|b]",
            "--constraint [a|b]: it cannot be combined with gpu and gpu&hbm80g, which is omitted",
        ),
    ],
)  # fmt: skip
def test_a_requested_constraint_is_combined_with_the_constraint_of_the_nodes(
    words: tuple[str, ...], constraint: str, notice: str, invoke: Run
) -> None:
    options, said = render_directives(invoke, "--node-type", "gpu-80g", *words, name="perlmutter")
    assert options["constraint"] == constraint
    assert notice in said
    assert ("--constraint" in said) == bool(notice)


def test_a_constraint_that_selects_gpus_is_combined_with_a_requested_constraint(
    invoke: Run, folder: Path
) -> None:
    write_profile(folder, TWO.replace("slurm:\n", "slurm:\n  gpu_request: constraint\n"))
    assert render_directives(invoke, "--node-type", "g", "-C", "nvme")[0]["constraint"] == "a100&nvme"
