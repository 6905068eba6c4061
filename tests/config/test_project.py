from __future__ import annotations

from pathlib import Path

import pytest

from dtslurm.config import project
from dtslurm.errors import ProfileInvalid
from dtslurm.model.jobs.project import Project
from dtslurm.services.request.request import JobRequest
from tests.config.conftest import Place

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


def write(folder: Path, text: str = TEXT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "dtslurm.yaml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)
    return path


def test_no_file_is_an_empty_project(place: Place) -> None:
    empty = project.load(place.cwd, env=place.env)
    assert empty == Project()
    assert empty.defaults == {}


def test_defaults_read_as_the_command_line_would_give_them(place: Place) -> None:
    path = write(place.cwd)
    found = project.load(place.cwd, env=place.env)
    assert (found.cluster, found.path) == ("leonardo", path)
    assert found.defaults == {
        "nodes": 4,
        "gpus_per_node": 0,
        "time": "02:30:00",
        "mem": "480G",
        "account": "012345",
        "env": ("OMP_NUM_THREADS=8", "EMPTY=", "WANDB_API_KEY"),
        "setup": ("module load cuda",),
        "launcher_options": ("max_restarts=3",),
    }
    assert found.origins["defaults.nodes"] == "dtslurm.yaml:3"


def test_every_default_is_an_option_of_submit() -> None:
    options = set(Project().options.__dataclass_fields__)
    request = set(JobRequest.__dataclass_fields__)
    assert options == request - {
        "script",
        "args",
        "module",
        "cluster",
        "origins",
        "payload",
        "separate_streams",
        "trials",
        "once",
        "transport",
        "no_check",
    }


def test_it_is_found_up_to_the_top_of_the_checkout(place: Place) -> None:
    write(place.cwd.parent)
    deep = place.cwd / "a" / "b"
    deep.mkdir(parents=True)
    (place.cwd / ".git").mkdir()
    assert project.find(deep, env=place.env) is None
    path = write(place.cwd)
    assert project.find(deep, env=place.env) == path


def test_it_is_found_up_to_home(place: Place) -> None:
    deep = place.home / "a" / "b"
    deep.mkdir(parents=True)
    write(place.home.parent)
    assert project.find(deep, env=place.env) is None
    path = write(place.home)
    assert project.find(deep, env=place.env) == path


def test_outside_home_and_checkouts_only_here_counts(place: Place) -> None:
    write(place.cwd)
    deep = place.cwd / "a"
    deep.mkdir()
    assert project.find(deep, env=place.env) is None


def test_every_fault_is_told_at_once(place: Place) -> None:
    write(
        place.cwd, "clusters: x\ndefaults:\n  nodes: 0\n  tim: 1h\n  env: {A-B: 1}\n  sbatch: [exclusive]\n"
    )
    wanted = "should be an option such as --exclusive or --name=value"
    with pytest.raises(ProfileInvalid) as caught:
        project.load(place.cwd, env=place.env)
    assert caught.value.problems == (
        "dtslurm.yaml:1: clusters: unknown key; did you mean 'cluster'?",
        "dtslurm.yaml:3: defaults.nodes: should be more than 0, not 0",
        "dtslurm.yaml:4: defaults.tim: unknown key; did you mean 'time'?",
        "dtslurm.yaml:5: defaults.env.A-B: is not a variable name; use only letters, digits and _",
        f"dtslurm.yaml:6: defaults.sbatch[0]: {wanted}, not 'exclusive'",
    )


def test_an_option_at_top_level_is_sent_to_defaults(place: Place) -> None:
    write(place.cwd, "nodes: 2\n")
    with pytest.raises(ProfileInvalid, match=r"dtslurm.yaml:1: nodes: .*did you mean 'defaults.nodes'"):
        project.load(place.cwd, env=place.env)


def test_c27_a_file_that_others_may_write_is_refused(place: Place) -> None:
    write(place.cwd).chmod(0o666)
    with pytest.raises(ProfileInvalid, match="every user can write"):
        project.load(place.cwd, env=place.env)
