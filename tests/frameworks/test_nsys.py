"""``dtslurm profile --with nsys`` with a real nsys, which observes NVTX ranges also without a GPU."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli, events_of
from tests.frameworks.conftest import Activated
from tests.frameworks.envs import environment
from tests.frameworks.nsys import find_nsys

pytestmark = [pytest.mark.frameworks, pytest.mark.slurm, pytest.mark.timeout(600)]

TRAINS = """
    import json, nvtx, os, pathlib, signal, sys, time
    rank = os.environ["SLURM_PROCID"]
    saved = pathlib.Path(f"step-{rank}")
    step = int(saved.read_text()) if saved.exists() else 0
    signal.signal(signal.SIGUSR2, lambda *_: print("early signal", flush=True))
    def save(*_):
        saved.write_text(str(step))
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("began at", step, flush=True)
    while not os.path.exists("stop"):
        step += 1
        with nvtx.annotate("forward and backward"):
            time.sleep(0.02)
        with open(os.environ["DTSLURM_METRICS"], "a") as file:
            file.write(json.dumps({"step": step, "loss": 1.0, "time": time.time()}) + "\\n")
"""


@pytest.fixture
def cli(activated: Activated) -> Cli:
    return activated(environment("nvtx", ["nvtx==0.2.8"]))


def submit(cli: Cli, *words: str, path: str) -> str:
    python = f"{cli.env['VIRTUAL_ENV']}/bin/python"
    layout = ["-N2", "-l", "srun", "--no-snapshot", "--python", python, "--env", f"PATH={path}"]
    job = cli.submit(*layout, *words, cli.script(TRAINS))
    cli.wait_until(lambda: cli("logs", job, code=None).stdout.count("began at 0") == 2)
    return job


def read_documented_session() -> list[str]:
    text = (Path(__file__).parents[2] / "docs/live.md").read_text()
    [session] = [block for block in text.split("```") if "--with nsys" in block and "$ dtslurm" in block]
    return session.splitlines()[1:]


def profile(cli: Cli, job: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Profile ranks, again if nsys itself has failed to start one of them, as it does on a busy machine."""
    for _ in range(3):
        done = cli("profile", job, "--with", "nsys", "--seconds", "1", *words, code=None, timeout=300)
        if "does not run below nsys" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done


def test_chosen_ranks_restart_below_nsys_and_are_recorded_as_often_as_asked(cli: Cli) -> None:
    words = ["--max-restarts", "1", "--signal-before", "60"]
    job = submit(cli, *words, path=f"{find_nsys()}:{os.environ['PATH']}")
    refused = cli("profile", job, "--with", "nsys", "--rank", "1", code=2)
    assert "the restart of the attempt was not confirmed, and nothing was changed" in refused.stderr
    done = profile(cli, job, "--rank", "1", "--yes", "-o", "first")
    assert "nsys recorded no work of a GPU of rank 1" in done.stderr
    assert "repeat the command" not in done.stderr  # its steps are known
    documented = read_documented_session()
    assert documented.pop(0) == "$ dtslurm profile 17 --with nsys --rank 1 --yes"
    *notes, traces = done.stderr.splitlines()
    assert documented.pop().partition(": ")[0] == traces.partition(": ")[0]
    assert documented == [*notes, *done.stdout.splitlines()]
    first = cli.folder / "first"
    assert sorted(item.name for item in first.iterdir()) == ["1.json", "1.nsys-rep"]
    assert {item.stat().st_mode & 0o777 for item in first.iterdir()} == {0o600}
    ranges = json.loads((first / "1.json").read_text())["traceEvents"]
    assert len(ranges) > 2
    assert {event["name"] for event in ranges} == {"forward and backward"}
    lengths = [event["dur"] for event in sorted(ranges, key=lambda event: event["ts"])]
    assert 20_000 <= min(lengths[1:-1]) < 1_000_000, lengths  # the recording cuts the others

    # A report that nsys itself can read, and no other program is below it.
    database = cli.folder / "report.sqlite"
    words = [str(find_nsys() / "nsys"), "export", "--type=sqlite", f"--output={database}"]
    subprocess.run([*words, str(first / "1.nsys-rep")], check=True, capture_output=True)
    with sqlite3.connect(database) as connection:
        [(count,)] = connection.execute("SELECT count(*) FROM NVTX_EVENTS WHERE eventType = 59")
    assert count >= len(ranges)
    variables = [cli("exec", job, "--rank", rank, "--", "env").stdout for rank in "01"]
    assert ["DTSLURM_NSYS_SESSION" in text for text in variables] == [False, True]

    # nsys would be killed by the early signal, which Slurm sends to every process of the step.
    subprocess.run(["scancel", "--signal=USR2", job], check=True, env=cli.env)
    cli.wait_until(lambda: cli("logs", job, "--rank", "1").stdout.count("early signal") == 1)
    profile(cli, job, "--rank", "1", "-o", "second")
    assert (cli.folder / "second/1.nsys-rep").exists()

    # The other rank needs a restart; then the reports of two nodes arrive at the same time.
    assert "the attempt ends" in profile(cli, job, "--yes", "-o", "third").stderr
    names = sorted(item.name for item in (cli.folder / "third").iterdir())
    assert names == ["0.json", "0.nsys-rep", "1.json", "1.nsys-rep"]
    (cli.folder / "stop").touch()
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    run = cli.run_dir(job)
    *restarts, end = [(event["reason"], event["counted"]) for event in events_of(run, "decision")]
    assert len(restarts) >= 2
    assert set(restarts) == {("the user requested it", False)}
    assert end == ("training is done", False)
    began = [
        int(line.split()[-1])
        for line in cli("logs", job, "--attempt", "1").stdout.splitlines()
        if "began" in line
    ]
    assert min(began) > 0  # both ranks saved at the end of the first attempt


def test_jobs_that_cannot_restart_below_nsys_are_refused_and_left_alone(cli: Cli) -> None:
    job = submit(cli, path=os.environ["PATH"])
    refused = cli("profile", job, "--with", "nsys", code=2)
    assert f"job {job} has no supervisor that restarts it" in refused.stderr
    assert "--max-restarts 3" in refused.stderr
    (cli.folder / "stop").touch()
    cli.wait_for_end(job)
    (cli.folder / "stop").unlink()
    job = submit(cli, "--max-restarts", "1", path=os.environ["PATH"])
    refused = cli("profile", job, "--with", "nsys", "--yes", code=2)
    assert "nsys is not on PATH where the ranks run" in refused.stderr
    (cli.folder / "stop").touch()
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    assert len(events_of(cli.run_dir(job), "attempt")) == 1
