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


def prepare_script(folder: Path, source: str | bytes, name: str = "train.py", **options: Any) -> Prepared:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(source.encode() if isinstance(source, str) else source)
    state = {"DTSLURM_LOCAL_STATE": str(folder.parent / "local")}
    context = Context(cwd=folder, env={**os.environ, **state})
    values = {"script": name, "cluster": "local", "launcher": "auto", "time": "5", **options}
    return prepare(context, JobRequest(**values), standalone=True)


def test_launcher_auto_reports_its_choice_and_the_reason(folder: Path) -> None:
    submission = prepare_script(folder, "\n" + DDP, ntasks_per_node=2).submission
    assert submission.spec.launcher == "torchrun"
    assert submission.notices[0] == "launcher torchrun: imports torch.distributed (train.py:2)"
    assert "torch.distributed.run" in submission.script


def test_auto_chooses_torchrun_for_a_single_rank_that_imports_torch_distributed(folder: Path) -> None:
    assert prepare_script(folder, DDP).submission.spec.launcher == "torchrun"
    assert prepare_script(folder, "print()").submission.spec.launcher == "single"


def test_auto_examines_modules_beside_the_script(folder: Path) -> None:
    (folder / "meet.py").write_text(DDP)
    submission = prepare_script(folder, "import torch\nimport meet\n", ntasks_per_node=2).submission
    assert "launcher torchrun: imports torch.distributed (meet.py:1)" in submission.notices
    assert not any("by itself" in line for line in submission.notices)


def test_auto_examines_a_script_given_as_a_module(folder: Path) -> None:
    prepare_script(folder, DDP, "pkg/train.py")
    submission = prepare_script(folder, "", "x.py", script="pkg.train", module=True).submission
    assert submission.notices[0] == "launcher torchrun: imports torch.distributed (train.py:1)"


def test_auto_uses_the_default_launcher_for_a_module_that_is_not_in_the_folder(folder: Path) -> None:
    submission = prepare_script(folder, "", script="no.such", module=True, ntasks_per_node=2).submission
    assert submission.spec.launcher == "torchrun"
    assert "the script cannot be examined" in submission.notices[0]


def test_several_ranks_of_a_script_that_spawns_ranks_cause_a_warning(folder: Path) -> None:
    submission = prepare_script(folder, SPAWN, ntasks_per_node=2).submission
    assert submission.spec.launcher == "torchrun"
    assert any("each of the 2 ranks would do this separately" in line for line in submission.notices)


def test_a_script_that_spawns_its_ranks_gets_one_task_with_all_gpus(folder: Path) -> None:
    (folder / "cluster_profiles").mkdir()
    (folder / "cluster_profiles" / "site.yaml").write_text(
        "scheduler: slurm\n"
        "node_types: {big: {sockets: 2, cores_per_socket: 8, gpus: {model: A100, count: 4}}}\n"
        "default_node_type: big\n"
    )
    submission = prepare_script(folder, SPAWN, cluster="site").submission
    assert (submission.spec.launcher, submission.layout.ranks_per_node) == ("single", 1)
    assert submission.layout.gpus_per_node == 4


def test_without_a_launcher_option_only_warnings_are_reported(folder: Path) -> None:
    submission = prepare_script(folder, "import torch\n", launcher=None, ntasks_per_node=2).submission
    assert submission.spec.launcher == "torchrun"
    assert submission.notices[0].startswith("train.py never initializes a process group: every rank would")
    assert not any(line.startswith("launcher ") for line in submission.notices)
    assert prepare_script(folder, DDP, launcher=None, ntasks_per_node=2).submission.notices == ()


def test_a_named_launcher_causes_no_warning(folder: Path) -> None:
    assert (
        prepare_script(folder, "import torch\n", launcher="torchrun", ntasks_per_node=2).submission.notices
        == ()
    )


@pytest.mark.parametrize("sizes", ["num_nodes=4", "devices=8, num_nodes=2", ""])
def test_a_lightning_trainer_with_sizes_unlike_the_job_causes_a_warning(folder: Path, sizes: str) -> None:
    options: dict[str, Any] = {"launcher": "lightning", "nodes": 2, "ntasks_per_node": 2}
    source = f"import lightning as L\nL.Trainer({sizes})\n"
    [notice] = prepare_script(folder, source, **options).submission.notices
    assert notice.startswith("train.py:2: the Lightning Trainer has ")
    right = "import lightning as L\nL.Trainer(devices=2, num_nodes=2)\n"
    assert prepare_script(folder, right, **options).submission.notices == ()
    assert prepare_script(folder, "def (", **options).submission.notices == ()
    (folder / "trainer.py").write_text(source)
    [notice] = prepare_script(folder, "import trainer\n", **options).submission.notices
    assert notice.startswith("trainer.py:2: ")


@pytest.mark.parametrize("source", [b"\xff\xfe\x00", b"def (", b"\x00" * 10, b"(" * 5000])
def test_auto_uses_the_default_launcher_for_an_unreadable_script(folder: Path, source: bytes) -> None:
    submission = prepare_script(folder, source, ntasks_per_node=2).submission
    assert submission.spec.launcher == "torchrun"
    assert "cannot be read as Python" in submission.notices[0]


@pytest.mark.parametrize("launcher", ["auto", None])
def test_an_error_in_launcher_detection_does_not_stop_the_submission(
    folder: Path, monkeypatch: pytest.MonkeyPatch, launcher: str | None
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(detect, "detect", fail)
    assert (
        prepare_script(folder, DDP, launcher=launcher, ntasks_per_node=2).submission.spec.launcher
        == "torchrun"
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"script": "none.py"}, "script none.py does not exist"),
        ({"script": "sub"}, "sub is a folder, not a script"),
        ({"script": "odd.yaml"}, "odd.yaml is not a job file: no line begins with script:"),
        ({"nodes": 0}, "--nodes must be at least 1"),
    ],
)
def test_an_invalid_request_is_reported_once_with_launcher_auto(
    folder: Path, options: dict[str, Any], problem: str
) -> None:
    (folder / "sub").mkdir()
    (folder / "odd.yaml").write_text("a: 1\n")
    with pytest.raises(RequestInvalid) as error:
        prepare_script(folder, DDP, **options)
    assert sum(problem in line for line in error.value.problems) == 1
