"""The page of the benchmarks: targets, measured values, missed targets and failed benchmarks."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import logs, overhead, page, requests, sampler, submission, targets
from benchmarks.__main__ import NAMES
from benchmarks.charts import Bar, Chart, compare_rounds, format_charts, median_and_quartiles
from benchmarks.peers import NAMES as PEERS
from benchmarks.peers import version
from benchmarks.scale import wrapper

ROWS = [row for rows in targets.load_targets().values() for row in rows]


@pytest.mark.parametrize("row", ROWS, ids=[row["figure"] for row in ROWS])
def test_a_target_has_a_limit_and_a_source(row: dict[str, Any]) -> None:
    if "measured" in row:
        assert isinstance(row["met"], bool)
        assert row["target"]
        return
    assert row["from"] in NAMES
    assert ("most" in row) != ("least" in row)
    assert ("bar" in row) != ("find" in row)
    assert re.compile(row.get("find", "()")).groups == 1


def test_every_target_has_a_result_and_every_missed_target_a_reason() -> None:
    results = page.load_results()
    for row in ROWS:
        measurement = targets.compare_with_target(row, results)
        assert measurement.met is not None, measurement
        assert measurement.met or measurement.reason, measurement


def benchmark_result(output: str = "", **more: Any) -> dict[str, Any]:
    conditions = {"seconds": 1, "date": "2026-01-02", "commit": "abc", "machine": "2 x X"}
    return {"ok": True, "output": output, "charts": [], **conditions, **more}


PRINTED = "first: 1,250 ms\nsecond: 90 ms\n"


@pytest.mark.parametrize(
    ("row", "measured", "met"),
    [
        ({"most": 1300, "find": r": ([\d,]+) ms"}, "1,250 ms", True),  # the worst counts
        ({"most": 1000, "find": r": ([\d,]+) ms"}, "1,250 ms", False),
        ({"least": 100, "find": r": ([\d,]+) ms"}, "90 ms", False),
        ({"least": 80, "find": r"^second: (\d+)"}, "90 ms", True),
        ({"most": 80, "find": r"third: (\d+)"}, "not in the output of the benchmark (`top`)", None),
        ({"most": 3, "bar": "slow", "take": "ratio"}, "4 ms", False),
        ({"most": 9, "bar": "slow"}, "8 ms", True),
        ({"most": 9, "bar": "slow", "chart": "T"}, "8 ms", True),
        ({"most": 9, "bar": "slow", "chart": "U"}, "not in the output of the benchmark (`top`)", None),
        ({"most": 9, "bar": "broken"}, "not in the output of the benchmark (`top`)", None),
        ({"most": 9, "bar": "slow", "from": "logs"}, "not measured yet (`logs`)", None),
        ({"target": "none", "measured": "none, by hand", "met": False}, "none, by hand", False),
    ],
)
def test_a_value_is_compared_with_its_target(row: dict[str, Any], measured: str, met: bool | None) -> None:
    chart = compare_rounds("T", "ms", "quick", {"quick": [2.0, 2.0], "slow": [8.0, 8.0], "broken": []})
    results = {"top": benchmark_result(PRINTED, charts=[asdict(chart)])}
    row = {"figure": "time", "unit": "ms", "from": "top", **row}
    measurement = targets.compare_with_target(row, results)
    assert (measurement.measured, measurement.met) == (measured, met)


def test_a_failed_command_and_a_failed_benchmark_are_shown() -> None:
    chart = compare_rounds(
        "T", "ms", "quick", {"quick": [1.0, 2.0, 4.0], "broken": []}, {"broken": "no | module"}
    )
    results = {"top": benchmark_result("failed with exit code 1", ok=False, charts=[asdict(chart)])}
    text = page.render_page(results)
    assert "| broken | failed: no   module |  |  |  |" in text
    assert "| quick | 2.00 | 1.50 to 3.00 | 1.00 x |  |" in text
    assert "the benchmark failed (`top`)" in text
    [(name, svg)] = page.draw_charts(results).items()
    assert f"({name})" in text
    assert "broken (failed)" in svg
    assert "<script" not in svg
    assert svg == page.draw_charts(results)[name]  # the file is under version control and must not change


def test_the_page_lists_missed_targets_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"figure": "fast", "most": 2000, "unit": "ms", "from": "top", "find": r"first: ([\d,]+)"},
        {
            "figure": "slow",
            "most": 9,
            "unit": "ms",
            "from": "top",
            "find": r"first: ([\d,]+)",
            "reason": "a | b",
        },
    ]
    monkeypatch.setattr(page, "load_targets", lambda: {"Times": rows})
    text = page.render_page({"top": benchmark_result(PRINTED)})
    assert "1 of 2 targets are met." in text
    assert "| fast | ≤ 2,000 ms | 1,250 ms | yes |" in text
    missed = text.partition("## Where dtslurm falls short")[2]
    assert "| slow | ≤ 9 ms | 1,250 ms | a &#124; b |" in missed
    assert "| fast |" not in missed


def test_ratios_are_computed_within_a_round() -> None:
    chart = compare_rounds("T", "s", "bare", {"bare": [1.0, 10.0, 100.0], "dtslurm": [2.0, 20.0, 200.0]})
    bar = chart.bars[1]
    assert (bar.value, bar.ratio, bar.ratio_low, bar.ratio_high) == (20.0, 2.0, 2.0, 2.0)
    assert median_and_quartiles([3.0]) == (3.0, 3.0, 3.0)


def test_the_page_shows_only_output_that_no_chart_shows() -> None:
    chart = Chart("Size", "MB", "small", (Bar("small", 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, note="3 packages"),))
    printed = format_charts([chart])
    text = page.render_page({"top": benchmark_result(printed + "more: 5\n", charts=[asdict(chart)])})
    assert "| small (3 packages) | 2.00 | 1.00 x |" in text
    assert "```text\nmore: 5\n```" in text
    assert (
        "```text"
        not in page.render_page({"top": benchmark_result(printed, charts=[asdict(chart)])}).partition(
            "### top"
        )[2]
    )


def test_the_page_describes_every_benchmark() -> None:
    results = page.load_results()
    text = page.render_page(results)
    for name in results:
        assert f"\n### {name}\n\n{page.describe_benchmark(name)}" in text
        assert page.describe_benchmark(name)


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_version_is_pinned(name: str) -> None:
    assert re.fullmatch(r"\d+[\w.]+", version(name))


def test_the_cost_of_the_log_tailer_is_measured() -> None:
    row = logs.measure_idle_tailer(3, seconds=0.1, settle_s=0.0)
    assert row["files"] == 3
    assert 3 < row["MB"] < 100


@pytest.mark.parametrize(
    "program",
    [sampler.PEER, overhead.TRAIN, requests.SUBMITIT, requests.TORCHX, submission.TRAIN],
    ids=["psutil", "overhead", "submitit", "torchx", "submission"],
)
def test_an_embedded_program_is_valid_python(program: str) -> None:
    compile(program, "<program>", "exec")


@pytest.mark.slurm
def test_shells_of_a_large_job_start_training_on_a_node(tmp_path: Path) -> None:
    environment = wrapper.prepare_run(tmp_path, 12_500)
    task = ["bash", str(tmp_path / "run/task.sh")]
    assert wrapper.start_ranks(tmp_path, environment, task) > 0
    assert [path.name for path in (tmp_path / "run/ranks/0/running").iterdir()] == ["node-0"]
    assert wrapper.start_step(tmp_path, environment) > 0


def test_the_readme_shows_the_present_figures() -> None:
    text = page.README.read_text()
    assert text == page.render_readme(text, page.load_results()), "make check writes it"
    assert "(missed)" in text  # the README also shows where dtslurm falls short
