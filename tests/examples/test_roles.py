"""The examples of runs with several roles."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "roles"


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_each_job_file_is_valid_on_a_cluster_with_gpus(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    tool = Cli("a100x8-ib", tmp_path, {"DTSLURM_RUN_ROOT": str(tmp_path / "runs")})
    job_file = tmp_path / "examples" / "roles" / name
    job_file.chmod(0o644)
    done = tool("render", "--cluster", "a100x8-ib", "-A", "a", "-p", "gpu", f"examples/roles/{name}")
    assert "role-" in done.stdout
    assert done.stderr.count("note: ") <= 2, done.stderr  # of the supervisor, and of all GPUs


def test_evaluations_of_the_example_succeed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "examples" / "roles" / "evaluate.yaml").chmod(0o644)
    venv = {"VIRTUAL_ENV": os.environ.get("VIRTUAL_ENV", str(ROOT / ".venv"))}
    tool = Cli("local", tmp_path, {"DTSLURM_RUN_ROOT": str(tmp_path / "runs"), **venv})
    job = tool.submit("examples/roles/evaluate.yaml")
    assert tool.wait_for_end(job, 300)["statuses"][0]["state"] == "COMPLETED"
    run = tool.run_dir(job).path
    lines = (run / "evaluations.jsonl").read_text().splitlines()
    results = [(row["step"], row["exit_code"]) for row in map(json.loads, lines)]
    log = (run / "roles/evaluator-0/logs/0/rank-0.log").read_text()
    assert {code for _, code in results} == {0}, log
    assert results[-1] == (640, 0)
    assert float(log.split()[-1]) < 0.01
