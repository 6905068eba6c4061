"""The Python API: submit, follow, wait and cancel."""

from __future__ import annotations

import textwrap
from typing import Any

from tests.e2e.conftest import WITHOUT_SSH, Cli

TRAIN = """\
import json, os, sys
print("hello from", os.environ.get("RANK", "0"), flush=True)
with open(os.environ["DTSLURM_METRICS"], "a") as metrics:
    metrics.write(json.dumps({"step": 1, "loss": 0.5}) + "\\n")
sys.exit(int(sys.argv[1]))
"""


def run(cli: Cli, text: str) -> dict[str, Any]:
    cli.script(TRAIN)
    return cli.python(
        "import asyncio, json, sys\nimport dtslurm\nfrom dtslurm import errors\n" + textwrap.dedent(text)
    )


def test_python_api_submits_follows_and_waits_for_a_script(cli: Cli) -> None:
    result = run(
        cli,
        """
        job = dtslurm.submit("train.py", 0, cluster=sys.argv[1], time=5, ntasks_per_node=2, launcher="srun")
        lines = {(line.rank, line.text) for line in job.logs([0, 1], follow=True)}
        found = dtslurm.Cluster(sys.argv[1]).job(job.id)
        print(json.dumps({
            "lines": sorted(lines), "code": job.wait(), "state": found.state, "metrics": job.result(),
            "newest": dtslurm.Cluster(sys.argv[1]).jobs(1)[0].id == job.id, "done": found.done,
        }))
        """,
    )
    assert result["lines"] == [[0, "hello from 0"], [1, "hello from 1"]]
    assert (result["code"], result["state"], result["done"], result["newest"]) == (0, "COMPLETED", True, True)
    assert result["metrics"] == {"step": 1, "loss": 0.5}


@WITHOUT_SSH
def test_python_api_awaits_and_explains_a_failure(cli: Cli) -> None:
    result = run(
        cli,
        """
        jobs = [dtslurm.Cluster(sys.argv[1]).submit("train.py", code, time=5) for code in (0, 7)]

        async def ends():
            return [await job for job in jobs]

        codes = asyncio.run(ends())
        try:
            jobs[1].result()
        except errors.JobFailed as error:
            print(json.dumps({"codes": codes, "error": error.message, "code": error.code,
                              "cause": jobs[1].diagnose().cause}))
        """,
    )
    assert result["codes"] == [0, 7]
    assert "failed with exit code 7" in result["error"]
    assert (result["code"], result["cause"]) == (7, "exit-code")


@WITHOUT_SSH
def test_python_api_wait_times_out_and_cancel_ends_the_job(cli: Cli) -> None:
    result = run(
        cli,
        """
        job = dtslurm.submit("train.py", 0, cluster=sys.argv[1], time=5, setup=["sleep 300"])
        try:
            job.wait(timeout=2)
        except TimeoutError as error:
            job.cancel()
            print(json.dumps({"error": str(error), "code": job.wait(), "state": job.state}))
        """,
    )
    assert "after 2 s" in result["error"]
    assert result["code"] != 0
    assert result["state"] == "CANCELLED"
