"""Real failures on a GPU, and the diagnosis of ``dtslurm diagnose``."""

from __future__ import annotations

import json

import pytest

from dtslurm.store.rundir import json_lines
from tests.gpu.conftest import SCRIPTS, GpuCli, Record
from tests.gpu.ways import FILL_THE_MEMORY, WAYS

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def fail(cli: GpuCli, record: Record, way: str, expected: str, options: tuple[str, ...]) -> None:
    """Fail in that way; keep what was said of it, and compare."""
    words = options if "-l" in options else ("-l", "single", *options)
    job, status = cli.train(*words, str(SCRIPTS / "fail.py"), way)
    verdict = json.loads(cli("diagnose", "--json", job).stdout)["verdict"]
    notes = json_lines(cli.run_dir(job).path / "metrics" / "0" / "node-0.jsonl")
    xids = [gpu["xid"] for note in notes for gpu in note.get("gpus", ()) if "xid" in gpu]
    errors = [line for line in cli.output(job).splitlines() if "rror" in line]
    seen = {
        "state": status["state"],
        "exit_code": status["exit_code"],
        "expected": expected,
        "told": verdict["cause"],
        "summary": verdict["summary"].partition(", at /")[0],  # no paths of this machine
        "xid": xids[-1] if xids else None,
        "last_error": errors[-1][:300] if errors else None,
    }
    record("failures", way, seen)
    assert status["state"] == "FAILED", cli.output(job)
    assert verdict["cause"] == expected, f"{verdict}\n{cli.output(job)}"


@pytest.mark.parametrize("way", [way for way in WAYS if way not in FILL_THE_MEMORY])
def test_failure_is_diagnosed(gpu_cli: GpuCli, record: Record, way: str) -> None:
    fail(gpu_cli, record, way, *WAYS[way])


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("way", FILL_THE_MEMORY)
def test_full_memory_is_diagnosed(gpu_cli: GpuCli, record: Record, way: str) -> None:
    fail(gpu_cli, record, way, *WAYS[way])


HANG = """\
import torch

print("waits for the GPU", flush=True)
torch.cuda._sleep(10**13)
torch.cuda.synchronize()
"""


@pytest.mark.gpu(alone=True)
def test_hanging_kernel_is_located_in_the_running_job(gpu_cli: GpuCli, record: Record) -> None:
    """The live diagnosis names the line that waits for the GPU; a cancel ends the job."""
    job = gpu_cli.start("-l", "single", gpu_cli.script(HANG, "hang.py"))
    gpu_cli.wait_until(lambda: "waits" in gpu_cli.output(job))
    live = json.loads(gpu_cli("diagnose", "--live", "--json", job).stdout)
    record("failures", "hang", {"live": live})
    gpu_cli("cancel", job)
    assert gpu_cli.wait_for_end(job)["statuses"][0]["state"] == "CANCELLED"
    assert "hang.py" in json.dumps(live)
