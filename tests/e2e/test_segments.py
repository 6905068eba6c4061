"""Nodes that must share a rack: the request of ``plan --emit job``, on a Slurm whose racks are blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.lab.cluster import SlurmLab
from tests.lab.software import Software

pytestmark = pytest.mark.slurm

SEGMENTS_SINCE = (23, 11)
BLOCKS = """\
BlockName=b1 Nodes=n[1-3]
BlockName=b2 Nodes=n[4-6]
BlockSizes=3
"""
PLAN = "llama-3-70b --gpu GB200 --gpus-per-node 4 -N 4 --layout tp=8,pp=2,dp=1,mbs=1,gbs=16,zero=1 --emit job"


def knows_segments(software: Software) -> bool:
    return tuple(int(part) for part in software.version().split(".")[:2]) >= SEGMENTS_SINCE


@pytest.fixture
def lab(lab_root: Path, slurm_software: Software) -> Iterator[SlurmLab]:
    """Six nodes in two racks, as far as this Slurm knows racks."""
    (lab_root / "etc").mkdir(parents=True, exist_ok=True)
    blocks = knows_segments(slurm_software)
    if blocks:
        (lab_root / "etc" / "topology.conf").write_text(BLOCKS)
    conf = ["TopologyPlugin=topology/block"] if blocks else []
    with SlurmLab(lab_root, nodes=6, extra_conf=conf, software=slurm_software) as lab:
        yield lab


def test_planned_job_gets_whole_segments_of_each_rack(lab: SlurmLab, tmp_path: Path) -> None:
    """At first one node of one rack and three of the other are free: the job waits for two of each."""
    folder = tmp_path / "project"
    folder.mkdir()
    cli = Cli("slurm", folder, {**lab.env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")})
    cli.script("import time; time.sleep(600)", "hold.py")
    cli.script("import os; print('nodes', os.environ['SLURM_JOB_NODELIST'])", "pretrain_gpt.py")
    (folder / "planned.yaml").write_text(cli("plan", *PLAN.split()).stdout)
    assert 'sbatch: ["--segment=2"]' in (folder / "planned.yaml").read_text()
    if not knows_segments(lab.software):
        words = ("submit", "--cluster", "slurm", "-t", "5", "-l", "srun", "planned.yaml")
        refused = cli(*words, code=None)
        assert refused.returncode != 0
        assert "before Slurm 23.11 omit it" in refused.stderr
        assert cli.recorded_runs() == []
        return
    holder = cli.submit("--exclusive", "-w", "n1,n2", "-N2", "-l", "srun", "hold.py")
    cli.wait_until(lambda: cli.state(holder) == "RUNNING")
    job = cli.submit("-l", "srun", "planned.yaml")
    cli.wait_until(lambda: cli.status(job)["statuses"][0]["reason"] not in (None, "", "None", "Priority"))
    shown = cli("status", job).stdout
    assert "free" in shown, shown  # nodes, or room in a rack
    cli("cancel", holder)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    (line,) = {
        line for line in (cli.run_dir(job).logs(0) / "rank-0.log").read_text().splitlines() if "nodes" in line
    }
    names = lab.run(["scontrol", "show", "hostnames", line.split()[1]]).stdout.split()
    assert len(names) == 4
    assert sum(name in {"n1", "n2", "n3"} for name in names) == 2
