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


def test_a_short_list_of_names_is_shown_completely() -> None:
    assert list_nearest("x", ["b", "a"]) == "a, b"
    assert list_nearest("x", []) == "none"


def test_a_long_list_is_shortened_to_the_five_nearest_names() -> None:
    listed = list_nearest("llama-7", MODELS)
    assert listed.startswith("llama-7b, ")
    assert listed.endswith(", and 75 more")
    assert listed.count(",") == 5


def test_an_empty_name_gets_the_five_nearest_names() -> None:
    assert list_nearest("", MODELS).count("llama") == 5
