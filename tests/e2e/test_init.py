"""``dtslurm init`` on a real Slurm, here and over SSH, with its first jobs."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.conftest import ON_SLURM, Cli
from tests.sshd.fixtures import Login
from tests.waiting import busyness


@ON_SLURM
def test_init_writes_a_profile_and_a_project_and_runs_a_job_here_and_on_slurm(cli: Cli) -> None:
    done = cli("init", "--yes", "--demo", "-p", "short", timeout=240)
    assert (cli.folder / "dtslurm.yaml").read_text() == "cluster: lab\ndefaults:\n  partition: short\n"
    assert "problem:" not in done.stderr
    assert "all 4 ranks are connected" in done.stdout
    assert "all 2 ranks are connected" in done.stdout
    nodes = {line.split(" on ")[1].split(",")[0] for line in done.stdout.splitlines() if " on n" in line}
    assert len(nodes) == 2
    assert "next: dtslurm submit SCRIPT" in done.stderr
    job = cli("submit", "--parsable", "-t", "5", "--wait", cli.script("print('mine')")).stdout.strip()
    assert cli.status(job)["record"]["cluster"] == "lab"


def converse(words: list[str], answers: list[tuple[str, str]], folder: Path, env: dict[str, str]) -> str:
    """Run dtslurm on a terminal, answer each question when it appears, and return what the terminal shows."""
    ours, theirs = pty.openpty()
    client = subprocess.Popen(
        [sys.executable, "-m", "dtslurm", *words], cwd=folder, env=env,
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown, seen, end = "", 0, time.monotonic() + 240 * busyness()
    remaining = list(answers)
    while time.monotonic() < end:
        if select.select([ours], [], [], 1.0)[0]:
            try:
                shown += os.read(ours, 4096).decode()
            except OSError:  # the terminal ends with its last process
                break
        if remaining and remaining[0][0] in shown[seen:]:
            seen = len(shown)
            os.write(ours, remaining.pop(0)[1].encode())
    os.close(ours)
    assert client.wait(30) == 0, shown
    assert not remaining, shown
    return shown


def test_init_over_ssh_asks_its_questions_and_runs_a_job_there(tmp_path: Path, sshd_login: Login) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    env = {**os.environ, **sshd_login.env, "PATH": os.environ["PATH"]}
    answers = [
        ("Login node", f"{sshd_login.host}\n"),
        ("Folder for your runs", "runs\n"),
        ("is relative", f"{tmp_path / 'far-runs'}\n"),
        ("Partition (main, short) [main]", "\n"),
        ("Account (", "\n"),
        ("Run a first job", "y\n"),
    ]
    shown = converse(["init"], answers, folder, env)
    assert "all 4 ranks are connected" in shown
    assert "all 2 ranks are connected" in shown
    assert "problem:" not in shown
    assert "jobs use the python3 of the cluster" in shown
    assert len(list((tmp_path / "far-runs").glob("hello-*"))) == 1
    assert (folder / "dtslurm.yaml").read_text() == "cluster: lab\ndefaults:\n  partition: main\n"
