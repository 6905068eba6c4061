from __future__ import annotations

import pytest

from dtslurm.dashboard.arrange import SORTS, Arrangement, arrange
from tests.dashboard.made import board, many_jobs

ROWS = board().rows


def names(choice: Arrangement) -> list[str]:
    return [row.job_id for row in arrange(ROWS, choice)]


def test_tasks_are_folded_until_their_array_is_expanded() -> None:
    assert "4704_1" not in names(Arrangement())
    shown = names(Arrangement(expanded=frozenset({"a" * 12})))
    at = shown.index("4704")
    assert shown[at + 1 : at + 4] == ["4704_0", "4704_1", "4704_2"]


def test_all_words_must_occur_and_negated_ones_must_not() -> None:
    assert names(Arrangement(words="llama")) == ["4701", "4702"]
    assert names(Arrangement(words="llama pending")) == ["4702"]
    assert names(Arrangement(words="llama !pending")) == ["4701"]
    assert names(Arrangement(words="LLAMA hpc gpu[01")) == ["4701"]


def test_an_array_is_shown_for_a_task_that_matches() -> None:
    assert names(Arrangement(words="4704_2")) == ["4704"]


def test_what_has_ended_can_be_hidden() -> None:
    assert names(Arrangement(hide_ended=True)) == ["4701", "4702", "4703", "4704", "4709"]


@pytest.mark.parametrize("sort", SORTS)
def test_every_order_has_all_rows_and_a_reverse(sort: str) -> None:
    assert sorted(names(Arrangement(sort=sort))) == sorted(names(Arrangement()))
    assert sorted(names(Arrangement(sort=sort, reverse=True))) == sorted(names(Arrangement()))


def test_by_state_what_runs_comes_first_and_what_went_well_last() -> None:
    shown = [row.state for row in arrange(many_jobs(200).rows, Arrangement(sort="state"))]
    assert shown[0] == "RUNNING"
    assert shown[-1] == "COMPLETED"
    assert shown.index("PENDING") < shown.index("FAILED")
