"""The code that a job runs: a snapshot of a work tree, or the folder itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.services.request import launcher_files
from dtslurm.services.request.request import JobRequest
from dtslurm.services.submit.prepare import Prepared, prepare
from dtslurm.services.submit.submit import submit
from dtslurm.services.wiring.context import Context
from dtslurm.store import snapshot
from tests.store.trees import git, write


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setenv("DTSLURM_LOCAL_STATE", str(tmp_path / "local"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tree = tmp_path / "tree"
    write(tree, {"train.py": "pass", "sub/other.py": "pass", ".gitignore": "data/\n", "data/big.bin": "x"})
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    return Context(cwd=tree)


def prepare_job(context: Context, **asked: object) -> Prepared:
    request = JobRequest(script="train.py", time="5", cluster="local", **asked)  # type: ignore[arg-type]
    return prepare(context, request, standalone=False)


def test_without_a_snapshot_a_job_runs_in_the_current_folder(context: Context) -> None:
    prepared = prepare_job(context)
    assert prepared.code is None
    assert prepared.submission.spec.work_dir == str(context.cwd)


def test_the_record_contains_the_commit_and_diff_of_the_working_folder(context: Context) -> None:
    git(context.cwd, "commit", "-qm", "first")
    write(context.cwd, {"train.py": "print()"})
    record = submit(context, prepare_job(context, sbatch=("--hold",)))
    result = json.loads((Path(record.run_dir) / "job.json").read_text())["git"]
    head = git(context.cwd, "rev-parse", "HEAD").strip()
    assert (result["commit"], result["dirty"]) == (head, True)
    assert "+print()" in (Path(record.run_dir) / "code.diff").read_text()
    context.cluster("local").scheduler.cancel([record.job_id or ""])


def test_a_snapshot_links_files_that_git_ignores(context: Context) -> None:
    prepared = prepare_job(context, snapshot=True, sbatch=("--hold",))
    record = submit(context, prepared)
    code = Path(record.run_dir) / "code"
    assert prepared.submission.spec.work_dir == str(code)
    assert (code / "train.py").read_text() == "pass"
    assert (code / "data").readlink() == context.cwd / "data"
    context.cluster("local").scheduler.cancel([record.job_id or ""])


def test_a_snapshot_links_a_fetched_run_directory(context: Context) -> None:
    write(context.cwd, {"got/job.json": "{}", "got/script.sbatch": "", "got/checkpoints/a": "x"})
    prepared = prepare_job(context, snapshot=True)
    assert prepared.code is not None
    assert [file.target for file in prepared.code.snapshot.files if file.path == "got"] == [
        str(context.cwd / "got")
    ]


def test_a_snapshot_job_submitted_in_a_subfolder_runs_in_that_subfolder(context: Context) -> None:
    context.cwd = context.cwd / "sub"
    request = JobRequest(script="other.py", time="5", cluster="local", snapshot=True)
    spec = prepare(context, request, standalone=False).submission.spec
    assert spec.work_dir.endswith("/code/sub")


@pytest.mark.parametrize("options", [{"code_include": ("data/",)}, {"code_exclude": ("sub/",)}])
def test_code_include_and_code_exclude_imply_a_snapshot(context: Context, options: dict[str, object]) -> None:
    assert prepare_job(context, **options).code is not None


@pytest.mark.parametrize("options", [{"snapshot": False, "code_include": ("data/",)}, {"chdir": "."}])
def test_no_snapshot_and_chdir_disable_the_snapshot(context: Context, options: dict[str, object]) -> None:
    prepared = prepare_job(context, **options)
    assert prepared.code is None
    assert prepared.submission.spec.work_dir == str(context.cwd)


def test_a_folder_outside_git_can_be_snapshotted(context: Context, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    context.cwd = tmp_path / "plain"
    (context.cwd / "train.py").write_text("pass")
    assert prepare_job(context, snapshot=True).code is not None


def test_the_snapshot_must_contain_the_configuration_file_of_the_launcher(context: Context) -> None:
    write(context.cwd, {"fsdp.yaml": "{}", "data/fsdp.yaml": "{}"})
    (context.cwd / "conf").symlink_to("sub")
    write(context.cwd, {"sub/fsdp.yaml": "{}"})
    asked = {"launcher": "accelerate", "env": ("PYTHONPATH=/x",), "snapshot": True}
    for path in ("fsdp.yaml", "conf/fsdp.yaml", "data/fsdp.yaml"):  # git ignores data/, which becomes a link
        prepare_job(context, launcher_options=(f"config_file={path}",), **asked)
    option = "config_file=nosuch.yaml"
    with pytest.raises(RequestInvalid) as caught:
        prepare_job(context, launcher_options=(option,), **asked)
    assert list(caught.value.problems) == [
        f"--launcher-option {option}: {context.cwd}/nosuch.yaml does not exist here"
    ]
    prepare_job(context, launcher_options=(option,), no_check=True, **asked)


def test_over_ssh_the_snapshot_decides_whether_a_configuration_file_exists(context: Context) -> None:
    write(context.cwd, {"fsdp.yaml": "{}", "data/fsdp.yaml": "{}", "sub/fsdp.yaml": "{}"})
    (context.cwd / "conf").symlink_to("sub")
    prepared = prepare_job(context, snapshot=True)
    assert prepared.code is not None

    def problems(path: str) -> list[str]:
        options = {"config_file": path}
        spec = replace(prepared.submission.spec, launcher="accelerate", launcher_options=options)
        remote: Any = SimpleNamespace(remote=True)
        request = JobRequest(script="train.py")
        return [
            item.message for item in launcher_files.find_unsent(context, remote, request, spec, prepared.code)
        ]

    for path in ("fsdp.yaml", "conf/fsdp.yaml", "/cluster/fsdp.yaml"):  # the preflight checks /cluster
        assert problems(path) == []
    assert problems("nosuch.yaml") == [
        f"--launcher-option config_file=nosuch.yaml: {context.cwd}/nosuch.yaml does not exist here"
    ]
    assert problems("data/fsdp.yaml") == [
        (
            "--launcher-option config_file=data/fsdp.yaml: the file is not copied with the code of "
            f"{context.cwd}; include it with --code-include, or give its path on the cluster"
        )
    ]


def test_a_snapshot_above_the_size_limit_is_refused(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "LIMIT_IN_GIT", (1, 10))
    with pytest.raises(RequestInvalid):
        prepare_job(context, snapshot=True)
