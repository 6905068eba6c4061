"""Leaks: growth is reported; growth that ends, or a fluctuation, is not."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.soak.leaks import Sample, leaks

STILL = Sample(
    memory_mib=100, files=20, threads=3, children=1, connections=1, far=2, dashboard_mib=60, state=40
)


def test_leaks_reports_nothing_for_constant_samples() -> None:
    assert leaks([STILL] * 40) == []


@pytest.mark.parametrize("name", [item.name for item in fields(Sample)])
def test_leaks_reports_each_growing_quantity(name: str) -> None:
    samples = [replace(STILL, **{name: getattr(STILL, name) + number}) for number in range(40)]
    assert [words.split()[0] for words in leaks(samples)] == [name]


def test_leaks_ignores_growth_that_ends_early() -> None:
    samples = [replace(STILL, memory_mib=100 + min(number, 8) * 5.0) for number in range(40)]
    assert leaks(samples) == []


def test_leaks_ignores_a_fluctuating_quantity() -> None:
    assert leaks([replace(STILL, files=20 + number % 3) for number in range(40)]) == []


def test_leaks_reports_growth_in_only_four_samples() -> None:
    assert leaks([STILL]) == []
    assert leaks([STILL, STILL, STILL, replace(STILL, children=9)]) == ["children grew from 1 to 9"]
