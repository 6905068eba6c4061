"""A Ray cluster as roles of a run: a head and a worker on nodes of their own, and a driver that uses both."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.frameworks.conftest import Activated
from tests.frameworks.test_other_frameworks import output, ray_python
from tests.frameworks.test_ray_shared import find_ray_process

pytestmark = [pytest.mark.frameworks, pytest.mark.slurm, pytest.mark.timeout(900)]

DRIVER = """
    import os, pathlib, sys, time, ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
    ray.init(log_to_driver=False)
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    print("attempt", os.environ["DTSLURM_ATTEMPT"], "nodes", len(alive), flush=True)
    here = ray.remote(num_cpus=1)(lambda: ray.get_runtime_context().get_node_id())
    used = [ray.get(here.options(scheduling_strategy=On(node, soft=False)).remote()) for node in alive]
    print("each was used:", used == alive, flush=True)
    pathlib.Path(sys.argv[1]).touch()
    while not pathlib.Path(sys.argv[2]).exists():
        ray.get(here.remote())
        time.sleep(0.2)
"""
JOB = """
job_name: ray
time: 10
max_restarts: 2
roles:
  trainer:
    script: driver.py
    launcher: single
    args: [ready, go]
    env:
      RAY_ADDRESS: "${role.ray.hosts}:${role.ray.ports}"
      RAY_AUTH_MODE: token
      RAY_AUTH_TOKEN_PATH: $DTSLURM_RUN_DIR/ray-token
  ray:
    extends: ray
    on: trainer
  ray-worker:
    extends: ray-worker
    nodes: 1
"""


@pytest.fixture
def cli(activated: Activated) -> Cli:
    return activated(ray_python())


def log(cli: Cli, job: str, attempt: int) -> str:
    return (cli.run_dir(job).logs(attempt) / "rank-0.log").read_text()


def test_driver_uses_the_cluster_of_the_roles_and_starts_again_with_a_killed_head(cli: Cli) -> None:
    cli.script(DRIVER, "driver.py")
    (cli.folder / "job.yaml").write_text(JOB)
    job = cli.submit("job.yaml")
    cli.wait_until((cli.folder / "ready").exists, 300)
    run = cli.run_dir(job).path
    assert (run / "ray-token").stat().st_mode & 0o777 == 0o600
    assert "attempt 0 nodes 2" in log(cli, job, 0), output(cli, job)
    assert "each was used: True" in log(cli, job, 0)

    (cli.folder / "ready").unlink()
    head = find_ray_process(run, "gcs_server")
    assert head is not None
    [folder] = re.findall(r"(/tmp/ray-[^/]+)/r/", Path(f"/proc/{head}/cmdline").read_text())[:1]
    os.kill(head, signal.SIGKILL)
    cli.wait_until((cli.folder / "ready").exists, 300)
    (cli.folder / "go").touch()
    status = cli.wait_for_end(job, limit=400)["statuses"][0]
    assert status["state"] == "COMPLETED", output(cli, job)
    assert "attempt 1 nodes 2" in log(cli, job, 1)
    assert not (run / "ray-token").exists()
    cli.wait_until(lambda: not Path(folder).exists() and find_ray_process(run, "raylet") is None, 60)
