"""The files of large jobs, in jobs of a few nodes for which the limit of small jobs is lowered."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Cli

MANY_RECORDS = """
    import os, pathlib
    folder = pathlib.Path(os.environ["DTSLURM_RUN_DIR"], "ranks", os.environ["DTSLURM_ATTEMPT"])
    if os.environ["RANK"] == "0":
        for number in range(3000):  # as many ranks as the argument list of a program has no room for
            (folder / f"{number:0100}.error.json").touch()
"""


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_end_of_a_job_reads_more_records_than_fit_on_a_command_line(
    cli: Cli,
) -> None:
    options = ("-N2", "-l", "srun", "--setup", "ulimit -s 256")  # room for 128 KiB of arguments
    job = cli.submit(*options, "--max-restarts", "0", cli.script(MANY_RECORDS))
    state = cli.wait_for_end(job, 240)["statuses"][0]["state"]
    output = (cli.run_dir(job).path / "logs/batch.log").read_text()
    assert state == "COMPLETED"
    assert "too long" not in output
    assert "ranks did" not in output
