from __future__ import annotations

import pytest

from dtslurm.dashboard.arrange import SORTS, Arrangement, arrange
from tests.dashboard.samples import board, many_jobs

ROWS = board().rows


def arranged_jobs(choice: Arrangement) -> list[str]:
    return [row.job_id for row in arrange(ROWS, choice)]


def test_array_tasks_are_hidden_until_their_array_is_expanded() -> None:
    assert "4704_1" not in arranged_jobs(Arrangement())
    shown = arranged_jobs(Arrangement(expanded=frozenset({"a" * 12})))
    at = shown.index("4704")
    assert shown[at + 1 : at + 4] == ["4704_0", "4704_1", "4704_2"]


def test_the_filter_requires_all_words_and_excludes_negated_words() -> None:
    assert arranged_jobs(Arrangement(filter_text="llama")) == ["4701", "4702"]
    assert arranged_jobs(Arrangement(filter_text="llama pending")) == ["4702"]
    assert arranged_jobs(Arrangement(filter_text="llama !pending")) == ["4701"]
    assert arranged_jobs(Arrangement(filter_text="LLAMA hpc gpu[01")) == ["4701"]


def test_an_array_is_shown_if_any_task_matches_the_filter() -> None:
    assert arranged_jobs(Arrangement(filter_text="4704_2")) == ["4704"]


def test_finished_runs_can_be_hidden() -> None:
    assert arranged_jobs(Arrangement(hide_ended=True)) == ["4701", "4702", "4703", "4704", "4709"]


@pytest.mark.parametrize("sort", SORTS)
def test_every_sort_order_keeps_all_rows(sort: str) -> None:
    assert sorted(arranged_jobs(Arrangement(sort=sort))) == sorted(arranged_jobs(Arrangement()))
    assert sorted(arranged_jobs(Arrangement(sort=sort, reverse=True))) == sorted(arranged_jobs(Arrangement()))


def test_the_state_order_puts_running_jobs_first_and_completed_jobs_last() -> None:
    shown = [row.state for row in arrange(many_jobs(200).rows, Arrangement(sort="state"))]
    assert shown[0] == "RUNNING"
    assert shown[-1] == "COMPLETED"
    assert shown.index("PENDING") < shown.index("FAILED")
