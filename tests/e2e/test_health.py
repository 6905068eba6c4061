"""A node that is bad from the start: a spare node replaces it, and the next job excludes it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from ClusterShell.NodeSet import NodeSet

from tests.e2e.conftest import ON_SLURM, WITHOUT_SSH, Cli
from tests.lab.cluster import SlurmLab

TRAIN = Path(__file__).with_name("surviving_train.py")
FABRIC = "extends: slurm\nfabric:\n  kind: infiniband\n  hcas: [mlx5_0]\n"
OVER_SSH = pytest.mark.parametrize(
    "cli", [pytest.param("far", marks=[pytest.mark.slurm, pytest.mark.ssh])], indirect=True
)


def profile(tmp_path: Path, name: str, text: str) -> None:
    folder = tmp_path / "config/dtslurm/cluster_profiles"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)


def adapters(top: Path, bad: str) -> str:
    """Make /sys of four nodes, of which one has its port down; return it as jobs are told."""
    for node in ("n1", "n2", "n3", "n4"):
        port = top / node / "class/infiniband/mlx5_0/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("1: DOWN\n" if node == bad else "4: ACTIVE\n")
    return f"{top}/%N"


def events(run: Path, name: str) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [item for item in map(json.loads, lines) if item["event"] == name]


@ON_SLURM
def test_spare_node_replaces_a_bad_node_and_the_next_job_excludes_the_bad_node(
    cli: Cli, tmp_path: Path
) -> None:
    profile(tmp_path, "fabric", FABRIC)
    shutil.copy(TRAIN, cli.folder / "train.py")
    sysfs = adapters(tmp_path / "sys", bad="n1")
    words = ["--cluster", "fabric", "-N2", "-l", "srun", "--python", sys.executable]
    job = cli.submit(
        *words,
        "--spare-nodes",
        "1",
        "-w",
        "n1,n2,n3",
        "--env",
        f"DTSLURM_SYSFS={sysfs}",
        "--env",
        "STEPS=8",
        "train.py",
    )
    run = cli.run_dir(job).path
    cli.wait_until(lambda: "node_excluded" in (run / "events.jsonl").read_text(), 180)
    assert not list((tmp_path / "state").rglob("nodes/*.jsonl"))
    next_job = cli("submit", "--dry-run", *words, "-t", "5", "train.py")  # before anybody looks at the run
    assert "#SBATCH --exclude=n1\n" in next_job.stdout
    assert cli.wait_for_end(job, limit=180)["statuses"][0]["state"] == "COMPLETED"
    assert json.loads((run / "final.json").read_text())
    result = {event["node"]: event for event in events(run, "health")}
    assert {node: event["ok"] for node, event in result.items()} == {"n1": False, "n2": True, "n3": True}
    fault = {"check": "hca", "level": "bad", "evidence": "mlx5_0 is DOWN"}
    assert fault in result["n1"]["findings"]
    [attempt] = events(run, "attempt")
    assert attempt["nodes"] == ["n2", "n3"]
    log = (run / "logs/batch.log").read_text()
    assert "dtslurm: health: node n1 is bad: hca: mlx5_0 is DOWN" in log

    cli("status", job)
    [known] = json.loads(cli("cluster", "nodes", "--cluster", "fabric", "--json").stdout)["nodes"]
    assert (known["node"], known["job"], known["reason"]) == ("n1", job, "health: hca: mlx5_0 is DOWN")
    again = cli("submit", "--dry-run", *words, "-t", "5", "train.py")
    assert "#SBATCH --exclude=n1\n" in again.stdout
    assert "note: 1 bad node excluded: n1 (health: hca: mlx5_0 is DOWN on " in again.stderr
    assert (
        "--exclude"
        not in cli("submit", "--dry-run", "--no-node-memory", *words, "-t", "5", "train.py").stdout
    )
    assert "--exclude" not in cli("submit", "--dry-run", *words, "-N4", "-t", "5", "train.py").stdout


@ON_SLURM
def test_job_without_a_spare_node_is_requeued_on_other_nodes(
    cli: Cli, tmp_path: Path, slurm_lab: SlurmLab
) -> None:
    profile(tmp_path, "fabric", f"{FABRIC}slurm:\n  start_now: yes\n")
    shutil.copy(TRAIN, cli.folder / "train.py")
    sysfs, once = adapters(tmp_path / "sys", bad=""), tmp_path / "once"
    port = f"{tmp_path}/sys/$SLURMD_NODENAME/class/infiniband/mlx5_0/ports/1"
    breaks = f"[ -e {once} ] || {{ echo '1: DOWN' >{port}/state; touch {once}; }}"  # where it starts first
    words = ["--cluster", "fabric", "-N2", "-x", "n4", "-l", "srun", "--python", sys.executable]
    words += ["--health-check", "--setup", breaks, "--env", f"DTSLURM_SYSFS={sysfs}", "--env", "STEPS=8"]
    job = cli.submit(*words, "train.py")
    run = cli.run_dir(job).path
    cli.wait_until((run / "final.json").exists, 180)
    assert cli.wait_for_end(job, limit=180)["statuses"][0]["state"] == "COMPLETED"
    [excluded] = events(run, "node_excluded")
    bad = excluded["node"]
    first, last = events(run, "decision")
    assert (first["action"], first["excluded"]) == ("requeue", [bad])
    assert last["reason"] == "training is done"
    [attempt] = events(run, "attempt")
    assert bad not in attempt["nodes"]
    shown = slurm_lab.run(["scontrol", "show", "job", job]).stdout
    [kept_off] = re.findall(r" ExcNodeList=(\S+)", shown)
    assert set(NodeSet(kept_off)) == {bad, "n4"}


@WITHOUT_SSH
def test_fault_of_all_nodes_stops_the_run_with_a_diagnosis(cli: Cli, tmp_path: Path) -> None:
    profile(tmp_path, "fabric", FABRIC.replace("slurm", cli.cluster))
    cli.script("print('hello')")
    words = ["--cluster", "fabric", "-N2", "-l", "srun", "--python", sys.executable, "--health-check"]
    job = cli.submit(*words, "--env", f"DTSLURM_SYSFS={tmp_path}", "train.py")
    ended = cli.wait_for_end(job, limit=180)["statuses"][0]
    assert (ended["state"], ended["exit_code"]) == ("FAILED", 86)
    verdict = json.loads(cli("diagnose", "--json", job).stdout)["verdict"]
    assert (verdict["cause"], verdict["blame"]) == ("health-check", "site")
    assert "the same problem on every node: hca: mlx5_0 does not exist" in verdict["summary"]


@OVER_SSH
def test_shared_bad_node_list_is_kept_on_the_cluster(cli: Cli, tmp_path: Path) -> None:
    profile(tmp_path, "team", f"extends: far\npaths:\n  node_memory: {tmp_path}/team.jsonl\n")
    cli.script("print('hello')")
    said = cli("cluster", "nodes", "--cluster", "team", "add", "n[1-2]", "--reason", "power supply")
    assert "n[1-2] of team: excluded for" in said.stderr
    assert len((tmp_path / "team.jsonl").read_text().splitlines()) == 2
    cli.env["XDG_STATE_HOME"] = str(tmp_path / "somebody else")
    nodes = json.loads(cli("cluster", "nodes", "--cluster", "team", "--json").stdout)["nodes"]
    assert [(item["node"], item["shared"]) for item in nodes] == [("n1", True), ("n2", True)]
    script = cli("submit", "--dry-run", "--cluster", "team", "-t", "5", "train.py").stdout
    assert "#SBATCH --exclude=n[1-2]\n" in script
    cli("cluster", "nodes", "remove", "n[1-2]", "--cluster", "team")
    assert json.loads(cli("cluster", "nodes", "--cluster", "team", "--json").stdout)["nodes"] == []
