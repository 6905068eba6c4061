"""A training script that is edited after the submission: each attempt records whether it had changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.waiting import wait_until

EDITS_ITSELF = """\
import os, sys
if os.environ["DTSLURM_ATTEMPT"] == "0":
    open(__file__, "a").write("# edited\\n")
    sys.exit(1)
"""


def changed_script_flags(run: Run, job: str) -> list[Any]:
    """Return, for each attempt of a finished job, whether the script had changed."""

    def seen() -> Any:
        [answer] = json.loads(run("status", job, "--json", code=0).stdout)["runs"]
        return answer

    wait_until(lambda: seen()["statuses"][0]["state"] in {"COMPLETED", "FAILED"}, f"the end of job {job}")
    return [attempt["script_changed"] for attempt in seen()["attempts"]]


def submit_job(run: Run, *words: str) -> str:
    done = run("submit", "--cluster", "local", "-l", "srun", "--json", *words, "train.py", code=0)
    job: str = json.loads(done.stdout)["run"]["job_id"]
    return job


@pytest.mark.parametrize("edited", [True, False])
def test_an_edit_of_the_script_while_the_job_is_pending_is_reported(
    run: Run, folder: Path, edited: bool
) -> None:
    job = submit_job(run, "--hold")
    if edited:
        (folder / "train.py").write_text("print('edited')\n")
    run("release", job, code=0)
    assert changed_script_flags(run, job) == [edited]
    assert json.loads(run("diagnose", job, "--json", code=0).stdout)["script_changed"] is edited
    for command in ("status", "diagnose"):
        shown = run(command, job, code=0).stdout
        assert ("train.py has changed since it was submitted (at 2" in shown) is edited
        assert ("attempt 0 started with the changed file. --snapshot freezes the code" in shown) is edited


def test_an_edit_of_the_script_between_attempts_is_reported_for_the_later_attempt(
    run: Run, folder: Path
) -> None:
    (folder / "train.py").write_text(EDITS_ITSELF)
    job = submit_job(run, "--max-restarts", "1")
    assert changed_script_flags(run, job) == [False, True]
    assert "attempt 1 started with the changed file" in run("status", job, code=0).stdout
    earlier = run("diagnose", job, "--attempt", "0", "--json", code=0).stdout
    assert json.loads(earlier)["script_changed"] is False


def test_a_snapshot_run_has_no_statement_about_a_changed_script(run: Run) -> None:
    assert changed_script_flags(run, submit_job(run, "--snapshot")) == [None]
