"""Data loading that resumes in the middle of an epoch with any number of ranks."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from dtslurm.errors import RequestInvalid


class ShardedBatchSampler:
    """Batches of sample indices for one rank; all ranks together see every sample once per epoch.

    Samples form one endless sequence of epochs, each shuffled by the seed. A step takes the next
    ``batch_size`` samples and distributes them over the ranks. The progress of training is therefore one
    number, `position`, which is independent of the number of ranks. All ranks have the same number of
    batches. The last step of an epoch takes the remaining samples: fewer than ``batch_size``, or up to
    ``world_size - 1`` more if fewer than one sample per rank would remain. Only if the number of ranks grew
    in the middle of an epoch, a remainder smaller than the number of ranks moves to the next epoch.

    Args:
        length: number of samples in an epoch.
        batch_size: number of samples in a step over all ranks. The shares of the ranks differ by one if the
            number of ranks does not divide it.
        rank: rank of this process; by default the rank of torch.distributed.
        world_size: number of ranks; by default the world size of torch.distributed.
        shuffle: whether to shuffle each epoch differently.
        seed: seed of the shuffling, the same on all ranks.
        drop_last: skip the samples at the end of an epoch that do not fill a step.

    Raises:
        RequestInvalid: the batch or the dataset has fewer samples than ranks.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if is_distributed else 0
        self.world_size = (
            world_size if world_size is not None else dist.get_world_size() if is_distributed else 1
        )
        if batch_size < self.world_size:
            raise RequestInvalid(
                [f"batch_size {batch_size} is less than one sample for each of {self.world_size} ranks"],
                hint="batch_size counts the samples of all ranks together",
            )
        if length < (batch_size if drop_last else self.world_size):
            raise RequestInvalid([f"{length} samples are too few for one step"])
        self.length, self.batch_size = length, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.position = 0
        self._cached_order: tuple[int, torch.Tensor] | None = None

    def sizes(self) -> list[int]:
        """Return the number of samples of each remaining step of this epoch."""
        remaining = max(0, (self.epoch + 1) * self.length - self.position)
        full_steps, remainder = divmod(remaining, self.batch_size)
        sizes = [self.batch_size] * full_steps
        if self.drop_last or not remainder:
            return sizes
        if remainder >= self.world_size:
            return [*sizes, remainder]
        if sizes:
            sizes[-1] += remainder
        return sizes

    def __len__(self) -> int:
        return len(self.sizes())

    def __iter__(self) -> Iterator[list[int]]:
        yield from map(self.samples_at, self.positions())

    def positions(self) -> Iterator[range]:
        """Yield the positions of each batch of this rank in the endless sequence of samples."""
        position = self.position
        for size in self.sizes():
            start = position + size * self.rank // self.world_size
            yield range(start, position + size * (self.rank + 1) // self.world_size)
            position += size

    def samples_at(self, positions: range) -> list[int]:
        """Return the sample indices at consecutive positions of the endless sequence."""
        return self._sample_indices(positions.start, positions.stop)

    def end_epoch(self) -> None:
        """Advance to the next epoch."""
        self.epoch += 1
        if self.drop_last:
            self.position = max(self.position, self.epoch * self.length)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of training in the data; the same on all ranks."""
        names = ("epoch", "position", "length", "seed", "shuffle")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a saved state, including its order of samples.

        Raises:
            RequestInvalid: the state belongs to a dataset of another length.
        """
        if state["length"] != self.length:
            raise RequestInvalid(
                [
                    (
                        f"the checkpoint belongs to a dataset of {state['length']} samples, but this "
                        f"dataset has {self.length}"
                    )
                ],
                hint="continue with the same dataset, or do not restore the loader",
            )
        for name in ("epoch", "position", "seed", "shuffle"):
            setattr(self, name, state[name])
        self._cached_order = None

    def _sample_indices(self, start: int, end: int) -> list[int]:
        """Return the sample indices from position ``start`` to ``end`` of the endless sequence."""
        indices: list[int] = []
        while start < end:
            epoch, first = divmod(start, self.length)
            last = min(self.length, first + end - start)
            indices += self._epoch_order(epoch)[first:last].tolist()
            start += last - first
        return indices

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        if self._cached_order is None or self._cached_order[0] != epoch:
            order = torch.arange(self.length)
            if self.shuffle:
                generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % (1 << 63))
                order = torch.randperm(self.length, generator=generator)
            self._cached_order = (epoch, order)
        return self._cached_order[1]


class _NumberedBatches:
    """The batches of a sampler as pairs of position and sample index, for `_SeededDataset`."""

    def __init__(self, sampler: ShardedBatchSampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for positions in self.sampler.positions():
            yield list(zip(positions, self.sampler.samples_at(positions), strict=True))


class _SeededDataset:
    """A dataset wrapper that makes random numbers depend only on the seed and the sample's position.

    With n workers, a worker process loads every n-th batch. Without this wrapper, its random numbers would
    depend on the number of workers and on the step at which training was interrupted. All other attributes
    are those of the wrapped dataset.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        # An assignment to an attribute would set it in the wrapped dataset.
        vars(self).update(_dataset=dataset, _seed=seed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, items: list[tuple[int, int]]) -> Any:
        if not hasattr(self._dataset, "__getitems__"):
            return [self[item] for item in items]
        self._seed_generators(items[0][0])
        return self._dataset.__getitems__([index for _, index in items])

    def __getitem__(self, item: tuple[int, int]) -> Any:
        position, index = item
        self._seed_generators(position)
        return self._dataset[index]

    def _seed_generators(self, position: int) -> None:
        text = f"{self._seed} {position}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also query the GPUs each time
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % (1 << 32))


class Loader:
    """A DataLoader that tracks its position in the data, and can be saved and restored.

    A batch counts as seen when the training loop receives it; batches that worker processes have prefetched
    do not count. All options of `torch.utils.data.DataLoader` except batch and sampler options are passed on
    (``num_workers``, ``collate_fn``, ``pin_memory`` ...).

    In worker processes, the random numbers of torch, Python and NumPy depend only on the seed and on the
    position of the sample in the sequence of samples. They are the same after a restore, and for any number
    of workers and ranks. Without workers, samples use the generators of the training process.

    Args:
        dataset: a map-style dataset, with ``len()`` and indexing.
        batch_size: number of samples in a step over all ranks.
        shuffle: as in `ShardedBatchSampler`, like ``seed`` and ``drop_last``.

    Raises:
        RequestInvalid: as in `ShardedBatchSampler`, or the dataset is an IterableDataset.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise RequestInvalid(
                ["an IterableDataset has no order in which training could be continued"],
                hint="pass a dataset with __len__ and __getitem__",
            )
        self.sampler = ShardedBatchSampler(
            len(dataset), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        # The loader needs a separate generator: a DataLoader draws from its generator when a loop starts. A
        # resumed epoch would leave torch's default generator in another state than an uninterrupted run.
        options.setdefault("generator", torch.Generator().manual_seed(seed))
        batches: Any = self.sampler
        if options.get("num_workers"):
            dataset, batches = _SeededDataset(dataset, seed), _NumberedBatches(self.sampler)
        self._loader = DataLoader(dataset, batch_sampler=batches, **options)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0."""
        return self.sampler.epoch

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the remaining epochs of ``total``; the caller loops over this loader once in each epoch."""
        while self.epoch < total:
            epoch = self.epoch
            yield epoch
            if self.epoch == epoch:  # a caller that read no batch would otherwise loop forever
                self.sampler.end_epoch()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of this epoch, then advance to the next epoch."""
        epoch = self.epoch
        sizes = self.sampler.sizes()
        for size, batch in zip(sizes, self._loader, strict=True):
            self.sampler.position += size
            yield batch
        if self.epoch == epoch:
            self.sampler.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of training in the data."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a saved state.

        Raises:
            RequestInvalid: the state belongs to a dataset of another length.
        """
        self.sampler.load_state_dict(state)
