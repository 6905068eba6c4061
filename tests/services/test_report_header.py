"""The header of a report: headline and key figures."""

from __future__ import annotations

from typing import Any

import pytest

from dtslurm.model.runs.telemetry import FirstFailure, TrainPoint
from dtslurm.presentation.quantities import format_short_number
from dtslurm.services.observe.report_header import (
    Headline,
    Tile,
    cost_tiles,
    describe_attempts,
    run_headline,
    size_tiles,
    time_tile,
    training_tiles,
)
from dtslurm.services.runs.run_times import RunTimes

NOW = 1000.0


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        ({"cause": "nan-loss", "rank": 3, "node": "n2"}, "nan-loss · rank 3 on n2 failed first"),
        ({"cause": "nan-loss", "rank": 0, "node": None}, "nan-loss · rank 0 failed first"),
        ({"cause": "node-failure", "rank": None, "node": "n2"}, "node-failure · on n2"),
        ({"cause": "unknown", "rank": None}, "unknown"),
    ],
)
def test_the_headline_of_a_failed_run_has_state_cause_and_first_failed_rank(
    verdict: dict[str, Any], text: str
) -> None:
    assert run_headline("FAILED", verdict, "after 1 restart") == Headline("FAILED", "bad", text)


@pytest.mark.parametrize(("rank", "cause"), [(3, "KeyError: 'label'"), (2, "python-exception")])
def test_the_exception_of_the_first_failed_rank_is_the_cause_in_the_headline(rank: int, cause: str) -> None:
    failure = FirstFailure(rank=rank, exit_code=1, error="KeyError: 'label'")
    verdict = {"cause": "python-exception", "rank": 3, "node": "n2"}
    assert run_headline("FAILED", verdict, "", failure).text == f"{cause} · rank 3 on n2 failed first"


@pytest.mark.parametrize(
    ("state", "kind"),
    [("COMPLETED", "good"), ("RUNNING", "plain"), ("STALLED 3m40s", "bad"), ("CANCELLED", "plain")],
)
def test_the_headline_of_other_runs_has_state_and_number_of_restarts(state: str, kind: str) -> None:
    assert run_headline(state, None, describe_attempts(3)) == Headline(state, kind, "after 2 restarts")
    assert describe_attempts(1) == ""


def test_unknown_figures_are_omitted() -> None:
    assert time_tile(None, 600, NOW) == []
    assert training_tiles({0: []}) == []
    assert cost_tiles(None, None, "") == []
    assert training_tiles({0: [TrainPoint(step=7)]}) == [Tile("steps", "7")]
    assert size_tiles(4, 0, 0) == [Tile("ranks", "4")]


def test_figures_cover_all_attempts() -> None:
    attempts = {
        0: [TrainPoint(step=step, loss=9.0 - step, tokens_per_s=40_000.0) for step in range(4)],
        1: [
            TrainPoint(step=step, loss=8.0 - step, tokens_per_s=50_000.0, total_steps=10)
            for step in (3, 4, 5)
        ],
    }
    assert training_tiles(attempts) == [
        Tile("steps", "5", "of 10 (50%)"),
        Tile("tokens/s", "45,000", "median"),
        Tile("last loss", "3", "best 3 at step 5"),
    ]
    slow = {0: [TrainPoint(step=1, step_time_s=0.25)]}
    assert Tile("seconds per step", "0.25", "median") in training_tiles(slow)


def test_tiles_show_duration_size_and_cost() -> None:
    assert time_tile(RunTimes(100.0, 400.0, paused_s=60.0), 600, NOW) == [
        Tile("duration", "5m00s", "limit 10m00s, 1m00s of it between attempts")
    ]
    assert size_tiles(16, 2, 16) == [Tile("GPUs", "16", "on 2 nodes")]
    assert cost_tiles(12.5, 25.0, "EUR") == [Tile("GPU-hours", "12.5", "25.00 EUR")]
    assert cost_tiles(12.5, None, "") == [Tile("GPU-hours", "12.5")]


@pytest.mark.parametrize(
    ("value", "text"), [(0.02134567, "0.02135"), (41026.4, "41,026"), (-3, "-3"), (2e15, "2e+15"), (0, "0")]
)
def test_numbers_are_rounded_to_few_digits(value: float, text: str) -> None:
    assert format_short_number(value) == text
