"""Write the table of launchers in docs/tested.md from the results of the tests that prove its cells.

A test says what it proves by ``@pytest.mark.proves(LAUNCHER, COLUMN, ...)``; a cell is proved if all tests
that claim it passed. With ``DTSLURM_TABLE=1`` a run that leaves none of these tests out compares the table
with that of docs/tested.md; ``UPDATE_TABLE=1`` writes it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "tested.md"
BEGIN, END = "<!-- launchers: begin -->\n", "<!-- launchers: end -->\n"
COLUMNS = {
    "renders": "renders",
    "runs": "trains for real",
    "exit": "exit code true",
    "signal": "early signal arrives",
    "logs": "log and record per rank",
}
# Cells that no test proves, with the reason. The table must have no other gaps.
NOTES: dict[tuple[str, str], str] = {
    ("llamafactory", "signal"): "the framework does not listen to it; the launcher is `torchrun`'s",
    ("torchtitan", "signal"): "the framework does not listen to it; the launcher is `torchrun`'s",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--frameworks``."""
    parser.addoption(
        "--frameworks", action="store_true", help="also train with frameworks that are installed for it"
    )


_outcomes: dict[tuple[str, str], list[bool]] = defaultdict(list)
_claims: dict[str, list[tuple[str, str]]] = defaultdict(list)
_collected: set[str] = set()
_selected: set[str] = set()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note which cells each collected test proves."""
    for item in items:
        if item.name.startswith("test_each_case_matches_its_golden_script["):
            item.add_marker(pytest.mark.proves(_golden_launcher(item), "renders"))
        params = item.callspec.params if hasattr(item, "callspec") else {}
        for mark in item.iter_markers("proves"):
            first, *columns = mark.args  # a launcher, or the parameter that names one
            launcher = str(params.get(first, first)).partition("-")[0]
            _claims[item.nodeid] += [(launcher, column) for column in columns]
        if item.nodeid in _claims:  # travels with the report from worker processes
            item.user_properties.append(("proves", _claims[item.nodeid]))


def _golden_launcher(item: pytest.Item) -> str:
    from tests.render.test_golden import CASES

    return CASES[item.name.partition("[")[2].rstrip("]")][1]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a test that proves something ended."""
    if str(report.outcome) != "rerun" and (report.when == "call" or report.outcome != "passed"):
        proved: Any = dict(report.user_properties).get("proves", ())
        for launcher, column in proved:
            _outcomes[launcher, column].append(report.outcome == "passed")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker process of pytest-xdist collected and selected."""
    result = getattr(node, "workeroutput", {})
    _collected.update(result.get("collected", ()))
    _selected.update(result.get("selected", ()))


def rows() -> dict[str, dict[str, bool]]:
    """Return launcher -> column -> proved, of what this session ran."""
    result: dict[str, dict[str, bool]] = defaultdict(dict)
    for (launcher, column), results in _outcomes.items():
        result[launcher][column] = all(results)
    return dict(sorted(result.items()))


def table() -> tuple[str, list[str]]:
    """Return the table as Markdown, and the cells that are empty without a reason."""
    gaps: list[str] = []
    reasons: list[str] = []
    lines = [f"| launcher | {' | '.join(COLUMNS.values())} |", f"|---|{'---|' * len(COLUMNS)}"]
    for launcher, cells in rows().items():
        shown = []
        for column in COLUMNS:
            reason = NOTES.get((launcher, column)) or NOTES.get((launcher, "*"))
            if cells.get(column):
                shown.append("yes")
            elif reason:
                if reason not in reasons:
                    reasons.append(reason)
                shown.append(f"[{reasons.index(reason) + 1}]")
            else:
                gaps.append(f"{launcher}: {column}")
                shown.append("")
        lines.append(f"| `{launcher}` | {' | '.join(shown)} |")
    notes = [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *("  \n".join(notes).splitlines()), ""]) + "\n", gaps


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write or compare the table, if every test that proves something was part of this session."""
    _collected.update(_claims)
    _selected.update(item.nodeid for item in getattr(session, "items", ()) if item.nodeid in _claims)
    worker = getattr(session.config, "workeroutput", None)
    if worker is not None:
        worker.update(collected=sorted(_collected), selected=sorted(_selected))
        return
    if not os.environ.get("DTSLURM_TABLE") or not _collected <= _selected:
        return
    text, gaps = table()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    fresh = f"{before}{BEGIN}{text}{END}{after}"
    if os.environ.get("UPDATE_TABLE"):
        PAGE.write_text(fresh)
    elif fresh != PAGE.read_text() or gaps:
        print(f"\nThe table of launchers is not what the tests prove. Gaps: {gaps or 'none'}\n{text}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
