"""Jobs that run the fabric check before training."""

from __future__ import annotations

import json
import sys

import pytest

from tests.e2e.conftest import WITHOUT_SSH, Cli

pytest.importorskip("torch", reason="the check measures with torch")
pytestmark = pytest.mark.slow
ASKED = ("-N2", "--fabric-check", "--python", sys.executable)


@WITHOUT_SSH
def test_training_starts_after_a_passed_fabric_check(cli: Cli) -> None:
    job = cli.submit(*ASKED, "--ntasks-per-node=2", cli.script("print('trained')"))
    assert [item["state"] for item in cli.wait_for_end(job, 150)["statuses"]] == ["COMPLETED"]
    run = cli.run_dir(job).path
    document = json.loads((run / "fabric.json").read_text())
    assert len(document["hosts"]) == 4
    assert document["problem"] is None
    assert "fabric check: " in (run / "logs" / "0" / "fabric-check.log").read_text()
    assert "GB/s over 4 ranks by gloo" in (run / "logs" / "batch.log").read_text()
    assert "trained" in (run / "logs" / "0" / "rank-3.log").read_text()


@WITHOUT_SSH
def test_training_does_not_start_after_a_failed_fabric_check(cli: Cli) -> None:
    profiles = cli.folder / "cluster_profiles"
    profiles.mkdir()
    fabric = "fabric: {kind: ethernet, environment_from: ethernet, expected_busbw_gbs: 1000000}"
    (profiles / "hopeful.yaml").write_text(f"extends: {cli.cluster}\n{fabric}\n")
    script = cli.script("print('trained')")
    job = cli.submit("--cluster=hopeful", *ASKED, "-l", "srun", "--env", "NCCL_SOCKET_IFNAME=lo", script)
    (status,) = cli.wait_for_end(job, 150)["statuses"]
    assert status["state"] == "FAILED"
    assert status["exit_code"] == 86
    run = cli.run_dir(job).path
    lines = (run / "logs" / "batch.log").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("fabric check failed: ")]
    assert "less than half of the 1e+06 expected" in line
    assert not list((run / "ranks" / "0").glob("*.json"))
    assert "export NCCL_NET=Socket" in (run / "script.sbatch").read_text()


@WITHOUT_SSH
def test_fabric_check_with_a_single_rank_is_refused(cli: Cli) -> None:
    stderr = cli("render", "--cluster", cli.cluster, "--fabric-check", cli.script("pass"), code=2).stderr
    assert "--fabric-check measures the network between ranks, and this job has only one rank" in stderr
