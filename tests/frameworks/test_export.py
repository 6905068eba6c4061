"""Exported results, read by MLflow's registry and by the libraries of model repositories."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.frameworks.envs import environment

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900), pytest.mark.sampled(1, "registries")]

SAVE = """\
import json, os, pathlib
import numpy
from safetensors.numpy import save_file

run = pathlib.Path(os.environ["DTSLURM_RUN_DIR"])
(run / "export").mkdir()
weights = {"layer.weight": numpy.arange(12, dtype="float32").reshape(3, 4), "layer.bias": numpy.ones(3)}
save_file(weights, run / "export" / "model.safetensors", metadata={"format": "np"})
(run / "export" / "config.json").write_text('{"model_type": "test"}')
with open(os.environ["DTSLURM_ARTIFACTS"], "a") as told:
    told.write(json.dumps({"path": "export", "step": 900, "metrics": {"accuracy": 0.91}}) + "\\n")
"""
READ_FOLDER = """\
import json, sys
from huggingface_hub import ModelCard
from safetensors.numpy import load_file

weights = load_file("repository/model.safetensors")
card = ModelCard.load("repository/README.md")
print(json.dumps({
    "bias": weights["layer.bias"].tolist(), "shape": weights["layer.weight"].shape,
    "library": card.data.library_name, "tags": card.data.tags, "text": card.text,
}))
"""
READ_REGISTRY = """\
import json, pathlib
import mlflow

client = mlflow.MlflowClient()
found = [client.get_model_version("digits", str(number)) for number in (1, 2)]
run = client.get_run(found[0].run_id)
source = client.get_model_version_download_uri("digits", "1")
place = pathlib.Path(mlflow.artifacts.download_artifacts(source))
print(json.dumps({
    "tags": found[0].tags, "metrics": run.data.metrics, "status": run.info.status,
    "files": sorted(path.name for path in place.iterdir()), "config": (place / "config.json").read_text(),
}))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """An environment with the readers, and with MLflow's client, which dtslurm itself imports."""
    return environment(
        "export",
        ["mlflow-skinny==3.17.2", "safetensors==0.6.2", "huggingface_hub==0.36.0", "numpy>=1.26"],
    )


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    folder, home = tmp_path / "project", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    env = {"DTSLURM_RUN_ROOT": str(tmp_path / "runs"), "DTSLURM_LOCAL_STATE": str(tmp_path / "local")}
    tool = Cli("local", folder, {**env, "HOME": str(home), "PATH": os.environ["PATH"]})
    yield tool
    for job in tool.started:
        tool("cancel", job, code=None)


@pytest.fixture
def saved(cli: Cli, python: Path) -> str:
    cli.script(SAVE, "save.py")
    job = cli.submit("-l", "single", "--python", str(python), "save.py")
    assert cli.wait_for_end(job, limit=120)["statuses"][0]["state"] == "COMPLETED"
    return job


def read(cli: Cli, python: Path, program: str) -> dict[str, object]:
    done = subprocess.run(
        [python, cli.script(program, "read.py")], cwd=cli.folder, env=cli.env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_huggingface_libraries_read_the_exported_model_repository(cli: Cli, saved: str, python: Path) -> None:
    cli("artifacts", "pull", saved, "export", "--to", "hf:./repository")
    result = read(cli, python, READ_FOLDER)
    assert (result["bias"], result["shape"]) == ([1.0] * 3, [3, 4])
    assert (result["library"], result["tags"]) == ("pytorch", ["dtslurm"])
    assert "| accuracy | 0.91 |" in str(result["text"])


def test_mlflow_registry_contains_each_export_as_a_version(cli: Cli, saved: str, python: Path) -> None:
    [packages] = python.parents[1].glob("lib/python3*/site-packages")
    store = cli.folder / "store"
    cli.env |= {"PYTHONPATH": str(packages), "MLFLOW_TRACKING_URI": store.as_uri()}
    cli.env["MLFLOW_ALLOW_FILE_STORE"] = "true"  # its databases want more than its client
    for version in ("1", "2"):
        answer = cli("artifacts", "pull", saved, "export", "--to", "mlflow:digits")
        assert version in answer.stdout + answer.stderr
    result = read(cli, python, READ_REGISTRY)
    assert result["files"] == ["config.json", "model.safetensors"]
    assert result["config"] == '{"model_type": "test"}'
    assert (result["metrics"], result["status"]) == ({"accuracy": 0.91}, "FINISHED")
    tags = result["tags"]
    assert isinstance(tags, dict)
    assert (tags["job_id"], tags["path"], len(tags["sha256"])) == (saved, "export", 64)
