"""The state of training objects: saving, restoring, copies and random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch import nn

from dtslurm.errors import RequestInvalid
from dtslurm.train import state as objects
from dtslurm.train.straggler import ForwardTimer, Straggler


@pytest.fixture(autouse=True)
def same_dice() -> Iterator[None]:
    """Leave random numbers as they were."""
    before = objects.get_rng_states()
    yield
    objects.set_rng_states(before)


class Counter:
    """Something of one's own that can be saved."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def trained() -> dict[str, Any]:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    counter = Counter()
    counter.count = 7
    return {"net": net, "optimizer": optimizer, "mean": torch.tensor([1.0, 2.0]), "counter": counter}


def test_models_optimizers_tensors_and_custom_objects_are_restored() -> None:
    old, new = trained(), trained()
    saved = objects.state_dicts(old)
    assert set(saved["net"]) == {"weight", "bias"}
    assert saved["mean"] is old["mean"]  # restored in place by whoever reads into it
    objects.load_state_dicts(new, {**saved, "mean": torch.zeros(2)})
    assert torch.equal(new["net"].weight, old["net"].weight)
    assert new["counter"].count == 7
    assert torch.equal(new["mean"], torch.tensor([1.0, 2.0]))
    momentum = [opt.state[opt.param_groups[0]["params"][0]]["momentum_buffer"] for opt in
                (old["optimizer"], new["optimizer"])]  # fmt: skip
    assert torch.equal(*momentum)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rate": 0.1}, "rate is a float, which cannot be restored in place"),
        (
            {"opt": torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0)},
            "the model whose parameters opt optimizes is not saved",
        ),
        (
            {"net": nn.Linear(2, 1), "opt": torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0)},
            "the model whose parameters opt optimizes is not saved",
        ),
    ],
    ids=["number", "optimizer alone", "another's optimizer"],
)
def test_object_that_cannot_be_saved_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestInvalid, match=words):
        objects.state_dicts(given)
    with pytest.raises(RequestInvalid, match=words):
        objects.check_objects(given)


def test_copy_is_independent_of_training_and_reuses_its_memory() -> None:
    weights = torch.ones(3, requires_grad=True)
    values = {"net": {"w": weights}, "groups": [{"lr": 0.1}, torch.ones(2)], "step": 3}
    first = objects.copy_to_cpu(values)
    with torch.no_grad():
        weights.mul_(5)
    assert torch.equal(first["net"]["w"], torch.ones(3))
    assert not first["net"]["w"].requires_grad
    second = objects.copy_to_cpu(values, first)
    assert second["net"]["w"] is first["net"]["w"]
    assert torch.equal(second["net"]["w"], torch.full((3,), 5.0))
    assert second["groups"][1] is first["groups"][1]
    assert (second["groups"][0], second["step"]) == ({"lr": 0.1}, 3)


@pytest.mark.parametrize(
    "before",
    [
        torch.zeros(4),
        torch.zeros(3, dtype=torch.float64),
        [torch.zeros(3)],
        None,
    ],
    ids=["other shape", "other kind", "no tensor", "nothing"],
)
def test_unsuitable_copy_memory_is_not_reused(before: Any) -> None:
    copy = objects.copy_to_cpu(torch.ones(3), before)
    assert copy is not before
    assert torch.equal(copy, torch.ones(3))


def test_lists_of_another_length_are_copied_into_new_memory() -> None:
    old = objects.copy_to_cpu([torch.zeros(2)])
    new = objects.copy_to_cpu([torch.ones(2), torch.ones(2)], old)
    assert new[0] is not old[0]
    assert objects.copy_to_cpu({"a": torch.ones(2)}, [1])["a"].sum() == 2


def test_size_counts_only_tensors() -> None:
    nest = {"a": torch.zeros(3), "b": [torch.zeros(2, dtype=torch.float64), (torch.zeros(1), "text")], "c": 7}
    assert objects.size_of(nest) == 12 + 16 + 4


def draw_random_numbers() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.random(), float(np.random.rand())


def test_random_generators_continue_from_the_saved_state() -> None:
    saved = objects.get_rng_states()
    first = draw_random_numbers()
    assert draw_random_numbers() != first
    objects.set_rng_states(saved)
    assert draw_random_numbers() == first


def test_seed_resets_all_random_generators() -> None:
    objects.seed_generators(2**40 + 3)  # more than NumPy takes
    first = draw_random_numbers()
    objects.seed_generators(2**40 + 3)
    assert draw_random_numbers() == first
    objects.seed_generators(4)
    assert draw_random_numbers() != first


def test_numpy_generator_is_skipped_when_numpy_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = objects.get_rng_states()
    monkeypatch.delitem(sys.modules, "numpy")
    without = objects.get_rng_states()
    assert set(with_it) - set(without) == {"numpy"}
    objects.seed_generators(3)
    first = (float(torch.rand(1)), random.random())
    objects.set_rng_states(with_it)
    objects.seed_generators(3)
    assert (float(torch.rand(1)), random.random()) == first
    assert "numpy" not in sys.modules


def test_single_process_collectives_return_their_input() -> None:
    assert objects.all_gather("mine", None) == ["mine"]
    assert objects.broadcast("mine", None) == "mine"
    alone = Straggler(None)
    alone.begin(1.0)
    assert alone.end() is None


class Event:
    """A GPU's event as torch has it, on a clock of this test's: done when the GPU has come so far."""

    now = 0.0
    reached = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.reached

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1000


def test_gpu_forward_time_counts_only_finished_work_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "now", 0.0)
    monkeypatch.setattr(Event, "reached", 0.0)
    net, own = nn.Linear(2, 1), ForwardTimer(torch.device("cuda"))
    own.watch(net)
    for begin, computed, done in ((10.0, 2.0, True), (20.0, 7.0, False), (30.0, 4.0, True)):
        Event.now = begin
        own.step_ended()
        Event.now = begin + computed
        net(torch.ones(1, 2))
        Event.reached = begin + (computed if done else 0)
        own.step_ended()
    assert own.take() == 3.0  # the second was not done yet: it does not count
    assert own.take() == 0.0


def test_step_without_a_forward_pass_has_no_forward_time() -> None:
    own = ForwardTimer(torch.device("cpu"))
    own.step_ended()
    assert own.take() == 0.0
