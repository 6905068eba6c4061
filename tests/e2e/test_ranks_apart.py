"""Ranks that train separately under a launcher for a group are reported on every screen."""

from __future__ import annotations

import json
import sys

import pytest

from tests.e2e.conftest import WITHOUT_SSH, Cli

pytestmark = pytest.mark.sampled(3, "apart")
# Trains until the ranks are found apart, or the last node has noted something five times.
TRAIN = """\
import os, pathlib, sys, time
import torch
if sys.argv[1] == "group":
    torch.distributed.init_process_group("gloo")
run = pathlib.Path(os.environ["DTSLURM_RUN_DIR"])
notes = run / "metrics" / os.environ["DTSLURM_ATTEMPT"] / f"node-{sys.argv[2]}.jsonl"
model = torch.nn.Linear(4, 1)
end, step = time.time() + 400, 0
while time.time() < end:
    loss = model(torch.ones(4)).square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.01)
    print(f"step {step} loss {loss.item():.4f}", flush=True)
    step += 1
    time.sleep(0.3)
    if '"evidence"' in (run / "events.jsonl").read_text():
        break
    if sys.argv[1] != "alone" and notes.exists() and notes.read_bytes().count(b"\\n") > 5:
        break
if sys.argv[1] == "group":
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


def options(cli: Cli, nodes: int, launcher: str) -> list[str]:
    size = (f"-N{nodes}", f"--ntasks-per-node={2 // nodes}")
    return ["--cluster", cli.cluster, "-t", "10", *size, "-l", launcher, "--python", sys.executable]


@pytest.mark.parametrize("nodes", [1, 2])
@WITHOUT_SSH
def test_torchrun_ranks_without_a_process_group_are_reported_everywhere(cli: Cli, nodes: int) -> None:
    words = options(cli, nodes, "torchrun")
    done = cli("submit", "-f", *words, cli.script(TRAIN), "alone", str(nodes - 1), timeout=600)
    text = (
        "NOT DISTRIBUTED: the 2 ranks do not train together: training continues, but no network connection "
    )
    text += "leads from rank"
    notices = [line for line in done.stderr.splitlines() if line.strip().startswith(text)]
    assert len(notices) == 2, done.stderr  # when it is found, and at the end
    assert "init_process_group()" in done.stderr

    [job] = [run["record"]["job_id"] for run in cli.recorded_runs()]
    shown = cli("status", job).stdout
    assert f"  warning    {text}" in shown
    assert "COMPLETED" in shown
    assert "NOT DISTRIBUTED" in cli("status").stdout
    verdict = json.loads(cli("diagnose", "--json", job).stdout)["verdict"]
    assert (verdict["cause"], verdict["rank"]) == ("not-distributed", None)
    stdout = cli("diagnose", job).stdout
    assert "not-distributed" in stdout
    assert "failed first" not in stdout


@WITHOUT_SSH
def test_ranks_in_a_process_group_are_not_reported(cli: Cli) -> None:
    job = cli.submit(*options(cli, 2, "torchrun")[2:], cli.script(TRAIN), "group", "1")
    cli.wait_for_end(job, limit=500)
    run = cli.run_dir(job)
    assert "step 1 loss" in (run.logs(0) / "rank-1.log").read_text()
    assert "distributed" not in (run.path / "events.jsonl").read_text()
    assert json.loads(cli("diagnose", "--json", job).stdout)["verdict"]["cause"] == "none"


@WITHOUT_SSH
def test_separate_srun_ranks_get_a_note_without_a_warning(cli: Cli) -> None:
    job = cli.submit(*options(cli, 1, "srun")[2:], cli.script(TRAIN), "alone", "0")
    cli.wait_for_end(job, limit=500)
    shown = cli("status", job).stdout
    assert "  note       training continues, but no network connection leads from ranks 0-1 on " in shown
    assert "NOT DISTRIBUTED" not in shown + cli("status").stdout
    assert json.loads(cli("diagnose", "--json", job).stdout)["verdict"]["cause"] == "none"
