"""What people write into scripts for sbatch, said to dtslurm."""

from __future__ import annotations

import sys

from tests.e2e.conftest import WITHOUT_SSH, Cli


@WITHOUT_SSH
def test_options_of_torchrun_reach_it(cli: Cli) -> None:
    script = cli.script("import os; print('role', os.environ['ROLE_NAME'])")
    options = ("--launcher-option", "role=my trainer", "--launcher-option", "--start-method=fork")
    job = cli.submit("-l", "torchrun", *options, "--python", sys.executable, script)
    assert {status["state"] for status in cli.wait_for_end(job)["statuses"]} == {"COMPLETED"}
    assert "role my trainer" in cli("logs", job).stdout
