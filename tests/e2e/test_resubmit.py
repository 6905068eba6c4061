"""A run submitted again: from the beginning, and from its last checkpoint."""

from __future__ import annotations

import json
import sys

from tests.e2e.conftest import WITHOUT_SSH, Cli

COUNTS = """
    import os, pathlib, sys
    file = pathlib.Path(os.environ["DTSLURM_CHECKPOINT_DIR"], "count")
    count = int(file.read_text()) if file.exists() else 0
    file.write_text(str(count + 1))
    print("counted", count + 1, sys.argv[1:], os.environ["GREETING"], flush=True)
    sys.exit(0 if count else 3)
"""


@WITHOUT_SSH
def test_resubmit_repeats_the_request_or_continues_from_a_checkpoint(cli: Cli) -> None:
    words = [
        "--python",
        sys.executable,
        "--env",
        "GREETING=hello",
        "-J",
        "counting",
        cli.script(COUNTS),
        "--lr",
        "1",
    ]
    first = cli.submit(*words)
    assert cli.wait_for_end(first)["statuses"][0]["exit_code"] == 3
    old = cli.run_dir(first).path

    second = cli("resubmit", "--parsable", first).stdout.strip()
    cli.started.append(second)
    assert cli.wait_for_end(second)["statuses"][0]["exit_code"] == 3  # from the beginning
    third = cli("resubmit", "--from-checkpoint", "--parsable", first).stdout.strip()
    cli.started.append(third)
    assert cli.wait_for_end(third)["statuses"][0]["state"] == "COMPLETED"
    fourth = cli("resubmit", "--from-checkpoint", "--parsable", third).stdout.strip()
    cli.started.append(fourth)
    assert cli.wait_for_end(fourth)["statuses"][0]["state"] == "COMPLETED"

    assert (old / "checkpoints/count").read_text() == "3"
    assert "counted 3 ['--lr', '1'] hello" in cli("logs", fourth).stdout
    records = [
        json.loads((cli.run_dir(job).path / "job.json").read_text()) for job in (second, third, fourth)
    ]
    assert [record["parent"] for record in records] == [str(old), str(old), records[1]["run_dir"]]
    assert {record["name"] for record in records} == {"counting"}
    assert str(old) in cli("status", third).stdout


@WITHOUT_SSH
def test_resubmit_of_a_run_without_a_request_is_refused(cli: Cli) -> None:
    job = cli.submit("--python", sys.executable, "--env", "GREETING=x", cli.script(COUNTS))
    cli.wait_for_end(job)
    path = cli.run_dir(job).path / "job.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in document.items() if key != "request"}))
    assert "does not contain the request" in cli("resubmit", job, code=2).stderr
