"""``dtslurm report``: the page of a run, in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli

TRAIN = """
import json, os, sys, time
rank = int(os.environ["RANK"])
if rank == 0:
    with open(os.environ["DTSLURM_METRICS"], "a") as metrics:
        for step in range(50):
            loss = float("nan") if step == 20 else 1e308 if step == 21 else 1 / (step + 1)
            metrics.write(json.dumps({"step": step, "loss": loss, "tokens_per_s": 100 + step}) + "\\n")
        metrics.write('{"step": 5')  # cut off in the middle
print("epoch 1 </pre></script><script>document.body.dataset.owned = 1</script>", flush=True)
while not (os.path.exists(os.environ["DTSLURM_METRICS"]) and os.path.getsize(os.environ["DTSLURM_METRICS"])):
    time.sleep(0.05)  # rank 0 writes them all at once
if rank == 1:
    raise ValueError("</pre></script><script>document.body.dataset.owned = 1</script>")
"""


def in_browser(page: Path) -> str:
    """Return the page as a browser makes it, with its scripts run and no network."""
    browser = shutil.which("chromium-headless-shell")
    assert browser, "tests/dashboard/install.sh installs it"
    argv = [browser, "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        [*argv, "--host-resolver-rules=MAP * ~NOTFOUND", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return done.stdout


def test_report_shows_a_failed_run_on_a_single_page(cli: Cli) -> None:
    job = cli.submit("-l", "srun", "--ntasks-per-node", "2", cli.script(TRAIN))
    cli.wait_for_end(job, limit=120)
    page = cli.folder / "page.html"
    assert cli("report", "-o", "page.html", job).stdout.strip() == str(page)
    text = page.read_text()
    assert "python-exception" in text
    assert text.count("<script>document.body") == 0  # only as text
    assert not re.search(r"""(?:src|href)=["'](?!#)""", text)  # asks nothing of a network
    assert "#SBATCH --ntasks-per-node=2" in text
    assert 'class="failed first"' in text
    assert "failed first: rank 1 (ValueError: " in text


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_report_page_draws_charts_and_runs_no_script_of_the_logs(cli: Cli) -> None:
    job = cli.submit("-l", "srun", "--ntasks-per-node", "2", cli.script(TRAIN))
    cli.wait_for_end(job)
    cli("report", "-o", "page.html", job)
    result = in_browser(cli.folder / "page.html")
    assert 'data-charts="2"' in result
    assert "data-owned" not in result
    assert result.count('class="uplot') == 2
    assert re.search(r'aria-label="loss: 1.000 at step 0, [0-9.]+ at step \d+"', result)
    assert re.search(r'aria-label="2 ranks; \d [a-z]+', result)
    assert "started on" in result  # events are told in words


TRIAL = """
import json, os, sys
lr = float(sys.argv[1])
with open(os.environ["DTSLURM_METRICS"], "a") as metrics:
    for step in range(20):
        metrics.write(json.dumps({"step": step, "loss": lr / (step + 1)}) + "\\n")
if lr > 0.02:
    raise KeyError("label")
"""
SWEEP = """
script: trial.py
args: ["${lr}"]
time: 5
sweep:
  grid: {lr: [0.01, 0.02, 0.05]}
  metric: loss
"""


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_report_of_a_sweep_shows_trials_curves_and_failures(cli: Cli) -> None:
    cli.script(TRIAL, "trial.py")
    (cli.folder / "sweep.yaml").write_text(SWEEP)
    job = cli.submit("sweep.yaml")
    cli.wait_for_end(job)
    cli("report", "-o", "page.html", job)
    text = (cli.folder / "page.html").read_text()
    causes = re.search(r'<table class="rows" id="failures">.*?</table>', text, re.DOTALL)
    assert causes is not None
    assert "lr=0.05" in causes[0]
    assert "KeyError: &#39;label&#39; (rank 0, trial.py:8)" in causes[0]
    trials = re.search(r'<table class="rows" id="trials">.*?</table>', text, re.DOTALL)
    assert trials is not None
    names = re.findall(r'<tr><td data-label="trial">(lr=[0-9.]+)</td>', trials[0])
    assert names == [
        "lr=0.01",
        "lr=0.02",
        "lr=0.05",
    ]
    result = in_browser(cli.folder / "page.html")
    assert 'data-charts="1"' in result
    assert result.count('class="u-series"') == 4  # the steps, and a curve for each trial
    cli("report", "-o", "task.html", f"{job}_2")
    assert "python-exception" in (cli.folder / "task.html").read_text()


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_report_of_an_array_shows_the_failed_task(cli: Cli) -> None:
    script = cli.script(
        "import os\nif os.environ['SLURM_ARRAY_TASK_ID'] == '1':\n    raise KeyError('label')"
    )
    job = cli.submit("-a", "0-2", script)
    cli.wait_for_end(job)
    cli("report", "-o", "page.html", job)
    text = (cli.folder / "page.html").read_text()
    assert '<span class="soft">task 1</span>' in text
    assert "python-exception" in text


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_report_of_an_unstarted_or_unknown_run_is_refused(cli: Cli) -> None:
    before = cli.submit(cli.script("import time; time.sleep(300)", "wait.py"))
    waiting = cli.submit("-d", f"afterok:{before}", cli.script(TRAIN))
    assert "has not started" in cli("report", waiting, code=2).stderr
    assert "no run 'nope' is known" in cli("report", "nope", code=3).stderr


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_compare_page_draws_two_runs_in_the_same_charts(cli: Cli) -> None:
    script = cli.script(TRAIN)
    jobs = [
        cli.submit("-l", "srun", "--ntasks-per-node", "2", script, *words) for words in ((), ("--lr", "2"))
    ]
    for job in jobs:
        cli.wait_for_end(job)
    cli("compare", *jobs, "-o", "page.html")
    result = in_browser(cli.folder / "page.html")
    assert 'data-charts="2"' in result
    assert "data-owned" not in result
    assert all(f"{job} train" in result for job in jobs)
    assert "<td>--lr 2</td>" in result
