"""Every screen shows the same duration of a run, and the nodes in the same notation."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from dtslurm.presentation.quantities import duration
from dtslurm.services.runs.run_times import attempts_of
from tests.e2e.conftest import ON_SLURM, Cli

TRAIN = """
import json, os, sys, time
attempt = int(os.environ["DTSLURM_ATTEMPT"])
rank = int(os.environ["RANK"])
if rank == 0:
    with open(os.environ["DTSLURM_METRICS"], "a") as metrics:
        for step in range(10):
            metrics.write(json.dumps({"step": step, "loss": 1 / (step + 1)}) + "\\n")
time.sleep(2)
if attempt == 0 and rank == 1:
    os.kill(os.getpid(), 9)
"""
SIZES = ("-l", "srun", "-N", "2", "--ntasks-per-node", "1")


def shown_durations(cli: Cli, job: str) -> dict[str, str]:
    """Return what each screen shows as the duration of a run that has ended."""
    cli("report", "-o", "page.html", job)
    cli("compare", job, job, "--json")
    result = cli.status(job)
    [row] = [row for row in json.loads(cli("top", "--json").stdout)["jobs"] if row["job_id"] == job]
    [line] = [line for line in cli("status").stdout.splitlines() if line.startswith(job)]
    after = re.search(r", after (\S+)", cli("status", job).stdout)
    page = re.search(r'<dt>duration</dt><dd class="value">([^<\s]+)', (cli.folder / "page.html").read_text())
    screen = re.search(rf"{job}.*", cli("top", "--once").stdout)
    assert after is not None
    assert page is not None
    assert screen is not None
    compared = json.loads(cli("compare", job, job, "--json").stdout)["runs"][0]
    seconds = result["durations"][job]["duration_s"]
    assert duration(seconds) in screen[0].split()
    return {
        "status": line.split()[6],
        "status JOB": after[1].rstrip(","),
        "status --json": duration(seconds),
        "top --json": duration(row["end"] - row["start"]),
        "report": page[1],
        "compare": duration(compared["took_s"]),
    }


@ON_SLURM
@pytest.mark.parametrize("words", [(), ("--max-restarts", "1")])
def test_all_screens_show_the_same_duration_and_node_notation(cli: Cli, words: tuple[str, ...]) -> None:
    job = cli.submit(*SIZES, *words, cli.script(TRAIN))
    result = cli.wait_for_end(job)
    shown = shown_durations(cli, job)
    assert len(set(shown.values())) == 1, shown
    nodes = result["statuses"][0]["nodelist"]
    assert re.fullmatch(r"[a-z]+\[\d-\d\]", nodes)
    texts = [
        cli("status", job).stdout,
        cli("top", "--once", job).stdout,
        (cli.folder / "page.html").read_text(),
    ]
    for text in texts:
        assert nodes in text
        assert not re.search(r"\b[a-z]+\d, ?[a-z]+\d\b", text)
    attempts = attempts_of(cli.run_dir(job).events())
    assert {attempt.nodes for attempt in attempts} == {nodes}
    assert len(attempts) == (2 if words else 1)
    pause = sum((after.started or 0) - (before.ended or 0) for before, after in pairwise(attempts))
    assert result["durations"][job]["between_attempts_s"] == pytest.approx(pause)
