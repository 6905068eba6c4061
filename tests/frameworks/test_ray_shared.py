"""Ray on a shared node: two jobs at the same time, and the remains of a cancelled job."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.frameworks.conftest import Activated
from tests.frameworks.test_other_frameworks import output, ray_python

pytestmark = [pytest.mark.frameworks, pytest.mark.slurm, pytest.mark.timeout(900)]

MEETS = """
    import os, pathlib, sys, time, ray
    print(os.environ["DTSLURM_RAY_FOLDER"], flush=True)
    print("at", os.environ["RAY_ADDRESS"], flush=True)
    ray.init()
    cpus, nodes = int(ray.cluster_resources()["CPU"]), len([node for node in ray.nodes() if node["Alive"]])
    pathlib.Path(sys.argv[1]).touch()
    while not pathlib.Path(sys.argv[2]).exists():
        time.sleep(0.2)
    square = ray.remote(lambda number: number * number)
    print(nodes, cpus, sum(ray.get([square.remote(number) for number in range(20)])), flush=True)
"""
WORDS = ("-N1", "-w", "n1", "-c2", "-l", "ray")


def folder(cli: Cli, job: str) -> Path:
    lines = (cli.run_dir(job).logs(0) / "rank-0.log").read_text().splitlines()
    [path] = [line for line in lines if line.startswith("/tmp/ray-")]
    return Path(path)


@pytest.fixture
def cli(activated: Activated) -> Cli:
    return activated(ray_python())


def submit(cli: Cli, *words: str) -> str:
    return cli.submit(*WORDS, cli.script(MEETS), *words)


@pytest.mark.sampled(1, "shared nodes")
def test_two_ray_jobs_share_a_node(cli: Cli) -> None:
    jobs = [submit(cli, "first", "second")]
    cli.wait_until((cli.folder / "first").exists, 300)  # two that start at once take longer than Ray waits
    jobs.append(submit(cli, "second", "first"))
    for job in jobs:
        status = cli.wait_for_end(job, limit=300)["statuses"][0]
        assert (status["state"], status["nodelist"]) == ("COMPLETED", "n1"), output(cli, job)
        lines = (cli.run_dir(job).logs(0) / "rank-0.log").read_text().splitlines()
        assert lines[-1] == "1 2 2470"
        assert not folder(cli, job).exists()


@pytest.mark.sampled(1, "shared nodes")
def test_cancelled_ray_job_removes_its_directory_and_refuses_clients_without_a_token(cli: Cli) -> None:
    job = submit(cli, "ready", "never")
    cli.wait_until((cli.folder / "ready").exists, 300)
    ray = folder(cli, job)
    assert ray.stat().st_mode & 0o777 == 0o700
    stranger = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False); print('it is in')"
    [address] = re.findall(r"^at (\S+)$", (cli.run_dir(job).logs(0) / "rank-0.log").read_text(), re.MULTILINE)
    done = subprocess.run(
        [ray_python(), "-c", stranger, address], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode != 0
    assert "it is in" not in done.stdout
    assert "token" in done.stderr, done.stderr
    cli("cancel", job)
    cli.wait_for_end(job, limit=120)
    cli.wait_until(lambda: not ray.exists(), 30)


def find_ray_process(run: Path, name: str) -> int | None:
    """Return a process of Ray in a run, None if there is none.

    Args:
        name: ``raylet`` is the process of each node, ``gcs_server`` that of the head.
    """
    found = []
    for entry in Path("/proc").iterdir():
        try:
            program = (entry / "cmdline").read_bytes().partition(b"\0")[0]
            if program.endswith(f"/{name}".encode()) and bytes(run) in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # no process, or it has ended
            continue
    return min(found, default=None)  # until it runs another program, a child looks like its parent


@pytest.mark.sampled(1, "shared nodes")
def test_ray_job_waits_for_a_slow_node(cli: Cli) -> None:
    (cli.folder / "second").touch()
    # Longer than Ray waits by itself: 30 s for its node, 60 s in a driver.
    delay = "RAY_testing_asio_delay_us=NodeInfoGcsService.grpc_server.RegisterNode=75000000:75000000"
    start = time.monotonic()
    job = cli.submit(*WORDS, "--env", delay, cli.script(MEETS), "first", "second")
    status = cli.wait_for_end(job, limit=400)["statuses"][0]
    assert status["state"] == "COMPLETED", output(cli, job)
    assert time.monotonic() > start + 75


@pytest.mark.sampled(1, "shared nodes")
def test_ray_job_waits_for_slow_agents(cli: Cli) -> None:
    (cli.folder / "second").touch()
    slow = "import sys, time\nif 'agent.py' in ' '.join(sys.orig_argv):\n    time.sleep(20)\n"
    (cli.folder / "sitecustomize.py").write_text(slow)
    job = cli.submit(*WORDS, "--env", f"PYTHONPATH={cli.folder}", cli.script(MEETS), "first", "second")
    status = cli.wait_for_end(job, limit=300)["statuses"][0]
    assert status["state"] == "COMPLETED", output(cli, job)
