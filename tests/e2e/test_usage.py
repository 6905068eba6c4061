"""GPU-hours of real jobs, from a real accounting database."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import ON_SLURM, Cli
from tests.e2e.test_sampler import TRAIN, telemetry_lines

NVML = Path(__file__).parents[1] / "worker" / "data" / "nvml.c"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the GPU library to look at")
@ON_SLURM
def test_usage_reports_held_used_and_idle_gpu_hours(cli: Cli, tmp_path: Path) -> None:
    library = tmp_path / "libnvidia-ml.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(NVML)], check=True)
    fake = ("--env", f"DTSLURM_NVML={library}", "--env", "FAKE_GPUS=2")
    script = cli.script(TRAIN)
    job = cli.submit("-N1", "--gpus-per-node=2", "-J", "greedy", *fake, "-l", "single", script, "1", "0")
    assert cli.wait_for_end(job, 450)["statuses"][0]["state"] == "COMPLETED"
    assert [len(record["gpus"]) for record in telemetry_lines(cli.run_dir(job), 0)][:2] == [2, 2]  # type: ignore[arg-type]

    def told() -> dict[str, float]:
        answer = json.loads(
            cli("usage", "--cluster", "slurm", "--since", "1h", "--by", "name", "--json").stdout
        )
        return next((row for row in answer["rows"] if row["group"] == "greedy"), {})

    cli.wait_until(lambda: told().get("gpu_hours_known"))  # accounting lags a little
    row = told()
    assert row["gpu_hours_asked"] == pytest.approx(2 * 10 / 60, abs=0.01)  # two GPUs for ten minutes
    assert 0 < row["gpu_hours_held"] < row["gpu_hours_asked"]
    assert row["gpu_hours_used"] == pytest.approx(row["gpu_hours_held"] * 0.905, abs=0.002)
    assert row["gpu_hours_idle"] == 0
    text = cli("usage", "--cluster", "slurm", "--since", "1h").stdout
    assert "GPU-hours were idle" in text.splitlines()[0]
    assert "--since 'x'" in cli("usage", "--since", "x", code=2).stderr


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_usage_reports_no_jobs_without_accounting(cli: Cli) -> None:
    assert "has no jobs" in cli("usage", "--cluster", "local").stderr
