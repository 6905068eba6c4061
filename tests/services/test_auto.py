from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.launch.detection import detect
from dtslurm.services.request.request import JobRequest
from dtslurm.services.submit.prepare import Prepared, prepare
from dtslurm.services.wiring.context import Context

DDP = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
SPAWN = "import torch.multiprocessing as mp\nmp.spawn(print)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    return project


def prepared(folder: Path, source: str | bytes, name: str = "train.py", **options: Any) -> Prepared:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(source.encode() if isinstance(source, str) else source)
    state = {"DTSLURM_LOCAL_STATE": str(folder.parent / "local")}
    context = Context(cwd=folder, env={**os.environ, **state})
    values = {"script": name, "cluster": "local", "launcher": "auto", "time": "5", **options}
    return prepare(context, JobRequest(**values), standalone=True)


def test_auto_says_what_it_chose_and_why(folder: Path) -> None:
    submission = prepared(folder, "\n" + DDP, ntasks_per_node=2).submission
    assert submission.spec.launcher == "torchrun"
    assert submission.notices[0] == "launcher torchrun: imports torch.distributed (train.py:2)"
    assert "torch.distributed.run" in submission.script


def test_one_rank_that_needs_variables_gets_them(folder: Path) -> None:
    assert prepared(folder, DDP).submission.spec.launcher == "torchrun"
    assert prepared(folder, "print()").submission.spec.launcher == "single"


def test_files_beside_the_script_are_read(folder: Path) -> None:
    (folder / "meet.py").write_text(DDP)
    submission = prepared(folder, "import torch\nimport meet\n", ntasks_per_node=2).submission
    assert "launcher torchrun: imports torch.distributed (meet.py:1)" in submission.notices
    assert not any("by itself" in line for line in submission.notices)


def test_a_module_is_read(folder: Path) -> None:
    prepared(folder, DDP, "pkg/train.py")
    submission = prepared(folder, "", "x.py", script="pkg.train", module=True).submission
    assert submission.notices[0] == "launcher torchrun: imports torch.distributed (train.py:1)"


def test_a_module_that_is_elsewhere_is_left_to_the_default(folder: Path) -> None:
    submission = prepared(folder, "", script="no.such", module=True, ntasks_per_node=2).submission
    assert submission.spec.launcher == "torchrun"
    assert "the script cannot be examined" in submission.notices[0]


def test_several_ranks_of_a_script_that_spawns_them(folder: Path) -> None:
    submission = prepared(folder, SPAWN, ntasks_per_node=2).submission
    assert submission.spec.launcher == "torchrun"
    assert any("each of the 2 ranks would do this separately" in line for line in submission.notices)


def test_a_script_that_starts_its_own_ranks_gets_all_gpus(folder: Path) -> None:
    (folder / "cluster_profiles").mkdir()
    (folder / "cluster_profiles" / "site.yaml").write_text(
        "scheduler: slurm\n"
        "node_types: {big: {sockets: 2, cores_per_socket: 8, gpus: {model: A100, count: 4}}}\n"
        "default_node_type: big\n"
    )
    submission = prepared(folder, SPAWN, cluster="site").submission
    assert (submission.spec.launcher, submission.layout.ranks_per_node) == ("single", 1)
    assert submission.layout.gpus_per_node == 4


def test_without_a_launcher_only_the_warnings_are_told(folder: Path) -> None:
    submission = prepared(folder, "import torch\n", launcher=None, ntasks_per_node=2).submission
    assert submission.spec.launcher == "torchrun"
    assert submission.notices[0].startswith("train.py never initialises a process group: every rank would")
    assert not any(line.startswith("launcher ") for line in submission.notices)
    assert prepared(folder, DDP, launcher=None, ntasks_per_node=2).submission.notices == ()


def test_a_launcher_that_is_named_is_trusted(folder: Path) -> None:
    assert prepared(folder, "import torch\n", launcher="torchrun", ntasks_per_node=2).submission.notices == ()


@pytest.mark.parametrize("sizes", ["num_nodes=4", "devices=8, num_nodes=2", ""])
def test_a_trainer_told_other_sizes_is_pointed_out_to_who_names_lightning(folder: Path, sizes: str) -> None:
    options: dict[str, Any] = {"launcher": "lightning", "nodes": 2, "ntasks_per_node": 2}
    source = f"import lightning as L\nL.Trainer({sizes})\n"
    [told] = prepared(folder, source, **options).submission.notices
    assert told.startswith("train.py:2: the Lightning Trainer has ")
    right = "import lightning as L\nL.Trainer(devices=2, num_nodes=2)\n"
    assert prepared(folder, right, **options).submission.notices == ()
    assert prepared(folder, "def (", **options).submission.notices == ()
    (folder / "trainer.py").write_text(source)
    [told] = prepared(folder, "import trainer\n", **options).submission.notices
    assert told.startswith("trainer.py:2: ")


@pytest.mark.parametrize("source", [b"\xff\xfe\x00", b"def (", b"\x00" * 10, b"(" * 5000])
def test_what_cannot_be_read_is_left_to_the_default(folder: Path, source: bytes) -> None:
    submission = prepared(folder, source, ntasks_per_node=2).submission
    assert submission.spec.launcher == "torchrun"
    assert "cannot be read as Python" in submission.notices[0]


@pytest.mark.parametrize("launcher", ["auto", None])
def test_detection_that_fails_fails_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, launcher: str | None
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(detect, "detect", fail)
    assert prepared(folder, DDP, launcher=launcher, ntasks_per_node=2).submission.spec.launcher == "torchrun"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"script": "none.py"}, "script none.py does not exist"),
        ({"script": "sub"}, "sub is a folder, not a script"),
        ({"script": "odd.yaml"}, "odd.yaml is not a job file: no line begins with script:"),
        ({"nodes": 0}, "--nodes must be at least 1"),
    ],
)
def test_requests_that_are_wrong_stay_wrong(folder: Path, options: dict[str, Any], problem: str) -> None:
    (folder / "sub").mkdir()
    (folder / "odd.yaml").write_text("a: 1\n")
    with pytest.raises(RequestInvalid) as error:
        prepared(folder, DDP, **options)
    assert sum(problem in line for line in error.value.problems) == 1
