"""Profiles discovered from real Slurms, here and over SSH, and verified on them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtslurm.slurm import commands, parse
from tests.conftest import skip_or_fail_without_slurm
from tests.e2e.conftest import ON_SLURM, Cli, far_profile
from tests.lab.cluster import SlurmLab
from tests.lab.many import ManyNodes
from tests.lab.software import SlurmUnavailable, Software
from tests.sshd.fixtures import Login

pytestmark = pytest.mark.slurm

# What a job on a node with eight GPUs would see.
NVIDIA_SMI = """\
#!/bin/sh
[ "$1" = topo ] && exit 1
for i in 0 1 2 3 4 5 6 7; do echo "$i, NVIDIA A100-SXM4-80GB, 81920, 00000000:0$i:00.0, 550.54"; done
"""


def with_gpus(cli: Cli) -> None:
    """Put NVIDIA's program on the PATH of jobs."""
    folder = cli.folder / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(NVIDIA_SMI)
    (folder / "nvidia-smi").chmod(0o755)
    path = cli.env.get("PATH", os.environ["PATH"])
    cli.env["PATH"] = f"{folder}:{path}"


def values(document: dict[str, Any]) -> dict[str, Any]:
    return {fact["key"]: fact["value"] for fact in document["facts"]}


@ON_SLURM
def test_discover_writes_and_updates_a_profile_that_check_verifies(cli: Cli) -> None:
    with_gpus(cli)
    path = cli.folder / "cluster_profiles" / "mine.yaml"
    done = cli("cluster", "discover", "-o", str(path), "--json")
    document = json.loads(done.stdout)
    assert (document["cluster"], document["written"], document["extends"]) == ("lab", True, None)
    assert document["node_types"] == {"gpu-a100x8": 4}
    result = values(document)
    assert result["node_types.gpu-a100x8.gpus.model"] == "A100-SXM4-80GB"
    assert result["node_types.gpu-a100x8.gpus.memory"] == "81920M"
    assert result["slurm.partitions.short.max_nodes"] == 2
    assert [probe["problem"] for probe in document["probes"]] == [""]
    assert not list((Path(cli.env["DTSLURM_RUN_ROOT"])).glob(".probe-*"))
    text = path.read_text()
    assert "# probe on n1" in text or "# probe on n" in text

    proof = json.loads(cli("cluster", "check", "mine", "--no-fabric", "--json", code=None).stdout)
    differing = {row["what"] for row in proof["claims"] if row["verdict"] == "differs"}
    assert differing <= {"environment.offline"}  # whether the internet is there may change meanwhile
    verdicts = {row["what"]: row["verdict"] for row in proof["claims"]}
    assert verdicts["slurm.version"] == "ok"
    assert verdicts["node type gpu-a100x8, GPUs in a job"] == "ok"
    assert verdicts["partition short, sbatch --test-only"] == "ok"

    edited = text.replace("partition: main  ", "partition: short ", 1).replace(
        "cores_per_socket: 8", "cores_per_socket: 9"
    )
    edited = edited.replace('max_time: "00:10:00"', 'max_time: "9:00:00" ')
    path.write_text(edited)
    stderr = cli("cluster", "discover", "-o", str(path), "--no-probe").stderr
    assert "your value is kept: slurm.partition is short, found main" in stderr
    assert path.read_text() == edited
    wrong = cli("cluster", "check", "mine", "--no-probe", "-l", "torchrun", code=1)
    rows = [line.split("  ") for line in wrong.stdout.splitlines()]
    assert [row[1] for row in rows if row[0] == "differs"] == [
        "partition short, max_time", "node type gpu-a100x8, cores_per_socket",
    ]  # fmt: skip


@ON_SLURM
def test_cluster_check_reports_memory_that_no_node_has(cli: Cli) -> None:
    profiles = cli.folder / "cluster_profiles"
    profiles.mkdir()
    (profiles / "greedy.yaml").write_text("extends: slurm\nslurm: {extra_options: [--mem=9T]}\n")
    words = ("--no-fabric", "--no-probe", "-l", "srun", "-p", "main", "--json")
    proof = json.loads(cli("cluster", "check", "greedy", *words, code=1).stdout)
    assert [row["verdict"] for row in proof["claims"] if row["what"].startswith("partition main")] == [
        "differs"
    ]


@ON_SLURM
def test_discover_overwrites_a_file_only_after_confirmation(cli: Cli) -> None:
    path = cli.folder / "lab.yaml"
    own = "# mine\nslurm:\n  partition: short   # I like it\n"
    path.write_text(own)
    stderr = cli("cluster", "discover", "-o", str(path), "--no-probe").stderr
    assert "+  max_array_size: 10001" in stderr
    assert "not written: there is no terminal for the confirmation" in stderr
    assert path.read_text() == own
    cli("cluster", "discover", "-o", str(path), "--no-probe", "--yes")
    new = path.read_text()
    assert new.startswith("# mine\nslurm:\n  partition: short   # I like it\n")
    assert "max_array_size: 10001" in new
    assert (
        json.loads(cli("cluster", "show", str(path), "--json").stdout)["profile"]["slurm"]["partition"]
        == "short"
    )


def test_discover_and_check_work_over_ssh(tmp_path: Path, sshd_login: Login) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    cli = Cli("far", folder, {**sshd_login.env, "PATH": os.environ["PATH"]})
    document = json.loads(cli("cluster", "discover", sshd_login.host, "--json").stdout)
    result = values(document)
    assert result["login.host"] == sshd_login.host
    assert result["slurm.partition"] == "main"
    assert result["node_types.gpu-a100x8.gpus.count"] == 8
    assert document["probes"][0]["seen"]["node"].startswith("n")
    far_profile(tmp_path, sshd_login.host)
    proof = cli("cluster", "check", "far", "--no-fabric", "--no-probe", "--json")
    assert json.loads(proof.stdout)["ok"] is True


@pytest.mark.slow
@ON_SLURM
def test_cluster_check_measures_the_network_between_two_nodes(cli: Cli) -> None:
    pytest.importorskip("torch", reason="the check measures with torch")
    with_gpus(cli)
    profiles = cli.folder / "cluster_profiles"
    profiles.mkdir()
    text = (
        "extends: slurm\nnode_types: {two-ranks-in-all: {cpus: 8}}\n"
        f"environment: {{python: {sys.executable}, variables: {{GLOO_SOCKET_IFNAME: {{value: lo}}}}}}\n"
    )
    fabric = "fabric: {kind: ethernet, expected_busbw_gbs: 1000000}\n"
    (profiles / "hopeful.yaml").write_text(text + fabric)
    words = ("-l", "torchrun", "-p", "main", "--json")
    bad = json.loads(cli("cluster", "check", "hopeful", *words, code=1, timeout=600).stdout)
    row = next(row for row in bad["claims"] if row["what"] == "fabric check")
    assert row["verdict"] == "differs"
    assert "less than half of the 1e+06 expected" in row["found"]


# ---- A thousand nodes ----


@pytest.fixture(scope="module")
def thousand_nodes(slurm_software: Software) -> Iterator[ManyNodes]:
    root = Path(tempfile.mkdtemp(prefix="dtslurm-lab-", dir="/tmp"))
    try:
        lab = ManyNodes(root)
        with lab:
            yield lab
    except SlurmUnavailable as error:
        skip_or_fail_without_slurm(error)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def test_discover_of_a_thousand_nodes_makes_few_requests(thousand_nodes: ManyNodes, tmp_path: Path) -> None:
    cli = Cli("slurm", tmp_path, {**thousand_nodes.env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")})
    with_gpus(cli)
    before = thousand_nodes.asked()
    done = cli("cluster", "discover", "--json", "-p", "short", "-o", "big.yaml")
    after = thousand_nodes.asked()
    assert sum(after.values()) - sum(before.values()) <= 10, (before, after)
    document = json.loads(done.stdout)
    assert document["nodes"] == 1000
    assert document["node_types"] == {
        "gpu-h100x8": 200, "gpu-a100x4-40G": 399, "gpu-a100x4-80G": 100, "gpu-a100x8": 1, "cpu-128": 300,
    }  # fmt: skip
    result = values(document)
    assert (
        result["slurm.partitions.main.note"] == "several node types: 399 gpu-a100x4-40G, 100 gpu-a100x4-80G"
    )
    assert result["node_types.gpu-a100x4-80G.constraint"] == "hbm80g"
    assert result["slurm.partitions.h100.note"] == "only for accounts ml"
    assert result["node_types.gpu-a100x8.gpus.model"] == "A100-SXM4-80GB"  # by the one node that runs jobs
    assert any("none of the 200 nodes of gpu-h100x8 is available" in line for line in document["notices"])
    assert any("accounting did not answer" in line for line in document["notices"])  # it is off here
    proof = json.loads(cli("cluster", "check", "./big.yaml", "--no-probe", "--json", "-l", "srun").stdout)
    assert proof["ok"] is True


def test_cluster_check_notes_another_slurm_version(thousand_nodes: ManyNodes, tmp_path: Path) -> None:
    cli = Cli("slurm", tmp_path, dict(thousand_nodes.env))
    path = tmp_path / "old.yaml"
    path.write_text('extends: slurm\nslurm: {version: "19.05.8", partition: short}\n')
    done = cli("cluster", "check", str(path), "--no-probe", "-l", "srun")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("notice")]
    assert line.split() == ["notice", "slurm.version", "19.05.8", thousand_nodes.version]


# ---- Bad input ----


def test_discover_reports_a_machine_without_slurm(tmp_path: Path) -> None:
    cli = Cli("none", tmp_path, {"PATH": "/nonexistent"})
    assert "no sbatch on this machine's PATH" in cli("cluster", "discover", code=2).stderr
    assert "without Slurm" in cli("cluster", "check", "local", code=2).stderr
    assert "give HOST or --cluster" in cli("cluster", "discover", "x", "--cluster", "y", code=2).stderr


def test_discover_refuses_unknown_partitions_and_unsuitable_files(
    thousand_nodes: ManyNodes, tmp_path: Path
) -> None:
    cli = Cli("slurm", tmp_path, dict(thousand_nodes.env))
    stderr = cli("cluster", "discover", "-p", "nope", code=2).stderr
    assert "there is no partition nope; available: cpu, h100, main, short" in stderr
    assert "must end in .yaml" in cli("cluster", "discover", "-o", "x.txt", code=2).stderr
    assert "is a folder" in cli("cluster", "discover", "-o", ".", code=2).stderr
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    assert "bad.yaml:" in cli("cluster", "discover", "-o", "bad.yaml", "--no-probe", code=2).stderr


def test_discover_extends_the_included_profile_of_a_known_cluster(
    thousand_nodes: ManyNodes, tmp_path: Path
) -> None:
    """The cluster has the name of an included profile; scontrol is real except for the cluster name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    real = thousand_nodes.software.which("scontrol")
    (folder / "scontrol").write_text(f'#!/bin/sh\n"{real}" "$@" | sed "/^ClusterName/s/= .*/= snellius/"\n')
    (folder / "scontrol").chmod(0o755)
    cli = Cli("slurm", tmp_path, {**thousand_nodes.env, "PATH": f"{folder}:{thousand_nodes.env['PATH']}"})
    document = json.loads(cli("cluster", "discover", "--no-probe", "--json").stdout)
    assert (document["name"], document["extends"]) == ("snellius", "snellius")
    assert "extends: snellius\n" in document["profile"]
    assert "Recognized as snellius by ClusterName snellius" in document["profile"]
    result = {fact["key"]: fact for fact in document["facts"]}
    assert "(profile snellius: " in result["slurm.partition"]["evidence"]
    path = tmp_path / "cluster_profiles" / "snellius.yaml"
    path.parent.mkdir()
    path.write_text(document["profile"])
    assert "no new values" in cli("cluster", "discover", "--no-probe", "-o", str(path)).stderr
    assert (
        json.loads(cli("cluster", "show", "snellius", "--json").stdout)["profile"]["slurm"]["partition"]
        == "main"
    )


# ---- A site that keeps its data private ----

PRIVATE = "PrivateData=accounts,events,jobs,nodes,partitions,reservations,usage,users"


NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


@pytest.fixture(scope="module")
def private_lab(slurm_software: Software) -> Iterator[SlurmLab]:
    """A cluster whose users see their own jobs and nothing else."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can ask Slurm as somebody else")
    root = Path(tempfile.mkdtemp(prefix="dtslurm-lab-", dir="/tmp"))
    root.chmod(0o711)
    try:
        with SlurmLab(root, nodes=2, extra_conf=[PRIVATE], software=slurm_software) as lab:
            yield lab
    except SlurmUnavailable as error:
        skip_or_fail_without_slurm(error)
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def stranger(private_lab: SlurmLab, tmp_path: Path) -> Cli:
    """The command line of one of its users: nobody, as far as Slurm's commands go."""
    programs, folder = tmp_path / "bin", tmp_path / "project"
    programs.mkdir()
    folder.mkdir()
    for name in ("scontrol", "sinfo", "squeue", "sacct", "sacctmgr", "srun", "sbatch", "scancel"):
        wrapper = programs / name
        wrapper.write_text(f'#!/bin/sh\nexec {" ".join(NOBODY)} "{private_lab.software.which(name)}" "$@"\n')
        wrapper.chmod(0o755)
    path = f"{programs}:{private_lab.env.get('PATH', os.environ['PATH'])}"
    return Cli("slurm", folder, {**private_lab.env, "PATH": path, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")})


def test_discover_reports_private_cluster_data_without_guessing(stranger: Cli) -> None:
    done = stranger("cluster", "discover", "--no-probe", "--json", "-o", "mine.yaml")
    document = json.loads(done.stdout)
    assert (document["nodes"], document["node_types"]) == (0, {})
    assert values(document)["slurm.max_array_size"] == 10001
    assert not [name for name in values(document) if name.startswith(("slurm.partition", "node_types"))]
    notices = "\n".join(document["notices"])
    assert (
        "Slurm did not report its partitions (slurm_load_partitions error: Access/permission denied)"
        in notices
    )
    assert "Slurm did not report its nodes (" in notices
    assert "accounting did not answer" in notices
    assert f"{PRIVATE}: nodes and partitions of others are hidden" in notices
    words = ("--no-probe", "--no-fabric", "-l", "single", "--json")
    proof = json.loads(stranger("cluster", "check", "./mine.yaml", *words).stdout)
    assert proof["ok"] is True
    assert "partition" not in str([row for row in proof["claims"] if row["verdict"] == "differs"])

    # A job is checked by Slurm's own dry run all the same.
    stranger.script("print(1)")
    submit = ("submit", "--cluster", "slurm", "-l", "single", "-t", "5", "--dry-run", "train.py")
    assert "#SBATCH --time=00:05:00" in stranger(*submit).stdout
    assert "invalid partition" in stranger(*submit[:-1], "-p", "nope", "train.py", code=2).stderr
    assert "no runs yet" in stranger("status").stdout + stranger("status").stderr


def test_user_sees_their_jobs_when_jobs_of_other_users_are_private(
    stranger: Cli, private_lab: SlurmLab
) -> None:
    for prefix in ([], NOBODY):
        private_lab.run([*prefix, "sbatch", "--hold", "--output=/dev/null", "--wrap=true"], cwd=Path("/"))
    env = {**os.environ, **stranger.env}
    done = subprocess.run(commands.squeue(), env=env, capture_output=True, text=True, check=False)
    [job] = parse.squeue(done.stdout, uid=65534, observed_at=0.0).jobs
    assert job.state.name == "PENDING"
