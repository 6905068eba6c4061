from __future__ import annotations

from pathlib import Path

import pytest

from dtslurm import assets
from dtslurm.config import profiles, strict_yaml
from dtslurm.config.tree import Items, Scalar
from dtslurm.model.cluster import Fabric, Variable
from tests.config.conftest import ProfileFolders
from tests.render.conftest import Render, render_job

__all__ = ["render_job"]

FOLDER = assets.templates() / "fabrics"
SHIPPED = sorted(path.stem for path in FOLDER.iterdir())


def load_fabric(place: ProfileFolders, text: str) -> Fabric:
    place.project("x", text)
    fabric = place.load("x").profile.fabric
    assert fabric is not None
    return fabric


def write_fabric(place: ProfileFolders, name: str, text: str) -> Path:
    return place._write(place.cwd / "templates" / "fabrics" / f"{name}.yaml", text)


def test_there_is_a_settings_file_for_each_known_fabric() -> None:
    assert SHIPPED == [
        "azure-nd",
        "efa",
        "ethernet",
        "gcp-gib",
        "gcp-tcpx",
        "gcp-tcpxo",
        "infiniband",
        "intel",
        "mnnvl",
        "omnipath",
        "roce",
        "slingshot-amd",
        "slingshot-nvidia",
    ]


@pytest.mark.parametrize("name", SHIPPED)
def test_packaged_fabrics_give_a_reason_for_each_value_and_a_source(
    name: str, profile_folders: ProfileFolders
) -> None:
    fabric = load_fabric(profile_folders, f"fabric: {{kind: ethernet, environment_from: {name}}}")
    assert fabric.environment
    assert all(variable.value and variable.why for variable in fabric.environment.values())
    root, problems = strict_yaml.parse((FOLDER / f"{name}.yaml").read_bytes(), name)
    assert not problems
    source = root.entries["source"].value
    assert isinstance(source, Items)
    assert all(isinstance(item, Scalar) and (item.text or "").startswith("https://") for item in source.items)


def test_fabric_values_have_an_origin(profile_folders: ProfileFolders) -> None:
    profile_folders.project("x", "fabric: {kind: infiniband, environment_from: infiniband}")
    origins = profile_folders.load("x").origins
    assert origins["fabric.environment.NCCL_NET.value"].startswith("fabrics/infiniband.yaml:")
    assert origins["fabric.environment_from"] == "cluster_profiles/x.yaml:1"


def test_the_profile_overrides_its_fabric_settings(profile_folders: ProfileFolders) -> None:
    fabric = load_fabric(
        profile_folders,
        """\
        fabric:
          kind: slingshot
          environment_from: slingshot-amd
          environment:
            NCCL_SOCKET_IFNAME: {value: hsn0}
            NCCL_NET_GDR_LEVEL: {value: 3, why: LUMI says so}
            NCCL_NET: null
            MINE: {value: 1}
        """,
    )
    assert "NCCL_NET" not in fabric.environment
    assert fabric.environment["NCCL_SOCKET_IFNAME"] == Variable(
        value="hsn0", why="start-up traffic goes over Slingshot too"
    )
    assert fabric.environment["NCCL_NET_GDR_LEVEL"].why == "LUMI says so"
    assert fabric.environment["FI_MR_CACHE_MONITOR"].value == "userfaultfd"
    assert next(iter(fabric.environment)) == "NCCL_SOCKET_IFNAME"  # in the fabric's own order
    assert list(fabric.environment)[-1] == "MINE"


def test_an_empty_environment_keeps_and_null_removes_the_fabric_settings(
    profile_folders: ProfileFolders,
) -> None:
    text = "fabric:\n  kind: infiniband\n  environment_from: infiniband\n  environment:"
    assert "NCCL_NET" in load_fabric(profile_folders, text).environment
    assert not load_fabric(profile_folders, f"{text} null").environment


def test_a_fabric_without_environment_from_gets_no_settings(profile_folders: ProfileFolders) -> None:
    assert load_fabric(profile_folders, "fabric: {kind: infiniband}") == Fabric(kind="infiniband")


def test_a_profile_can_extend_a_profile_with_fabric_settings(profile_folders: ProfileFolders) -> None:
    profile_folders.project("x", "extends: mi250x8-slingshot\nfabric: {interfaces: [hsn0]}")
    fabric = profile_folders.load("x").profile.fabric
    assert fabric is not None
    assert fabric.environment["NCCL_CROSS_NIC"].value == "1"


def test_setup_lines_and_mounts_of_the_fabric_are_added(profile_folders: ProfileFolders) -> None:
    profile_folders.project(
        "x",
        "container: {runtime: pyxis, mounts: [/data, /var/tmp]}\n"
        "fabric: {kind: tcpxo, environment_from: gcp-tcpxo}\n",
    )
    profile = profile_folders.load("x").profile
    assert profile.fabric is not None
    assert profile.fabric.setup[1] == 'source "$NCCL_LIB_DIR/nccl-env-profile.sh" || exit'
    assert profile.container.mounts == ("/data", "/var/tmp", "/var/lib/tcpxo", "/dev/aperture_devices")
    profile_folders.project(
        "y", "extends: x\nfabric: {mounts: [/opt/nccl], setup: []}\ncontainer: {mounts: null, runtime: pyxis}"
    )
    profile = profile_folders.load("y").profile
    assert profile.container.mounts == ("/opt/nccl",)
    assert profile.fabric is not None
    assert profile.fabric.setup == ()


def test_a_project_can_define_its_own_fabric_settings(profile_folders: ProfileFolders) -> None:
    write_fabric(profile_folders, "infiniband", "environment: {A: {value: 1, why: ours}}\n")
    fabric = load_fabric(profile_folders, "fabric: {kind: infiniband, environment_from: infiniband}")
    assert fabric.environment == {"A": Variable(value="1", why="ours")}


def test_an_unknown_fabric_is_reported_with_its_position(profile_folders: ProfileFolders) -> None:
    profile_folders.project("x", "fabric:\n  kind: slingshot\n  environment_from: slingshot-amdd\n")
    (problem,) = profile_folders.problems("x")
    start = "cluster_profiles/x.yaml:3: fabric.environment_from: unknown fabric 'slingshot-amdd'; did you "
    assert problem.startswith(start + "mean 'slingshot-amd'? (known: slingshot-amd, slingshot-nvidia, ")


@pytest.mark.parametrize("name", ["../fabrics/infiniband", "/etc/passwd", "."])
def test_a_fabric_name_cannot_be_a_path(name: str, profile_folders: ProfileFolders) -> None:
    profile_folders.project("x", f"fabric: {{kind: infiniband, environment_from: {name}}}")
    assert f"unknown fabric '{name}'" in profile_folders.problems("x")[0]


def test_all_mistakes_in_a_fabric_file_are_reported_together(profile_folders: ProfileFolders) -> None:
    write_fabric(
        profile_folders,
        "ours",
        "enviroment: {}\nsetup: one\nenvironment:\n  1A: {value: 1}\n  B: {why: so}\n",
    )
    profile_folders.project("x", "fabric:\n  kind: infiniband\n  environment_from: ours\n  rate_gbps: fast\n")
    path = "templates/fabrics/ours.yaml"
    assert profile_folders.problems("x") == [
        "cluster_profiles/x.yaml:4: fabric.rate_gbps: should be a number, not 'fast'",
        f"{path}:1: enviroment: unknown key; did you mean 'environment'?",
        f"{path}:2: fabric.setup: should be a list, not 'one'",
        f"{path}:4: fabric.environment.1A: is not a variable name; use only letters, digits and _",
        f"{path}:5: fabric.environment.B.value: is missing",
    ]


@pytest.mark.parametrize("value", ["[a]", "{a: b}"])
def test_several_fabric_names_are_refused(value: str, profile_folders: ProfileFolders) -> None:
    profile_folders.project("x", f"fabric: {{kind: infiniband, environment_from: {value}}}")
    assert "fabric.environment_from: should be " in profile_folders.problems("x")[0]


def test_a_fabric_file_that_every_user_can_write_is_refused(profile_folders: ProfileFolders) -> None:
    write_fabric(profile_folders, "ours", "environment: {}\n").chmod(0o666)
    profile_folders.project("x", "fabric: {kind: infiniband, environment_from: ours}")
    assert profile_folders.problems("x")[0].startswith("templates/fabrics/ours.yaml:1: every user can write")


def test_fabric_setup_lines_are_rendered_only_for_several_nodes(
    profile_folders: ProfileFolders, render_job: Render
) -> None:
    profile_folders.project("x", "extends: a100x8-ib\nfabric: {kind: gib, environment_from: gcp-gib}")
    profile = profiles.load("x", cwd=profile_folders.cwd, env=profile_folders.env).profile
    line = "source /usr/local/gib/scripts/set_nccl_env.sh || exit\n"
    assert line in render_job(profile, "torchrun", nodes=2).script
    assert line not in render_job(profile, "torchrun", nodes=1).script
