"""The dataclass decorator of dtslurm behaves like the decorator of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any

import pytest

from dtslurm.model.values import dataclass

Maker = Callable[..., Any]
both = pytest.mark.parametrize("make", [dataclass, dataclasses.dataclass], ids=["ours", "standard"])


def make_classes(make: Maker) -> tuple[Any, Any, Any]:
    @make(frozen=True)
    class Point:
        x: float
        name: str = field(default="a", repr=False)
        note: str = field(default="", compare=False)

    @make(frozen=True, kw_only=True)
    class Deep(Point):
        inner: Any = None

    @make
    class Open:
        items: list[Any] = field(default_factory=list)

    return Point, Deep, Open


@both
def test_dataclasses_have_a_repr(make: Maker) -> None:
    point, deep, loose = make_classes(make)
    assert repr(point(1)).endswith(".Point(x=1, note='')")
    assert repr(deep(x=1, inner=point(2))).count("x=") == 2
    itself = loose()
    itself.items.append(itself)
    assert repr(itself).endswith(".Open(items=[...])")


@both
def test_equal_dataclasses_have_equal_hashes(make: Maker) -> None:
    point, deep, loose = make_classes(make)
    assert point(1, note="b") == point(1)
    assert hash(point(1, note="b")) == hash(point(1))
    assert point(1) != point(2)
    assert point(1) != deep(x=1)
    assert point(1) != 1
    assert point(1).__eq__(1) is NotImplemented
    odd = float("nan")
    assert point(odd) == point(odd)
    assert loose() == loose()
    with pytest.raises(TypeError, match="unhashable"):
        hash(loose())


@both
def test_frozen_dataclasses_cannot_be_changed(make: Maker) -> None:
    point, deep, loose = make_classes(make)
    with pytest.raises(FrozenInstanceError):
        point(1).x = 2
    with pytest.raises(FrozenInstanceError):
        del deep(x=1).inner
    kept = loose()
    kept.items = [1]
    assert dataclasses.replace(deep(x=1), x=2) == deep(x=2)
    assert copy.deepcopy(kept) == kept


@both
def test_methods_defined_by_the_class_are_kept(make: Maker) -> None:
    @make(frozen=True)
    class Own:
        x: int = 0

        def __repr__(self) -> str:
            return "own"

        def __hash__(self) -> int:
            return 7

    @make(frozen=True)
    class Equal:  # noqa: PLW1641 - its hash is made
        x: int = 0

        def __eq__(self, other: object) -> bool:
            return True

    own: Any = Own
    equal: Any = Equal
    assert (repr(own()), hash(own()), own(0) == own()) == ("own", 7, True)
    assert equal(1) == equal(2)
    assert hash(equal(1)) == hash(equal(1))


@both
def test_ordered_dataclasses_compare_their_fields(make: Maker) -> None:
    @make(frozen=True, order=True)
    class Version:
        major: int
        minor: int = 0

    version: Any = Version
    old, new = version(1, 9), version(2)
    assert (old < new, old <= new, old > new, old >= new) == (True, True, False, False)
    assert max(old, new) == new
    with pytest.raises(TypeError):
        sorted([old, (1, 9)])


@dataclass(frozen=True)
class Sent:
    """A value at the top of a module, as pickle needs it."""

    x: int


def test_dataclasses_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Sent(1))) == Sent(1)
