from __future__ import annotations

import pytest

from dtslurm.model.jobs.constraint import join_constraints


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((), None),
        ((None, "", None), None),
        ((None, "gpu&hbm80g", None), "gpu&hbm80g"),
        (("gpu", "gpu&hbm80g", "nvme"), "gpu&hbm80g&nvme"),
        (("gpu", "gpu", "gpu&nvme"), "gpu&nvme"),
        (("gpu", None, "a|b"), "gpu&(a|b)"),
        (("gpu", None, "(a|b)&c"), "gpu&(a|b)&c"),
        (("gpu", "(a&gpu)", "a|b"), "gpu&(a&gpu)&(a|b)"),
        (("a|b", None, "(a|b)"), "(a|b)"),
        ((None, None, "a|b"), "a|b"),
        ((None, None, "[a*2&b]"), "[a*2&b]"),
        (("[a|b]", "[a|b]", None), "[a|b]"),
    ],
)
def test_constraints_are_joined(given: tuple[str | None, ...], text: str | None) -> None:
    assert join_constraints(*given) == (text, [])


@pytest.mark.parametrize(
    ("given", "text", "left_out"),
    [
        (("gpu", "big", "[a|b]"), "[a|b]", ["gpu", "big"]),
        (("gpu", None, "a*2"), "a*2", ["gpu"]),
        (("gpu", "[a|b]", "nvme"), "nvme", ["gpu", "[a|b]"]),
        (("gpu", None, "a,b"), "a,b", ["gpu"]),
        (("gpu", None, "gpu&[a|b]"), "gpu&[a|b]", []),
        (("gpu", None, "a|b&c"), "a|b&c", ["gpu"]),  # from left to right: what a pair of parentheses changes
        (("gpu", None, "(a&b)|c"), "(a&b)|c", ["gpu"]),  # Slurm takes no parentheses in parentheses
        (("gpu", None, "((a"), "((a", ["gpu"]),
    ],
)
def test_constraints_that_cannot_be_joined_replace_the_others(
    given: tuple[str | None, ...], text: str, left_out: list[str]
) -> None:
    assert join_constraints(*given) == (text, left_out)
