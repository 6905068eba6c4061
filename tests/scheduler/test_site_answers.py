"""What a Slurm told of itself, kept for other processes."""

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


def answers(folder: Path, clock: Clock, place: str = "here") -> SiteAnswers:
    return SiteAnswers(clock, BlobCache(folder), place)


def test_another_process_takes_the_answer_for_a_minute(tmp_path: Path, clock: Clock) -> None:
    answers(tmp_path, clock).put(ASKED, clock.now, "MaxArraySize = 1001\n\u00fc")
    clock.now += KEPT_S - 1
    other = answers(tmp_path, clock)
    assert other.get(ASKED) == "MaxArraySize = 1001\n\u00fc"
    clock.now += 1
    assert other.get(ASKED) is None
    assert answers(tmp_path, clock).get(ASKED) is None


def test_another_slurm_or_another_question_has_other_answers(tmp_path: Path, clock: Clock) -> None:
    answers(tmp_path, clock).put(ASKED, clock.now, "told")
    assert answers(tmp_path, clock, "there").get(ASKED) is None
    assert answers(tmp_path, clock).get([*ASKED, "more"]) is None


def test_what_was_told_in_the_future_is_not_believed(tmp_path: Path, clock: Clock) -> None:
    answers(tmp_path, clock).put(ASKED, clock.now + 5, "told")
    assert answers(tmp_path, clock).get(ASKED) is None


def test_damage_costs_a_question_and_no_more(tmp_path: Path, clock: Clock) -> None:
    answers(tmp_path, clock).put(ASKED, clock.now, "told")
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-2])
    assert answers(tmp_path, clock).get(ASKED) is None
    file.write_bytes(b"")
    assert answers(tmp_path, clock).get(ASKED) is None


def test_what_is_forgotten_is_asked_again_and_kept_anew(tmp_path: Path, clock: Clock) -> None:
    one = answers(tmp_path, clock)
    one.put(ASKED, clock.now, "old")
    clock.now += 1
    one.forget()
    assert one.get(ASKED) is None
    clock.now += 1
    one.put(ASKED, clock.now, "new")
    assert one.get(ASKED) == "new"
    assert answers(tmp_path, clock).get(ASKED) == "new"
