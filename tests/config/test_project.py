from __future__ import annotations

from pathlib import Path

import pytest

from dtslurm.config import project
from dtslurm.errors import ProfileInvalid
from dtslurm.model.jobs.project import Project
from dtslurm.services.request.request import JobRequest
from tests.config.conftest import ProfileFolders

TEXT = """\
cluster: leonardo
defaults:
  nodes: 4
  gpus_per_node: 0
  time: 2:30:00
  mem: 480G
  account: 012345
  env:
    OMP_NUM_THREADS: 8
    EMPTY: ""
    WANDB_API_KEY:
  setup:
    - module load cuda
  launcher_options: {max_restarts: 3}
"""


def write_project(folder: Path, text: str = TEXT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "dtslurm.yaml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)
    return path


def test_without_a_file_the_project_is_empty(profile_folders: ProfileFolders) -> None:
    empty = project.load(profile_folders.cwd, env=profile_folders.env)
    assert empty == Project()
    assert empty.defaults == {}


def test_project_defaults_have_the_form_of_command_line_options(profile_folders: ProfileFolders) -> None:
    path = write_project(profile_folders.cwd)
    result = project.load(profile_folders.cwd, env=profile_folders.env)
    assert (result.cluster, result.path) == ("leonardo", path)
    assert result.defaults == {
        "nodes": 4,
        "gpus_per_node": 0,
        "time": "02:30:00",
        "mem": "480G",
        "account": "012345",
        "env": ("OMP_NUM_THREADS=8", "EMPTY=", "WANDB_API_KEY"),
        "setup": ("module load cuda",),
        "launcher_options": ("max_restarts=3",),
    }
    assert result.origins["defaults.nodes"] == "dtslurm.yaml:3"


def test_every_project_default_is_an_option_of_submit() -> None:
    options = set(Project().options.__dataclass_fields__)
    request = set(JobRequest.__dataclass_fields__)
    assert options == request - {
        "script",
        "args",
        "module",
        "cluster",
        "origins",
        "payload",
        "roles",
        "separate_streams",
        "trials",
        "allocation",
        "idle_limit",
        "once",
        "transport",
        "no_check",
    }


def test_the_project_file_is_searched_up_to_the_top_of_the_checkout(profile_folders: ProfileFolders) -> None:
    write_project(profile_folders.cwd.parent)
    deep = profile_folders.cwd / "a" / "b"
    deep.mkdir(parents=True)
    (profile_folders.cwd / ".git").mkdir()
    assert project.find(deep, env=profile_folders.env) is None
    path = write_project(profile_folders.cwd)
    assert project.find(deep, env=profile_folders.env) == path


def test_the_project_file_is_searched_up_to_the_home_folder(profile_folders: ProfileFolders) -> None:
    deep = profile_folders.home / "a" / "b"
    deep.mkdir(parents=True)
    write_project(profile_folders.home.parent)
    assert project.find(deep, env=profile_folders.env) is None
    path = write_project(profile_folders.home)
    assert project.find(deep, env=profile_folders.env) == path


def test_elsewhere_only_the_current_folder_is_searched(profile_folders: ProfileFolders) -> None:
    write_project(profile_folders.cwd)
    deep = profile_folders.cwd / "a"
    deep.mkdir()
    assert project.find(deep, env=profile_folders.env) is None


def test_all_mistakes_in_a_project_file_are_reported_together(profile_folders: ProfileFolders) -> None:
    write_project(
        profile_folders.cwd,
        "clusters: x\ndefaults:\n  nodes: 0\n  tim: 1h\n  env: {A-B: 1}\n  sbatch: [exclusive]\n",
    )
    text = "should be an option such as --exclusive or --name=value"
    with pytest.raises(ProfileInvalid) as caught:
        project.load(profile_folders.cwd, env=profile_folders.env)
    assert caught.value.problems == (
        "dtslurm.yaml:1: clusters: unknown key; did you mean 'cluster'?",
        "dtslurm.yaml:3: defaults.nodes: should be more than 0, not 0",
        "dtslurm.yaml:4: defaults.tim: unknown key; did you mean 'time'?",
        "dtslurm.yaml:5: defaults.env.A-B: is not a variable name; use only letters, digits and _",
        f"dtslurm.yaml:6: defaults.sbatch[0]: {text}, not 'exclusive'",
    )


def test_an_option_at_top_level_is_reported_with_its_place_in_defaults(
    profile_folders: ProfileFolders,
) -> None:
    write_project(profile_folders.cwd, "nodes: 2\n")
    with pytest.raises(ProfileInvalid, match=r"dtslurm.yaml:1: nodes: .*did you mean 'defaults.nodes'"):
        project.load(profile_folders.cwd, env=profile_folders.env)


def test_c27_a_project_file_that_every_user_can_write_is_refused(profile_folders: ProfileFolders) -> None:
    write_project(profile_folders.cwd).chmod(0o666)
    with pytest.raises(ProfileInvalid, match="every user can write"):
        project.load(profile_folders.cwd, env=profile_folders.env)
