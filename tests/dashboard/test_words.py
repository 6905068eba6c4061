"""Texts of the dashboard about jobs, clusters, ranks, nodes and progress."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtslurm.dashboard import words
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.telemetry import GpuSample, RankCell, TrainPoint
from dtslurm.services.observe.run_list import Board, ClusterLine, JobRow
from dtslurm.views.forecast import Forecast
from dtslurm.views.run_page import NodeCell, Page
from tests.dashboard.samples import NOW, board, page_of, row


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"about": "jobs with a higher priority wait, too", "estimated_start": int(NOW) + 3600},
            "jobs with a higher priority wait, too; estimated start 23:26",
        ),
        ({"estimated_start": int(NOW) + 3600}, "estimated start 23:26"),
        ({"estimated_start": int(NOW) + 2 * 86400}, "estimated start Mon 22:26"),
        ({"estimated_start": int(NOW) + 30 * 86400}, "estimated start 2026-12-21 22:26"),
        ({"about": "it waits", "estimated_start": int(NOW) - 5}, "it waits"),
        ({"about": "asks for too much", "never": True}, "asks for too much: it will never start as it is"),
    ],
)
def test_the_about_text_of_a_pending_job_has_reason_and_estimated_start(
    values: dict[str, object], said: str
) -> None:
    waiting = row(1, state="PENDING", pending=True, start=None, **values)
    assert words.describe_row(waiting, NOW)[0] == said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "1h02m/4h00m"),
        ({"limit": None}, "1h02m"),
        ({"start": None}, "-/4h00m"),
        ({"start": None, "limit": None}, "-"),
        ({"over": True, "end": int(NOW) - 3663}, "1m00s"),
        ({"start": int(NOW) + 60}, "0s/4h00m"),  # a clock that is ahead
    ],
)
def test_the_time_text_shows_elapsed_time_and_limit(values: dict[str, object], said: str) -> None:
    assert words.format_times(row(1, **values), NOW) == said


@pytest.mark.parametrize(
    ("values", "said"),
    [({}, "2n 16g"), ({"gpus": None}, "2n 16r"), ({"nodes": None, "gpus": None}, "- 16r")],
)
def test_the_size_text_shows_nodes_and_gpus_or_ranks(values: dict[str, object], said: str) -> None:
    assert words.format_size(row(1, **values)) == said


STEADY = Forecast(step=100, total=1000, pace=2.0, done_at=NOW + 450)


@pytest.mark.parametrize(
    ("forecast", "lines"),
    [
        (STEADY, ["step 100 of 1,000 (10%) · 2 steps/s · done in 7m30s"]),
        (replace(STEADY, total=None, done_at=None), ["step 100 · 2 steps/s"]),
        (replace(STEADY, pace=0.25, done_at=None), ["step 100 of 1,000 (10%) · 4 s a step"]),
        (Forecast(step=3), ["step 3"]),
        (
            replace(STEADY, cut_at=900),
            [
                "step 100 of 1,000 (10%) · 2 steps/s · done in 7m30s",
                "will stop at step 900 of 1,000, at the time limit",
            ],
        ),
        (
            replace(STEADY, cut_at=900, quiet_s=600, stalled=True),
            [
                "step 100 of 1,000 (10%)",
                "no step for 10m00s, far longer than a step takes (before: 2 steps/s)",
            ],
        ),
    ],
)
def test_the_forecast_text_shows_step_pace_and_end(forecast: Forecast, lines: list[str]) -> None:
    assert words.describe_forecast(forecast, NOW) == lines


STALLED = Activity(stalled=True, since=NOW - 220, quiet_s=220, summary="no work for 3m40s; rank 3 is stopped")
COMPILES = Activity(stalled=False, since=NOW - 90, quiet_s=90, summary="rank 0 waits for its child cc1plus")


def test_the_list_and_header_mark_a_stalled_job() -> None:
    stalled = row(1, activity=STALLED, forecast=replace(STEADY, cut_at=900, stalled=True))
    assert words.format_state(stalled) == ("■ STALLED 3m40s", "bad")
    assert words.describe_row(stalled, NOW) == ("no work for 3m40s; rank 3 is stopped", "bad")
    assert detail_line(stalled) == "no work for 3m40s; d examines every rank; rank 3 is stopped"
    assert words.format_header(stalled, None, NOW)[0][0].startswith("■ STALLED 3m40s  train-1")
    assert words.count_states(Board(rows=(stalled, row(2)))) == "1 running · 1 stalled"
    assert [piece for piece, _ in words.describe_activity(stalled, "d")] == [
        "no work for 3m40s", "d examines every rank; rank 3 is stopped",
    ]  # fmt: skip
    assert words.format_state(row(1, activity=STALLED, state="COMPLETED", over=True))[0] == "✓ COMPLETED"


def test_a_job_whose_rank_waits_for_a_child_process_is_shown_as_running() -> None:
    compiles = row(1, activity=COMPILES)
    assert words.format_state(compiles) == ("● RUNNING", "good")
    assert words.describe_row(compiles, NOW) == ("rank 0 waits for its child cc1plus", "warn")
    assert words.describe_activity(compiles, "d") == [("rank 0 waits for its child cc1plus", "warn")]
    assert words.describe_activity(row(1), "d") == []


def test_the_throughput_of_a_stalled_job_is_marked_as_former() -> None:
    page = page_of(steps=20)
    assert [title for title, _ in words.select_curves(page, 2)][1].startswith("tokens/s 4")
    stopped = replace(page, forecast=replace(STEADY, stalled=True))
    titles = [title for title, _ in words.select_curves(stopped, 2)]
    assert not titles[0].endswith("stalled")
    assert titles[1].endswith(", before it stalled")


def test_without_a_cut_the_forecast_mentions_none() -> None:
    assert words.describe_cut(STEADY) == ""
    assert words.format_progress(row(1)) == ""
    assert words.format_progress(row(1, forecast=STEADY)) == "10%"
    assert words.format_progress(row(1, forecast=Forecast(step=41_200))) == "41,200"


def detail_line(job: JobRow) -> str:
    return words.describe_selected(job, NOW)[1][0]


def test_the_detail_lines_describe_the_selected_job() -> None:
    assert words.describe_selected(row(1), NOW)[0][0] == "train-1 4701 on hpc: gpu[01-02], 16 ranks"
    assert words.describe_selected(row(1, nodelist="", ranks=1), NOW)[0][0].endswith(": no nodes yet, 1 rank")
    assert detail_line(row(1, forecast=STEADY)) == "step 100 of 1,000 (10%) · 2 steps/s · done in 7m30s"
    assert detail_line(row(1, about="attempt 2", forecast=STEADY)).startswith("attempt 2; step 100 of")
    assert detail_line(row(1, forecast=STEADY, over=True, ok=True, about="")) == ""
    assert detail_line(row(1, about="asks for too much", fix="lower --time")) == (
        "asks for too much: lower --time"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (ClusterLine(name="hpc"), ("hpc: querying", "dim")),
        (ClusterLine(name="hpc", trouble="no link"), ("hpc: no link", "bad")),
        (ClusterLine(name="hpc", observed_at=NOW - 5), ("hpc ok", "dim")),
        (ClusterLine(name="hpc", observed_at=NOW + 5), ("hpc ok", "dim")),
        (ClusterLine(name="hpc", observed_at=NOW - 61), ("hpc 1m01s ago", "warn")),
        (
            ClusterLine(name="hpc", observed_at=NOW - 61, trouble="no link"),
            ("hpc: no answer for 1m01s (no link); last known state", "bad"),
        ),
    ],
)
def test_the_cluster_text_shows_age_and_errors(line: ClusterLine, said: tuple[str, str]) -> None:
    assert words.describe_cluster(line, NOW) == said


def test_a_cluster_of_runs_with_several_profiles_is_named_once() -> None:
    lines = [ClusterLine(name="hpc", observed_at=NOW - age) for age in (1, 2)]
    lines += [ClusterLine(name="hpc", trouble="no link"), ClusterLine(name="other", observed_at=NOW)]
    texts = [text for text, _ in words.describe_clusters(lines, NOW)]
    assert texts == ["hpc ok", "hpc: no link", "other ok"]


def test_the_counts_have_a_fixed_order_and_count_array_tasks() -> None:
    states = words.count_states(board())
    assert states.startswith("3 running · 2 pending · 1 failed · 2 completed · 1 cancelled")
    assert words.count_states(Board()) == "no runs yet"


def test_a_rank_is_described_with_its_known_values() -> None:
    assert words.describe_rank(RankCell(rank=3)) == "rank 3: waiting · log 0B"
    full = RankCell(
        rank=3,
        state="running",
        host="n1",
        pid=7,
        gpu=55.4,
        memory=0.5,
        silent=65,
        size=2048,
        deviation="no output while other ranks write",
    )
    assert words.describe_rank(full) == (
        "rank 3: running · on n1 · pid 7 · GPU 55 % · GPU memory 50% · last output 1m05s ago · log 2.0K"
        " · no output while other ranks write"
    )


def test_a_list_of_outliers_is_shortened_to_three() -> None:
    cells = tuple(RankCell(rank=rank, state="failed", deviation="exit code 1") for rank in range(5))
    page = Page(key="k", ranks=cells)
    assert words.list_outliers(page) == "outliers: 0 exit code 1; 1 exit code 1; 2 exit code 1 and 2 more"
    assert words.count_ranks(page) == "5 failed"
    assert words.count_ranks(Page(key="k")) == "no ranks yet"


def test_missing_node_values_are_dashes_and_old_samples_show_their_age() -> None:
    cells = words.format_node_cells(NodeCell(name="n1", age=120))
    assert {cells[key][0] for key in ("gpu", "memory", "heat", "cpu", "ram", "rx", "tx", "disk")} == {"-"}
    assert cells["about"] == ("last sample 2m00s ago", "bad")
    busy = NodeCell(
        name="n1",
        gpus=(GpuSample(index=0, util=70.0, temperature_c=85.0), GpuSample(index=1)),
        memory=0.96,
        disks=(("/tmp", 0.2), ("/scratch", 0.99)),
    )
    cells = words.format_node_cells(busy)
    assert (cells["gpus"][0], cells["gpu"], cells["heat"]) == ("70 -", ("70%", "good"), ("85°", "bad"))
    assert (cells["ram"], cells["disk"], cells["about"]) == (("96%", "bad"), ("99%", "bad"), ("", ""))


@pytest.mark.parametrize(("use", "kind"), [(60.0, "good"), (20.0, "warn"), (19.0, "bad")])
def test_the_colour_of_gpu_use_depends_on_the_value(use: float, kind: str) -> None:
    cells = words.format_node_cells(NodeCell(name="n1", gpus=(GpuSample(index=0, util=use),)))
    assert cells["gpu"][1] == kind


def test_the_header_shows_time_reason_or_end() -> None:
    assert words.format_header(row(1), None, NOW)[1][0] == "attempt 0 · 1h02m of 4h00m"
    assert words.format_header(row(1, limit=None, attempt=2), None, NOW)[1][0] == "attempt 2 · 1h02m"
    assert words.format_header(row(1, start=None), None, NOW)[1][0] == "attempt 0 · not started"
    ended = row(1, over=True, end=int(NOW) - 3663, limit=None, about="exit code 1")
    assert words.format_header(ended, None, NOW)[1][0] == "attempt 0 · 1m00s · exit code 1"
    assert words.format_header(row(1, nodelist=""), None, NOW)[0][0].endswith("16 ranks on 2n 16g")


def test_without_a_throughput_steps_per_second_are_drawn() -> None:
    points = tuple(TrainPoint(step=step, time=NOW + 2 * step, loss=1.0) for step in range(10))
    page = Page(key="k", points=points)
    assert [title for title, _ in words.select_curves(page, 4)] == ["loss 1", "steps/s 0.5"]
    assert words.select_curves(page, 4)[1][1][0] == (1.0, 0.5)
    assert len(words.select_curves(page_of(4), 1)) == 1
    timeless = tuple(replace(point, time=None) for point in points)
    assert [title for title, _ in words.select_curves(Page(key="k", points=timeless), 4)] == ["loss 1"]
    still = tuple(replace(point, time=NOW) for point in points)
    assert [title for title, _ in words.select_curves(Page(key="k", points=still), 4)] == ["loss 1"]
