from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtslurm import assets
from dtslurm.config import profiles
from dtslurm.errors import ProfileInvalid, ProfileNotFound
from dtslurm.model.cluster import Partition
from dtslurm.model.jobs.destination import choose_destination
from dtslurm.model.jobs.options import Placement
from tests.config.conftest import ProfileFolders

SHIPPED = sorted(path.stem for path in assets.cluster_profiles().glob("*.yaml"))


def test_project_profiles_precede_user_profiles_and_packaged_profiles(
    profile_folders: ProfileFolders,
) -> None:
    assert profile_folders.load("local").path == assets.cluster_profiles() / "local.yaml"
    user = profile_folders.user("local", "title: mine\n")
    assert profile_folders.load("local").path == user
    project = profile_folders.project("local", "title: ours\n")
    assert profile_folders.load("local").path == project
    assert profile_folders.load("local").profile.title == "ours"


def test_xdg_config_home_is_searched(profile_folders: ProfileFolders) -> None:
    path = profile_folders._write(
        profile_folders.cwd / "xdg" / "dtslurm" / "cluster_profiles" / "x.yaml", "title: t\n"
    )
    env = {**profile_folders.env, "XDG_CONFIG_HOME": str(profile_folders.cwd / "xdg")}
    assert profiles.find("x", cwd=profile_folders.cwd, env=env) == path


def test_a_profile_can_be_selected_by_path(profile_folders: ProfileFolders) -> None:
    path = profile_folders._write(profile_folders.cwd / "other" / "mine.yaml", "title: t\n")
    for name in ("other/mine.yaml", "./other/mine.yaml", str(path)):
        assert profile_folders.load(name).path == path
        assert profile_folders.load(name).profile.name == "mine"
    with pytest.raises(ProfileNotFound, match=r"file other/yours.yaml does not exist"):
        profile_folders.load("other/yours.yaml")


@pytest.mark.parametrize(("given", "meant"), [("perlmuter", "perlmutter"), ("our", "ours")])
def test_an_unknown_profile_is_reported_with_the_closest_known_profile(
    profile_folders: ProfileFolders, given: str, meant: str
) -> None:
    profile_folders.project("ours", "")
    with pytest.raises(ProfileNotFound) as caught:
        profile_folders.load(given)
    assert list(caught.value.problems) == [f"no cluster profile {given!r}; did you mean {meant!r}?"]
    assert "dtslurm cluster list" in caught.value.hint


def test_a_profile_name_must_match_its_file_name(profile_folders: ProfileFolders) -> None:
    profile_folders.project("x", "name: y\n")
    assert profile_folders.problems("x") == [
        "cluster_profiles/x.yaml:1: name: should be 'x', the name of the file, which --cluster uses"
    ]


def test_variables_set_by_the_job_are_refused(profile_folders: ProfileFolders) -> None:
    profile_folders.project(
        "x",
        """\
        environment: {variables: {SLURM_JOB_ID: 3, SLURM_CPU_BIND: none}}
        fabric: {kind: roce, environment: {DTSLURM_RUN_DIR: /x}}
        """,
    )
    assert [line.split(" is ")[0] for line in profile_folders.problems("x")] == [
        "cluster_profiles/x.yaml:1: environment.variables.SLURM_JOB_ID:",
        "cluster_profiles/x.yaml:2: fabric.environment.DTSLURM_RUN_DIR:",
    ]


_EXTENDED = """\
slurm: {partition: gpu, partitions: {gpu: {node_type: a8}, short: {max_time: 30, node_type: a4}}}
node_types: {a8: {gpus: {model: A100, count: 8}}, a4: {gpus: {model: A100, count: 4}}}
default_node_type: a8
environment: {variables: {A: "1", B: "2"}}
"""


def test_null_removes_inherited_sections(profile_folders: ProfileFolders) -> None:
    profile_folders.project("base", _EXTENDED)
    profile_folders.project(
        "x",
        """\
        extends: base
        slurm: {partitions: {short: null, debug: }}
        node_types: {a4: ~}
        environment: {variables: {A: null}}
        """,
    )
    loaded = profile_folders.load("x")
    assert list(loaded.profile.slurm.partitions) == ["gpu", "debug"]
    assert list(loaded.profile.node_types) == ["a8"]
    assert list(loaded.profile.environment.variables) == ["B"]
    assert not {"slurm.partitions.short", "node_types.a4"} & set(loaded.origins)


def test_a_reference_to_a_removed_section_is_reported(profile_folders: ProfileFolders) -> None:
    profile_folders.project("base", _EXTENDED)
    profile_folders.project(
        "x", "extends: base\nslurm: {partitions: {gpu: null}}\nnode_types: {a4: null, a8: null}\n"
    )
    folder = "cluster_profiles"
    assert profile_folders.problems("x") == [
        f"{folder}/base.yaml:1: slurm.partition: there is no partition in slurm.partitions 'gpu' (short)",
        (
            f"{folder}/base.yaml:1: slurm.partitions.short.node_type: there is no node type 'a4' (none "
            "is defined)"
        ),
        f"{folder}/base.yaml:3: default_node_type: there is no node type 'a8' (none is defined)",
    ]


def test_a_removed_section_can_be_defined_again(profile_folders: ProfileFolders) -> None:
    profile_folders.project("base", _EXTENDED)
    profile_folders.project("middle", "extends: base\nslurm: {partitions: {short: null}}\n")
    profile_folders.project("x", "extends: middle\nslurm: {partitions: {short: {max_nodes: 2}}}\n")
    assert profile_folders.load("x").profile.slurm.partitions["short"] == Partition(max_nodes=2)


def test_extends_merges_mappings_and_replaces_other_values(profile_folders: ProfileFolders) -> None:
    profile_folders.project(
        "base",
        """\
        title: base
        slurm: {partition: gpu, extra_options: [--a, --b], partitions: {gpu: {max_time: 1h}, cpu: {}}}
        environment: {offline: true}
        fabric: {kind: infiniband}
        """,
    )
    profile_folders.project(
        "middle", "extends: base\nslurm:\n  extra_options: [--c]\n  partitions: {gpu: {max_nodes: 4}}\n"
    )
    profile_folders.project("top", "extends: middle\nslurm: {qos: high}\nenvironment:\nfabric: null\n")
    loaded = profile_folders.load("top")
    customs = loaded.profile.slurm
    assert (customs.partition, customs.qos, customs.extra_options) == ("gpu", "high", ("--c",))
    assert (str(customs.partitions["gpu"].max_time), customs.partitions["gpu"].max_nodes) == ("01:00:00", 4)
    assert loaded.profile.environment.offline is True
    assert loaded.profile.fabric is None
    assert (loaded.profile.name, loaded.profile.title) == ("top", "base")
    folder = "cluster_profiles"
    assert loaded.origins["slurm.qos"] == f"{folder}/top.yaml:2"
    assert loaded.origins["slurm.extra_options"] == f"{folder}/middle.yaml:3"
    assert loaded.origins["slurm.partitions.gpu.max_nodes"] == f"{folder}/middle.yaml:4"
    assert loaded.origins["slurm.partitions.gpu.max_time"] == f"{folder}/base.yaml:2"
    assert loaded.origins["name"] == f"{folder}/top.yaml"


def test_a_project_profile_can_extend_the_packaged_profile_of_the_same_name(
    profile_folders: ProfileFolders,
) -> None:
    profile_folders.project("leonardo", "extends: leonardo\nslurm: {account: mine}\n")
    loaded = profile_folders.load("leonardo")
    assert (loaded.profile.slurm.account, loaded.profile.slurm.partition) == ("mine", "boost_usr_prod")
    assert loaded.origins["slurm.account"] == "cluster_profiles/leonardo.yaml:2"
    assert loaded.origins["slurm.partition"].startswith("leonardo.yaml:")


def test_profiles_beside_the_project_file_are_found_from_subfolders(profile_folders: ProfileFolders) -> None:
    (profile_folders.cwd / ".git").mkdir()
    below = profile_folders.cwd / "src"
    below.mkdir()
    profile_folders.project("ours", "title: above\n")
    with pytest.raises(ProfileNotFound):
        profiles.load("ours", cwd=below, env=profile_folders.env)
    file = profile_folders._write(profile_folders.cwd / "dtslurm.yaml", "cluster: ours\n")
    result = profiles.load("ours", cwd=below, env=profile_folders.env)
    assert result.profile.title == "above"
    assert {file, below / "dtslurm.yaml"} <= set(result.watched)
    nearer = profile_folders._write(
        below / "cluster_profiles" / "ours.yaml", "extends: ours\nslurm: {qos: x}\n"
    )
    result = profiles.load("ours", cwd=below, env=profile_folders.env)
    assert (result.path, result.profile.title, result.profile.slurm.qos) == (nearer, "above", "x")


def test_user_profiles_can_extend_packaged_profiles_inside_a_checkout(
    profile_folders: ProfileFolders,
) -> None:
    profile_folders.user("jumped", "extends: slurm\ntitle: mine\n")
    checkout = assets.cluster_profiles().parent
    assert profiles.load("jumped", cwd=checkout, env=profile_folders.env).profile.title == "mine"


def test_a_user_profile_does_not_extend_a_project_profile(profile_folders: ProfileFolders) -> None:
    own = profile_folders.user("base", "slurm: {qos: user}\n")
    profile_folders.project("base", "slurm: {qos: project}\n")
    profile_folders.user("x", "extends: base\n")
    assert profile_folders.load("x").profile.slurm.qos == "user"
    assert own.exists()


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"a": "extends: b", "b": "\nextends: a"}, "b.yaml:2: extends: is circular: {a} → {b} → {a}"),
        (
            {"a": "extends: a"},
            (
                "a.yaml:1: extends: a profile cannot extend itself, and there is no later profile of "
                "this name in the search path"
            ),
        ),
        (
            {"a": "extends: perlmuter"},
            "a.yaml:1: extends: no cluster profile 'perlmuter'; did you mean 'perlmutter'?",
        ),
        ({"a": "extends: ./b.yaml"}, "a.yaml:1: extends: file ./b.yaml does not exist"),
        ({"a": "extends: ./a.yaml"}, "a.yaml:1: extends: is circular: {a} → {a}"),
        ({"a": "extends: [b]"}, "a.yaml:1: extends: should be the name of one profile"),
        (
            {"a": "extends: b", "b": "\nslurm: {qoss: x}"},
            "b.yaml:2: slurm.qoss: unknown key; did you mean 'qos'?",
        ),
    ],
)
def test_a_wrong_extends_value_is_reported_with_its_position(
    profile_folders: ProfileFolders, files: dict[str, str], problem: str
) -> None:
    for name, text in files.items():
        profile_folders.project(name, text + "\n")
    result = problem.format(a="cluster_profiles/a.yaml", b="cluster_profiles/b.yaml")
    assert profile_folders.problems("a") == [f"cluster_profiles/{result}"]


def test_c27_a_profile_that_every_user_can_write_is_refused(profile_folders: ProfileFolders) -> None:
    path = profile_folders.project("x", "title: t\n")
    path.chmod(0o646)
    with pytest.raises(ProfileInvalid) as caught:
        profile_folders.load("x")
    assert caught.value.problems[0].startswith("cluster_profiles/x.yaml:1: every user can write to this file")
    assert caught.value.hint.endswith(f"chmod o-w {path}")


def test_a_profile_that_is_no_regular_file_is_refused_without_blocking(
    profile_folders: ProfileFolders,
) -> None:
    folder = profile_folders.project("x", "").parent
    os.mkfifo(folder / "pipe.yaml")
    (folder / "dir.yaml").mkdir()
    (folder / "gone.yaml").symlink_to("nowhere")
    assert profile_folders.problems("pipe") == ["cluster_profiles/pipe.yaml:1: not a regular file"]
    assert profile_folders.problems("dir")[0].startswith("cluster_profiles/dir.yaml:1: ")
    assert profile_folders.problems("gone") == [
        "cluster_profiles/gone.yaml:1: cannot be read: No such file or directory"
    ]


def test_an_invalid_profile_is_listed_with_its_error(profile_folders: ProfileFolders) -> None:
    profile_folders.project("broken", "slurm: [\n")
    profile_folders.project("wrong", "a: 1\nb: 2\n")
    entries = {
        entry.name: entry
        for entry in profiles.list_profiles(cwd=profile_folders.cwd, env=profile_folders.env)
    }
    assert list(entries) == sorted([*SHIPPED, "broken", "wrong"])
    assert entries["broken"].title is None
    assert (entries["broken"].error or "").startswith("cluster_profiles/broken.yaml:")
    assert (entries["wrong"].error or "").endswith("(and 1 more)")
    assert entries["local"].error is None
    assert entries["local"].title


def test_profiles_load_without_home_and_folders(tmp_path: Path) -> None:
    assert profiles.load("local", cwd=tmp_path / "nowhere", env={}).profile.scheduler == "local"


@pytest.mark.parametrize("name", SHIPPED)
def test_packaged_profiles_load_with_title_and_sources(name: str, profile_folders: ProfileFolders) -> None:
    loaded = profile_folders.load(name)
    assert loaded.profile.name == name
    assert loaded.profile.title
    places = {origin.partition(":")[0] for origin in loaded.origins.values()}
    assert all(place.startswith("fabrics/") or place.removesuffix(".yaml") in SHIPPED for place in places)
    if loaded.profile.scheduler == "slurm" and name != "slurm":
        assert loaded.profile.sources


@pytest.mark.parametrize("name", SHIPPED)
def test_fabric_variables_of_packaged_profiles_have_reasons(
    name: str, profile_folders: ProfileFolders
) -> None:
    fabric = profile_folders.load(name).profile.fabric
    for variable in fabric.environment.values() if fabric else ():
        assert variable.why


def test_packaged_profiles_describe_known_machines_correctly(profile_folders: ProfileFolders) -> None:
    perlmutter, leonardo = (
        profile_folders.load("perlmutter").profile,
        profile_folders.load("leonardo").profile,
    )
    big = perlmutter.node_type("gpu-80g")
    assert big is not None
    assert (big.constraint, big.gpu_count, big.schedulable_cpus) == ("gpu&hbm80g", 4, 128)
    assert perlmutter.slurm.qos == "regular"
    node = choose_destination(Placement(partition="boost_usr_prod"), leonardo).node
    assert node is not None
    assert (str(node.memory), node.schedulable_cpus) == ("494000M", 32)
    mi250x = profile_folders.load("mi250x8-slingshot").profile.node_type(None)
    assert mi250x is not None
    assert (mi250x.gpu_count, mi250x.schedulable_cpus) == (8, 56)
