"""The survive example as a job: after a requeue or a preemption its result is unchanged."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtslurm.store.rundir import RunDir
from tests.e2e.conftest import ON_SLURM, WITHOUT_SSH, Cli, events_of
from tests.lab.cluster import SlurmLab
from tests.lab.software import Software

torch = pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "survive" / "train.py"
WORDS = ["--ntasks-per-node", "2", "-l", "torchrun", "--python", sys.executable, "--no-snapshot"]


def start(cli: Cli, *words: str, pause: str = "0") -> tuple[str, RunDir]:
    shutil.copy(EXAMPLE, cli.folder)
    job = cli.submit(*WORDS, *words, "train.py", pause)
    return job, cli.run_dir(job)


def whole(cli: Cli) -> Any:
    """Return the weights of a run that nothing happens to."""
    job, _ = start(cli)
    assert cli.wait_for_end(job, limit=240)["statuses"][0]["state"] == "COMPLETED"
    return weights(cli)


def weights(cli: Cli) -> Any:
    result = torch.load(cli.folder / "net.pt")
    (cli.folder / "net.pt").unlink()
    return result


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.sampled(1, "the example")
@WITHOUT_SSH
def test_requeued_job_ends_with_the_weights_of_an_undisturbed_job(cli: Cli) -> None:
    wanted = whole(cli)
    job, run = start(cli, pause="0.01")
    cli.wait_until((run.path / "checkpoints" / "step-00000100-a0").exists, limit=240)
    cli("requeue", job)
    assert cli.wait_for_end(job, limit=240)["statuses"][0]["state"] == "COMPLETED"
    [restored] = events_of(run, "restored")
    assert restored["attempt"] == 1
    assert restored["step"] >= 100
    assert same(weights(cli), wanted)
    assert (run.path / "attempt").read_text() == "1\n"


@pytest.fixture
def preempting(tmp_path: Path, lab_root: Path, slurm_software: Software) -> Iterator[tuple[Cli, SlurmLab]]:
    """A cluster whose partition `urgent` takes nodes from jobs of `main`, after a time of grace."""
    extra = [
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "PartitionName=main Nodes=ALL Default=YES MaxTime=1-00:00:00 State=UP PriorityTier=1 GraceTime=30",
        "PartitionName=urgent Nodes=ALL State=UP PriorityTier=9 PreemptMode=off",
    ]
    folder = tmp_path / "project"
    folder.mkdir()
    with SlurmLab(lab_root, nodes=1, extra_conf=extra, software=slurm_software) as lab:
        yield Cli("slurm", folder, {**lab.env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")}), lab


@pytest.mark.sampled(1, "the example")
@pytest.mark.slurm
def test_f25_f27_preempted_example_saves_in_the_grace_time_and_continues(
    preempting: tuple[Cli, SlurmLab],
) -> None:
    cli, lab = preempting
    wanted = whole(cli)
    job, run = start(cli, "-p", "main", pause="0.05")
    cli.wait_until((run.path / "checkpoints" / "step-00000050-a0").exists, limit=240)
    lab.run(["sbatch", "-p", "urgent", "--exclusive", "-t", "1", "--wrap", "sleep 1"])
    cli.wait_until(lambda: "exits with code 85" in (run.logs(0) / "rank-0.log").read_text(), limit=120)
    last = events_of(run, "checkpoint")[-1]["step"]
    if "PENDING" not in cli.state(job):  # a Slurm before 24.05 takes a job that ends in its grace for failed
        over = {"FAILED", "PENDING", "COMPLETED"}
        cli.wait_until(lambda: any(state in cli.state(job) for state in over), limit=120)
        if "FAILED" in cli.state(job):
            cli("requeue", job)
    assert cli.wait_for_end(job, limit=240)["statuses"][0]["state"] == "COMPLETED"
    assert events_of(run, "restored")[-1]["step"] == last
    assert same(weights(cli), wanted)


@pytest.mark.slurm
@pytest.mark.parametrize("words", [("-l", "srun"), ("-l", "torchrun", "--ntasks-per-node", "2")])
def test_a_preemption_without_a_supervisor_is_diagnosed(
    preempting: tuple[Cli, SlurmLab], words: tuple[str, ...]
) -> None:
    cli, lab = preempting
    script = cli.script("""
        import time
        for step in range(600):
            print("step", step, "loss", 1 / (step + 1), flush=True)
            time.sleep(1)
    """)
    job = cli.submit("-p", "main", "-t", "20", "--python", sys.executable, *words, script)
    log = cli.run_dir(job).logs(0) / "rank-0.log"
    cli.wait_until(lambda: log.exists() and "step 3" in log.read_text(), limit=120)
    lab.run(["sbatch", "-p", "urgent", "--exclusive", "-t", "1", "--wrap", "sleep 1"])
    cli.wait_for_end(job, limit=240)
    verdict = json.loads(cli("diagnose", "--json", job).stdout)["verdict"]
    assert (verdict["cause"], verdict["blame"]) == ("preempted", "site")
    assert verdict["confidence"] > 0.9


@pytest.mark.slurm
def test_each_task_of_a_preempted_array_completes_once(preempting: tuple[Cli, SlurmLab]) -> None:
    """The environment variable ``ARRAY_TASKS`` sets the size of the array.

    Three tasks run until they are preempted, so that each preemption meets a running task. A task costs 1.1 s
    of CPU time, so an array of 1,000 tasks costs some 20 minutes: too much for the suite.
    """
    cli, lab = preempting
    tasks = int(os.environ.get("ARRAY_TASKS", "16"))
    long_tasks = [tasks * share // 4 for share in range(1, 4)]
    script = cli.script(f"""
        import os, pathlib, time
        task = int(os.environ["SLURM_ARRAY_TASK_ID"])
        running = pathlib.Path(f"running-{{task}}")
        if task in {long_tasks} and not running.exists():  # preempted before this line, it runs again
            running.touch()
            time.sleep(600)
        time.sleep(3)
        with open("completed.txt", "a") as file:
            file.write(f"{{task}}\\n")
    """)
    completed = cli.folder / "completed.txt"
    job = cli.submit("-p", "main", "-a", f"0-{tasks - 1}", "--max-restarts", "1", "--no-snapshot", script)
    for task in long_tasks:
        cli.wait_until((cli.folder / f"running-{task}").exists, limit=60 + tasks)
        lab.run(["sbatch", "-p", "urgent", "--exclusive", "-t", "1", "--wrap", "sleep 1"])
    statuses = cli.wait_for_end(job, limit=240 + tasks)["statuses"]
    assert [item["state"] for item in statuses] == ["COMPLETED"] * tasks
    assert set(map(int, completed.read_text().split())) == set(range(tasks))
    attempts: dict[int, int] = {}
    for index, run in cli.run_dir(job).tasks().items():
        records = sorted(run.path.glob("ranks/*/0.json"), key=lambda path: int(path.parent.name))
        codes = [json.loads(path.read_text())["exit_code"] for path in records]
        assert (codes.count(0), codes[-1]) == (1, 0), (run.path, codes)
        attempts[int(index)] = len(codes)
    assert all(attempts[task] >= 2 for task in long_tasks), attempts


@ON_SLURM
def test_f45_hang_of_a_single_rank_is_detected_at_the_hang_timeout(cli: Cli) -> None:
    script = cli.script("""
        import os, time
        print("step 1", flush=True)
        if os.environ["DTSLURM_ATTEMPT"] == "0":
            time.sleep(600)
    """)
    job = cli.submit("-l", "single", "--max-restarts", "1", "--hang-timeout", "15s", script)
    cli.wait_until(lambda: [event for event in cli.run_dir(job).events() if event["event"] == "hang"], 240)
    [hang] = [event for event in cli.run_dir(job).events() if event["event"] == "hang"]
    assert "and no rank computed" in hang["summary"]  # else it takes three times as long
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
