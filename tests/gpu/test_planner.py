"""The estimates of ``plan`` for one GPU, compared with measurements of training."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.gpu import nvidia_smi
from tests.gpu.configurations import CALIBRATED_ON, configurations, layout
from tests.gpu.conftest import SCRIPTS, GpuCli, Record
from tests.gpu.scores import Errors, measured, ratios

pytestmark = [pytest.mark.gpu(alone=True), pytest.mark.slow]


@pytest.mark.timeout(1200)
def test_planned_memory_and_step_time_are_close_to_measurements(
    gpu_python: Path, tmp_path: Path, record: Record
) -> None:
    """Most configurations train; each measurement is recorded, and the page scores it."""
    asked = tmp_path / "configurations.json"
    asked.write_text(json.dumps(configurations()))
    argv = [str(gpu_python), str(SCRIPTS / "measure.py"), str(asked)]
    rows = []
    with (tmp_path / "stderr").open("w+") as errors:
        process = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, text=True)
        with process:
            for line in process.stdout or ():
                if line.startswith("{"):
                    rows.append(json.loads(line))
                    record("planner", "rows", rows)
        assert process.returncode == 0, (tmp_path / "stderr").read_text()[-3000:]
    trained = measured(rows)
    assert len(trained) >= 40, [row.get("error") for row in rows]
    result = ratios(trained, nvidia_smi.ask("name")[0]["name"])
    assert Errors.of(item.memory for item in result).median < 0.3
    assert Errors.of(item.time for item in result).median < 0.5


def test_calibration_by_a_run_matches_its_step_time(gpu_cli: GpuCli, record: Record) -> None:
    """`plan --calibrate JOB` reads a run, and `plan` then predicts the step time of the run."""
    row = CALIBRATED_ON
    (gpu_cli.folder / "row.json").write_text(json.dumps([row] * 4))
    (gpu_cli.folder / "model.json").write_text(json.dumps(row["model"]))
    job, status = gpu_cli.train("-l", "single", str(SCRIPTS / "measure.py"), "row.json")
    assert status["state"] == "COMPLETED", gpu_cli.output(job)
    words = ["plan", "--model-config", "model.json", "--cluster", "local", "-N", "1", "--json"]
    words += ["-s", str(row["seq_len"]), "--framework", row["framework"], "--layout", layout(row)]
    before = json.loads(gpu_cli(*words).stdout)["candidates"][0]
    gpu_cli(*words, "--calibrate", job)
    after = json.loads(gpu_cli(*words).stdout)["candidates"][0]
    measured = json.loads(gpu_cli.output(job).strip().splitlines()[-1])
    seen = {
        "measured_s": measured["step_time_s"],
        "before_s": before["step_time_s"]["total"],
        "after_s": after["step_time_s"]["total"],
    }
    record("planner", "calibrated", seen)
    assert abs(seen["after_s"] / seen["measured_s"] - 1) < 0.1, seen
