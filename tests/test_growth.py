"""The exponent and the chart of a benchmark's cost growth."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks.scale.growth import Curve, picture


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_exponent_is_fitted_to_the_last_decade(power: float) -> None:
    start = ((10, 500.0), (100, 500.0))  # what a start costs says nothing of growth
    points = (*start, *((n, 3.0 * n**power) for n in (1000, 3000, 10000)))
    assert Curve("x", points).exponent == pytest.approx(power)


def test_a_curve_of_one_size_has_no_exponent() -> None:
    assert Curve("x", ((10, 1.0),)).exponent is None
    assert Curve("x", ()).exponent is None


def test_the_picture_shows_every_curve_with_its_exponent() -> None:
    curves = [Curve("a & b", ((10, 1.0), (100, 10.0))), Curve("once", ((10, 2.0),))]
    root = ET.fromstring(picture([("cost by size", curves), ("nothing", [])]))
    text = " ".join(root.itertext())
    assert "a & b ~ n^1.00" in text
    assert "once" in text
    assert "cost by size" in text
