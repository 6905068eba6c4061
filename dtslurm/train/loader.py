"""Batches for all ranks that go on in the middle of an epoch, with however many ranks there are then."""

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
        yield from map(self.samples_at, self.positions())

    def positions(self) -> Iterator[range]:
        """Yield the positions of each batch of this rank in the endless order of samples."""
        position = self.position
        for size in self.sizes():
            begin = position + size * self.rank // self.world_size
            yield range(begin, position + size * (self.rank + 1) // self.world_size)
            position += size

    def samples_at(self, positions: range) -> list[int]:
        """Return the samples at consecutive positions of the endless order."""
        return self._indices(positions.start, positions.stop)

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


class _NumberedBatches:
    """The batches of a sampler as pairs of position and index, for `_SeededDataset`."""

    def __init__(self, sampler: ShardedBatchSampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for positions in self.sampler.positions():
            yield list(zip(positions, self.sampler.samples_at(positions), strict=True))


class _SeededDataset:
    """A dataset whose random numbers depend on the seed and the sample's position alone.

    A worker process draws the numbers of every second, third, … batch. By themselves they would depend on the
    number of workers, and on where the loop was broken off. Other attributes are those of the dataset.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
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

    def __getitems__(self, places: list[tuple[int, int]]) -> Any:
        if not hasattr(self._dataset, "__getitems__"):
            return [self[place] for place in places]
        self._seed_numbers(places[0][0])
        return self._dataset.__getitems__([index for _, index in places])

    def __getitem__(self, place: tuple[int, int]) -> Any:
        position, index = place
        self._seed_numbers(position)
        return self._dataset[index]

    def _seed_numbers(self, position: int) -> None:
        text = f"{self._seed} {position}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks for GPUs, too, each time
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % (1 << 32))


class Loader:
    """A DataLoader that knows where in the data training stands, and can be saved and restored.

    Batches that worker processes have fetched ahead do not count as seen: a batch counts from the moment
    the training loop gets it. Everything that `torch.utils.data.DataLoader` takes beside
    batches and samplers is passed on (``num_workers``, ``collate_fn``, ``pin_memory`` ...).

    In worker processes, the random numbers of torch, Python and NumPy depend on the seed and on the position
    of the sample in the order of samples alone. They are the same after a restore, and for any number of
    workers and of ranks. Without workers, samples draw from the generators of the training process.

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
        # A generator of its own: a DataLoader draws from it each time a loop begins, and one that goes on in
        # the middle of an epoch would leave torch's own generator in another state than an undisturbed run.
        options.setdefault("generator", torch.Generator().manual_seed(seed))
        batches: Any = self.sampler
        if options.get("num_workers"):
            dataset, batches = _SeededDataset(dataset, seed), _NumberedBatches(self.sampler)
        self._loader = DataLoader(dataset, batch_sampler=batches, **options)

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
