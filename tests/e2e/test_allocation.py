"""``dtslurm alloc`` and ``dtslurm submit --in``: runs as steps of an allocation that the user holds."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import ON_SLURM, Cli, events_of
from tests.lab.cluster import SlurmLab
from tests.waiting import busyness

pytestmark = pytest.mark.timeout(600)
ON_SLURM_AND_OVER_SSH = pytest.mark.parametrize(
    "cli",
    [
        pytest.param("slurm", marks=pytest.mark.slurm),
        pytest.param("far", marks=[pytest.mark.slurm, pytest.mark.ssh]),
    ],
    indirect=True,
)
WAITS = """
    import os, signal, sys, time
    def save(*_):
        time.sleep(1)
        open("saved-" + os.environ["RANK"], "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("began", os.environ["RANK"], flush=True)
    while True:
        time.sleep(0.2)
"""


@pytest.fixture
def sharing_steps(slurm_lab: SlurmLab) -> None:
    """Skip the test if the steps of this Slurm share only CPUs, so that --in is refused."""
    if tuple(int(part) for part in slurm_lab.version.split(".")[:2]) < (22, 5):
        pytest.skip(f"in Slurm {slurm_lab.version} steps share only CPUs")


@pytest.fixture
def allocation(cli: Cli, sharing_steps: None) -> str:
    """An allocation of two nodes with two GPUs and two CPUs each."""
    words = ["-N2", "--gpus-per-node=2", "--ntasks-per-node=2", "-t10", "--parsable"]
    job = cli("alloc", "--cluster", cli.cluster, *words).stdout.strip()
    cli.started.append(job)
    return job


def run_in(cli: Cli, allocation: str, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    options = ["--cluster", cli.cluster, "--in", allocation, "--python", sys.executable, "--no-snapshot"]
    return cli("submit", *options, *words, code=code)


@ON_SLURM_AND_OVER_SSH
def test_script_runs_at_once_on_all_nodes_and_gpus_of_the_allocation(cli: Cli, allocation: str) -> None:
    text = """
        import os, sys
        print(os.environ["WORLD_SIZE"], os.environ["SLURM_JOB_NODELIST"], os.environ["CUDA_VISIBLE_DEVICES"])
        sys.exit(int(sys.argv[1]))
    """
    done = run_in(cli, allocation, "-l", "srun", "-p", "main", "--wait", cli.script(text), "3", code=3)
    assert f"no effect in allocation {allocation}: --partition" in done.stderr
    run = json.loads(cli("status", "--json", "-n", "1").stdout)["runs"][0]
    job = run["record"]["job_id"]
    assert job.startswith(f"{allocation}.")
    assert (run["statuses"][0]["state"], run["statuses"][0]["exit_code"]) == ("FAILED", 3)
    nodes = run["statuses"][0]["nodelist"]
    lines = [line for line in cli("logs", job).stdout.splitlines() if "] 4 " in line]
    assert sorted(lines) == [f"[{rank}] 4 {nodes} 0,1" for rank in range(4)]
    assert "exit code 3" in cli("diagnose", job).stdout
    single = run_in(cli, allocation, "-l", "single", "--wait", cli.script("print('once')"))
    assert "COMPLETED" in single.stderr
    assert cli.state(allocation) == "RUNNING"


@ON_SLURM
@pytest.mark.usefixtures("sharing_steps")
def test_script_runs_in_an_allocation_of_salloc(cli: Cli) -> None:
    environment = {**os.environ, **cli.env}
    argv = ["salloc", "--no-shell", "-N1", "-c2", "--gpus-per-node=1", "-t5"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    job = done.stderr.split()[-1]
    text = "import os; print('GPU', os.environ['CUDA_VISIBLE_DEVICES'])"
    try:
        assert "[0] GPU 0" in run_in(cli, job, "-l", "srun", "--follow", cli.script(text)).stdout
    finally:
        subprocess.run(["scancel", job], env=environment, check=True)


@ON_SLURM_AND_OVER_SSH
def test_cancel_ends_the_run_and_not_the_allocation(cli: Cli, allocation: str) -> None:
    run = run_in(cli, allocation, "-l", "srun", "--parsable", cli.script(WAITS)).stdout.strip()
    cli.wait_until(lambda: cli("logs", run, code=None).stdout.count("began") == 4)
    assert cli("exec", run, "printenv", "RANK").stdout == "0\n"
    in_use = run_in(cli, allocation, "train.py", code=2).stderr
    assert f"run {run} is running in this allocation" in in_use
    assert "cannot be requeued" in cli("requeue", run, code=2).stderr
    assert cli("cancel", run).stderr + cli("status", run).stdout
    assert cli.wait_for_end(run)["statuses"][0]["state"] == "CANCELLED"
    assert sorted(path.name for path in cli.folder.glob("saved-*")) == [f"saved-{rank}" for rank in range(4)]
    assert cli.state(allocation) == "RUNNING"
    assert (
        cli("exec", allocation, "--all", "--", "sh", "-c", "echo on $SLURMD_NODENAME").stdout.count("on n")
        == 2
    )
    assert cli("exec", allocation, "cat").stdout == ""
    argv = [sys.executable, "-m", "dtslurm", "exec", allocation, "-i", "--", "tr", "a-z", "A-Z"]
    environment = {**os.environ, **cli.env}
    done = subprocess.run(argv, input="lines\n", text=True, capture_output=True, check=True, env=environment)
    assert done.stdout == "LINES\n"
    assert "has no ranks" in cli("exec", allocation, "--rank", "0", "true", code=2).stderr
    assert "has no node 'nowhere'" in cli("exec", allocation, "--node", "nowhere", "true", code=2).stderr


@contextlib.contextmanager
def started(cli: Cli, *words: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "dtslurm", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(argv, cwd=cli.folder, env={**os.environ, **cli.env}, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


@ON_SLURM
def test_ctrl_c_ends_the_run_and_not_the_allocation(cli: Cli, allocation: str) -> None:
    options = ["--cluster", cli.cluster, "--in", allocation, "--python", sys.executable, "-l", "srun", "-N1"]
    with started(cli, "submit", *options, "-f", cli.script(WAITS)) as client:
        assert client.stdout is not None
        lines = []
        for line in client.stdout:
            lines.append(line)
            if "began" in line:
                client.send_signal(signal.SIGINT)
                break
        rest, _ = client.communicate(timeout=60 * busyness())
        assert client.returncode == 130
    run = next(line.split()[1] for line in lines if line.startswith("run "))
    assert f"cancelled: {run}; allocation {allocation} stays" in rest
    assert cli.wait_for_end(run)["statuses"][0]["state"] == "CANCELLED"
    assert cli.state(allocation) == "RUNNING"


@ON_SLURM
def test_end_of_the_allocation_ends_the_run(cli: Cli, allocation: str) -> None:
    run = run_in(cli, allocation, "-l", "srun", "--parsable", cli.script(WAITS)).stdout.strip()
    cli.wait_until(lambda: cli("logs", run, code=None).stdout.count("began") == 4)
    cli("cancel", allocation)
    # To sacct, a step without an end has the state of its job; this one ends with exit code 0.
    assert cli.wait_for_end(run)["statuses"][0]["state"] in {"CANCELLED", "COMPLETED"}
    cli.wait_for_end(allocation)
    assert len(list(cli.folder.glob("saved-*"))) == 4  # Slurm gave the ranks the time to save
    assert (
        f"job {allocation} has ended: its state is CANCELLED"
        in run_in(cli, allocation, "train.py", code=2).stderr
    )


@ON_SLURM
def test_supervisor_restarts_within_the_allocation_and_requeues_nothing(cli: Cli, allocation: str) -> None:
    text = """
        import os, sys
        sys.exit({"0": 7, "1": 85}[os.environ["DTSLURM_ATTEMPT"]])
    """
    options = ["-l", "srun", "-N1", "--max-restarts=1", "--no-health-check", "--parsable"]
    run = run_in(cli, allocation, *options, cli.script(text)).stdout.strip()
    assert cli.wait_for_end(run)["statuses"][0]["exit_code"] == 85
    decisions = events_of(cli.run_dir(run), "decision")
    assert [decision["action"] for decision in decisions] == ["restart", "stop"]
    assert "not requeued" in decisions[1]["reason"]
    assert cli.status(allocation)["statuses"][0]["restarts"] in {0, None}
    assert cli.state(allocation) == "RUNNING"


@ON_SLURM
def test_run_outlives_the_srun_that_started_it(cli: Cli, allocation: str) -> None:
    run = run_in(cli, allocation, "-l", "srun", "-N1", "--parsable", cli.script(WAITS)).stdout.strip()
    cli.wait_until(lambda: "began" in cli("logs", run, code=None).stdout)
    name = f"dtslurm:{cli.status(run)['record']['token']}"
    clients = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(word.startswith(f"--job-name={name}") for word in process.info["cmdline"] or ())
    ]
    assert clients
    for client in clients:
        client.suspend()  # a process of srun kills the step if it sees the other one killed
    for client in clients:
        client.kill()
    assert cli.state(run) == "RUNNING"
    cli("cancel", run)
    assert cli.wait_for_end(run)["statuses"][0]["state"] == "CANCELLED"
    assert sorted(path.name for path in cli.folder.glob("saved-*")) == ["saved-0", "saved-1"]


@ON_SLURM
def test_of_runs_that_start_at_the_same_time_one_goes_on(cli: Cli, allocation: str) -> None:
    words = ["--cluster", cli.cluster, "--in", allocation, "--python", sys.executable, "-l", "srun", "-N1"]
    words += ["--no-check", "--parsable", cli.script(WAITS)]
    with started(cli, "submit", *words) as one, started(cli, "submit", *words) as other:
        outputs = {client: client.communicate(timeout=60 * busyness())[0] for client in (one, other)}
    refused = [text for client, text in outputs.items() if client.returncode]
    assert len(refused) == 1
    run = next(text.split()[-1] for client, text in outputs.items() if client.returncode == 0)
    assert f"run {run} is running in this allocation" in refused[0]
    cli("cancel", run)
    assert cli.wait_for_end(run)["statuses"][0]["state"] == "CANCELLED"


@ON_SLURM
def test_jobs_in_which_no_run_can_start_are_refused(cli: Cli, allocation: str) -> None:
    environment = {**os.environ, **cli.env}

    def sbatch(*words: str) -> str:
        argv = ["sbatch", "--parsable", "--output=/dev/null", *words, "--wrap=sleep 600"]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    cli.script("print()")
    held, array = sbatch("--hold"), sbatch("--array=1")
    own_run = cli.submit("-l", "srun", "--python", sys.executable, cli.script(WAITS, "wait.py"))
    try:
        cli.wait_until(lambda: cli.state(own_run) == "RUNNING")
        for words, problem in {
            ("999999999",): "Slurm knows no such job",
            (held,): f"job {held} is pending (JobHeldUser)",
            (array,): f"job {array}_1 is a task of a job array",
            (own_run,): f"job {own_run} is a run itself",
            (allocation, "-N", "3"): f"the run needs 3 nodes, and allocation {allocation} has 2",
        }.items():
            assert (
                problem in cli("submit", "--cluster", cli.cluster, "--in", *words, "train.py", code=2).stderr
            )
        assert len(cli.recorded_runs()) == 2
    finally:
        subprocess.run(["scancel", held, array], env=environment, check=True)


@ON_SLURM
def test_allocation_that_nobody_uses_ends(cli: Cli) -> None:
    done = cli("alloc", "--cluster", cli.cluster, "-t10", "--idle", "00:00:03")
    job = done.stdout.split()[1]
    cli.started.append(job)
    assert "no step has run in it for 00:00:03" in done.stdout
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    assert "no step has run for 3 s" in cli("logs", job).stdout


@ON_SLURM
@pytest.mark.usefixtures("sharing_steps")
def test_documented_session_works(cli: Cli) -> None:
    text = (
        (Path(__file__).parents[2] / "docs" / "live.md")
        .read_text()
        .partition("## Run scripts in an allocation")[2]
    )
    commands = [line.split() for line in re.findall(r"^\$ dtslurm (.+)$", text, re.MULTILINE)]
    cli.script("print('hello')")
    assert [words[0] for words in commands] == ["alloc", "submit", "exec", "cancel"]
    done = cli(*commands[0])
    job = done.stdout.split()[1]
    cli.started.append(job)
    outputs = [cli(*(job if word == "17" else word for word in words)).stdout for words in commands[1:]]
    assert "hello" in outputs[0]
    assert len(outputs[1].split()) == 2
    for line in done.stdout.splitlines()[1:]:
        assert line.replace(job, "17") in text


@ON_SLURM
def test_ctrl_c_cancels_an_allocation_that_is_pending(cli: Cli) -> None:
    words = ["alloc", "--cluster", cli.cluster, "-t10", "--sbatch=--begin=now+1hour"]
    with started(cli, *words) as client:
        assert client.stdout is not None
        for line in client.stdout:
            if "pending, BeginTime" in line:
                client.send_signal(signal.SIGINT)
                break
        rest, _ = client.communicate(timeout=60 * busyness())
        assert client.returncode == 130
    assert "is cancelled" in rest
    job = json.loads(cli("status", "--json").stdout)["runs"][0]["record"]["job_id"]
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "CANCELLED"


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_embedded_scheduler_has_no_allocations(cli: Cli) -> None:
    assert "cluster local has no Slurm" in cli("alloc", "--cluster", "local", code=2).stderr
    words = ["submit", "--cluster", "local", "--in", "1"]
    assert "cluster local has no Slurm" in cli(*words, cli.script("print()"), code=2).stderr
    for text in (
        "script: train.py\nstages: {a: {}, b: {needs: [a]}}\n",
        'script: train.py\nargs: ["${lr}"]\nsweep: {grid: {lr: [1, 2]}}\n',
    ):
        assert "contradict --in" in cli(*words, cli.script(text, "job.yaml"), code=2).stderr
    assert "--idle: 'soon' is not a duration" in cli("alloc", "--idle", "soon", code=2).stderr
    assert cli.recorded_runs() == []
