"""The early signal reaches training code under every launcher, in time, and ends no other process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtslurm.store.rundir import RunDir
from tests.e2e.conftest import ON_SLURM, WITHOUT_SSH, Cli
from tests.lab.cluster import SlurmLab

WAITS = """
    import os, signal, sys, time
    heard = []
    signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    print("ready", flush=True)
    end = time.time() + 300
    while not heard and time.time() < end:
        time.sleep(0.1)
    print("heard", heard, flush=True)
    sys.exit(85 if heard else 1)
"""

SAVES = """
    import json, os, pathlib, signal, sys, time
    heard = []
    signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    ranks = pathlib.Path(os.environ["DTSLURM_RUN_DIR"], "ranks", "0")
    rank, slow = int(os.environ["RANK"]), int(sys.argv[1])

    def left():
        return [json.loads(path.read_text())["exit_code"] for path in ranks.glob("[0-9].json")].count(85)

    print("ready", flush=True)
    while not heard:
        time.sleep(0.1)
    if rank == slow:
        while left() < 3:
            time.sleep(0.1)
        time.sleep(float(sys.argv[2]))
        print("saved", flush=True)
        sys.exit(int(sys.argv[3]))
    sys.exit(85)
"""


@pytest.mark.slurm
@pytest.mark.proves("launcher", "signal")
@pytest.mark.parametrize("launcher", ["single", "srun", "torchrun"])
def test_early_signal_reaches_every_rank(launcher: str, tmp_path: Path, slurm_lab: SlurmLab) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    cli = Cli("slurm", folder, {**slurm_lab.env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")})
    place = [] if launcher == "single" else ["-N2", "--ntasks-per-node", "2"]
    words = [*place, "-l", launcher, "--signal-before", "60", "--python", sys.executable, cli.script(WAITS)]
    job = cli.submit(*words)
    run, world = cli.run_dir(job), 1 if launcher == "single" else 4
    texts = [run.logs(0) / f"rank-{rank}.log" for rank in range(world)]
    cli.wait_until(lambda: all(path.is_file() and "ready" in path.read_text() for path in texts), 180)
    slurm_lab.run(["scancel", "--signal=USR2", job])  # to every process of the step, as at the time limit
    status = cli.wait_for_end(job, limit=180)["statuses"][0]
    assert [path.read_text().splitlines()[-1] for path in texts] == ["heard [12]"] * world
    assert [record.exit_code for record in run.ranks(0)] == [85] * world
    assert (status["state"], status["exit_code"]) == ("FAILED", 85)


@WITHOUT_SSH
@pytest.mark.parametrize(("launcher", "slow"), [("srun", 0), ("srun", 3), ("torchrun", 2)])
def test_rank_may_continue_saving_after_other_ranks_have_exited_with_85(
    cli: Cli, launcher: str, slow: int
) -> None:
    job, run = start_saving(cli, launcher, slow, "6", "85")
    status = cli.wait_for_end(job, limit=180)["statuses"][0]
    assert (run.logs(0) / f"rank-{slow}.log").read_text().splitlines()[-1] == "saved"
    assert [record.exit_code for record in run.ranks(0)] == [85] * 4
    assert (status["state"], status["exit_code"]) == ("FAILED", 85)
    output = (run.path / "logs" / "batch.log").read_text()
    assert "saved a checkpoint and ended with 85, which requests a requeue" in output
    assert "failed first" not in output
    assert "failed first" not in cli("diagnose", job).stdout


@WITHOUT_SSH
def test_rank_that_fails_to_save_ends_the_job_with_its_code(cli: Cli) -> None:
    # The others can see that this rank has ended two seconds before its script continues.
    cli.script('#!/bin/bash\n/bin/rm "$@"\n[[ "$*" != */running/* ]] || sleep 2\n', "rm")
    (cli.folder / "rm").chmod(0o755)
    cli.script(f"setup: ['export PATH={cli.folder}:$PATH']\nscript: train.py\n", "job.yaml")
    job, run = start_saving(cli, "srun", 1, "1", "7", submitted="job.yaml")
    # This is long before the 300 s that the others would wait for it.
    status = cli.wait_for_end(job, limit=180)["statuses"][0]
    assert [record.exit_code for record in run.ranks(0)] == [85, 7, 85, 85]
    assert run.first_failure(0) == (1, 7)
    assert (status["state"], status["exit_code"]) == ("FAILED", 7)


@WITHOUT_SSH
def test_cancel_ends_a_hanging_rank_that_other_ranks_wait_for(cli: Cli) -> None:
    job, run = start_saving(cli, "srun", 1, "600", "85")
    cli.wait_until(lambda: [record.exit_code for record in run.ranks(0)].count(85) == 3)
    cli("cancel", job)
    status = cli.wait_for_end(job, limit=180)["statuses"][0]
    assert status["state"] == "CANCELLED"
    assert [record.exit_code for record in run.ranks(0)] == [85, 143, 85, 85]


def start_saving(
    cli: Cli, launcher: str, *args: str | int, submitted: str = "train.py"
) -> tuple[str, RunDir]:
    """Four ranks that have heard the early signal, one of which takes longer to save."""
    options = ["-N2", "--ntasks-per-node", "2", "-l", launcher, "--signal-before", "300"]
    cli.script(SAVES)
    job = cli.submit(*options, "--python", sys.executable, submitted, *map(str, args))
    run = cli.run_dir(job)
    send_early_signal(cli, job, run)
    return job, run


def send_early_signal(cli: Cli, job: str, run: RunDir) -> None:
    """Signal a step of four ranks once all of them are ready."""
    texts = [run.logs(0) / f"rank-{rank}.log" for rank in range(4)]
    cli.wait_until(lambda: all(path.is_file() and "ready" in path.read_text() for path in texts), 180)
    if "SLURM_CONF" in cli.env:  # to every process of the step, as at the time limit
        subprocess.run(["scancel", "--signal=USR2", job], env={**os.environ, **cli.env}, check=True)
    else:
        step = Path(cli.env["DTSLURM_LOCAL_STATE"], "jobs", job, "steps", "0")
        os.kill(json.loads(step.read_text())["pid"], signal.SIGUSR2)


@pytest.mark.timeout(400)
@ON_SLURM
def test_f34_raised_time_limit_applies_to_the_supervisor_and_to_a_cancel(
    cli: Cli, slurm_lab: SlurmLab
) -> None:
    """The supervisor reads the new limit in time, and does not take a cancel for the old time limit."""
    script = cli.script("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    job = cli.submit("-t", "2", "--total-time", "1h", "--python", sys.executable, script)
    run = cli.run_dir(job)
    cli.wait_until(lambda: "ready" in text_of(run.logs(0) / "rank-0.log"))
    slurm_lab.run(["scontrol", "update", f"JobId={job}", "TimeLimit=5"])
    limit_at = read_epoch(slurm_lab, job, "StartTime") + 120
    cli.wait_until(lambda: time.time() > limit_at + 3, 240)
    assert len([item for item in run.events() if item["event"] == "attempt"]) == 1
    slurm_lab.run(["scancel", job])
    ended = cli.wait_for_end(job)
    assert ended["statuses"][0]["state"] == "CANCELLED"
    causes = [event["cause"] for event in run.events() if event["event"] == "attempt_ended"]
    assert causes in ([], ["cancelled"])  # if there was time to write it


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def read_epoch(lab: SlurmLab, job: str, name: str) -> float:
    shown = lab.run(["scontrol", "show", "job", job]).stdout
    stamp = next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}="))
    return time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))
