"""The files of large jobs, in jobs of a few nodes for which the limit of small jobs is lowered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from dtslurm.store.rundir import RunDir
from tests.e2e.conftest import WITHOUT_SSH, Cli, events_of
from tests.e2e.test_lost_agents import agent_processes

LARGE = ("-N2", "--ntasks-per-node", "2", "-l", "srun", "--env", "DTSLURM_PLAIN_NODES=1")
MANY_RECORDS = """
    import os, pathlib
    folder = pathlib.Path(os.environ["DTSLURM_RUN_DIR"], "ranks", os.environ["DTSLURM_ATTEMPT"])
    if os.environ["RANK"] == "0":
        for number in range(3000):  # as many ranks as the argument list of a program has no room for
            (folder / f"{number:0100}.error.json").touch()
"""
STEPS = """
    import os, pathlib, sys, time
    rank, folder = os.environ["RANK"], pathlib.Path(os.environ["DTSLURM_CHECKPOINT_DIR"])
    (folder / f"files-{rank}").write_text(os.environ["DTSLURM_NODE_FILES"])
    print("begin", rank, flush=True)
    has_printed = False
    for step in range(6000):
        if (folder / "print").exists() and not has_printed:
            has_printed = True
            print("step", step, "of", rank, flush=True)
        if (folder / "fail").exists() or (folder / "end").exists():
            print("end", rank, "on stderr", end="", file=sys.stderr, flush=True)
            if rank == "3" and (folder / "fail").exists():
                raise ValueError("bad value of rank 3")
            time.sleep(600 if (folder / "fail").exists() else 0)
            break
        time.sleep(0.2)
"""


def log_of(cli: Cli, job: str, *words: str) -> str:
    return cli("logs", job, *words).stdout


@WITHOUT_SSH
def test_f87_the_ranks_of_a_node_share_a_log_that_outlives_its_agents(cli: Cli) -> None:
    job = cli.submit(*LARGE, "--max-restarts", "0", cli.script(STEPS))
    run = cli.run_dir(job)
    checkpoints, logs = run.path / "checkpoints", run.path / "logs/0"
    cli.wait_until(lambda: "begin 3" in log_of(cli, job, "--rank", "3"))
    cli.wait_until(lambda: "begin 0" in log_of(cli, job, "--rank", "0"))
    assert {path.name for path in logs.glob("rank*")} == {"ranks-0.log", "ranks-2.log"}
    assert {path.name for path in (run.path / "ranks/0").glob("*.json*")} >= {
        "ranks-0.jsonl",
        "ranks-2.jsonl",
    }
    for node in events_of(run, "attempt")[0]["nodes"]:  # the ranks write on without an agent
        for agent in agent_processes(run, node):
            os.kill(agent, signal.SIGKILL)
    (checkpoints / "print").touch()
    cli.wait_until(lambda: "of 2" in log_of(cli, job, "--rank", "2"))
    cli.wait_until(lambda: "of 0" in log_of(cli, job, "--rank", "0"))
    (checkpoints / "fail").touch()
    assert cli.wait_for_end(job, 240)["statuses"][0]["state"] == "FAILED"
    text = log_of(cli, job, "--rank", "3")
    assert [
        text.count(words) for words in ("begin 3", "of 3", "end 3 on stderr", "ValueError: bad value")
    ] == [1] * 4
    plain = subprocess.run(
        ["grep", "-h", "^3: ", *logs.glob("ranks-*.log")], capture_output=True, text=True, check=True
    ).stdout
    assert "3: ValueError: bad value of rank 3" in plain
    diagnosis = json.loads(cli("diagnose", "--json", job, code=None).stdout)
    assert "bad value of rank 3" in json.dumps(diagnosis)
    assert run.first_failure(0) == (3, 1)
    assert "bad value of rank 3" in run.first_error(0)
    assert [record.rank for record in run.ranks(0)] == [0, 1, 2, 3]
    assert {record.exit_code for record in run.ranks(0) if record.rank == 3} == {1}


@WITHOUT_SSH
def test_a_followed_rank_of_a_large_job_is_complete_and_leaves_no_files_on_its_node(cli: Cli) -> None:
    job = cli.submit(*LARGE, "--max-restarts", "0", cli.script(STEPS))
    run = cli.run_dir(job)
    cli.wait_until(lambda: len(list((run.path / "checkpoints").glob("files-*"))) == 4)
    command = ["logs", job, "--rank", "1", "--follow"]
    (run.path / "checkpoints/end").touch()
    followed = cli(*command, timeout=240).stdout
    assert cli.wait_for_end(job, 240)["statuses"][0]["state"] == "COMPLETED"
    assert "begin 1" in followed
    assert "end 1 on stderr" in followed
    assert {record.exit_code for record in run.ranks(0)} == {0}
    for path in (run.path / "checkpoints").glob("files-*"):
        assert not Path(path.read_text()).exists()


@WITHOUT_SSH
def test_ranks_of_a_large_job_wait_for_each_other_with_one_file_for_each_node(cli: Cli) -> None:
    job = cli.submit(*LARGE, "--max-restarts", "0", "--signal-before", "60", cli.script(STEPS))
    run = cli.run_dir(job)
    cli.wait_until(lambda: len(list((run.path / "checkpoints").glob("files-*"))) == 4)
    running = run.path / "ranks/0/running"
    assert {path.name for path in running.iterdir()} == {"node-0", "node-1"}
    (run.path / "checkpoints/end").touch()
    assert cli.wait_for_end(job, 240)["statuses"][0]["state"] == "COMPLETED"
    assert list(running.iterdir()) == []


@WITHOUT_SSH
def test_f87_the_next_attempt_copies_what_the_ranks_of_a_killed_agent_have_written(cli: Cli) -> None:
    job = cli.submit(*LARGE, "--max-restarts", "1", cli.script(STEPS))
    run = cli.run_dir(job)
    checkpoints = run.path / "checkpoints"
    cli.wait_until(lambda: "begin 3" in log_of(cli, job, "--rank", "3"))
    files = Path((checkpoints / "files-3").read_text())
    (checkpoints / "print").touch()
    cli.wait_until(lambda: "of 3" in (files / "3.log").read_text())
    for pid in processes_on(
        run, events_of(run, "attempt")[0]["nodes"][1]
    ):  # at most 5 s of output are not copied
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cli.wait_until(lambda: "of 3" in log_of(cli, job, "--rank", "3", "--attempt", "0"), 240)
    (checkpoints / "end").touch()
    assert cli.wait_for_end(job, 300)["statuses"][0]["state"] == "COMPLETED"
    assert log_of(cli, job, "--rank", "3", "--attempt", "0").count("begin 3") == 1
    assert not files.exists()


def processes_on(run: RunDir, node: str) -> list[int]:
    """Return the processes of a run's ranks and of their agent on a node."""
    expected = {f"SLURMD_NODENAME={node}", f"DTSLURM_RUN_DIR={run.path}", "DTSLURM_ATTEMPT=0"}
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (folder / "environ").read_bytes().decode("utf-8", "replace").split("\0")
            pids += [int(folder.name)] if expected <= set(variables) else []
    return pids


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
