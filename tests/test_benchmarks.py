"""The page of benchmarks says what was asked, what was reached, and what failed."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks import asked, page
from benchmarks.__main__ import NAMES
from benchmarks.figures import chart, middle
from benchmarks.peers import NAMES as PEERS
from benchmarks.peers import version


def test_every_figure_says_what_is_asked_and_where_it_is_read() -> None:
    for figure in (one for below in asked.figures().values() for one in below):
        if "seen" in figure:
            continue
        assert figure["from"] in NAMES, figure
        assert ("most" in figure) != ("least" in figure), figure
        assert ("bar" in figure) != ("find" in figure), figure
        assert re.compile(figure.get("find", "()")).groups == 1, figure


def result(output: str = "", **more: Any) -> dict[str, Any]:
    told = {"seconds": 1, "date": "2026-01-02", "commit": "abc", "machine": "2 x X"}
    return {"ok": True, "output": output, "charts": [], **told, **more}


PRINTED = "first: 1,250 ms\nsecond: 90 ms\n"


@pytest.mark.parametrize(
    ("figure", "reached", "enough"),
    [
        ({"most": 1300, "find": r": ([\d,]+) ms"}, "1,250 ms", True),  # the worst counts
        ({"most": 1000, "find": r": ([\d,]+) ms"}, "1,250 ms", False),
        ({"least": 100, "find": r": ([\d,]+) ms"}, "90 ms", False),
        ({"least": 80, "find": r"^second: (\d+)"}, "90 ms", True),
        ({"most": 80, "find": r"third: (\d+)"}, "not among what its benchmark told (`top`)", None),
        ({"most": 3, "bar": "slow", "take": "ratio"}, "4 ms", False),
        ({"most": 9, "bar": "slow"}, "8 ms", True),
        ({"most": 9, "bar": "broken"}, "not among what its benchmark told (`top`)", None),
        ({"most": 9, "bar": "slow", "from": "logs"}, "not measured yet (`logs`)", None),
        ({"asked": "none", "seen": "none, by hand"}, "none, by hand", None),
    ],
)
def test_what_was_reached(figure: dict[str, Any], reached: str, enough: bool | None) -> None:
    found = chart("T", "ms", "quick", {"quick": [2.0, 2.0], "slow": [8.0, 8.0], "broken": []})
    known = {"top": result(PRINTED, charts=[asdict(found)])}
    row = asked.reached({"figure": "it", "unit": "ms", "from": "top", **figure}, known)
    assert (row.reached, row.enough) == (reached, enough)


def test_what_failed_is_shown_as_failed() -> None:
    found = chart("T", "ms", "quick", {"quick": [1.0, 2.0, 4.0], "broken": []}, {"broken": "no | module"})
    known = {"top": result("failed with exit code 1", ok=False, charts=[asdict(found)])}
    text = page.page(known)
    assert "| broken | failed: no   module |" in text
    assert "| quick | 2.00 | 1.50 to 3.00 | 1.00 x |" in text
    assert "its benchmark failed (`top`)" in text
    [(name, drawn)] = page.pictures(known).items()
    assert f"({name})" in text
    assert "broken (failed)" in drawn
    assert "<script" not in drawn
    assert (
        drawn == page.pictures(known)[name]
    )  # the same every time, as files under version control should be


def test_ratios_are_taken_round_by_round() -> None:
    found = chart("T", "s", "bare", {"bare": [1.0, 10.0, 100.0], "ours": [2.0, 20.0, 200.0]})
    ours = found.bars[1]
    assert (ours.value, ours.ratio, ours.ratio_low, ours.ratio_high) == (20.0, 2.0, 2.0, 2.0)
    assert middle([3.0]) == (3.0, 3.0, 3.0)


def test_the_page_of_what_was_last_measured_can_be_made() -> None:
    found = page.results()
    text = page.page(found)
    for name in found:
        assert f"\n### {name}\n" in text


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_pinned(name: str) -> None:
    assert re.fullmatch(r"\d+[\w.]+", version(name))
