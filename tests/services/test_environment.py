"""The Python environment of a job, with real uv projects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs.job import Submission
from dtslurm.services.request.request import JobRequest
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.wiring.context import Context
from tests.e2e.conftest import Cli

PROJECT = '[project]\nname = "digits"\nversion = "1"\nrequires-python = ">=3.8"\ndependencies = []\n'


def uv(folder: Path, *words: str) -> None:
    env = {key: value for key, value in os.environ.items() if key not in {"VIRTUAL_ENV", "CONDA_PREFIX"}}
    argv = [sys.executable, "-m", "uv", "--offline", "--no-cache", "--no-config", *words]
    subprocess.run(
        argv, cwd=folder, env={**env, "UV_PYTHON": sys.executable}, check=True, capture_output=True
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "digits"
    (folder / "src").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "src" / "train.py").write_text("import sys; print(sys.prefix)\n")
    uv(folder, "lock")
    return folder


def prepare_submission(folder: Path, env: dict[str, str] | None = None, **asked: str) -> Submission:
    home = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "DTSLURM_LOCAL_STATE": str(folder / "local")}
    context = Context(cwd=folder, env={**home, "DTSLURM_TRUSTED_FOLDERS": "/", **(env or {})})
    request = JobRequest(**{"script": "train.py", "cluster": "local", "time": "5", **asked})  # type: ignore[arg-type]
    return prepare(context, request, standalone=False).submission


def test_a_uv_project_is_used_if_no_environment_is_active(project: Path) -> None:
    uv(project, "sync")
    result = prepare_submission(project / "src")
    assert f"source {project}/.venv/bin/activate || exit" in result.script
    assert result.notices[0] == f"no environment is active: the job uses uv's {project}/.venv"


def test_the_active_environment_takes_precedence_over_the_uv_environment(project: Path) -> None:
    uv(project, "sync")
    other = project.parent / "other"
    other.mkdir()
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        result = prepare_submission(project / "src", {name: str(other)})
        assert f"source {other}/bin/activate" in result.script
        assert "uv" not in " ".join(result.notices)


def test_the_python_option_takes_precedence_over_the_uv_environment(project: Path) -> None:
    uv(project, "sync")
    assert "activate" not in prepare_submission(project / "src", python="python3").script


def test_a_uv_environment_without_a_project_is_used(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=tmp_path, check=True)
    assert (
        "activate" not in prepare_submission(tmp_path).script
    )  # as ever: others are for their users to activate
    uv(tmp_path, "venv", "--clear")
    assert f"source {tmp_path}/.venv/bin/activate" in prepare_submission(tmp_path).script


def test_the_uv_environment_may_be_in_another_folder(project: Path) -> None:
    uv(project, "venv", "envs/login")
    result = prepare_submission(project / "src", {"UV_PROJECT_ENVIRONMENT": "envs/login"})
    assert f"source {project}/envs/login/bin/activate" in result.script


def test_a_uv_project_without_an_environment_is_refused(project: Path) -> None:
    with pytest.raises(RequestInvalid, match=r"has no environment .*\.venv: run uv sync, or give --python"):
        prepare_submission(project / "src")
    (project / "src" / "cluster_profiles").mkdir()
    text = "extends: local\nenvironment:\n  setup: [module load pytorch]\n"
    (project / "src" / "cluster_profiles" / "site.yaml").write_text(text)
    assert "activate" not in prepare_submission(project / "src", cluster="site").script


def test_a_command_line_as_python_option_is_refused(project: Path) -> None:
    with pytest.raises(
        RequestInvalid, match=r"'uv run python' is a command line.* uses the project's \.venv"
    ):
        prepare_submission(project / "src", python="uv run python")


def test_a_job_runs_in_the_uv_environment(project: Path, tmp_path: Path) -> None:
    uv(project, "sync")
    env = {"VIRTUAL_ENV": "", "CONDA_PREFIX": "", "DTSLURM_LOCAL_STATE": str(tmp_path / "local")}
    cli = Cli("local", project / "src", {**env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")})
    job = cli.submit("-N2", "-l", "srun", "train.py")
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    logs = [cli.run_dir(job).logs(0) / f"rank-{rank}.log" for rank in range(2)]
    assert [path.read_text() for path in logs] == [f"{project}/.venv\n"] * 2
