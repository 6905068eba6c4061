from __future__ import annotations

import pytest

from dtslurm.suggestions import list_nearest, suggest_name

MODELS = [f"llama-{number}b" for number in range(80)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("torchrn", "; did you mean 'torchrun'?"), ("TORCH_RUN", "; did you mean 'torchrun'?"), ("xyz", "")],
)
def test_a_close_name_is_suggested(name: str, expected: str) -> None:
    assert suggest_name(name, ["single", "torchrun"]) == expected


def test_few_names_are_listed_whole() -> None:
    assert list_nearest("x", ["b", "a"]) == "a, b"
    assert list_nearest("x", []) == "none"


def test_of_many_names_the_five_nearest_are_listed() -> None:
    listed = list_nearest("llama-7", MODELS)
    assert listed.startswith("llama-7b, ")
    assert listed.endswith(", and 75 more")
    assert listed.count(",") == 5


def test_names_that_are_like_nothing_are_answered_too() -> None:
    assert list_nearest("", MODELS).count("llama") == 5
