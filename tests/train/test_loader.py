"""Every sample is used once an epoch, across interruptions and changes of the number of ranks."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtslurm.errors import RequestInvalid

pytest.importorskip("torch")

import numpy as np
import torch
from torch.utils.data import IterableDataset

from dtslurm.train import Loader, ShardedBatchSampler


def samplers(length: int, batch: int, world: int, **more: Any) -> list[ShardedBatchSampler]:
    return [ShardedBatchSampler(length, batch, rank=rank, world_size=world, **more) for rank in range(world)]


shapes = st.tuples(st.integers(1, 6), st.integers(0, 12), st.integers(0, 60)).map(
    lambda item: (item[0], item[0] + item[1], item[0] + item[2])  # world, batch, length
)


@given(shape=shapes, seed=st.integers(0, 5), shuffle=st.booleans())
def test_epoch_is_distributed_completely_and_evenly_to_the_ranks(
    shape: tuple[int, int, int], seed: int, shuffle: bool
) -> None:
    world, batch, length = shape
    ranks = [list(item) for item in samplers(length, batch, world, seed=seed, shuffle=shuffle)]
    assert len({len(batches) for batches in ranks}) == 1  # nobody waits for a step that others do not make
    assert all(batches and min(map(len, batches)) >= 1 for batches in ranks)
    assert sorted(index for batches in ranks for batch in batches for index in batch) == list(range(length))
    for step in zip(*ranks, strict=True):
        assert max(map(len, step)) - min(map(len, step)) <= 1
        assert sum(map(len, step)) <= batch + world - 1
    if not shuffle:
        flat = [index for step in zip(*ranks, strict=True) for item in step for index in item]
        assert flat == list(range(length))


@settings(max_examples=200)
@given(
    length=st.integers(8, 60),
    seed=st.integers(0, 3),
    parts=st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 10), st.integers(0, 9)), min_size=1, max_size=8
    ),
)
def test_each_sample_is_used_once_an_epoch_across_interruptions(
    length: int, seed: int, parts: list[tuple[int, int, int]]
) -> None:
    state: dict[str, Any] | None = None
    drawn: list[int] = []
    for world, extra, steps in parts:
        ranks = samplers(length, world + extra, world, seed=seed)
        for rank in ranks if state else []:
            assert state is not None
            rank.load_state_dict(state)
        left = steps
        while left:
            sizes = ranks[0].sizes()
            for size, step in zip(sizes, zip(*ranks, strict=True), strict=True):
                drawn += [index for item in step for index in item]
                for rank in ranks:
                    rank.position += size
                left -= 1
                if not left:
                    break
            else:
                for rank in ranks:
                    rank.end_epoch()
        states = [rank.state_dict() for rank in ranks]
        assert all(state == states[0] for state in states)
        state = states[0]
    whole, rest = divmod(len(drawn), length)
    for epoch in range(whole):
        assert sorted(drawn[epoch * length : (epoch + 1) * length]) == list(range(length))
    assert max(Counter(drawn[whole * length :]).values(), default=0) <= 1
    assert rest == len(drawn[whole * length :])


@given(shape=shapes, seed=st.integers(0, 5))
def test_resumed_sampler_continues_with_the_same_batches(shape: tuple[int, int, int], seed: int) -> None:
    world, batch, length = shape
    [whole] = samplers(length, batch, 1, seed=seed)
    batches = list(whole)
    for stop in range(len(batches) + 1):
        [again] = samplers(length, batch, 1, seed=9)
        again.load_state_dict({**whole.state_dict(), "position": sum(whole.sizes()[:stop])})
        assert list(again) == batches[stop:]
    assert world >= 1


def test_epochs_are_shuffled_differently_and_reproducibly() -> None:
    def two_epochs() -> list[list[list[int]]]:
        loader = Loader(range(10), 4, seed=2)
        return [[batch.tolist() for batch in loader] for _ in loader.epochs(2)]

    first, second = two_epochs()
    assert first != second
    assert [first, second] == two_epochs()


def test_drop_last_omits_the_last_incomplete_batch() -> None:
    loader = Loader(range(10), 4, shuffle=False, drop_last=True)
    assert [[batch.tolist() for batch in loader] for _ in loader.epochs(2)] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    ] * 2
    assert len(loader) == 2


def test_epochs_advance_without_reading_a_batch() -> None:
    loader = Loader(range(10), 4)
    assert list(loader.epochs(3)) == [0, 1, 2]
    assert (loader.epoch, list(loader.epochs(3))) == (3, [])


def test_loader_position_counts_batches_that_training_has_received() -> None:
    loader = Loader(range(10), 4)
    for _ in loader:
        assert loader.state_dict()["position"] == 4
        break


@pytest.mark.parametrize(
    ("length", "batch", "words"),
    [(10, 3, "batch_size 3 is less than one sample"), (3, 4, "3 samples are too few")],
)
def test_too_small_batch_or_dataset_is_refused(length: int, batch: int, words: str) -> None:
    with pytest.raises(RequestInvalid, match=words):
        ShardedBatchSampler(length, batch, rank=0, world_size=4)


def test_checkpoint_of_a_dataset_with_another_length_is_refused() -> None:
    saved = Loader(range(10), 4).state_dict()
    with pytest.raises(
        RequestInvalid, match="the checkpoint belongs to a dataset of 10 samples, but this dataset has 11"
    ):
        Loader(range(11), 4).load_state_dict(saved)


def test_iterable_dataset_is_refused() -> None:
    class Stream(IterableDataset[int]):  # type: ignore[misc, unused-ignore]
        def __iter__(self) -> Iterator[int]:
            yield 1

    with pytest.raises(RequestInvalid, match="no order in which training could be continued"):
        Loader(Stream(), 4)


class Noisy:
    """A dataset that draws random numbers of every kind for each sample."""

    def __init__(self, length: int, *, together: bool = False) -> None:
        self.length = length
        if together:
            self.__getitems__ = lambda indices: [self[index] for index in indices]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(1)), random.random(), float(np.random.rand())


def drawn_batches(loader: Loader, epochs: int = 2, stop_at: int = -1) -> list[Any]:
    """Return the batches of some epochs, up to so many."""
    batches: list[Any] = []
    for _ in loader.epochs(epochs):
        for batch in loader:
            batches.append(batch)
            if len(batches) == stop_at:
                return batches
    return batches


def noisy_loader(workers: int = 2, rank: int = 0, world: int = 1, batch: int = 4) -> Loader:
    loader = Loader(Noisy(22), batch, seed=3, num_workers=workers, collate_fn=list)
    loader.sampler.rank, loader.sampler.world_size = rank, world
    return loader


@pytest.mark.parametrize("stop_at", [1, 3, 6, 8])
def test_random_numbers_of_workers_continue_exactly_after_a_resume(stop_at: int) -> None:
    undisturbed, first, second = drawn_batches(noisy_loader()), noisy_loader(), noisy_loader()
    before = drawn_batches(first, stop_at=stop_at)
    second.load_state_dict(first.state_dict())
    assert before + drawn_batches(second) == undisturbed


def test_random_numbers_of_workers_depend_only_on_the_sample() -> None:
    result = {sample for batch in drawn_batches(noisy_loader(1)) for sample in batch}
    assert len(result) == 44
    assert (
        len({numbers[1] for numbers in result}) == len({numbers[3] for numbers in result}) == 44
    )  # in each epoch
    assert result == {sample for batch in drawn_batches(noisy_loader(2)) for sample in batch}
    ranks = [drawn_batches(noisy_loader(2, rank, 2)) for rank in (0, 1)]
    assert result == {sample for batches in ranks for batch in batches for sample in batch}


def test_dataset_of_a_loader_with_workers_forwards_attributes_and_pickles() -> None:
    dataset = Noisy(22, together=True)
    loader = Loader(dataset, 4, seed=3, num_workers=1, collate_fn=list)
    seen = loader._loader.dataset
    seen.marked = True
    assert dataset.marked  # type: ignore[attr-defined]
    assert (seen.length, len(seen)) == (22, 22)
    again = pickle.loads(pickle.dumps(Loader(Noisy(22), 4, seed=3, num_workers=1)._loader.dataset))
    assert again[5, 3] == loader._loader.dataset[5, 3]
