from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs import stages
from dtslurm.model.jobs.sweep import Asha, Condition, Distribution, Optuna, Sweep
from dtslurm.services.submit.sweep import trials_of

GRID = {"lr": ("1e-4", "3e-4"), "seed": ("0", "1", "2")}


def test_a_grid_contains_every_combination_with_the_last_variable_first() -> None:
    points = list(Sweep(grid=GRID))
    assert [tuple(point.values()) for point in points[:4]] == [
        ("1e-4", "0"),
        ("1e-4", "1"),
        ("1e-4", "2"),
        ("3e-4", "0"),
    ]
    assert len(points) == Sweep(grid=GRID).size() == 6


def test_zipped_lists_advance_together_and_combine_with_points() -> None:
    sweep = Sweep(points=({"size": "7b"}, {"size": "13b"}), zipped={"a": ("1", "2"), "b": ("x", "y")})
    assert list(sweep) == [
        {"size": size, "a": a, "b": b} for size in ("7b", "13b") for a, b in (("1", "x"), ("2", "y"))
    ]


def test_a_seed_determines_the_samples() -> None:
    spread = {
        "lr": Distribution.parse("loguniform(1e-5, 1e-2)"),
        "act": Distribution.parse("choice(relu, gelu)"),
    }
    first = list(Sweep(random=spread, samples=20, seed=1))
    assert first == list(Sweep(random=spread, samples=20, seed=1))
    assert first != list(Sweep(random=spread, samples=20, seed=2))
    assert all(1e-5 <= float(point["lr"]) <= 1e-2 for point in first)
    assert {point["act"] for point in first} == {"relu", "gelu"}


def test_a_very_large_grid_is_iterated_lazily() -> None:
    many = {f"v{number}": tuple(map(str, range(10))) for number in range(12)}
    sweep = Sweep(grid=many)
    assert sweep.size() == 10**12
    assert [point["v11"] for point in islice(sweep, 3)] == ["0", "1", "2"]


@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.lists(st.integers(), min_size=1, max_size=4, unique=True), min_size=1
    )
)
def test_no_point_of_a_grid_occurs_twice(grid: dict[str, list[int]]) -> None:
    sweep = Sweep(grid={name: tuple(map(str, values)) for name, values in grid.items()})
    points = [tuple(point.items()) for point in sweep]
    assert len(set(points)) == len(points) == sweep.size()


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("lr < 1e-3", True),
        ("lr * 10 >= 1e-3 and seed == 0", True),
        ("model in ('7b', '13b')", True),
        ("not model == '7b'", False),
        ("0 <= seed < 1", True),
        ("seed % 2 == 1 or lr > 1", False),
        ("flag", True),
        ("flag == false", False),
        ("-seed == 0", True),
    ],
)
def test_conditions_are_evaluated(text: str, holds: bool) -> None:
    point = {"lr": "1e-4", "seed": "0", "model": "7b", "flag": "true"}
    assert Condition.parse(text).holds(point) is holds


@pytest.mark.parametrize(
    "text", ["__import__('os')", "lr.real", "lr ** 9", "lambda: 1", "[x for x in y]", "lr <", "", "1 << 99"]
)
def test_a_condition_may_contain_only_comparisons(text: str) -> None:
    with pytest.raises(ValueError, match=r"expression|only comparisons"):
        Condition.parse(text)


def test_a_condition_that_cannot_be_evaluated_is_reported_with_the_point() -> None:
    sweep = Sweep(grid={"model": ("7b",)}, when=Condition.parse("model < 3"))
    with pytest.raises(RequestInvalid, match="model=7b"):
        list(trials_of(sweep))
    long = Sweep(grid={"model": ("x",)}, when=Condition.parse("model * 999999999 == 'x'"))
    with pytest.raises(RequestInvalid, match="strings can only be compared"):
        list(trials_of(long))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("uniform(0)", "two numbers"),
        ("uniform(1, 0)", "less than"),
        ("loguniform(0, 1)", "greater than 0"),
        ("randint(1.5, 2)", "whole numbers"),
        ("normal(0, 0)", "greater than 0"),
        ("choice(a,,b)", "separated by commas"),
        ("gauss(0, 1)", "not one of"),
        ("uniform(0, inf)", "finite"),
        ("uniform(nan, 1)", "finite"),
    ],
)
def test_an_invalid_distribution_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Distribution.parse(text)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({}, ""),
        ({"grid": {"a": ()}}, "grid"),
        ({"grid": {"a": ("1",)}, "zipped": {"a": ("2",)}}, "a"),
        ({"zipped": {"a": ("1",), "b": ("1", "2")}}, "zipped"),
        ({"points": ({"a": "1"}, {"b": "1"})}, "points[1]"),
        ({"random": {"a": Distribution.parse("uniform(0, 1)")}}, "samples"),
        ({"grid": GRID, "samples": 3}, "samples"),
        ({"grid": GRID, "when": Condition.parse("momentum > 0")}, "when"),
        ({"grid": GRID, "optuna": Optuna()}, "optuna"),
        ({"grid": GRID, "asha": Asha(eta=1)}, "asha"),
        ({"grid": GRID, "trials_per_node": 2, "trials_per_gpu": 2}, "trials_per_gpu"),
    ],
)
def test_inconsistent_sweep_settings_are_reported(values: dict[str, Any], key: str) -> None:
    assert key in [where for where, _ in Sweep(**values).problems()]
    assert Sweep(grid=GRID, when=Condition.parse("lr > 0")).problems() == []


def test_trials_with_equal_names_are_refused() -> None:
    with pytest.raises(RequestInvalid, match="trials 0 and 1 of the sweep have the same name: lr1e-4"):
        list(trials_of(Sweep(grid=GRID, name="lr${lr}")))
    with pytest.raises(RequestInvalid, match="same name"):
        list(trials_of(Sweep(grid={"lr": ("1", "1")})))
    names = [trial.name for trial in trials_of(Sweep(grid=GRID, name="${number}"))]
    assert names == ["0", "1", "2", "3", "4", "5"]


def test_stages_are_ordered_after_their_dependencies() -> None:
    needs = {"evaluate": ["train"], "train": ["prepare"], "prepare": [], "other": []}
    assert stages.order_stages(needs) == ["prepare", "train", "evaluate", "other"]
    assert stages.find_ancestors("evaluate", needs) == {"train", "prepare"}
    with pytest.raises(ValueError, match=r"^(a → b → a|b → a → b)$"):
        stages.order_stages({"a": ["b"], "b": ["a"], "c": []})
    assert stages.folder_variable("pre-train") == "DTSLURM_STAGE_PRE_TRAIN_DIR"
    assert stages.parse_need("afterany:prep") == ("afterany", "prep")
    with pytest.raises(ValueError, match="afterok:NAME"):
        stages.parse_need("afternotok:prep")
