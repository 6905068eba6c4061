"""Runs whose ranks have stopped making progress, and runs that only appear to have stopped."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.e2e.conftest import Cli

# Steps are told until the sampler of this node has seen enough of them: on a busy machine it looks seldom.
STEPS = """
    import json, os, subprocess, sys, time

    folder = os.path.dirname(os.environ["DTSLURM_METRICS"])
    activity = os.path.join(folder, "activity-%s.json" % os.environ.get("SLURM_NODEID", "0"))

    def learned():
        try:
            with open(activity) as file:
                return json.load(file)["learned"]
        except (OSError, ValueError):
            return False

    for step in range(300):
        if learned():
            break
        with open(os.environ["DTSLURM_METRICS"], "a") as file:
            file.write(json.dumps({"time": time.time(), "step": step, "total_steps": 1000}) + "\\n")
        print("step", step, flush=True)
        time.sleep(1)
"""
SLEEP = "    time.sleep(10_000)\n"
# A quarter of a CPU, which is more than what counts as work.
COMPILE = """
    os.symlink(sys.executable, "cc1plus")
    work = "import time\\nstart = time.monotonic()\\nwhile True:\\n"
    work += "  if time.process_time() > 0.25 * (time.monotonic() - start): time.sleep(0.02)\\n"
    work += "  else: sum(range(10**5))"
    subprocess.run([os.path.abspath("cc1plus"), "-c", work])
"""

STALLED = re.compile(r"STALLED \d+m\d\ds")


def stalled_ranks(cli: Cli, job: str) -> bool:
    return any(result["stalled"] for result in cli.status(job)["activity"].values())


def look_until_stalled(cli: Cli, *words: str) -> str:
    """Return what a command prints about a stalled run.

    On a busy machine a sample may be so late that for a moment nothing is known of the run's activity.
    """
    texts: list[str] = []

    def stalled() -> object:
        texts.append(cli(*words).stdout)
        return STALLED.search(texts[-1].splitlines()[0])

    cli.wait_until(stalled)
    return texts[-1]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.sampled(1)
def test_idle_run_is_reported_as_stalled_and_a_compiling_run_is_not(cli: Cli) -> None:
    several = cli.cluster != "local"
    words = ("-N2", "-l", "srun") if several else ("-l", "single")
    compiles = cli.submit("-t", "20", "-l", "single", cli.script(STEPS + COMPILE, "compile.py"))
    job = cli.submit("-t", "20", *words, "--python", sys.executable, cli.script(STEPS + SLEEP, "hang.py"))
    assert "STALLED" not in cli("status", job).stdout
    cli.wait_until(lambda: stalled_ranks(cli, job), 400)

    shown = look_until_stalled(cli, "status", job)
    assert "no step, output or activity of any rank for " in shown
    assert f"dtslurm diagnose --live {job}" in shown
    [status] = cli.status(job)["statuses"]
    assert (status["state"], status["raw_state"]) in {("RUNNING", "RUNNING"), ("RUNNING", "")}

    assert "nothing has failed" not in look_until_stalled(cli, "diagnose", job)
    assert json.loads(cli("diagnose", "--json", job).stdout)["verdict"]["cause"] == "stalled"

    page = look_until_stalled(cli, "top", "--once", job)
    assert "far longer than a step takes (before: " in page
    cli.wait_until(lambda: STALLED.search(cli("top", "--once").stdout))

    def reported() -> object:
        cli("report", job, "-o", "report.html")
        return STALLED.search((cli.folder / "report.html").read_text())

    cli.wait_until(reported)

    cli.wait_until(
        lambda: cli.status(compiles)["activity"], 120
    )  # its samples are there: it is known to work
    cli.wait_until(lambda: "waits for its child" in cli("status", compiles).stdout, 300)
    [known] = cli.status(compiles)["activity"].values()
    assert not known["stalled"]
    assert known["summary"].endswith("; rank 0 waits for its child cc1plus")
    assert "rank 0 waits for its child cc1plus" in cli("top", "--once", compiles).stdout
    listed = cli("status").stdout
    if cli.cluster != "far":  # the list shows what copies there are of far files, and asks for none
        assert "STALLED" in next(line for line in listed.splitlines() if line.startswith(job))
    assert "RUNNING" in next(line for line in listed.splitlines() if line.startswith(compiles))


def test_run_without_samples_is_not_reported_as_stalled(cli: Cli) -> None:
    job = cli.submit("--no-sample", "-l", "single", cli.script("import time; time.sleep(600)"))
    cli.wait_until(lambda: cli.state(job) == "RUNNING")
    assert cli.status(job)["activity"] == {}
