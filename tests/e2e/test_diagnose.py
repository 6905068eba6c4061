"""Runs that fail for real, and the diagnosis of ``dtslurm diagnose``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ON_SLURM, WITHOUT_SSH, Cli

TWO_BY_TWO = ("-N2", "--ntasks-per-node", "2", "-l", "srun")

# The second rank of the second node fails in this way; the others go on until they are ended.
FAILURE = """
    import os, sys, time
    for step in range(20):
        print("step", step, "loss", 1 / (step + 1), flush=True)
    if os.environ["RANK"] == "3":
        {failure}
    time.sleep(60)
"""

WAYS = {
    "exception": ("raise ValueError('bad shard 17')", "python-exception", 1, None, "code"),
    "import": ("import no_such_module_here", "import-error", 1, None, None),
    "exit-code": ("sys.exit(42)", "exit-code", 42, None, "code"),
    "kill": ("os.kill(os.getpid(), 9)", "killed", 137, 9, "unknown"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "segfault", 139, 11, "code"),
    "bus": ("os.kill(os.getpid(), 7)", "bus-error", 135, 7, None),
    "nan": ("print('Loss is nan, stopping training'); sys.exit(1)", "nan-loss", 1, None, "code"),
    "disk": ("open('/dev/full', 'w', buffering=1).write('checkpoint\\n')", "disk-full", 1, None, None),
    "port": (
        "import socket; a = socket.create_server(('', 0)); socket.create_server(('', a.getsockname()[1]))",
        "port-in-use", 1, None, None,
    ),
}  # fmt: skip


def verdict_of(cli: Cli, job: str, *words: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(cli("diagnose", "--json", *words, job).stdout)
    assert document["schema"] == 1
    assert document["job"] == job
    verdict: dict[str, Any] = document["verdict"]
    return verdict


@pytest.mark.sampled(4)
@WITHOUT_SSH
@pytest.mark.parametrize("way", WAYS)
def test_diagnose_names_the_rank_that_failed_and_the_cause(cli: Cli, way: str) -> None:
    failure, cause, code, signal, blame = WAYS[way]
    job = cli.submit(*TWO_BY_TWO, cli.script(FAILURE.replace("{failure}", failure)))
    cli.wait_for_end(job, limit=120)
    verdict = verdict_of(cli, job)
    assert (verdict["cause"], verdict["rank"], verdict["local_rank"]) == (cause, 3, 1)
    assert (verdict["exit_code"], verdict["signal"]) == (code, signal)
    assert verdict["node"] == {record.rank: record.host for record in cli.run_dir(job).ranks(0)}[3]
    assert verdict["evidence"]
    assert blame in (None, verdict["blame"])
    stdout = cli("diagnose", job).stdout
    assert "rank 3" in stdout
    assert cause in stdout


@WITHOUT_SSH
def test_diagnose_shows_the_frame_of_the_user_code(cli: Cli) -> None:
    script = cli.script("import json\n\ndef load():\n    json.loads('no json')\n\nload()\n")
    job = cli.submit(script)
    cli.wait_for_end(job)
    verdict = verdict_of(cli, job)
    assert verdict["cause"] == "python-exception"
    assert "train.py:4 in load" in verdict["summary"]
    assert any("json.loads('no json')" in line["text"] for line in verdict["evidence"])


@WITHOUT_SSH
def test_diagnose_names_the_hanging_rank_from_the_collective_timeouts(cli: Cli) -> None:
    job = cli.submit(
        *TWO_BY_TWO, "--python", sys.executable,
        cli.script("""
            import datetime, pathlib, time, traceback
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            rank, group = dist.get_rank(), dist.new_group(timeout=datetime.timedelta(seconds=8))
            for step in range(5):
                dist.all_reduce(torch.ones(4))
                print("step", step, flush=True)
            if rank == 2:
                time.sleep(600)
            try:
                dist.all_reduce(torch.ones(4), group=group)
            except RuntimeError:
                traceback.print_exc()
                pathlib.Path(f"gave-up-{rank}").touch()
                while len(list(pathlib.Path().glob("gave-up-*"))) < 3:  # srun ends the others with the first
                    time.sleep(0.1)
                raise
        """),
    )  # fmt: skip
    cli.wait_for_end(job, limit=200)
    verdict = verdict_of(cli, job)
    assert (verdict["cause"], verdict["rank"]) == ("collective-timeout", 2)


@WITHOUT_SSH
def test_diagnose_finds_an_exception_among_ranks_with_lost_connections(cli: Cli) -> None:
    job = cli.submit(
        "-N2", "--ntasks-per-node", "2", "-l", "torchrun", "--python", sys.executable,
        cli.script("""
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            for step in range(9):
                dist.all_reduce(torch.ones(4))
                if dist.get_rank() == 1 and step == 5:
                    {}["missing"]
        """),
    )  # fmt: skip
    cli.wait_for_end(job, limit=200)
    verdict = verdict_of(cli, job)
    assert (verdict["cause"], verdict["rank"]) == ("python-exception", 1)
    assert "KeyError" in verdict["summary"]


@WITHOUT_SSH
def test_diagnose_reports_a_cancelled_job(cli: Cli) -> None:
    job = cli.submit(*TWO_BY_TWO, cli.script("import time; print('hello', flush=True); time.sleep(90)"))
    run = cli.run_dir(job)
    cli.wait_until(lambda: len(run.ranks(0)) == 4)
    cli("cancel", job)
    cli.wait_for_end(job, limit=120)
    verdict = verdict_of(cli, job)
    assert (verdict["cause"], verdict["rank"], verdict["blame"]) == ("cancelled", None, "user")


@pytest.mark.sampled(1)
@WITHOUT_SSH
@pytest.mark.slow
def test_diagnose_reports_a_time_limit_unless_a_rank_failed_before(cli: Cli) -> None:
    failed = cli.submit(
        "-t", "1", *TWO_BY_TWO,
        cli.script("""
            import os, time, traceback
            if os.environ["RANK"] == "1":
                try:
                    [][7]
                except IndexError:
                    traceback.print_exc()
            time.sleep(290)
        """),
    )  # fmt: skip
    if cli.cluster == "slurm":  # this machine alone has no room for both at once
        script = cli.script("import time; print('hello', flush=True); time.sleep(290)", "fine.py")
        fine = cli.submit("-t", "1", *TWO_BY_TWO, script)
        cli.wait_for_end(fine, limit=200)
        verdict = verdict_of(cli, fine)
        assert (verdict["cause"], verdict["rank"], verdict["blame"]) == ("time-limit", None, "user")
        assert "1 min" in verdict["summary"]
    cli.wait_for_end(failed, limit=200)
    verdict = verdict_of(cli, failed)
    assert (verdict["cause"], verdict["rank"]) == ("python-exception", 1)


@WITHOUT_SSH
def test_diagnose_reports_that_nothing_failed(cli: Cli) -> None:
    job = cli.submit(cli.script("print('WARNING: error: CUDA out of memory in autotune, ignored')"))
    cli.wait_for_end(job)
    assert verdict_of(cli, job)["cause"] == "none"
    assert "did not fail" in cli("diagnose", job).stdout


@WITHOUT_SSH
def test_diagnose_reports_a_missing_attempt(cli: Cli) -> None:
    job = cli.submit(cli.script("print(1)"))
    cli.wait_for_end(job)
    assert "no attempt 7, only 0" in cli("diagnose", "--attempt", "7", job, code=2).stderr


@WITHOUT_SSH
def test_c1_diagnose_prints_no_control_sequences(cli: Cli) -> None:
    job = cli.submit(
        cli.script(r"raise ValueError('\x1b]52;c;ZXZpbA==\x07\x1b[2J evil\nJobState=COMPLETED')")
    )
    cli.wait_for_end(job)
    stdout = cli("diagnose", job).stdout
    assert "evil" in stdout
    assert "\x1b" not in stdout
    assert "\x07" not in stdout


@WITHOUT_SSH
def test_c30_log_text_does_not_change_the_verdict_of_a_successful_run(cli: Cli) -> None:
    lines = "print('Segmentation fault'); print('srun: error: Node failure on n1')"
    job = cli.submit(cli.script(lines))
    cli.wait_for_end(job)
    assert verdict_of(cli, job)["cause"] == "none"


@pytest.mark.parametrize("cli", ["local"], indirect=True)
@pytest.mark.skipif(os.geteuid() != 0, reason="root mounts the small disk")
def test_f67_diagnose_names_a_disk_filled_by_logs(cli: Cli, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k,mode=0700", "tmpfs", small], check=True)
    try:
        script = cli.script("for number in range(100000): print(number, 'x' * 50)")
        job = cli.submit("--run-root", str(small), "-l", "srun", "--no-sample", script)
        assert cli.wait_for_end(job)["statuses"][0]["state"] == "FAILED"
        verdict = verdict_of(cli, job)
        assert (verdict["cause"], verdict["blame"]) == ("disk-full", "unknown")
        assert verdict["confidence"] < 0.7  # a guess, and said to be one
        assert "0 bytes are free" in verdict["evidence"][0]["text"]
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


@ON_SLURM
def test_f13_missing_output_directory_is_explained(cli: Cli) -> None:
    job = cli.submit("--sbatch=--hold", cli.script("print(1)"))
    logs = cli.run_dir(job).path / "logs"
    shutil.rmtree(logs)
    cli("release", job)
    if cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED":  # Slurm 26.05 makes the folder
        assert (logs / "batch.log").exists()
        return
    result: dict[str, Any] = {}

    def accounted() -> bool:  # which lags; that of Slurm 20.11 tells at times exit code 1 in place of 0:53
        result.update(cli.status(job)["statuses"][0])
        return bool(result["signal"] == 53 or result["exit_code"] == 1)

    cli.wait_until(accounted)
    if result["signal"] == 53:
        assert "could not open the job's output file" in cli("status", job).stdout.replace("\n", " ")
    verdict = verdict_of(cli, job)
    assert (verdict["cause"], verdict["blame"]) == ("unknown", "site")
    assert "could not start the script" in verdict["summary"]
