"""What of training objects goes into a checkpoint, and back: the same keys for any number of ranks."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dtslurm.errors import RequestInvalid

State = Mapping[str, Any]


def state_dicts(objects: State) -> dict[str, Any]:
    """Return one state_dict of each object.

    A model's has its parameters' own names, whether or not it is wrapped in DistributedDataParallel, sharded
    by FSDP or compiled; an optimizer's has the same names, so that either can be read by another number of
    ranks.

    Raises:
        RequestInvalid: an object is none that can be saved.
    """
    return {name: _state_dict(name, item, objects) for name, item in objects.items()}


def check(objects: State) -> None:
    """Find out what cannot be saved before training starts, at no cost.

    Raises:
        RequestInvalid: an object is none that can be saved.
    """
    for name, item in objects.items():
        if isinstance(item, torch.optim.Optimizer):
            _model_of(name, item, objects)
        elif not isinstance(item, torch.nn.Module | torch.Tensor):
            _check_own(name, item)


def load_state_dicts(objects: State, loaded: Mapping[str, Any]) -> None:
    """Give every object its state back; tensors given as they are have it already."""
    for name, item in objects.items():
        if isinstance(item, torch.nn.Module):
            set_model_state_dict(item, loaded[name])
        elif isinstance(item, torch.optim.Optimizer):
            set_optimizer_state_dict(_model_of(name, item, objects), item, loaded[name])
        elif not isinstance(item, torch.Tensor):
            item.load_state_dict(loaded[name])


def _state_dict(name: str, item: Any, objects: State) -> Any:
    if isinstance(item, torch.nn.Module):
        return get_model_state_dict(item)
    if isinstance(item, torch.optim.Optimizer):
        return get_optimizer_state_dict(_model_of(name, item, objects), item)
    if isinstance(item, torch.Tensor):
        return item
    _check_own(name, item)
    return item.state_dict()


def _check_own(name: str, item: Any) -> None:
    if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
        raise RequestInvalid(
            [f"{name} is a {type(item).__name__}, which cannot be restored in place"],
            hint="give models, optimizers, tensors, or objects with state_dict() and load_state_dict()",
        )


def _model_of(name: str, optimizer: torch.optim.Optimizer, objects: State) -> Any:
    parameters = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for item in objects.values():
        if isinstance(item, torch.nn.Module) and parameters <= {id(one) for one in item.parameters()}:
            return item
    raise RequestInvalid(
        [f"{name} optimizes parameters of no model that is saved with it"],
        hint="give its model too: its parameters' names are what the optimizer's state is kept by",
    )


def staged(value: Any, before: Any = None) -> Any:
    """Return a copy on the CPU that training does not change, in the memory of an earlier one if it fits."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if isinstance(before, torch.Tensor) and type(before) is type(value) and _alike(value, before):
            return before.copy_(value, non_blocking=True)
        return value.to("cpu", copy=True)
    if isinstance(value, Mapping):
        old = before if isinstance(before, Mapping) else {}
        return {key: staged(item, old.get(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        fits = isinstance(before, list | tuple) and len(before) == len(value)
        olds = before if fits else [None] * len(value)
        return [staged(item, old) for item, old in zip(value, olds, strict=True)]
    return value


def size_of(value: Any) -> int:
    """Return the bytes of all tensors in a nest of containers, of sharded ones the whole."""
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    return sum(map(size_of, value)) if isinstance(value, list | tuple) else 0


def _alike(value: torch.Tensor, before: torch.Tensor) -> bool:
    same = value.shape == before.shape and value.dtype == before.dtype and value.stride() == before.stride()
    return bool(same and getattr(value, "placements", None) == getattr(before, "placements", None))


def dice() -> dict[str, torch.Tensor]:
    """Return the state of this process's random numbers: torch's, Python's, and NumPy's if it is in use."""
    found = {"torch": torch.get_rng_state(), "python": _as_tensor(random.getstate())}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = _as_tensor([kind, keys.tolist(), *rest])
    return found


def set_dice(states: Mapping[str, torch.Tensor]) -> None:
    """Go on with random numbers from there."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = _from_tensor(states["python"])
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(_from_tensor(states["numpy"])))


def seed_dice(seed: int) -> None:
    """Start random numbers anew: torch's, Python's, and NumPy's if it is in use."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def _as_tensor(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(value: torch.Tensor) -> Any:
    return json.loads(bytes(value.tolist()))


def all_gather(value: Any, group: Any) -> list[Any]:
    """Return every rank's value, on every rank."""
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def broadcast(value: Any, group: Any) -> Any:
    """Return rank 0's value, on every rank."""
    found = [value]
    if group is not None:
        dist.broadcast_object_list(found, src=0, group=group)
    return found[0]
