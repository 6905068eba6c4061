"""Long matrices are sampled: a run tries some cases of each, chosen by a seed that it prints.

``@pytest.mark.sampled(N)`` on a parametrized test says that N of its cases are enough for one run;
``@pytest.mark.sampled(N, "name")`` says so of all tests of a file that are marked with this name. ``--seed``
chooses the same cases again, ``--everything`` takes all.

A test that goes to a cluster in several ways (its parameter ``cli``: on this machine, on a Slurm, over SSH)
takes one of them in each run, if nothing else is said of it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--seed`` and ``--everything``."""
    group = parser.getgroup("sampling")
    group.addoption("--seed", type=int, help="choose the cases of sampled tests as that run did")
    group.addoption("--everything", action="store_true", help="run all cases of sampled tests")


def pytest_configure(config: pytest.Config) -> None:
    """Draw a seed; a worker process of pytest-xdist takes that of the run."""
    if config.option.seed is None:
        drawn = random.SystemRandom().randrange(1_000_000)
        config.option.seed = getattr(config, "workerinput", {}).get("seed", drawn)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker process of pytest-xdist the seed."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    """Tell how to repeat the choice."""
    return (
        "sampled tests: all cases"
        if config.option.everything
        else f"sampled tests: --seed {config.option.seed}"
    )


@pytest.hookimpl(trylast=True)  # what other hooks leave out is no case
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of sampled tests that the seed does not choose."""
    if config.option.everything:
        return
    choose_one_way(items)
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[matrix_of(item)].append(item)
    left = set()
    for matrix, every in cases.items():
        mark = every[0].get_closest_marker("sampled")
        assert mark is not None
        chosen = random.Random(f"{config.option.seed} {matrix}").sample(every, min(mark.args[0], len(every)))
        left |= {item for item in every if item not in chosen}
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


def choose_one_way(items: list[pytest.Item]) -> None:
    """Mark the tests that go to a cluster in several ways, but those of ``make test-quick``."""
    ways: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        case = getattr(item, "callspec", None)
        if case and "cli" in case.params and not any(map(item.get_closest_marker, ("sampled", "quick"))):
            others = "-".join(word for word in case.id.split("-") if word != case.params["cli"])
            ways[item.nodeid.partition("[")[0], others].append(item)
    for (test, others), every in ways.items():
        for item in every:
            item.add_marker(pytest.mark.sampled(1, f"{test} {others}"))


def matrix_of(item: pytest.Item) -> str:
    """Return the name of the matrix that a sampled test is a case of."""
    mark = item.get_closest_marker("sampled")
    assert mark is not None
    test = item.nodeid.partition("[")[0]
    return f"{test.partition('::')[0]}::{mark.args[1]}" if len(mark.args) > 1 else test


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell the choice once more, where it is seen of a run that failed."""
    config = terminalreporter.config
    if not config.option.everything:
        terminalreporter.write_line(
            f"Sampled tests: --seed {config.option.seed} chooses the same cases again."
        )
