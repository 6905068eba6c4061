"""Jobs that run without progress, and their diagnosis by ``dtslurm diagnose --live``."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.e2e.conftest import ON_SLURM, WITHOUT_SSH, Cli

pytestmark = pytest.mark.sampled(4, "live")
TWO_NODES = ("-N2", "--python", sys.executable)

# Three steps are done by all; then one rank does something of its own while the others wait for it.
TRAINING = """
    import datetime, os, signal, sys, time
    import torch, torch.distributed as dist

    def load(step):
        if dist.get_rank() == dist.get_world_size() // 2 and step == 3:
            print("now", flush=True)
            {trouble}

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=900))
    for step in range(9):
        load(step)
        dist.all_reduce(torch.ones(4))
        print("step", step, flush=True)
"""
# A child that cannot get to its program keeps its parent in an uninterruptible wait.
BLOCK = (
    'os.mkfifo("never"); os.posix_spawn("/bin/true", ["true"], {}, '
    'file_actions=[(os.POSIX_SPAWN_OPEN, 0, "never", os.O_RDONLY, 0)])'
)
TROUBLES = {
    "sleeps": ("time.sleep(600)", "sleeping in load ("),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "stopped (by a signal or a debugger)"),
    "blocked": (BLOCK, "waiting for a device or file system"),
}


def wait_for_output(cli: Cli, job: str, word: str = "now") -> None:
    cli.wait_until(
        lambda: word in "".join(path.read_text() for path in cli.run_dir(job).logs(0).glob("rank-*.log"))
    )


def live_diagnosis(cli: Cli, job: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(cli("diagnose", "--live", "--json", job).stdout)
    assert (document["schema"], document["job"], document["live"]) == (1, job, True)
    return document


def until_waiting(cli: Cli, job: str, count: int) -> dict[str, Any]:
    """Look until so many ranks are seen to wait for others."""
    seen: dict[str, Any] = {}

    def wait() -> bool:
        seen.update(live_diagnosis(cli, job))
        counts: list[int] = [place["count"] for place in seen["places"] if place["kind"] == "waits"]
        # On a busy node py-spy may not get the time to read every stack.
        return sum(counts) == count and all(rank["by"] == "py-spy" for rank in seen["ranks"])

    cli.wait_until(wait, 240)
    return seen


def check(cli: Cli, trouble: str, per_node: int) -> None:
    code, words = TROUBLES[trouble]
    script = cli.script(TRAINING.replace("{trouble}", code))
    job = cli.submit(*TWO_NODES, "--ntasks-per-node", str(per_node), "-l", "torchrun", script)
    wait_for_output(cli, job)
    seen = until_waiting(cli, job, 2 * per_node - 1)
    verdict = seen["verdict"]
    assert (verdict["cause"], verdict["rank"], verdict["suspects"]) == ("hang", per_node, str(per_node))
    assert verdict["node"] == {record.rank: record.host for record in cli.run_dir(job).ranks(0)}[per_node]
    assert words in verdict["summary"]
    assert "all_reduce" in verdict["summary"]
    assert verdict["advice"]
    by = [rank["by"] for rank in seen["ranks"]]
    assert by.count("py-spy") == 2 * per_node, seen["missing"]
    texts: list[str] = []

    def named() -> bool:
        texts.append(cli("diagnose", "--live", job).stdout)
        return f"rank {per_node}" in texts[-1] and "the job hangs" in texts[-1]

    cli.wait_until(named)
    assert cli.state(job) == "RUNNING"


@WITHOUT_SSH
def test_live_diagnosis_names_a_sleeping_rank(cli: Cli) -> None:
    check(cli, "sleeps", 2)


@ON_SLURM
@pytest.mark.parametrize("trouble", ["stopped", "blocked"])
def test_live_diagnosis_names_a_stopped_or_blocked_rank(cli: Cli, trouble: str) -> None:
    check(cli, trouble, 1)


@pytest.mark.parametrize(
    "cli", [pytest.param("far", marks=[pytest.mark.slurm, pytest.mark.ssh])], indirect=True
)
def test_live_diagnosis_works_over_ssh(cli: Cli) -> None:
    check(cli, "sleeps", 1)


@WITHOUT_SSH
def test_live_diagnosis_reports_the_progress_of_a_computing_job(cli: Cli) -> None:
    job = cli.submit(
        *TWO_NODES, "-l", "srun",
        cli.script("""
            def a(n):
                return sum(i * i for i in range(n))

            def b(n):
                return sum(i + i for i in range(n))

            print("now", flush=True)
            step = 0
            while True:
                a(2000) + b(2000)
                step += 1
                if step % 500 == 0:
                    print("step", step, flush=True)
        """),
    )  # fmt: skip
    cli.wait_until(lambda: len(cli.run_dir(job).ranks(0)) == 2)
    wait_for_output(cli, job)
    verdict = live_diagnosis(cli, job)["verdict"]
    assert (verdict["cause"], verdict["rank"]) == ("none", None)
    assert "makes progress" in cli("diagnose", "--live", job).stdout
    assert "--live" in cli("diagnose", job).stdout


@ON_SLURM
def test_live_diagnosis_examines_a_node_when_the_first_node_has_finished(cli: Cli) -> None:
    job = cli.submit(
        *TWO_NODES, "-l", "srun",
        cli.script("""
            import os, sys, time
            if os.environ["RANK"] == "0":
                sys.exit()
            while True:
                print("now", flush=True)
                time.sleep(1)
        """),
    )  # fmt: skip
    cli.wait_until(lambda: 0 in [record.exit_code for record in cli.run_dir(job).ranks(0)])
    wait_for_output(cli, job)
    document = live_diagnosis(cli, job)
    assert document["verdict"]["cause"] != "hang"
    [working] = [look for look in document["ranks"] if look["rank"] == 1]
    assert working["by"] in ("py-spy", "signal", "proc")


@WITHOUT_SSH
def test_live_diagnosis_of_an_ended_job_is_refused(cli: Cli) -> None:
    job = cli.submit(cli.script("print(1)"))
    cli.wait_for_end(job)
    assert "is not running: its state is COMPLETED" in cli("diagnose", "--live", job, code=2).stderr
    assert "--attempt" in cli("diagnose", "--live", "--attempt", "0", job, code=2).stderr
