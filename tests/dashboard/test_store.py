from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.dashboard import ascii_fallback
from dtslurm.dashboard.store import CHUNK, ERRORS, LineStore, compile_pattern


def filled_store(lines: int, **values: Any) -> LineStore:
    store = LineStore(**values)
    for begin in range(0, lines, 1000):
        end = min(lines, begin + 1000)
        store.add(str(begin % 7), b"".join(b"line %d\n" % number for number in range(begin, end)))
    return store


def test_lines_are_returned_by_number() -> None:
    store = filled_store(3 * CHUNK + 5)
    assert store.lines([0, CHUNK - 1, CHUNK, 3 * CHUNK + 4]) == [
        ("0", "line 0"),
        (str(CHUNK // 1000 * 1000 % 7), f"line {CHUNK - 1}"),
        (str(CHUNK // 1000 * 1000 % 7), f"line {CHUNK}"),
        (str((3 * CHUNK + 4) // 1000 * 1000 % 7), f"line {3 * CHUNK + 4}"),
    ]
    assert store.lines([-1, 3 * CHUNK + 5]) == [("", ""), ("", "")]


def test_the_oldest_lines_are_dropped_above_the_limit() -> None:
    store = filled_store(10 * CHUNK, most_lines=3 * CHUNK)
    assert store.total == 10 * CHUNK
    assert 3 * CHUNK <= store.total - store.first <= 5 * CHUNK
    assert store.lines([store.first])[0][1] == f"line {store.first}"
    assert store.lines([store.first - 1]) == [("", "")]
    small = filled_store(10 * CHUNK, most_bytes=100_000)
    assert small.total - small.first < 10 * CHUNK


def test_only_the_last_state_of_a_rewritten_line_is_kept_and_long_lines_are_cut() -> None:
    store = LineStore()
    store.add("0", b"1%\r50%\r100%\r\n" + b"x" * 100_000 + b"\n\xff\xfe\n")
    texts = [text for _, text in store.lines([0, 1, 2])]
    assert texts[0] == "100%"
    assert texts[1] == "x" * 4096 + "…"
    assert texts[2] == "��"


def matching_numbers(store: LineStore, text: str, begin: int = 0) -> list[int]:
    return [number for match in store.find_matches(compile_pattern(text), begin) for number in match]


def test_patterns_match_within_single_lines() -> None:
    store = LineStore()
    store.add("0", b"alpha\nbeta\nalpha beta\n\nBETA\n")
    assert matching_numbers(store, "^beta$") == [1, 4]
    assert matching_numbers(store, "alpha\\s+beta") == [2]
    assert matching_numbers(store, "BETA") == [4]
    assert matching_numbers(store, "beta", 2) == [2, 4]
    with pytest.raises(re.error):
        compile_pattern("(")


def test_a_search_goes_forwards_and_backwards_over_chunks() -> None:
    store = filled_store(3 * CHUNK)
    pattern = compile_pattern(r"^line (5|5000|9999)$")
    assert [number for match in store.find_matches(pattern, 0) for number in match] == [5, 5000, 9999]
    assert store.find_last(pattern, store.total) == 9999
    assert store.find_last(pattern, 9999) == 5000
    assert store.find_last(pattern, 5) is None


@given(
    st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line and b"\r" not in line), max_size=30)
)
def test_arbitrary_lines_are_stored_and_searched_correctly(lines: list[bytes]) -> None:
    store = LineStore()
    store.add("0", b"".join(line + b"\n" for line in lines))
    assert [text for _, text in store.lines(range(len(lines)))] == [
        line.decode("utf-8", "replace") for line in lines
    ]
    pattern = re.compile(rb"[a\x00]+")
    matches = [number for numbers in store.find_matches(pattern, 0) for number in numbers]
    assert matches == [number for number, line in enumerate(lines) if pattern.search(line)]


def test_a_thread_can_read_while_another_adds_lines() -> None:
    store = LineStore(most_lines=2 * CHUNK)
    writer = threading.Thread(target=lambda: [store.add("1", b"some line\n" * 100) for _ in range(2000)])  # type: ignore[func-returns-value]
    writer.start()
    while writer.is_alive():
        numbers = range(store.first, store.total)
        for source, text in store.lines(numbers[-50:]):
            assert (source, text) in {("1", "some line"), ("", "")}
    writer.join()
    assert store.total == 200_000


@pytest.mark.parametrize(
    "line", [b"ValueError: no", b"Traceback (most recent call last):", b"Killed", b"NCCL WARN x"]
)
def test_error_lines_are_recognised(line: bytes) -> None:
    assert ERRORS.search(line)


def test_ordinary_lines_are_not_recognised_as_errors() -> None:
    assert not ERRORS.search(b"step 12 loss 0.31 error_rate_schedule=cosine terror")


@given(st.text("aé数\u0301⣿█\x1b\U0001f600"))
def test_arbitrary_text_has_an_ascii_form(text: str) -> None:
    assert ascii_fallback.to_ascii(text).isascii()


def test_every_glyph_has_an_ascii_form_of_the_same_width() -> None:
    for glyph in [*ascii_fallback.STATES.values(), *ascii_fallback.RANKS.values(), *"▸▾▲▼·…█▏⣿⠁─│°"]:
        assert len(ascii_fallback.to_ascii(glyph)) == 1
        assert ascii_fallback.to_ascii(glyph).isprintable()


@pytest.mark.parametrize(
    ("encoding", "ascii_only"),
    [("UTF-8", False), ("utf8", False), ("ANSI_X3.4-1968", True), ("latin-1", True)],
)
def test_the_encoding_determines_ascii_mode(encoding: str, ascii_only: bool) -> None:
    assert ascii_fallback.ascii_only(encoding) is ascii_only
