"""``dtslurm profile`` with a real py-spy, on ranks that really wait for each other."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.e2e.conftest import Cli
from tests.frameworks.conftest import Activated
from tests.frameworks.envs import environment

pytestmark = [pytest.mark.frameworks, pytest.mark.slurm, pytest.mark.timeout(600)]

UNEQUAL = """
    import time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    numbers, rank = torch.ones(10), dist.get_rank()
    def compute():
        end = time.monotonic() + (0.4 if rank == 1 else 0.02)
        while time.monotonic() < end:
            sum(range(1000))
    print("began", flush=True)
    while True:
        compute()
        dist.all_reduce(numbers)
"""


@pytest.fixture
def cli(activated: Activated) -> Cli:
    return activated(environment("py-spy", ["py-spy==0.4.2"]))


def test_profile_names_the_rank_that_the_others_wait_for(cli: Cli) -> None:
    tools = f"{cli.env['VIRTUAL_ENV']}/bin"
    words = ["-N2", "-l", "srun", "--python", sys.executable, "--no-snapshot"]
    path = f"PATH={os.environ['PATH']}:{tools}"
    job = cli.submit(*words, "--env", path, cli.script(UNEQUAL))
    cli.wait_until(lambda: cli("logs", job, code=None).stdout.count("began") == 2)
    done = cli("profile", job, "--seconds", "4")
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "compute (" in rows["1"]
    assert "the others wait for rank 1, which is mostly in compute (" in done.stdout
    [folder] = cli.folder.glob(f"profile-{job}-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    for rank, place in (("0", "all_reduce"), ("1", "compute")):  # where each one is most of the time
        trace = folder / f"{rank}.json"
        assert trace.stat().st_mode & 0o777 == 0o600
        events = json.loads(trace.read_text())
        assert place in {event["name"] for event in events}
        assert {event["ph"] for event in events} == {"B", "E"}
    document = json.loads(cli("profile", job, "--rank", "1", "--seconds", "1", "-o", "one", "--json").stdout)
    [profile] = document["profiles"]
    assert (profile["label"], [item.name for item in (cli.folder / "one").iterdir()]) == ("1", ["1.json"])


def test_job_without_py_spy_is_told_what_to_install(cli: Cli) -> None:
    words = ["-l", "single", "--python", "/usr/bin/python3", "--no-snapshot", "--env", "PATH=/usr/bin:/bin"]
    job = cli.submit(*words, cli.script("import time; print('began', flush=True); time.sleep(600)"))
    cli.wait_until(lambda: "began" in cli("logs", job, code=None).stdout)
    stderr = cli("profile", job, "--seconds", "1", code=2).stderr
    assert "py-spy is not installed where the ranks run" in stderr
    assert "pip install py-spy" in stderr
    assert not list(cli.folder.glob("profile-*"))
