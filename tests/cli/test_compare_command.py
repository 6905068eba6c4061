"""``dtslurm compare`` as text, JSON and HTML."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtslurm.cli.commands.compare import draw_curves
from tests.cli.conftest import Run
from tests.cli.sample_runs import Runs


@pytest.fixture
def two_runs(runs: Runs) -> None:
    for job, slope in (("17", 0.1), ("18", 0.2)):
        lines = "\n".join(json.dumps({"step": step, "loss": 4 - slope * step}) for step in range(10))
        events = [{"time": 1_750_000_000 - 90, "event": "started", "attempt": 0, "nodes": "n1"}]
        events += [{"time": 1_750_000_000, "event": "ended", "attempt": 0, "exit_code": 0}]
        files = {
            "metrics/0/train.jsonl": lines + "\n",
            "logs/0/rank-0.log": "",
            "logs/0/manifest.json": json.dumps({"world_size": 1}),
            "events.jsonl": events,
        }
        runs.add("train", job, files=files)
        record = runs.root / f"train-{job}" / "job.json"
        document = json.loads(record.read_text())
        document["request"] = {"args": ["--lr", f"{slope}"], "time": "10"}
        record.write_text(json.dumps(document))


@pytest.mark.usefixtures("two_runs")
def test_compare_prints_results_and_differences_side_by_side(invoke: Run) -> None:
    stdout = invoke("compare", "17", "18", code=0).stdout
    assert "last loss  3.1        2.2" in stdout
    assert "args           --lr 0.1  --lr 0.2" in stdout
    assert "o 17 train  x 18 train" in stdout
    assert max(map(len, stdout.splitlines())) <= 80


@pytest.mark.usefixtures("two_runs")
def test_compare_prints_json(invoke: Run) -> None:
    document = json.loads(invoke("compare", "18", "17", "--json", code=0).stdout)
    assert [run["record"]["job_id"] for run in document["runs"]] == ["18", "17"]
    assert document["runs"][0]["curves"]["loss"][-1] == [9, pytest.approx(2.2)]
    assert document["differences"] == [
        {"section": "configuration", "name": "args", "values": ["--lr 0.2", "--lr 0.1"]}
    ]


@pytest.mark.usefixtures("two_runs")
def test_compare_writes_an_html_page(invoke: Run, folder: Path) -> None:
    invoke("compare", "17", "18", "-o", "two.html", code=0)
    text = (folder / "two.html").read_text()
    assert '"label":"loss"' in text
    assert "<td>--lr 0.2</td>" in text
    assert "https://" not in text.split("<script")[0]


@pytest.mark.parametrize("jobs", [("17",), tuple("123456789")])
def test_compare_accepts_two_to_eight_runs(invoke: Run, jobs: tuple[str, ...]) -> None:
    assert "can be compared" in invoke("compare", *jobs, code=2).stderr


def test_overlay_draws_short_and_flat_curves() -> None:
    assert len(draw_curves([((0, 1.0),), ((0, 1.0), (5, 1.0))], 40)) == 15
    assert draw_curves([((3, 2.0), (4, 1.0)), ()], 60)[-1].split() == ["3", "4"]
