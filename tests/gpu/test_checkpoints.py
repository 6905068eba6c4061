"""The speed at which the training loop saves and restores weights on a GPU."""

from __future__ import annotations

import re

import pytest

from tests.gpu.conftest import SCRIPTS, GpuCli, Record

pytestmark = [pytest.mark.gpu(alone=True), pytest.mark.slow]
GIB = 4


def test_checkpoint_saves_and_restores_identical_weights(gpu_cli: GpuCli, record: Record) -> None:
    job, status = gpu_cli.train("-l", "single", str(SCRIPTS / "checkpoints.py"), str(GIB))
    output = gpu_cli.output(job)
    assert status["state"] == "COMPLETED", output
    again = gpu_cli("resubmit", "--from-checkpoint", "--parsable", job).stdout.strip()
    gpu_cli.started.append(again)
    assert gpu_cli.wait_for_end(again)["statuses"][0]["state"] == "COMPLETED", gpu_cli.output(again)
    values = dict(re.findall(r"^(\w+_s) ([\d.]+)$", output + "\n" + gpu_cli.output(again), re.MULTILINE))
    record("checkpoints", "seconds", {"gib": GIB, **{name: float(value) for name, value in values.items()}})
    digests = re.findall(r"^digest (-?\d+)$", output + "\n" + gpu_cli.output(again), re.MULTILINE)
    assert len(digests) == 2
    assert digests[0] == digests[1]
    assert set(values) == {"torch_save_s", "save_s", "copy_s", "restored_s"}
