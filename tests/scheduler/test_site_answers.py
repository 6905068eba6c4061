"""Answers of a Slurm about its configuration, cached for other processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtslurm.scheduler.site_answers import KEPT_S, SiteAnswers
from dtslurm.store.blob_cache import BlobCache

ASKED = ["scontrol", "show", "config"]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_answers(folder: Path, clock: Clock, place: str = "here") -> SiteAnswers:
    return SiteAnswers(clock, BlobCache(folder), place)


def test_cached_answer_is_shared_between_processes_for_a_minute(tmp_path: Path, clock: Clock) -> None:
    make_answers(tmp_path, clock).put(ASKED, clock.now, "MaxArraySize = 1001\n\u00fc")
    clock.now += KEPT_S - 1
    other = make_answers(tmp_path, clock)
    assert other.get(ASKED) == "MaxArraySize = 1001\n\u00fc"
    clock.now += 1
    assert other.get(ASKED) is None
    assert make_answers(tmp_path, clock).get(ASKED) is None


def test_cached_answer_applies_only_to_the_same_cluster_and_command(tmp_path: Path, clock: Clock) -> None:
    make_answers(tmp_path, clock).put(ASKED, clock.now, "told")
    assert make_answers(tmp_path, clock, "there").get(ASKED) is None
    assert make_answers(tmp_path, clock).get([*ASKED, "more"]) is None


def test_cached_answer_from_the_future_is_ignored(tmp_path: Path, clock: Clock) -> None:
    make_answers(tmp_path, clock).put(ASKED, clock.now + 5, "told")
    assert make_answers(tmp_path, clock).get(ASKED) is None


def test_damaged_cache_file_is_ignored(tmp_path: Path, clock: Clock) -> None:
    make_answers(tmp_path, clock).put(ASKED, clock.now, "told")
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-2])
    assert make_answers(tmp_path, clock).get(ASKED) is None
    file.write_bytes(b"")
    assert make_answers(tmp_path, clock).get(ASKED) is None


def test_forgotten_answer_is_replaced_by_a_new_answer(tmp_path: Path, clock: Clock) -> None:
    answers = make_answers(tmp_path, clock)
    answers.put(ASKED, clock.now, "old")
    clock.now += 1
    answers.forget()
    assert answers.get(ASKED) is None
    clock.now += 1
    answers.put(ASKED, clock.now, "new")
    assert answers.get(ASKED) == "new"
    assert make_answers(tmp_path, clock).get(ASKED) == "new"
