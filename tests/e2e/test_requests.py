"""The requests that the windows of one user make to a real controller, by the controller's count."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dtslurm.model.runs.state import JobState
from tests.e2e.conftest import ON_SLURM, Cli
from tests.lab.cluster import SlurmLab

QUESTIONS = re.compile(
    r"REQUEST_(?:JOB_USER_INFO|JOB_INFO\w*|PARTITION_INFO|NODE_INFO\w*|FED_INFO)\s.*?count:(\d+)"
)
WINDOWS = 5
WATCHED_S = 35.0
SETTLED_S = 6.0  # windows that have just opened ask once more what they were told of


def requests(lab: SlurmLab) -> int:
    """Return how many questions about jobs, partitions and nodes the controller has had."""
    result = lab.run(["sdiag"]).stdout.partition("by message type")[2].partition("by user")[0]
    return sum(int(number) for number in QUESTIONS.findall(result))


def settled_requests(lab: SlurmLab) -> bool:
    before = requests(lab)
    time.sleep(SETTLED_S)
    return requests(lab) == before


@contextmanager
def window(cli: Cli, job: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A user's window that follows a job."""
    argv = [sys.executable, "-m", "dtslurm", "logs", "-f", job]
    with (
        output.open("wb") as file,
        subprocess.Popen(
            argv, cwd=cli.folder, env={**os.environ, **cli.env}, stdout=file, stderr=subprocess.STDOUT
        ) as process,
    ):
        yield process
        process.kill()


@pytest.mark.slow
@ON_SLURM
def test_f21_five_windows_make_at_most_five_requests_a_minute(
    cli: Cli, slurm_lab: SlurmLab, tmp_path: Path
) -> None:
    cli.script("import time; print('here I am', flush=True); time.sleep(600)")
    job = cli.submit("train.py")
    cli.wait_until(lambda: cli.state(job) == JobState.RUNNING.value)
    outputs = [tmp_path / f"window{number}" for number in range(WINDOWS)]
    with ExitStack() as stack:
        windows = [stack.enter_context(window(cli, job, output)) for output in outputs]
        cli.wait_until(lambda: all(b"here I am" in output.read_bytes() for output in outputs))
        cli.wait_until(lambda: all(b"RUNNING" in output.read_bytes() for output in outputs))
        cli.wait_until(lambda: settled_requests(slurm_lab))
        before, begin = requests(slurm_lab), time.monotonic()
        time.sleep(WATCHED_S)
        asked, minutes = requests(slurm_lab) - before, (time.monotonic() - begin) / 60
        assert asked <= 5 * minutes + 2, f"{asked} requests in {minutes * 60:.0f} s"
        cli.wait_until(lambda: requests(slurm_lab) > before)  # they do ask

        before = requests(slurm_lab)
        by_hand = [cli.status(job) for _ in range(3)]
        assert {run["statuses"][0]["state"] for run in by_hand} == {"RUNNING"}
        assert requests(slurm_lab) - before <= 2 * 3
        cli("cancel", job)
        assert cli.state(job) != "RUNNING"  # right at once after our own action
        cli.wait_until(lambda: all(item.poll() is not None for item in windows))
        assert requests(slurm_lab) - before <= 30
    for output in outputs:
        assert b"CANCELLED" in output.read_bytes()
