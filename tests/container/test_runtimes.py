from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dtslurm.container import registry
from dtslurm.container.base import ContainerOptions, mount_problems
from dtslurm.container.pyxis import reference
from dtslurm.errors import RequestInvalid
from dtslurm.model.shell import join
from tests.render.conftest import Render, load_profile, render_job

__all__ = ["render_job"]  # a fixture

ENTRY = ContainerOptions(
    image="nvcr.io/nvidia/pytorch:25.01-py3",
    work_dir="/home/me/pro ject",
    nodes=2,
    ranks_per_node=8,
    mounts=("/data", "/scratch/me:/scratch:ro"),
    variables=("NCCL_DEBUG",),
    gpu_vendor="nvidia",
)


@pytest.mark.parametrize(
    ("image", "written"),
    [
        ("nvcr.io/nvidia/pytorch:25.01-py3", "nvcr.io#nvidia/pytorch:25.01-py3"),
        ("localhost:5000/mine", "localhost:5000#mine"),
        ("pytorch/pytorch:latest", "pytorch/pytorch:latest"),
        ("ubuntu", "ubuntu"),
        ("docker://ubuntu", "ubuntu"),
        ("docker://nvcr.io/nvidia/pytorch:25.01-py3", "nvcr.io#nvidia/pytorch:25.01-py3"),
        ("docker://nvcr.io#nvidia/pytorch:25.01-py3", "nvcr.io#nvidia/pytorch:25.01-py3"),
        ("dockerd://mine", "dockerd://mine"),
        ("/images/torch.sqsh", "/images/torch.sqsh"),
        ("nvcr.io#nvidia/pytorch", "nvcr.io#nvidia/pytorch"),
    ],
)
def test_enroot_reference_separates_registry_and_image_with_a_hash_sign(image: str, written: str) -> None:
    assert reference(replace(ENTRY, image=image)) == written


@pytest.mark.parametrize("written", ["", "docker://"])
@pytest.mark.parametrize("sign", ["/", "#"])
def test_each_runtime_writes_an_image_reference_in_its_own_syntax(written: str, sign: str) -> None:
    entry = replace(ENTRY, image=f"{written}nvcr.io{sign}nvidia/pytorch:25.01-py3")
    plain = "nvcr.io/nvidia/pytorch:25.01-py3"
    assert registry.load("shifter").directives(entry) == {"image": f"docker:{plain}"}
    assert registry.load("podman-hpc").prefix(entry)[-1] == plain
    assert registry.load("podman-hpc").values(entry) == {"image": plain}
    assert registry.load("apptainer").source(entry) == f"docker://{plain}"
    assert registry.load("pyxis").source(entry) == "docker://nvcr.io#nvidia/pytorch:25.01-py3"
    assert entry.stem == ENTRY.stem


@pytest.mark.parametrize(
    ("image", "fixed"),
    [
        ("nvcr.io/nvidia/pytorch:25.01-py3", True),
        ("docker://ubuntu@sha256:0123", True),
        ("nvcr.io#nvidia/pytorch:25.01-py3", True),
        ("ubuntu", False),
        ("localhost:5000/mine", False),
        ("docker://pytorch/pytorch:latest", False),
    ],
)
def test_apptainer_shares_an_image_file_between_runs_only_for_fixed_references(
    image: str, fixed: bool
) -> None:
    entry = replace(ENTRY, image=image)
    assert entry.fixed is fixed
    runtime = registry.load("apptainer")
    assert (runtime.file(entry) is not None) is fixed
    kept = runtime.file(replace(entry, offline=True))  # somebody must have pulled it before
    assert kept is not None
    assert re.fullmatch(r"[\w.-]+-[0-9a-f]{8}\.sif", kept)


def test_similar_image_references_get_different_file_names() -> None:
    stems = {
        replace(ENTRY, image=image).stem for image in ("a/b-c:1", "a-b/c:1", "a/b/c:1", "docker://a/b/c:1")
    }
    assert len(stems) == 3


def test_pyxis_uses_the_imported_image_or_the_named_image_file() -> None:
    runtime = registry.load("pyxis")
    assert '--container-image="$image"' in join(runtime.srun_options(ENTRY))
    assert runtime.source(ENTRY) == "docker://nvcr.io#nvidia/pytorch:25.01-py3"
    alone = replace(ENTRY, image="/images/torch.sqsh")
    assert "--container-image=/images/torch.sqsh" in join(runtime.srun_options(alone))
    assert runtime.values(alone)["pull"] is None


def test_pyxis_passes_job_variables_that_override_the_image_variables() -> None:
    words = join(registry.load("pyxis").srun_options(ENTRY))
    assert "--container-env=DTSLURM_RUN_DIR," in words
    assert "NCCL_DEBUG" in words
    assert "'/home/me/pro ject:/home/me/pro ject,/data:/data,/scratch/me:/scratch:ro'" in words


def test_pyxis_passes_variables_set_by_the_fabric_setup_script(tmp_path: Path, render_job: Render) -> None:
    (tmp_path / "vendor.sh").write_text("export NCCL_NET=gIB NCCL_CROSS_NIC=0\n")
    site = load_profile("h100x8-ib")
    assert site.fabric is not None
    site = replace(site, fabric=replace(site.fabric, setup=(f"source {tmp_path}/vendor.sh",)))
    text = render_job(site, "srun", nodes=2, container="ubuntu", runtime="pyxis").script
    [setup] = [line for line in text.splitlines() if line.endswith("vendor.sh")]
    [result] = [line for line in text.splitlines() if line.startswith("vendor_set=")]
    option = re.findall(r"--container-env=\S+", text)[-1]
    done = subprocess.run(
        ["bash", "-c", f"{setup}\n{result}\necho {option}"], capture_output=True, text=True, check=True
    )
    names = done.stdout.strip().partition("=")[2].split(",")
    assert {"MASTER_ADDR", "NCCL_NET", "NCCL_CROSS_NIC"} <= set(names)
    assert "" not in names
    alone = render_job(site, "srun", nodes=1, container="ubuntu", runtime="pyxis").script
    assert "vendor_set" not in alone


@pytest.mark.parametrize(("vendor", "flag"), [("nvidia", "--nv"), ("amd", "--rocm"), (None, None)])
def test_apptainer_passes_the_gpu_flag_of_the_vendor(vendor: str | None, flag: str | None) -> None:
    words = registry.load("apptainer").prefix(replace(ENTRY, gpu_vendor=vendor))
    assert [word for word in ("--nv", "--rocm") if word in words] == ([flag] if flag else [])


def test_apptainer_pulls_a_registry_reference_and_runs_an_image_file_directly() -> None:
    runtime = registry.load("singularity")
    assert runtime.source(ENTRY) == "docker://nvcr.io/nvidia/pytorch:25.01-py3"
    assert runtime.prefix(ENTRY)[-1] == '"$image"'
    assert runtime.prefix(ENTRY)[0] == "singularity"
    alone = replace(ENTRY, image="/images/torch.sif")
    assert runtime.values(alone)["pull"] is None
    assert runtime.prefix(alone)[-1] == "/images/torch.sif"


def test_shifter_passes_a_registry_image_as_a_directive_and_rejects_image_files() -> None:
    runtime = registry.load("shifter")
    assert runtime.directives(ENTRY) == {"image": "docker:nvcr.io/nvidia/pytorch:25.01-py3"}
    assert runtime.check(replace(ENTRY, image="/images/torch.sif"))


def test_podman_hpc_passes_variables_by_name_and_the_gpu_flag() -> None:
    words = registry.load("podman-hpc").prefix(ENTRY)
    assert [word for word in words if word.startswith("--env=")] == [
        "--env=SLURM_*",
        "--env=DTSLURM_*",
        "--env=NCCL_DEBUG",
    ]
    assert "--gpu" in words
    assert "--env=NCCL_*" in registry.load("podman-hpc").prefix(replace(ENTRY, vendor_script=True))


def test_cscs_container_engine_requires_an_edf_file_without_mounts() -> None:
    runtime = registry.load("cscs-ce")
    assert len(runtime.check(ENTRY)) == 2
    edf = replace(ENTRY, image="/home/me/torch.toml", mounts=())
    assert runtime.check(edf) == []
    assert runtime.srun_options(edf) == ("--environment=/home/me/torch.toml",)


@pytest.mark.parametrize("mount", ["data", "/a:b", "/a:/b:x", "", "/a:/b:ro:/c"])
def test_malformed_mounts_are_reported(mount: str) -> None:
    assert mount_problems((mount,))


def test_unknown_runtime_error_suggests_a_similar_name() -> None:
    with pytest.raises(RequestInvalid, match="did you mean 'apptainer'"):
        registry.load("aptainer")
