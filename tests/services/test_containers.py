"""Container problems that ``prepare`` reports before submission."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs.roles import RoleOptions, Roles, RoleSpec
from dtslurm.services.request.request import JobRequest
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.wiring.context import Context


@pytest.fixture
def context(tmp_path: Path) -> Context:
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "cluster_profiles").mkdir()
    (tmp_path / "bin").mkdir()
    profile = "extends: local\ncontainer:\n  runtime: apptainer\n"
    (tmp_path / "cluster_profiles" / "boxed.yaml").write_text(profile)
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path)}
    return Context(cwd=tmp_path, env={**env, "DTSLURM_TRUSTED_FOLDERS": "/"})


def render_with_container(context: Context, **asked: object) -> str:
    request = JobRequest(script="train.py", time="10", **{"cluster": "boxed", **asked})  # type: ignore[arg-type]
    return prepare(context, request, standalone=False).submission.script


def install_apptainer(context: Context) -> None:
    program = context.cwd / "bin" / "apptainer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)


def test_a_container_on_a_cluster_without_a_runtime_is_refused(context: Context) -> None:
    with pytest.raises(RequestInvalid, match="has no container runtime"):
        render_with_container(context, cluster="local", container="ubuntu")


def test_a_container_runtime_that_is_not_installed_is_refused(context: Context) -> None:
    with pytest.raises(RequestInvalid, match="apptainer is not on PATH"):
        render_with_container(context, container="ubuntu")


def test_all_container_problems_are_reported_together(context: Context) -> None:
    with pytest.raises(RequestInvalid) as caught:
        render_with_container(context, container="./none.sif", container_mounts=("/nowhere", "relative"))
    assert [text.split(":")[0] for text in caught.value.problems] == [
        "--container-mount 'relative'",
        "the image does not exist",
        "--container-mount /nowhere",
        "container runtime apptainer",
    ]


def test_container_mounts_require_an_image(context: Context) -> None:
    with pytest.raises(RequestInvalid, match="needs --container"):
        render_with_container(context, container_mounts=("/data",))


def test_a_container_job_uses_the_python_of_the_image(context: Context) -> None:
    install_apptainer(context)
    (context.cwd / "torch.sif").write_text("")
    text = render_with_container(context, container="./torch.sif").replace("\\\n", "")
    words = " ".join(text.split())
    assert f'apptainer exec --env=PYTHONNOUSERSITE=1 --bind="$DTSLURM_RUN_DIR" --bind={context.cwd}' in words
    assert f'{context.cwd}/torch.sif bash "$DTSLURM_RUN_DIR/task.sh"' in words
    assert " exec python train.py </dev/null " in words
    assert os.environ.get("VIRTUAL_ENV", "no venv") not in text


def test_a_tilde_in_the_path_of_an_image_is_the_home(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_apptainer(context)
    monkeypatch.setenv("HOME", str(context.cwd))
    (context.cwd / "torch.sif").write_text("")
    text = render_with_container(context, container="~/torch.sif").replace("\\\n", "")
    assert f'{context.cwd}/torch.sif bash "$DTSLURM_RUN_DIR/task.sh"' in " ".join(text.split())
    text = render_with_container(context, roles=with_image_of_a_role("~/torch.sif"), output="~/%j.log")
    assert f" {context.cwd}/torch.sif " in text
    assert f'{context.cwd}/"$SLURM_JOB_ID".log' in text


def test_an_image_reference_is_pulled_into_a_shared_folder(context: Context) -> None:
    install_apptainer(context)
    text = render_with_container(context, container="nvcr.io/nvidia/pytorch:25.01-py3")
    assert 'apptainer pull "$part" docker://nvcr.io/nvidia/pytorch:25.01-py3 && mv "$part" "$image"' in text
    assert '\nimage="$images"/nvcr.io-nvidia-pytorch-25.01-py3-' in text
    assert "/.images\n" in text
    assert "/.images" not in render_with_container(context, container="nvcr.io/nvidia/pytorch")


def test_on_offline_nodes_an_image_must_be_pulled_before_submission(context: Context) -> None:
    install_apptainer(context)
    with (context.cwd / "cluster_profiles" / "boxed.yaml").open("a") as file:
        file.write("environment: {offline: true}\n")
    with pytest.raises(RequestInvalid) as caught:
        render_with_container(context, container="ubuntu:24.04")
    [problem] = caught.value.problems
    assert "compute nodes of boxed have no internet, so pull it here first: mkdir -p " in problem
    command = problem.partition("first: ")[2].replace("apptainer pull", "echo an image >")
    subprocess.run(["sh", "-c", command], check=True)  # as the user does, but for the runtime
    assert 'image="$images"/ubuntu-24.04-' in render_with_container(context, container="ubuntu:24.04")


def with_image_of_a_role(image: str) -> Roles:
    options = RoleOptions(command=("serve",), container=image)
    judge = RoleSpec(name="judge", options=options, nodes=0, on="t", instances=1, ports=(), restart="alone")
    return Roles(main="t", others=(judge,))


def test_the_image_of_a_role_is_checked_as_that_of_the_job(context: Context) -> None:
    with pytest.raises(RequestInvalid, match=r"roles\.judge\.container: the profile of local has no cont"):
        render_with_container(context, cluster="local", roles=with_image_of_a_role("vllm:1"))
    with pytest.raises(RequestInvalid) as caught:
        render_with_container(context, roles=with_image_of_a_role("./none.sif"))
    assert [text.split(":")[0] for text in caught.value.problems] == [
        "the image does not exist",
        "container runtime apptainer",
    ]
    install_apptainer(context)
    assert "docker://vllm:1" in render_with_container(context, roles=with_image_of_a_role("vllm:1"))


def test_a_runtime_with_one_image_for_each_job_refuses_another_image_for_a_role(context: Context) -> None:
    profile = "extends: local\ncontainer: {runtime: shifter}\n"
    (context.cwd / "cluster_profiles" / "shifted.yaml").write_text(profile)
    with pytest.raises(RequestInvalid, match="shifter has one image for the whole job"):
        render_with_container(context, cluster="shifted", roles=with_image_of_a_role("vllm:1"))
