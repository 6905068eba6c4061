"""The list of tests with a second try, and the files that start first."""

from __future__ import annotations

import datetime as dt

from tests.conftest import SECOND_TRIES, TAKE_LONGEST, TESTS, second_tries

TEXT = """# a comment
2026-01-01 tests/test_a.py::test_b it races
2026-01-20 tests/test_c.py::test_d[x] it races too
"""


def test_a_second_tries_entry_is_valid_for_thirty_days() -> None:
    assert second_tries(TEXT, dt.date(2026, 1, 31)) == {
        "tests/test_a.py::test_b",
        "tests/test_c.py::test_d[x]",
    }
    assert second_tries(TEXT, dt.date(2026, 2, 1)) == {"tests/test_c.py::test_d[x]"}


def test_the_list_of_second_tries_is_short() -> None:
    assert len(second_tries(SECOND_TRIES.read_text(), dt.date.min.replace(year=2000))) <= 5


def test_the_files_that_start_first_exist() -> None:
    assert [name for name in TAKE_LONGEST if not (TESTS / name).is_file()] == []
