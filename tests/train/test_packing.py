"""A packed state unpacks exactly: classes, keys, numbers and tensors, at any depth."""

from __future__ import annotations

import collections
import io
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.train.packing import VALUES, pack, unpack


class Pair(NamedTuple):
    """A tuple with names."""

    left: Any
    right: Any


def is_equal_nest(one: Any, other: Any) -> bool:
    """Tell whether two nests have the same classes, keys and values, bit by bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_equal_nest(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal_nest, one, other))
    return bool(one == other)


keys = st.one_of(st.text(max_size=3), st.integers(-3, 300), st.just("_values"), st.just("a.b"))
tensors = st.builds(
    lambda size, kind: torch.arange(size).to(kind),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3), tensors
)
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.tuples(inner, inner).map(lambda both: Pair(*both)),
    ),
    max_leaves=12,
)


@given(nests)
def test_packed_nest_unpacks_exactly(value: Any) -> None:
    packed = pack(value)
    assert all(isinstance(item, torch.Tensor) for name, item in packed.items() if name != VALUES)
    file = io.BytesIO()
    torch.save(packed[VALUES], file)
    file.seek(0)
    assert is_equal_nest(unpack({**packed, VALUES: torch.load(file, weights_only=False)}), value)


def test_plain_values_load_with_weights_only() -> None:
    packed = pack({"lr": [0.1], "milestones": collections.Counter({30: 1}), 3: (torch.ones(2), "x")})
    file = io.BytesIO()
    torch.save(packed[VALUES], file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == packed[VALUES]


def test_packed_tensors_are_named_by_their_paths() -> None:
    value = {"state": {"fc.weight": {"exp_avg": torch.ones(1)}}, "old": [torch.ones(1), 2]}
    assert set(pack(value)) == {VALUES, "state.fc.weight.exp_avg", "old.0"}


def test_later_changes_do_not_affect_packed_values() -> None:
    value: dict[str, Any] = {"losses": [1.0], "seen": {2}}
    packed = pack(value)
    value["losses"].append(0.5)
    value["seen"].add(3)
    assert unpack(packed) == {"losses": [1.0], "seen": {2}}
