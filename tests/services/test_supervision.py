"""The supervisor files that submit writes into a run directory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dtslurm.services.request.request import JobRequest
from dtslurm.services.submit import supervision
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.wiring.context import Context


def install_supervisor(tmp_path: Path) -> Path:
    for name, data in supervision.files(Context(cwd=tmp_path)).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / supervision.FOLDER


def test_the_supervisor_starts_without_dtslurm(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", install_supervisor(tmp_path), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--max-restarts" in done.stdout


def test_the_supervisor_uses_the_rules_of_diagnose(tmp_path: Path) -> None:
    folder = install_supervisor(tmp_path)
    run = tmp_path / "run"
    (run / "logs/0").mkdir(parents=True)
    (run / "ranks/0").mkdir(parents=True)
    (run / "logs/0/rank-1.log").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    record = {"schema": 1, "rank": 1, "local_rank": 1, "node_rank": 0, "host": "n1", "pid": 1, "started": 1}
    text = json.dumps({**record, "ended": 2, "exit_code": 1, "signal": None})
    (run / "ranks/0/1.json").write_text(text)
    (run / "ranks/0/first-failure").write_text("1 1\n")
    program = (
        "import sys, json; sys.path.insert(0, sys.argv[1]);"
        "from worker.supervisor.verdict import verdict_on;"
        "print(json.dumps(verdict_on(sys.argv[1], sys.argv[2], 0, 2, 1, [])))"
    )
    argv = [sys.executable, "-S", "-c", program, str(folder), str(run)]
    verdict = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    assert (verdict["cause"], verdict["rank"], verdict["node"]) == ("gpu-out-of-memory", 1, "n1")
    assert verdict["advice"]


def test_by_code_derives_a_cause_from_exit_codes(tmp_path: Path) -> None:
    from dtslurm.worker.supervisor.verdict import by_code

    assert by_code(137, None)["cause"] == "killed"
    assert by_code(1, [3, 139])["cause"] == "segfault"
    assert by_code(1, [3, 139])["rank"] == 3


def test_the_supervisor_files_are_reproducible(tmp_path: Path) -> None:
    context = Context(cwd=tmp_path)
    assert supervision.files(context) == supervision.files(context)


@pytest.mark.parametrize("nodes", ["2", "65"])
def test_the_node_agent_of_a_large_job_is_loaded_from_one_file(tmp_path: Path, nodes: str) -> None:
    folder = install_supervisor(tmp_path)
    (folder / "worker/supervisor/lease.py").rename(folder / "worker/supervisor/away.py")
    program = [sys.executable, "-S", "-B", str(folder), "node"]
    env = {"PATH": "/usr/bin:/bin", "SLURM_STEP_NUM_NODES": nodes}
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1  # there is no run
    assert ("lease" in done.stderr) == (nodes == "2")
    env["DTSLURM_PLAIN_NODES"] = "65"
    assert b"lease" in subprocess.run(program, capture_output=True, check=False, env=env).stderr


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["2", "65"])
def test_the_node_preflight_runs_without_dtslurm(tmp_path: Path, nodes: str) -> None:
    folder = install_supervisor(tmp_path)
    wanted = {"nodes": 2, "hcas": ["mlx5_0"], "rdma": True}
    (folder / "health.json").write_text(json.dumps(wanted))
    argv = [sys.executable, "-S", str(folder), "preflight", str(folder / "health.json"), "localhost", "1"]
    env = {"PATH": "/usr/bin:/bin", "DTSLURM_RUN_DIR": str(tmp_path), "SLURMD_NODENAME": "n7"}
    env |= {"DTSLURM_SYSFS": f"{tmp_path}/%N", "SLURM_STEP_NUM_NODES": nodes}
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=env)
    lines = [json.loads(line.partition("dtslurm-health: ")[2]) for line in done.stdout.splitlines()]
    assert {line["node"] for line in lines} == {"n7"}
    assert (lines[0]["begin"], lines[-1]["end"]) == (True, True)
    levels = {line["check"]: line["level"] for line in lines if "check" in line}
    assert levels["hca"] == "bad"
    assert levels["run-dir"] == "ok"
    assert levels["clock"] == "unknown"  # nobody listens there


def test_the_expectations_of_the_health_check_come_from_the_profile(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    request = JobRequest(
        script="train.py", cluster="a100x8-ib", nodes=2, time="10", account="a", launcher="torchrun"
    )
    made = prepare(Context(cwd=tmp_path), replace(request, health_check=True), standalone=True)
    [data] = supervision.health_files(made.submission, made.cluster.profile).values()
    document = json.loads(data)
    assert (document["gpus"], document["vendor"], document["intra_node"]) == (8, "nvidia", "nvswitch")
    assert (document["rdma"], document["nic_count"], document["rate_gbps"]) == (True, 8, 200)
    assert (document["framework"], document["rendezvous"]) == ("torch", True)
    assert "--health-check --max-restarts=0" in made.submission.script
    off = prepare(
        Context(cwd=tmp_path), replace(request, max_restarts=1, health_check=False), standalone=True
    )
    assert supervision.health_files(off.submission, off.cluster.profile) == {}
    assert "--health-check" not in off.submission.script
