"""What of training objects goes into a checkpoint, and back: the same keys for any number of ranks."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _get_fqns,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

from dtslurm.errors import RequestInvalid
from dtslurm.train.packing import VALUES, pack, unpack

State = Mapping[str, Any]


def state_dicts(objects: State) -> dict[str, Any]:
    """Return what a checkpoint keeps of each object: tensors by name, and of all but models the rest packed.

    A model's parameters have their own names, whether or not it is wrapped in DistributedDataParallel,
    sharded by FSDP or compiled; an optimizer's state has the same names, so that either can be read by
    another number of ranks.

    Raises:
        RequestInvalid: an object is none that can be saved.
    """
    return {name: _state_dict(name, item, objects) for name, item in objects.items()}


def templates(objects: State, saved: Metadata) -> dict[str, Any]:
    """Return what `load_state_dicts` takes, with tensors of the saved shapes to read into.

    Tensors of models, and tensors given as they are, are read in place. What an object's state has grown or
    shrunk since is of no account: what was saved is what is read.

    Raises:
        RequestInvalid: an object cannot be restored, or the shape of a tensor differs from the saved one.
    """
    values = {}
    for name, item in objects.items():
        own = _state_dict(name, item, objects)
        if isinstance(item, torch.nn.Module | torch.Tensor):
            _check_shapes({name: own} if own is item else {f"{name}.{key}": own[key] for key in own}, saved)
            values[name] = own
        else:
            values[name] = _template(name, own, _shards(name, item, objects), saved)
    return values


def _check_shapes(own: State, saved: Metadata) -> None:
    """Refuse a tensor whose shape differs from the saved one; torch 2.4 silently reads a part of it."""
    for key, value in own.items():
        meta = saved.state_dict_metadata.get(key)
        if not isinstance(value, torch.Tensor) or not isinstance(meta, TensorStorageMetadata):
            continue
        if value.shape != meta.size:
            shapes = f"{tuple(value.shape)} here and {tuple(meta.size)} in the checkpoint"
            raise RequestInvalid([f"the shape of {key} is {shapes}"])


def _template(name: str, own: State, shards: State, saved: Metadata) -> dict[str, Any]:
    """Return what is read of one object: a tensor for each that was saved, sharded as the object's own is."""
    keys = [key for key in saved.state_dict_metadata if key.startswith(f"{name}.")]
    tensors = {}
    for key in keys:
        meta, short = saved.state_dict_metadata[key], key.removeprefix(f"{name}.")
        if not isinstance(meta, TensorStorageMetadata):
            continue
        like, shard = own.get(short), shards.get(short.rpartition(".")[0])
        if like is not None and type(like) is not torch.Tensor and like.shape == meta.size:
            tensors[key] = like
        elif shard is not None and shard.shape == meta.size:
            tensors[key] = torch.empty_like(shard, dtype=meta.properties.dtype, requires_grad=False)
        else:
            tensors[key] = torch.empty(meta.size, dtype=meta.properties.dtype)
    if f"{name}.{VALUES}" in keys or not keys:
        return {VALUES: (), **{key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items()}}
    nest: dict[str, Any] = {}  # of an earlier version, whose states were not packed
    for key in keys:
        set_element(nest, saved.planner_data[key][1:], tensors.get(key, ()))
    return nest


def _shards(name: str, item: Any, objects: State) -> dict[str, torch.Tensor]:
    """Return the parameters of an optimizer by the paths to their states, which are sharded as they are."""
    if not isinstance(item, torch.optim.Optimizer):
        return {}
    names = _find_names(_model_of(name, item, objects))
    return {f"state.{names[one]}": one for group in item.param_groups for one in group["params"]}


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
    """Give every object its state back; tensors given as they are have it already.

    Raises:
        RequestInvalid: an optimizer has other groups of parameters than the one that was saved.
    """
    for name, item in objects.items():
        if isinstance(item, torch.nn.Module):
            set_model_state_dict(item, loaded[name])
        elif isinstance(item, torch.optim.Optimizer):
            _load_optimizer(name, item, _model_of(name, item, objects), _unpack(loaded[name]))
        elif not isinstance(item, torch.Tensor):
            item.load_state_dict(_unpack(loaded[name]))


def _state_dict(name: str, item: Any, objects: State) -> Any:
    if isinstance(item, torch.nn.Module):
        return get_model_state_dict(item)
    if isinstance(item, torch.optim.Optimizer):
        return pack(_name_parameters(_model_of(name, item, objects), item))
    if isinstance(item, torch.Tensor):
        return item
    _check_own(name, item)
    return pack(item.state_dict())


def _unpack(loaded: State) -> Any:
    return unpack(loaded) if VALUES in loaded else loaded


def _find_names(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Return the names of a model's parameters without the prefixes of wrappers such as DDP's ``module.``."""
    return {one: min(_get_fqns(model, name)) for name, one in model.named_parameters()}


def _has_flat_parameters(model: torch.nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _name_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state_dict with names of parameters in place of their numbers.

    torch's `get_optimizer_state_dict` makes a step where the optimizer has no state yet. The optimizer counts
    that step, and it fails where a step needs a closure. FSDP's flat parameters need it.
    """
    if _has_flat_parameters(model):
        return dict(get_optimizer_state_dict(model, optimizer))
    names = _find_names(model)
    raw = optimizer.state_dict()
    numbers: dict[Any, str] = {}
    groups = []
    for own, group in zip(optimizer.param_groups, raw["param_groups"], strict=True):
        named = [names[one] for one in own["params"]]
        numbers.update(zip(group["params"], named, strict=True))
        groups.append({**group, "params": named})
    state = {numbers.get(number, number): value for number, value in raw["state"].items()}
    return {**raw, "state": state, "param_groups": groups}


def _load_optimizer(
    name: str, optimizer: torch.optim.Optimizer, model: torch.nn.Module, saved: dict[str, Any]
) -> None:
    """Give an optimizer its state back.

    Raises:
        RequestInvalid: its groups have other parameters than those that were saved.
    """
    if _has_flat_parameters(model):
        set_optimizer_state_dict(model, optimizer, saved, options=StateDictOptions(strict=False))
        return
    names = _find_names(model)
    raw = optimizer.state_dict()
    own = [[names[one] for one in group["params"]] for group in optimizer.param_groups]
    by_names = {frozenset(group["params"]): group for group in saved["param_groups"]}
    if {frozenset(group) for group in own} != set(by_names) or len(own) != len(saved["param_groups"]):
        raise RequestInvalid([f"the parameter groups of {name} differ from those in the checkpoint"])
    numbers: dict[Any, Any] = {}
    groups = []
    for named, group in zip(own, raw["param_groups"], strict=True):
        numbers.update(zip(named, group["params"], strict=True))
        groups.append({**by_names[frozenset(named)], "params": group["params"]})
    state = {numbers.get(key, key): value for key, value in saved["state"].items()}
    optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})
    parameters = {names[one]: one for group in optimizer.param_groups for one in group["params"]}
    for key, values in saved["state"].items():
        if key in parameters:
            _keep_types(optimizer.state[parameters[key]], values)


def _keep_types(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Undo what torch's `load_state_dict` does to tensors of another type than the parameter's."""
    for key, value in saved.items():
        own = state.get(key)
        if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) and own.dtype != value.dtype:
            state[key] = value.to(own.device)


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
    if isinstance(value, tuple) and not _has_tensors(value):
        return value  # such as what `pack` has copied already
    if isinstance(value, list | tuple):
        fits = isinstance(before, list | tuple) and len(before) == len(value)
        olds = before if fits else [None] * len(value)
        items = [staged(item, old) for item, old in zip(value, olds, strict=True)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, torch.Tensor) or (
        isinstance(value, list | tuple) and any(map(_has_tensors, value))
    )


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
