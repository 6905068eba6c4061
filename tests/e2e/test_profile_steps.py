"""``dtslurm profile --with torch`` on ranks that train together and really wait for each other."""

from __future__ import annotations

import json
import sys

import pytest

from tests.e2e.conftest import WITHOUT_SSH, Cli

pytestmark = pytest.mark.timeout(600)
UNEQUAL = """
    import os, time, torch, torch.distributed as dist
    from dtslurm import train
    with train.session() as run:
        numbers = torch.ones(200, 200)
        print("began", flush=True)
        ends = torch.zeros(1)
        while not ends:  # for all ranks at the same step
            end = time.monotonic() + (0.3 if run.rank == 1 else 0.01)
            while time.monotonic() < end:
                torch.mm(numbers, numbers)
            ends.fill_(os.path.exists("stop"))
            dist.all_reduce(ends)
            run.end_step()
"""


@WITHOUT_SSH
def test_steps_of_ranks_show_the_rank_that_the_others_wait_for(cli: Cli) -> None:
    layout = ["--ntasks-per-node", "2"] if cli.cluster == "local" else ["-N2"]
    words = [*layout, "-l", "srun", "--python", sys.executable, "--no-snapshot"]
    job = cli.submit(*words, cli.script(UNEQUAL))
    cli.wait_until(lambda: cli("logs", job, code=None).stdout.count("began") == 2)
    done = cli("profile", job, "--with", "torch", "--steps", "12")
    assert done.stdout.split("\n")[0].split() == [
        "RANK",
        "COMPUTE",
        "COMM",
        "DATA",
        "OTHER",
        "MOST",
        "TIME",
        "IN",
    ]
    assert "the others wait for rank 1, which is mostly in aten::mm" in done.stdout
    [folder] = cli.folder.glob(f"profile-{job}-*")
    for rank in "01":
        events = json.loads((folder / f"{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in events]
        assert {name for name in names if name.startswith("ProfilerStep#")} == {
            f"ProfilerStep#{number}" for number in range(1, 13)
        }
        assert "aten::mm" in names
        assert "gloo:all_reduce" in names
    again = json.loads(
        cli("profile", job, "--with", "torch", "--rank", "0", "--steps", "1", "-o", "one", "--json").stdout
    )
    assert [profile["label"] for profile in again["profiles"]] == ["0"]
    memory = cli("profile", job, "--with", "memory", "--rank", "0", "--steps", "1", "-o", "memory").stdout
    assert [line.split()[:2] for line in memory.splitlines()] == [["RANK", "DEVICE"], ["0", "CPU"]]
    assert "aten::mm " in memory
    (cli.folder / "stop").touch()
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"


PLAIN = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    numbers = torch.ones(600, 600)
    print("began", flush=True)
    ends = torch.zeros(1)
    while not ends:  # for all ranks at the same step
        end = time.monotonic() + (0.15 if dist.get_rank() == 1 else 0)
        while time.monotonic() < end:
            torch.mm(numbers, numbers)
        optimizer.zero_grad()
        model(torch.ones(8, 8)).sum().backward()
        ends.fill_(os.path.exists("stop"))
        dist.all_reduce(ends)
        optimizer.step()
    dist.destroy_process_group()
"""


@WITHOUT_SSH
def test_job_that_knows_nothing_of_dtslurm_is_profiled_if_pytorch_asks_for_requests(cli: Cli) -> None:
    layout = ["--ntasks-per-node", "2"] if cli.cluster == "local" else ["-N2"]
    words = [*layout, "-l", "torchrun", "--python", sys.executable, "--no-snapshot"]
    job = cli.submit(*words, "--env", "KINETO_USE_DAEMON=1", cli.script(PLAIN))
    cli.wait_until(lambda: cli("logs", job, code=None).stdout.count("began") == 2)
    done = cli("profile", job, "--with", "torch", "--steps", "3", timeout=240)
    assert "the others wait for rank 1, which is mostly in aten::mm" in done.stdout
    [folder] = cli.folder.glob(f"profile-{job}-*")
    for rank in "01":
        events = json.loads((folder / f"{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in events]
        assert names.count("Optimizer.step#SGD.step") > 3
        assert "gloo:all_reduce" in names
    assert "Error when sync_send" not in cli("logs", job).stdout  # PyTorch asks all the time
    (cli.folder / "stop").touch()
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_options_of_the_other_tool_are_refused(cli: Cli) -> None:
    assert "--steps has no effect with py-spy" in cli("profile", "1", "--steps", "3", code=2).stderr
    stderr = cli("profile", "1", "--with", "torch", "--seconds", "3", code=2).stderr
    assert "--seconds has no effect with torch" in stderr
    stderr = cli("profile", "1", "--with", "nsys", "--steps", "3", code=2).stderr
    assert "--steps has no effect with nsys" in stderr
    stderr = cli("profile", "1", "--with", "nsys", "--role", "rollout", code=2).stderr
    assert "--role has no effect with nsys" in stderr
