"""The sampler on each node of a job, and its lack of effect on the job."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dtslurm.services.observe.telemetry import RunPart, read_telemetry
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir, json_lines
from tests.e2e.conftest import ON_SLURM, WITHOUT_SSH, Cli

# Trains until every node has noted something twice, so that nothing hangs on how fast this machine is.
TRAIN = """\
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["DTSLURM_RUN_DIR"], "metrics", os.environ["DTSLURM_ATTEMPT"])
nodes, code = int(sys.argv[1]), int(sys.argv[2])
end = time.time() + 400
while time.time() < end:
    files = [folder / f"node-{node}.jsonl" for node in range(nodes)]
    if all(file.is_file() and file.read_bytes().count(b"\\n") >= 2 for file in files):
        print("noted by all nodes")
        sys.exit(code)
    time.sleep(0.3)
sys.exit("no notes came: " + str(list(folder.iterdir())))
"""


def sampler_commands(run: RunDir) -> list[str]:
    """Return the command lines of the run's samplers that are alive."""
    result = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{run.path}/sampler.py".encode() in words:
            result.append(b" ".join(words).decode())
    return result


def telemetry_lines(run: RunDir, node: int, attempt: int = 0) -> list[dict[str, object]]:
    return list(json_lines(run.path / "metrics" / str(attempt) / f"node-{node}.jsonl"))


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@WITHOUT_SSH
def test_every_node_is_sampled_without_an_effect_on_the_job(cli: Cli, launcher: str) -> None:
    script = cli.script(TRAIN)
    options = ("-N2", "--ntasks-per-node=2", "-l", launcher, "--python", sys.executable)
    job = cli.submit(*options, script, "2", "0")
    status = cli.wait_for_end(job, 450)["statuses"][0]
    assert (status["state"], status["exit_code"]) == ("COMPLETED", 0)
    run = cli.run_dir(job)
    assert "noted by all nodes" in (run.logs(0) / "rank-0.log").read_text()
    for node in (0, 1):
        first, *_, last = telemetry_lines(run, node)
        assert (first["schema"], first["node_rank"]) == (1, node)
        assert {"nics", "disks", "memory_used", "memory_total", "load", "time"} <= set(first)
        assert "gpus" not in first
        assert "cpu_percent" in last
    if cli.cluster == "slurm":
        assert telemetry_lines(run, 0)[0]["node"] != telemetry_lines(run, 1)[0]["node"]
    telemetry = read_telemetry(Context(cwd=cli.folder), run.load())
    assert [(item.node_rank, item.gpus) for item in telemetry.nodes] == [(0, ()), (1, ())]
    assert [rank.exit_code for rank in telemetry.ranks.values()] == [0, 0, 0, 0]
    cli.wait_until(lambda: not sampler_commands(run))


@WITHOUT_SSH
def test_sampled_job_returns_the_exit_code_of_training_and_leaves_no_process(cli: Cli) -> None:
    job = cli.submit("-l", "single", cli.script(TRAIN), "1", "7")
    status = cli.wait_for_end(job, 450)["statuses"][0]
    assert (status["state"], status["exit_code"]) == ("FAILED", 7)
    run = cli.run_dir(job)
    assert len(telemetry_lines(run, 0)) >= 2
    cli.wait_until(lambda: not sampler_commands(run))


@WITHOUT_SSH
def test_cancelled_job_ends_its_sampler(cli: Cli) -> None:
    job = cli.submit("-l", "single", cli.script("import time; time.sleep(600)"))
    run = cli.run_dir(job)
    cli.wait_until(lambda: telemetry_lines(run, 0))
    assert len(sampler_commands(run)) == 1
    cli("cancel", job)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "CANCELLED"
    cli.wait_until(lambda: not sampler_commands(run))


@ON_SLURM
def test_each_array_task_has_separate_telemetry(cli: Cli) -> None:
    job = cli.submit("-a", "0-1", "-l", "single", cli.script(TRAIN), "1", "0")
    assert {item["state"] for item in cli.wait_for_end(job, 450)["statuses"]} == {"COMPLETED"}
    tasks = cli.run_dir(job).tasks()
    assert [len(telemetry_lines(task, 0)) >= 2 for task in tasks.values()] == [True, True]
    telemetry = read_telemetry(Context(cwd=cli.folder), cli.run_dir(job).load(), RunPart(task="1"))
    assert (telemetry.task, telemetry.tasks, len(telemetry.nodes)) == ("1", ("0", "1"), 1)


def test_sampler_program_is_copied_into_the_run_directory(cli: Cli) -> None:
    run = cli.run_dir(cli.submit("--no-check", "-l", "single", cli.script("pass")))
    assert (run.path / "sampler.py").is_file()
    document = run.document()
    assert document["spec"]["sample"] is True


@ON_SLURM
def test_no_sample_option_omits_the_sampler(cli: Cli) -> None:
    job = cli.submit("--no-sample", "-l", "single", cli.script("print('hello')"))
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    run = cli.run_dir(job)
    assert not [path for path in run.path.rglob("*") if "sampler" in path.name or "node-0.jsonl" in path.name]
    assert "sampler.py" not in run.script_path.read_text()
    (cli.folder / "dtslurm.yaml").write_text("defaults:\n  sample: no\n")
    assert "sampler.py" not in cli("submit", "--dry-run", "-l", "single", "train.py").stdout
    again = cli("submit", "--dry-run", "--sample", "-l", "single", "train.py").stdout
    assert "/sampler.py" in again
    assert (
        "sampler.py" not in cli("render", "-l", "single", "train.py").stdout
    )  # plain sbatch has no such file


@ON_SLURM
def test_broken_sampler_does_not_affect_the_job(cli: Cli) -> None:
    job = cli.submit("--sbatch=--hold", "-l", "single", cli.script("print('trained')"))
    run = cli.run_dir(job)
    (run.path / "sampler.py").write_text("raise SystemExit(9)")
    cli("release", job)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    log = (run.logs(0) / "rank-0.log").read_text()
    assert log == "trained\n"
    assert json.loads((run.path / "ranks" / "0" / "0.json").read_text())["exit_code"] == 0
