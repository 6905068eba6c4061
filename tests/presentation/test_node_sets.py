"""Folding of node sets."""

from __future__ import annotations

import pytest

from dtslurm.presentation.node_sets import fold_nodes


@pytest.mark.parametrize(
    ("nodes", "folded"),
    [
        (["n2", "n1"], "n[1-2]"),
        ("n1,n2,n4", "n[1-2,4]"),
        ("n[1-2]", "n[1-2]"),
        ("gpu09,gpu10", "gpu[09-10]"),
        ("n[1-2],m3", "m3,n[1-2]"),
        ([], ""),
        ("", ""),
        (None, ""),
        (7, ""),
        ("n1,[", "n1,["),  # no set of nodes
        ("@all,n1", "@all,n1"),  # no group is looked up
        ("n[0-99999999],m1", "n[0-99999999],m1"),  # would fill the memory
    ],
)
def test_node_lists_are_folded(nodes: object, folded: str) -> None:
    assert fold_nodes(nodes) == folded
