"""The dashboard in a real terminal (tmux, 80x24), beside a training job."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ClusterShell.NodeSet import NodeSet

from tests.conftest import skip_or_fail
from tests.e2e.conftest import ON_SLURM, WITHOUT_SSH, Cli, far_profile
from tests.lab.cluster import SlurmLab
from tests.sshd.fixtures import Login

TRAIN = """
    import json, os, time
    rank = int(os.environ["RANK"])
    for step in range(1, 4000):
        loss = 2.5 / (1 + step * 0.01)
        print(f"rank {rank} step {step} loss {loss:.4f}", flush=True)
        if rank == 0:
            record = {"time": time.time(), "rank": 0, "step": step, "total_steps": 100_000, "loss": loss}
            with open(os.environ["DTSLURM_METRICS"], "a") as file:
                file.write(json.dumps(record) + "\\n")
        time.sleep(0.2)
"""


class Terminal:
    """A terminal of 80 columns and 24 lines in which the dashboard runs."""

    def __init__(self, cli: Cli, *words: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="dtslurm-tmux-", dir="/tmp")  # sockets' names must be short
        self._cli = cli
        argv = [sys.executable, "-m", "dtslurm", "top", *words]
        env = {**os.environ, **cli.env, "LC_ALL": "C.UTF-8"}
        env.pop("TMUX", None)
        self._env = {**env, "TMUX_TMPDIR": self._folder}
        self._tmux("new-session", "-d", "-x", "80", "-y", "24", "-c", str(cli.folder), shlex.join(argv))

    def _tmux(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        argv = ["tmux", "-f", "/dev/null", *words]
        return subprocess.run(argv, env=self._env, check=check, capture_output=True, text=True, timeout=600)

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def shown(self) -> str:
        return self._tmux("capture-pane", "-p", check=False).stdout

    def wait_until(self, *texts: str) -> str:
        try:
            self._cli.wait_until(lambda: all(text in self.shown() for text in texts), limit=90)
        except AssertionError:
            pytest.fail(f"{texts} did not come; the terminal shows:\n{self.shown()}")
        return self.shown()

    @property
    def alive(self) -> bool:
        return self._tmux("has-session", check=False).returncode == 0

    def close(self) -> None:
        self._tmux("kill-server", check=False)
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture
def tmux() -> Iterator[list[Terminal]]:
    if shutil.which("tmux") is None:
        skip_or_fail("tmux", "tests/dashboard/install.sh")
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


@WITHOUT_SSH
def test_top_shows_and_cancels_a_training_job(cli: Cli, tmux: list[Terminal]) -> None:
    script = cli.script(TRAIN)
    job = cli.submit("-N2", "--ntasks-per-node", "1", "-l", "srun", script)
    terminal = Terminal(cli)
    tmux.append(terminal)
    terminal.wait_until("dtslurm top", job, "RUNNING", "1 running")
    terminal.press("Enter")
    shown = terminal.wait_until("loss", "of 100,000", "will stop at step", "started")
    assert f"{job} on {cli.cluster}" in shown
    terminal.press("2")
    terminal.wait_until("2 running", "rank 0")
    terminal.press("4")
    terminal.wait_until("rank 1 step", "following")
    terminal.press("r", "1", "Enter")
    terminal.wait_until("following", "· rank 1")
    assert "0 rank 0 step" not in terminal.shown()
    terminal.press("5")
    terminal.wait_until("nothing has failed so far")
    terminal.press("c")
    terminal.wait_until("Cancel train", "Yes")
    terminal.press("Enter")  # No, unless one says otherwise
    cli.wait_until(lambda: "Cancel train" not in terminal.shown(), limit=90)
    terminal.press("q")
    terminal.wait_until("1 running")
    confirm(cli, terminal, "c", "Cancel train")
    terminal.wait_until("1 cancelled")
    terminal.press("q")
    cli.wait_until(lambda: not terminal.alive)


def confirm(cli: Cli, terminal: Terminal, key: str, question: str) -> None:
    """Answer a question with yes; one that comes before it can be read is none: it is said again."""
    terminal.press(key)
    terminal.wait_until(question, "Yes")

    def gone() -> bool:
        if question in terminal.shown():
            terminal.press("y")
        return question not in terminal.shown()

    cli.wait_until(gone, limit=90)


def use_a_shell(cli: Cli, terminal: Terminal, job: str) -> None:
    """Open a shell on a node from a job's page, look where it is, and come back to the page."""
    confirm(cli, terminal, "x", "Open a shell on")
    terminal.wait_until("leave with exit")
    terminal.press("C-u")  # a yes that was said once too often
    terminal.press("echo in=$SLURM_JOB_ID on=$SLURMD_NODENAME step=$SLURM_STEP_ID.", "Enter")
    shown = terminal.wait_until(f"in={job} on=")
    assert f"--jobid={job} --overlap" in shown.replace("\n", "")
    node = shown.partition(f"in={job} on=")[2].split()[0]
    assert node in NodeSet(cli.status(job)["statuses"][0]["nodelist"])
    terminal.press("exit", "Enter")
    terminal.wait_until("1 overview", f"{job} on {cli.cluster}")


@ON_SLURM
def test_top_opens_a_shell_beside_a_running_job(cli: Cli, tmux: list[Terminal]) -> None:
    job = cli.submit("--ntasks-per-node", "1", "-l", "srun", cli.script(TRAIN))
    terminal = Terminal(cli, job)
    tmux.append(terminal)
    terminal.wait_until("overview", "RUNNING", "loss")
    use_a_shell(cli, terminal, job)
    assert cli.state(job) == "RUNNING"
    terminal.press("q", "q")
    cli.wait_until(lambda: not terminal.alive)


@pytest.mark.slurm
def test_top_over_ssh_recovers_from_a_lost_connection(
    tmp_path: Path, sshd_login: Login, slurm_lab: SlurmLab, tmux: list[Terminal]
) -> None:
    lab = sshd_login.lab
    alias = f"s{secrets.token_hex(2)}"  # it may be tried twice
    server = lab.server(alias, env={**slurm_lab.env, "HOME": str(lab.home(alias))})
    far_profile(tmp_path, server.alias)
    folder = tmp_path / "project"
    folder.mkdir()
    cli = Cli("far", folder, dict(lab.env))
    job = cli.submit("-N2", "--ntasks-per-node", "1", "-l", "srun", cli.script(TRAIN))
    try:
        terminal = Terminal(cli, "--cluster", "far")
        tmux.append(terminal)
        terminal.wait_until(job, "RUNNING", "far ok")
        terminal.press("Enter")
        terminal.wait_until("loss", "of 100,000", "started", "rank 1 step")
        use_a_shell(cli, terminal, job)
        server.down()
        kept = terminal.wait_until("last update", "of 100,000")
        assert f"{job} on far" in kept
        terminal.press("4")
        terminal.wait_until("connection lost", "rank 1 step")
        terminal.press("q")
        terminal.wait_until(job, "RUNNING")
        terminal.press("F5")
        terminal.wait_until("far: no answer for", "last known state")
        lab.up(server)
        terminal.press("F5")
        terminal.wait_until("far ok")
        terminal.press("Enter")
        terminal.wait_until("1 overview", "loss")
        terminal.press("4")
        terminal.wait_until("rank 0 step", "all ranks")
        terminal.press("q", "q")
        cli.wait_until(lambda: not terminal.alive)
    finally:
        if server.process.poll() is not None:
            lab.up(server)
        cli("cancel", job, code=None)


@WITHOUT_SSH
def test_top_prints_a_single_frame_for_pipes_and_json(cli: Cli) -> None:
    script = cli.script(TRAIN)
    job = cli.submit("--ntasks-per-node", "1", "-l", "srun", script)
    cli.wait_until(lambda: "of 100,000" in cli("top", "--once", job).stdout)
    frame = cli("top")  # no terminal
    assert job in frame.stdout
    assert "RUNNING" in frame.stdout
    assert cli("top", "--once", "--ascii", job).stdout.isascii()
    board = json.loads(cli("top", "--json").stdout)
    assert board["schema"] == 1
    assert [row["job_id"] for row in board["jobs"] if row["recorded"]] == [job]  # others' may be in the queue
    page = json.loads(cli("top", "--json", job).stdout)["job"]
    assert page["world_size"] == 1
    assert page["forecast"]["total"] == 100_000
    assert page["ranks"][0]["state"] == "running"
    assert "no run '99999'" in cli("top", "99999", code=3).stderr


@ON_SLURM
def test_raised_time_limit_is_shown_on_every_screen(cli: Cli, slurm_lab: SlurmLab) -> None:
    job = cli.submit("-t", "3", "--ntasks-per-node", "1", "-l", "srun", cli.script(TRAIN))
    cli.wait_until(lambda: cli.state(job) == "RUNNING")
    slurm_lab.run(["scontrol", "update", f"JobId={job}", "TimeLimit=50"])

    def left() -> float:
        (status,) = cli.status(job)["statuses"]
        return float(status["time_left"])

    cli.wait_until(lambda: left() > 2000)
    stdout = cli("status", job).stdout
    assert re.search(r"running .*, 4\dm(\d+s)? left\n", stdout)
    assert re.search(r"limit +50m00s\n", stdout)
    (row,) = [row for row in json.loads(cli("top", "--json").stdout)["jobs"] if row["job_id"] == job]
    assert row["limit"] == 3000
    assert row["time_left"] > 2000
    assert "/50m00s" in cli("top", "--once").stdout


@ON_SLURM
def test_top_and_status_show_a_queued_job_without_a_run_record(
    cli: Cli, slurm_lab: SlurmLab, tmp_path: Path, tmux: list[Terminal]
) -> None:
    asked = tmp_path / "asked"
    shim = tmp_path / "bin" / "squeue"
    shim.parent.mkdir()
    real = shutil.which("squeue", path=slurm_lab.env.get("PATH", os.environ["PATH"]))
    shim.write_text(f'#!/bin/sh\necho >>{asked}\nexec {real} "$@"\n')
    shim.chmod(0o755)
    cli.env["PATH"] = f"{shim.parent}:{cli.env.get('PATH', os.environ['PATH'])}"
    script = cli.script(
        f"""
        import os, pathlib, time
        pathlib.Path({str(tmp_path)!r}, "started-" + os.environ["SLURM_JOB_ID"]).touch()
        time.sleep(900)
        """
    )
    lost, kept = (cli.submit("--ntasks-per-node", "1", "-l", "srun", script) for _ in range(2))
    cli.wait_until(lambda: cli.state(lost) == cli.state(kept) == "RUNNING")
    # A script that still has to open files of its run directory would fail when that is moved.
    cli.wait_until(lambda: all((tmp_path / f"started-{job}").exists() for job in (lost, kept)))

    def requests(*words: str) -> int:
        """Count what a command asks where the last answer is too old to serve."""
        time.sleep(4)
        before = len(asked.read_text())
        cli(*words)
        return len(asked.read_text()) - before

    usual = requests("top", "--once")
    run = cli.run_dir(lost).path
    run.rename(tmp_path / "moved")
    try:
        assert requests("top", "--once") == usual
        match = re.search(r"no record of the run can be read", cli("status").stdout)
        assert match is not None
        cli.env["COLUMNS"] = "140"  # for the whole text beside a long job id
        frame = cli("top", "--once").stdout
        del cli.env["COLUMNS"]
        (line,) = [line for line in frame.splitlines() if f" {lost} " in line]
        assert match[0] in line
        assert "RUNNING" in line
        rows = {row["job_id"]: row for row in json.loads(cli("top", "--json").stdout)["jobs"]}
        assert (rows[lost]["recorded"], rows[kept]["recorded"]) == (False, True)
        assert f"dtslurm cancel {lost} --cluster slurm ends the job" in rows[lost]["fix"]
        cli("cancel", kept)
        cli.wait_for_end(kept)
        cli.run_dir(kept).path.rename(tmp_path / "moved-too")  # none of its runs can be read any more
        assert lost in cli("top", "--once").stdout
        tmux.append(Terminal(cli))
        tmux[0].wait_until(lost, "RUNNING")
        cli("cancel", lost)
        cli.wait_until(lambda: "RUNNING" not in tmux[0].shown())
    finally:
        (tmp_path / "moved").rename(run)


def test_top_reports_a_cluster_that_cannot_be_reached(cli_far_down: Cli, tmux: list[Terminal]) -> None:
    terminal = Terminal(cli_far_down)
    tmux.append(terminal)
    shown = terminal.wait_until("gone:", "lost-run")
    assert "UNKNOWN" in shown
    terminal.press("q")
    cli_far_down.wait_until(lambda: not terminal.alive)


@pytest.fixture
def cli_far_down(tmp_path: Path) -> Cli:
    """A user with a run on a cluster whose login node does not exist."""
    folder = tmp_path / "project"
    profiles = folder / "cluster_profiles"
    profiles.mkdir(parents=True)
    (profiles / "gone.yaml").write_text("extends: slurm\nlogin:\n  host: login.invalid\n")
    run = tmp_path / "runs" / "lost-run"
    run.mkdir(parents=True)
    record = {
        "schema": 1,
        "token": "0123456789ab",
        "cluster": "gone",
        "name": "lost-run",
        "run_dir": "/far/runs/lost-run",
        "mirror": str(run),
        "phase": "submitted",
        "created_at": 1.0,
        "job_id": "77",
        "profile": str(profiles / "gone.yaml"),
    }
    (run / "job.json").write_text(json.dumps(record))
    return Cli("gone", folder, {"DTSLURM_RUN_ROOT": str(tmp_path / "runs")})
