"""Equal lines of many ranks are merged."""

from __future__ import annotations

import pytest
from ClusterShell.RangeSet import RangeSet
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.logs.fold import Folded, LineFolder, rank_set
from dtslurm.model.jobs.job import LogLine


def line(rank: int | None, text: str, attempt: int = 0, task: str | None = None) -> LogLine:
    source = "batch" if rank is None else str(rank)
    return LogLine(source=source, text=text, rank=rank, attempt=attempt, task=task)


def rank_texts(folded_lines: list[Folded]) -> list[tuple[str, str]]:
    return [(rank_set(item.ranks), item.line.text) for item in folded_lines]


def test_folder_merges_equal_lines_of_many_ranks() -> None:
    folder = LineFolder()
    folder.add((line(rank, "ready") for rank in range(1024)), 0.0)
    folder.add([line(3, "odd"), line(7, "odd")], 0.1)
    assert rank_texts(folder.take(0.1, everything=True)) == [("0-1023", "ready"), ("3,7", "odd")]


def test_folder_releases_lines_after_the_window() -> None:
    folder = LineFolder(window=1.0)
    folder.add([line(0, "a")], 10.0)
    assert folder.take(10.9) == []
    folder.add([line(1, "a")], 10.9)
    assert rank_texts(folder.take(11.0)) == [("0-1", "a")]
    folder.add([line(2, "a")], 11.0)
    assert rank_texts(folder.take(12.0)) == [("2", "a")]


def test_folder_releases_lines_at_once_when_the_buffer_is_full() -> None:
    folder = LineFolder(window=99.0, max_waiting=10)
    folder.add((line(0, str(number)) for number in range(10)), 0.0)
    assert len(folder.take(0.0)) == 10


def test_folder_does_not_merge_repeated_lines_of_the_same_rank() -> None:
    folder = LineFolder()
    folder.add([line(0, "x"), line(0, "x"), line(1, "x"), line(1, "x")], 0.0)
    assert rank_texts(folder.take(0.0, everything=True)) == [("0-1", "x"), ("0-1", "x")]


def test_folder_does_not_merge_lines_of_different_tasks_attempts_or_job_output() -> None:
    folder = LineFolder()
    folder.add([line(0, "x"), line(1, "x", task="3"), line(1, "x", 1), line(None, "x"), line(None, "x")], 0.0)
    assert len(folder.take(0.0, everything=True)) == 5


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc")), max_size=60))
def test_folder_preserves_the_lines_and_their_order_for_each_rank(wrote: list[tuple[int, str]]) -> None:
    folder = LineFolder()
    folder.add((line(rank, text) for rank, text in wrote), 0.0)
    result = folder.take(0.0, everything=True)
    for rank in range(6):
        assert [item.line.text for item in result if rank in item.ranks] == [
            text for who, text in wrote if who == rank
        ]
    assert all(len(item.ranks) == len(set(item.ranks)) for item in result)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_rank_set_text_parses_back_to_the_same_ranks(ranks: set[int]) -> None:
    assert {int(number) for number in RangeSet(rank_set(ranks))} == ranks


@pytest.mark.parametrize(("ranks", "text"), [([5], "5"), ([2, 0, 1, 7], "0-2,7"), ([], "")])
def test_rank_set_formats_consecutive_ranks_as_ranges(ranks: list[int], text: str) -> None:
    assert rank_set(ranks) == text
