"""Batches for all ranks that go on in the middle of an epoch, with however many ranks there are then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from dtslurm.errors import RequestInvalid


class ShardedBatchSampler:
    """Batches of indices for one rank; all ranks together see every sample once an epoch.

    Samples come in one endless order: epoch after epoch, each shuffled anew from the seed. A step takes
    the next ``batch_size`` of them and deals these out, so where training stands is one number,
    `position`, that means the same to any number of ranks. Each rank has as many batches as the others.
    The last step of an epoch has what is left: fewer samples, or up to ``world_size - 1`` more where less
    than one per rank would remain. Only where ranks became more in the middle of an epoch, a rest too
    small to go round waits for the next epoch.

    Args:
        length: samples in an epoch.
        batch_size: samples in a step over all ranks. Shares differ by one where it does not divide.
        rank: of this process; by default that of torch.distributed.
        world_size: likewise.
        shuffle: whether each epoch has an order of its own.
        seed: what that order is made of, the same on all ranks.
        drop_last: leave out the samples of an epoch that make no whole step.

    Raises:
        RequestInvalid: a batch is too small for the ranks, or the data for one sample each.
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
        joined = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if joined else 0
        self.world_size = world_size if world_size is not None else dist.get_world_size() if joined else 1
        if batch_size < self.world_size:
            raise RequestInvalid(
                [f"batch_size {batch_size} is less than one sample for each of {self.world_size} ranks"],
                hint="batch_size counts the samples of all ranks together",
            )
        if length < (batch_size if drop_last else self.world_size):
            raise RequestInvalid([f"{length} samples make not even one step"])
        self.length, self.batch_size = length, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.position = 0
        self._order: tuple[int, torch.Tensor] | None = None

    def sizes(self) -> list[int]:
        """Return how many samples each step takes that is left of this epoch."""
        left = max(0, (self.epoch + 1) * self.length - self.position)
        full, rest = divmod(left, self.batch_size)
        sizes = [self.batch_size] * full
        if self.drop_last or not rest:
            return sizes
        if rest >= self.world_size:
            return [*sizes, rest]
        if sizes:
            sizes[-1] += rest
        return sizes

    def __len__(self) -> int:
        return len(self.sizes())

    def __iter__(self) -> Iterator[list[int]]:
        position = self.position
        for size in self.sizes():
            begin = position + size * self.rank // self.world_size
            end = position + size * (self.rank + 1) // self.world_size
            yield self._indices(begin, end)
            position += size

    def end_epoch(self) -> None:
        """Go on to the next epoch."""
        self.epoch += 1
        if self.drop_last:
            self.position = max(self.position, self.epoch * self.length)

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands; the same on all ranks."""
        names = ("epoch", "position", "length", "seed", "shuffle")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; the order of samples is the saved one's.

        Raises:
            RequestInvalid: it is of other data.
        """
        if state["length"] != self.length:
            raise RequestInvalid(
                [f"the checkpoint is of {state['length']} samples, and there are {self.length} now"],
                hint="go on with the same data, or leave the loader out of what is restored",
            )
        for name in ("epoch", "position", "seed", "shuffle"):
            setattr(self, name, state[name])
        self._order = None

    def _indices(self, begin: int, end: int) -> list[int]:
        """Return the samples at some places of the endless order."""
        found: list[int] = []
        while begin < end:
            epoch, first = divmod(begin, self.length)
            last = min(self.length, first + end - begin)
            found += self._order_of(epoch)[first:last].tolist()
            begin += last - first
        return found

    def _order_of(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            order = torch.arange(self.length)
            if self.shuffle:
                dice = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % (1 << 63))
                order = torch.randperm(self.length, generator=dice)
            self._order = (epoch, order)
        return self._order[1]


class Loader:
    """A DataLoader that knows where in the data training stands, and can be saved and restored.

    Batches that worker processes have fetched ahead do not count as seen: a batch counts from the moment
    the training loop gets it. Everything that `torch.utils.data.DataLoader` takes beside
    batches and samplers is passed on (``num_workers``, ``collate_fn``, ``pin_memory`` ...).

    Args:
        dataset: a map-style dataset: it has ``len()`` and an index.
        batch_size: samples in a step over all ranks.
        shuffle: as in `ShardedBatchSampler`, like ``seed`` and ``drop_last``.

    Raises:
        RequestInvalid: as of `ShardedBatchSampler`, or the dataset has no index.
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
                ["an IterableDataset has no order to go on in"], hint="give a dataset with len() and an index"
            )
        self.sampler = ShardedBatchSampler(
            len(dataset), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        # With dice of its own: a DataLoader throws them each time a loop begins, and one that goes on in the
        # middle of an epoch would leave torch's own other numbers than an undisturbed run has.
        options.setdefault("generator", torch.Generator().manual_seed(seed))
        self._loader = DataLoader(dataset, batch_sampler=self.sampler, **options)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self.sampler.epoch

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs that are left of so many; loop over this loader once in each."""
        while self.epoch < total:
            epoch = self.epoch
            yield epoch
            if self.epoch == epoch:  # or a loop that looked at no batch would go round for ever
                self.sampler.end_epoch()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left of this epoch, and go on to the next when it is over."""
        epoch = self.epoch
        sizes = self.sampler.sizes()
        for size, batch in zip(sizes, self._loader, strict=True):
            self.sampler.position += size
            yield batch
        if self.epoch == epoch:
            self.sampler.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            RequestInvalid: it is of other data.
        """
        self.sampler.load_state_dict(state)
