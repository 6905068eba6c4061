"""Requests that the profile, Slurm or the nodes would refuse are reported before submission."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.slurm_programs import Programs
from tests.discover.answers import PARTITIONS

PROFILE = """\
name: site
title: A site
scheduler: slurm
slurm:
  account_required: true
  mem: forbidden
  partition: gpu
  max_nodes: 16
  max_time: 1-00:00:00
  partitions:
    gpu: {max_time: "2:00:00", max_nodes: 4, node_type: big}
    long: {node_type: big}
node_types:
  big: {cpus: 64, memory: 512G, gpus: {model: A100-SXM4-80GB, count: 8}}
container: {runtime: apptainer}
"""


@pytest.fixture(autouse=True)
def site_profile(slurm: Programs, folder: Path) -> Path:
    """Write a profile with required and forbidden options; Slurm accepts every dry run."""
    slurm.say("sbatch --test-only", "sbatch: Job 1 to start at 2026-01-01T00:00:00\n")
    parts = [PARTITIONS.replace("PartitionName=main", f"PartitionName={name}") for name in ("gpu", "long")]
    slurm.say("scontrol -o show partition", "".join(parts))
    path = folder / "cluster_profiles" / "site.yaml"
    path.parent.mkdir()
    return write_file(path, PROFILE)


def write_file(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o644)
    return path


ASKED = ("--cluster", "site", "-A", "mine", "-t", "60")
RENDER = ("render", *ASKED)
SUBMIT = ("submit", *ASKED, "--python", sys.executable, "-l", "srun")


def test_a_valid_request_is_rendered_without_messages(invoke: Run) -> None:
    done = invoke(*RENDER, "-N", "2", "--gpus-per-node", "8", "train.py", code=0)
    assert "#SBATCH --account=mine" in done.stdout
    assert "#SBATCH --mem" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("render", "--cluster", "site", "-t", "60", "train.py"),
            "cluster site requires an account: give --account (-A)",
        ),
        ((*RENDER, "--mem", "10G", "train.py"), "cluster site does not accept --mem"),
        (
            (*RENDER, "-p", "gqu", "train.py"),
            "--partition 'gqu': cluster site has no such partition; did you mean 'gpu'? (available:",
        ),
        ((*RENDER, "-p", "zebra", "train.py"), "cluster site has no such partition (available: gpu, long"),
        ((*RENDER, "-t", "180", "train.py"), "--time 03:00:00: partition gpu allows at most 02:00:00"),
        (
            (*RENDER, "-p", "long", "-t", "2-00:00:00", "train.py"),
            "--time 2-00:00:00: cluster site allows at most 1-00:00:00",
        ),
        ((*RENDER, "-N", "5", "train.py"), "--nodes 5: partition gpu allows at most 4"),
        (
            (*RENDER, "-N", "4", "--spare-nodes", "1", "train.py"),
            "--nodes 4 and --spare-nodes 1: partition gpu allows at most 4",
        ),
        ((*RENDER, "-N", "17", "-p", "long", "train.py"), "--nodes 17: cluster site allows at most 16"),
        ((*RENDER, "--container-mount", "/data", "train.py"), "--container-mount needs --container IMAGE"),
        ((*SUBMIT, "--container", "/no/image.sif", "train.py"), "the image does not exist: /no/image.sif"),
        (
            (*SUBMIT, "--container", "docker://x", "--container-mount", "/no/data", "train.py"),
            "--container-mount /no/data: /no/data does not exist",
        ),
        (
            (*SUBMIT, "--container", "docker://x", "train.py"),
            "container runtime apptainer: apptainer is not on PATH",
        ),
        ((*RENDER, "--tracking", "project", "train.py"), "--tracking 'project': write key=value"),
        ((*RENDER, "--sbatch", "exclusive", "train.py"), "--sbatch"),
        ((*RENDER, "trian.py"), "script trian.py does not exist; did you mean 'train.py'?"),
        ((*RENDER, "nowhere/train.py"), "does not exist (folder "),
        (
            (*RENDER, "--fabric-check", "-N", "1", "--gpus-per-node", "1", "train.py"),
            "--fabric-check measures the network between ranks, and this job has only one rank",
        ),
    ],
)
def test_requests_that_violate_the_profile_are_refused(
    invoke: Run, words: tuple[str, ...], message: str
) -> None:
    done = invoke(*words, code=2)
    assert message in done.stderr
    assert done.stdout == ""


def test_a_profile_may_require_mem(invoke: Run, site_profile: Path) -> None:
    write_file(site_profile, PROFILE.replace("mem: forbidden", "mem: required").replace("memory: 512G, ", ""))
    assert "cluster site requires --mem" in invoke(*RENDER, "train.py", code=2).stderr
    assert "#SBATCH --mem=10G" in invoke(*RENDER, "--mem", "10G", "train.py", code=0).stdout


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ("none", "--container: the profile of site has no container runtime"),
        ("pyxis", "container runtime pyxis: srun has no option --container-image"),
    ],
)
def test_a_container_is_refused_without_a_runtime(
    invoke: Run, slurm: Programs, site_profile: Path, runtime: str, message: str
) -> None:
    write_file(site_profile, PROFILE.replace("runtime: apptainer", f"runtime: {runtime}"))
    asked = (*SUBMIT, "--dry-run", "--container", "docker://x", "train.py")
    assert message in invoke(*asked, code=2).stderr
    if runtime == "pyxis":
        slurm.say("srun --help", "      --container-image=[USER@][REGISTRY#]IMAGE\n")
        assert "--container-image" in invoke(*asked, code=0).stdout


def test_the_container_runtime_may_come_from_a_module(invoke: Run, site_profile: Path) -> None:
    write_file(site_profile, PROFILE + "environment: {modules: [apptainer]}\n")
    assert "apptainer" in invoke(*RENDER, "--container", "docker://x", "train.py", code=0).stdout


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        (
            ("--env", "HF_TOKEN=x"),
            "--env HF_TOKEN is written into the script; --secret HF_TOKEN keeps its value out",
        ),
        (
            ("--tracker", "mlflow", "--tracking", "uri=https://me:hush@host:5000"),
            "which is written into the script; --secret MLFLOW_TRACKING_URI keeps it out of it",
        ),
        (
            ("--max-restarts", "2"),
            (
                "restarts need the supervisor, which only dtslurm submit installs; with plain sbatch the "
                "job is a single attempt"
            ),
        ),
        (
            ("--artifact", "*.pt"),
            "artifacts are registered only in jobs of dtslurm submit, not with plain sbatch",
        ),
        (("--stage-out", "/tmp/out:out"), "with --signal-before N also before the time limit"),
        (("-N", "2", "--fabric-check"), "the profile has no fabric.expected_busbw_gbs"),
        (
            ("-N", "2", "--fabric-check", "-l", "mpi"),
            "--fabric-check needs torch: ",
        ),
    ],
)
def test_render_prints_notices(invoke: Run, words: tuple[str, ...], notice: str) -> None:
    done = invoke(*RENDER, *words, "train.py", code=0)
    assert notice in done.stderr
    assert done.stdout.startswith("#!/bin/bash")


def test_without_a_time_the_default_limit_of_the_partition_applies(invoke: Run) -> None:
    done = invoke("render", "--cluster", "site", "-A", "mine", "train.py", code=0)
    assert "note: no --time given: the partition's default limit applies\n" in done.stderr


# ---- Slurm's own word, and sbatch's ----


def test_a_refused_dry_run_of_slurm_stops_the_submission(invoke: Run, slurm: Programs) -> None:
    refusal = "sbatch: error: Batch job submission failed: Invalid qos specification\n"
    slurm.refuse("sbatch --test-only", refusal)
    done = invoke(*SUBMIT, "train.py", code=2)
    assert "Batch job submission failed: Invalid qos specification\n" in done.stderr
    assert not any(line.startswith("sbatch --parsable") for line in slurm.asked)


def test_busy_nodes_in_the_dry_run_cause_only_a_note(invoke: Run, slurm: Programs) -> None:
    slurm.refuse("sbatch --test-only", "allocation failure: Requested nodes are busy\n")
    slurm.say("sbatch --parsable", "4711\n")
    done = invoke(*SUBMIT, "train.py", code=0)
    assert "note: sbatch --test-only: allocation failure: Requested nodes are busy\n" in done.stderr


def test_a_slurm_that_does_not_answer_stops_the_submission(invoke: Run, slurm: Programs) -> None:
    slurm.refuse(
        "sbatch --test-only", "sbatch: error: Unable to contact slurm controller (connect failure)\n"
    )
    done = invoke(*SUBMIT, "train.py", code=3)
    assert "Unable to contact slurm controller" in done.stderr
    assert not any(line.startswith("sbatch --parsable") for line in slurm.asked)


def test_a_submitted_job_carries_its_token_as_comment(invoke: Run, slurm: Programs) -> None:
    slurm.say("sbatch --parsable", "4711\n")
    done = invoke(*SUBMIT, "train.py", code=0)
    assert "submitted job 4711 (train) to site" in done.stderr
    [asked] = [line for line in slurm.asked if line.startswith("sbatch --parsable")]
    assert re.search(r"--comment=dtslurm:[0-9a-f]+:[0-9a-f]+ ", asked)


@pytest.mark.parametrize("name", ["site", "other"])
def test_the_slurm_of_another_cluster_is_not_used(
    invoke: Run, slurm: Programs, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_file(folder / "cluster_profiles" / "site.yaml", f"{PROFILE}login: {{host: site.invalid}}\n")
    conf = write_file(tmp_path / "slurm.conf", f"ClusterName={name}\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    slurm.say("sbatch --parsable", "4711\n")
    done = invoke(*SUBMIT, "train.py", code=0 if name == "site" else 4)
    doctor = invoke("doctor", "--cluster", "site").stdout
    if name == "site":
        assert "submitted job 4711 (train) to site, the Slurm on this machine" in done.stderr
        assert re.search(r"reached by +the Slurm on this machine \(ClusterName site\)", doctor)
    else:
        assert "site.invalid" in done.stderr
        assert (
            "if this machine's Slurm is site's: add its ClusterName to recognise: in the profile"
            in done.stderr
        )
        assert not any(line.startswith("sbatch") for line in slurm.asked)
        assert "to site.invalid" in doctor
        assert "this machine's Slurm was not recognized as the cluster's Slurm" in doctor


def test_a_job_that_sbatch_refuses_leaves_no_run(invoke: Run, slurm: Programs, tmp_path: Path) -> None:
    del slurm  # it refuses whatever it is not told to take
    assert "refused" in invoke(*SUBMIT, "train.py", code=3).stderr
    assert not list((tmp_path / "runs").glob("train-*"))
    assert "no runs yet" in invoke("status", code=0).stderr


def test_a_secret_must_not_be_a_variable_of_the_profile(
    invoke: Run, site_profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "hush")
    write_file(site_profile, PROFILE + "environment: {variables: {HF_HOME: {value: /scratch}}}\n")
    refused = invoke(*SUBMIT, "--secret", "HF_HOME", "train.py", code=2).stderr
    assert "environment.variables of the cluster's profile also sets HF_HOME" in refused


def test_secrets_are_stored_in_a_private_file_only(
    invoke: Run, slurm: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hush")
    slurm.say("sbatch --parsable", "4711\n")
    invoke(*SUBMIT, "--secret", "MY_TOKEN", "train.py", code=0)
    [run] = (tmp_path / "runs").glob("train-*")
    assert "hush" not in (run / "script.sbatch").read_text()
    assert (run / "secrets").read_text() == "export MY_TOKEN=hush\n"
    assert (run / "secrets").stat().st_mode & 0o077 == 0


def test_a_profile_may_forbid_or_require_requeues(invoke: Run, site_profile: Path) -> None:
    write_file(site_profile, PROFILE.replace("mem: forbidden", "requeue: forbidden"))
    refused = invoke(*RENDER, "--requeue", "train.py", code=2).stderr
    assert "--requeue: cluster site does not allow requeues (slurm.requeue of its profile)" in refused
    assert "#SBATCH --no-requeue" in invoke(*RENDER, "train.py", code=0).stdout
    write_file(site_profile, PROFILE.replace("mem: forbidden", "requeue: required"))
    refused = invoke(*RENDER, "--no-requeue", "train.py", code=2).stderr
    assert "cluster site does not accept --no-requeue" in refused
