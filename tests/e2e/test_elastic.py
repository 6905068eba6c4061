"""Elastic jobs: nodes are lost, training continues on the others, and the job's end is reported correctly."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.store.rundir import RunDir
from tests.disks import fill, small_disk
from tests.e2e.conftest import WITHOUT_SSH, Cli
from tests.lab.cluster import SlurmLab
from tests.lab.software import Software

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.sampled(1, "losses")]

SCRIPT = Path(__file__).with_name("elastic_train.py")


def submit(
    cli: Cli, fault: str, *options: str, launcher: str = "torchrun", python: str = sys.executable
) -> tuple[str, RunDir]:
    chosen = [word for option in options for word in ("--launcher-option", option)]
    words = ["-N2", "--ntasks-per-node", "2", "-l", launcher, *chosen, "--env", f"FAULT={fault}"]
    job = cli.submit(*words, "--python", python, str(SCRIPT))
    return job, cli.run_dir(job)


def everything(run: RunDir) -> str:
    files = sorted((run.path / "logs").rglob("*.log"))
    return "\n".join(f"==> {path.name}\n{path.read_text()[-3000:]}" for path in files)


def check_survived(cli: Cli, job: str, run: RunDir) -> None:
    """Two of four ranks have finished what four began."""
    status = cli.wait_for_end(job, limit=240)["statuses"][0]
    assert (status["state"], status["exit_code"]) == ("COMPLETED", 0), everything(run)
    worlds = (run.path / "checkpoints" / "worlds").read_text().split()
    assert (worlds[0], worlds[-1]) == ("4", "2")
    restarts = [event for event in run.events() if event["event"] == "restart"]
    assert restarts[-1]["world_size"] == 2
    for rank in range(2):
        text = (run.logs(0) / f"rank-{rank}.log").read_text()
        second = text.partition("world of 2 from step ")[2]
        assert int(second.split()[0]) >= 5  # not from the start again
        losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", text, re.MULTILINE)]
        assert re.findall(r"^step (\d+) ", second, re.MULTILINE)[-1] == "29"
        assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    records = {record.rank: record for record in run.ranks(0)}
    assert [records[rank].exit_code for rank in range(2)] == [0, 0]
    assert records[0].host == records[1].host
    assert run.first_failure(0) is None


@WITHOUT_SSH
def test_elastic_job_survives_the_loss_of_an_agent(cli: Cli) -> None:
    job, run = submit(cli, "node", "nnodes=1:2", "max_restarts=1")
    check_survived(cli, job, run)


@WITHOUT_SSH
def test_exit_code_is_the_first_failure_since_the_last_restart(cli: Cli) -> None:
    how = "nnodes=1:2" if cli.cluster == "local" else "rdzv_backend=c10d"
    job, run = submit(cli, "codes", "max_restarts=1", how)
    status = cli.wait_for_end(job, limit=240)["statuses"][0]
    assert (status["state"], status["exit_code"]) == ("FAILED", 7), everything(run)
    assert run.first_failure(0) == (1, 7)
    assert {event["world_size"] for event in run.events() if event["event"] == "restart"} == {4}


FREES = """
    import os, pathlib
    run = pathlib.Path(os.environ["DTSLURM_RUN_DIR"])
    (run.parents[2] / "world_size").write_text((run / "ranks" / "0" / "world_size").read_text())
    (run.parents[1] / "filler").unlink()
"""


@pytest.fixture
def own_lab(slurm_software: Software) -> Iterator[SlurmLab]:
    """A cluster whose nodes may be lost."""
    root = Path(tempfile.mkdtemp(prefix="dtslurm-elastic-", dir="/tmp"))
    try:
        with SlurmLab(root, software=slurm_software, nodes=2) as lab:
            yield lab
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system, which nodes that are started later see."""
    with small_disk(tmp_path / "disk", "size=8m") as folder:
        yield folder


@pytest.mark.slurm
def test_f16_temporarily_full_disk_does_not_fail_a_successful_run(
    disk: Path, own_lab: SlurmLab, tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    cli = Cli("slurm", folder, {**own_lab.env, "DTSLURM_RUN_ROOT": str(disk / "runs")})
    words = ["--ntasks-per-node", "1", "-l", "torchrun", "--no-snapshot", "--python", sys.executable]
    words += ["--launcher-option", "nnodes=1:1", "--launcher-option", "max_restarts=1"]
    job = cli.submit(*words, cli.script(FREES))
    run = cli.run_dir(job)
    cli.wait_until((run.logs(0) / "node-0.log").exists)  # torchrun starts, which takes a while
    fill(disk)
    status = cli.wait_for_end(job, limit=240)["statuses"][0]
    assert (tmp_path / "world_size").read_text() == "", "the disk was not full when the rank started"
    assert (status["state"], status["exit_code"]) == ("COMPLETED", 0), everything(run)
    assert "integer expression" not in (run.path / "logs" / "batch.log").read_text()


@pytest.mark.slurm
def test_elastic_job_survives_the_loss_of_a_node(own_lab: SlurmLab, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    cli = Cli("slurm", folder, {**own_lab.env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")})
    job, run = submit(cli, "wait", "nnodes=1:2", "max_restarts=1")
    logs = [run.logs(0) / f"rank-{rank}.log" for rank in range(4)]
    cli.wait_until(lambda: all(path.exists() and "waiting" in path.read_text() for path in logs), limit=120)
    own_lab.kill_node("n2")
    check_survived(cli, job, run)


@pytest.mark.slurm
def test_job_without_checkpoints_does_not_restart_after_the_loss_of_a_node(
    own_lab: SlurmLab, tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    cli = Cli("slurm", folder, {**own_lab.env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")})
    script = cli.script("import time; open('result', 'a').write('begun,'); time.sleep(600)")
    jobs = [cli.submit("-w", "n2", "--no-snapshot", *words, script) for words in ((), ("--requeue",))]
    cli.wait_until(lambda: (folder / "result").exists() and (folder / "result").read_text() == "begun,begun,")
    own_lab.kill_node("n2")
    cli.wait_until(lambda: cli.state(jobs[0]) == "NODE_FAIL" and cli.state(jobs[1]) == "PENDING", limit=240)
