"""The state of training objects in a checkpoint, with the same keys for any number of ranks."""

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
    """Return the state of each object for a checkpoint: tensors by name, and other values packed.

    The keys of a model are its plain parameter names, even if the model is wrapped in
    DistributedDataParallel, sharded by FSDP or compiled. The keys of an optimizer's state use the same names.
    Both can therefore be restored by a different number of ranks. The state of a model is not packed.

    Raises:
        RequestInvalid: an object cannot be saved.
    """
    return {name: _state_dict(name, item, objects) for name, item in objects.items()}


def templates(objects: State, metadata: Metadata) -> dict[str, Any]:
    """Return the input of `load_state_dicts` with tensors of the saved shapes, into which torch reads.

    Tensors of models, and tensors that are objects themselves, are read in place. The templates follow the
    saved state, so an object's current state may have more or fewer entries.

    Raises:
        RequestInvalid: an object cannot be restored, or the shape of a tensor differs from the saved one.
    """
    values = {}
    for name, item in objects.items():
        current = _state_dict(name, item, objects)
        if isinstance(item, torch.nn.Module | torch.Tensor):
            _check_shapes(
                {name: current} if current is item else {f"{name}.{key}": current[key] for key in current},
                metadata,
            )
            values[name] = current
        else:
            values[name] = _template(name, current, _sharded_parameters(name, item, objects), metadata)
    return values


def _check_shapes(own_state: State, saved_metadata: Metadata) -> None:
    """Refuse a tensor whose shape differs from the saved shape, because torch 2.4 silently reads a part."""
    for key, value in own_state.items():
        metadata = saved_metadata.state_dict_metadata.get(key)
        if not isinstance(value, torch.Tensor) or not isinstance(metadata, TensorStorageMetadata):
            continue
        if value.shape != metadata.size:
            shapes = f"{tuple(value.shape)} in the model and {tuple(metadata.size)} in the checkpoint"
            raise RequestInvalid([f"the shape of {key} is {shapes}"])


def _template(name: str, own_state: State, shards: State, saved_metadata: Metadata) -> dict[str, Any]:
    """Return the template of one object: a tensor for each saved one, sharded like the object's own."""
    keys = [key for key in saved_metadata.state_dict_metadata if key.startswith(f"{name}.")]
    tensors = {}
    for key in keys:
        metadata, name_in_object = saved_metadata.state_dict_metadata[key], key.removeprefix(f"{name}.")
        if not isinstance(metadata, TensorStorageMetadata):
            continue
        own_tensor, shard = own_state.get(name_in_object), shards.get(name_in_object.rpartition(".")[0])
        if (
            own_tensor is not None
            and type(own_tensor) is not torch.Tensor
            and own_tensor.shape == metadata.size
        ):
            tensors[key] = own_tensor
        elif shard is not None and shard.shape == metadata.size:
            tensors[key] = torch.empty_like(shard, dtype=metadata.properties.dtype, requires_grad=False)
        else:
            tensors[key] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
    if f"{name}.{VALUES}" in keys or not keys:
        return {VALUES: (), **{key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items()}}
    nested_values: dict[str, Any] = {}  # Earlier versions did not pack the states.
    for key in keys:
        set_element(nested_values, saved_metadata.planner_data[key][1:], tensors.get(key, ()))
    return nested_values


def _sharded_parameters(name: str, item: Any, objects: State) -> dict[str, torch.Tensor]:
    """Return an optimizer's parameters by the paths to their states, which are sharded like them."""
    if not isinstance(item, torch.optim.Optimizer):
        return {}
    names = _find_names(_find_model(name, item, objects))
    return {
        f"state.{names[parameter]}": parameter for group in item.param_groups for parameter in group["params"]
    }


def check_objects(objects: State) -> None:
    """Check before training starts that all objects can be saved, without copying anything.

    Raises:
        RequestInvalid: an object cannot be saved.
    """
    for name, item in objects.items():
        if isinstance(item, torch.optim.Optimizer):
            _find_model(name, item, objects)
        elif not isinstance(item, torch.nn.Module | torch.Tensor):
            _check_stateful(name, item)


def load_state_dicts(objects: State, loaded_states: Mapping[str, Any]) -> None:
    """Load the state of every object; tensors that are objects themselves were already read in place.

    Raises:
        RequestInvalid: an optimizer's parameter groups differ from the saved groups.
    """
    for name, item in objects.items():
        if isinstance(item, torch.nn.Module):
            set_model_state_dict(item, loaded_states[name])
        elif isinstance(item, torch.optim.Optimizer):
            _load_optimizer(name, item, _find_model(name, item, objects), _unpack(loaded_states[name]))
        elif not isinstance(item, torch.Tensor):
            item.load_state_dict(_unpack(loaded_states[name]))


def _state_dict(name: str, item: Any, objects: State) -> Any:
    if isinstance(item, torch.nn.Module):
        return get_model_state_dict(item)
    if isinstance(item, torch.optim.Optimizer):
        return pack(_name_parameters(_find_model(name, item, objects), item))
    if isinstance(item, torch.Tensor):
        return item
    _check_stateful(name, item)
    return pack(item.state_dict())


def _unpack(loaded_state: State) -> Any:
    return unpack(loaded_state) if VALUES in loaded_state else loaded_state


def _find_names(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Return the names of a model's parameters without prefixes of wrappers, such as DDP's ``module.``."""
    return {parameter: min(_get_fqns(model, name)) for name, parameter in model.named_parameters()}


def _has_flat_parameters(model: torch.nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _name_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state_dict with parameter names instead of parameter indices.

    torch's `get_optimizer_state_dict` performs a step if the optimizer has no state yet. The optimizer counts
    that step, and the step fails if it needs a closure. Only FSDP's flat parameters need that function.
    """
    if _has_flat_parameters(model):
        return dict(get_optimizer_state_dict(model, optimizer))
    names = _find_names(model)
    state_dict = optimizer.state_dict()
    names_by_index: dict[Any, str] = {}
    groups = []
    for own_group, group in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        group_names = [names[parameter] for parameter in own_group["params"]]
        names_by_index.update(zip(group["params"], group_names, strict=True))
        groups.append({**group, "params": group_names})
    state = {names_by_index.get(index, index): value for index, value in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def _load_optimizer(
    name: str, optimizer: torch.optim.Optimizer, model: torch.nn.Module, saved_state: dict[str, Any]
) -> None:
    """Load an optimizer's state.

    Raises:
        RequestInvalid: the optimizer's parameter groups differ from the saved groups.
    """
    if _has_flat_parameters(model):
        set_optimizer_state_dict(model, optimizer, saved_state, options=StateDictOptions(strict=False))
        return
    names = _find_names(model)
    state_dict = optimizer.state_dict()
    own_groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    saved_groups = {frozenset(group["params"]): group for group in saved_state["param_groups"]}
    if {frozenset(group) for group in own_groups} != set(saved_groups) or len(own_groups) != len(
        saved_state["param_groups"]
    ):
        raise RequestInvalid([f"the parameter groups of {name} differ from those in the checkpoint"])
    indices_by_name: dict[Any, Any] = {}
    groups = []
    for group_names, group in zip(own_groups, state_dict["param_groups"], strict=True):
        indices_by_name.update(zip(group_names, group["params"], strict=True))
        groups.append({**saved_groups[frozenset(group_names)], "params": group["params"]})
    state = {indices_by_name.get(key, key): value for key, value in saved_state["state"].items()}
    optimizer.load_state_dict({**saved_state, "state": state, "param_groups": groups})
    parameters = {
        names[parameter]: parameter for group in optimizer.param_groups for parameter in group["params"]
    }
    for key, values in saved_state["state"].items():
        if key in parameters:
            _restore_dtypes(optimizer.state[parameters[key]], values)


def _restore_dtypes(state: dict[str, Any], saved_values: Mapping[str, Any]) -> None:
    """Restore the saved dtypes, because torch's `load_state_dict` casts tensors to the parameter's dtype."""
    for key, value in saved_values.items():
        loaded_value = state.get(key)
        if (
            isinstance(value, torch.Tensor)
            and isinstance(loaded_value, torch.Tensor)
            and loaded_value.dtype != value.dtype
        ):
            state[key] = value.to(loaded_value.device)


def _check_stateful(name: str, item: Any) -> None:
    if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
        raise RequestInvalid(
            [f"{name} is a {type(item).__name__}, which cannot be restored in place"],
            hint="pass models, optimizers, tensors, or objects with state_dict() and load_state_dict()",
        )


def _find_model(name: str, optimizer: torch.optim.Optimizer, objects: State) -> Any:
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for item in objects.values():
        if isinstance(item, torch.nn.Module) and parameters <= {
            id(parameter) for parameter in item.parameters()
        }:
            return item
    raise RequestInvalid(
        [f"the model whose parameters {name} optimizes is not saved with it"],
        hint="pass the model, too: the optimizer's state is stored under the names of the model's parameters",
    )


def copy_to_cpu(value: Any, previous_copy: Any = None) -> Any:
    """Return a CPU copy of a value; reuse the memory of ``previous_copy`` if the shapes match."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if (
            isinstance(previous_copy, torch.Tensor)
            and type(previous_copy) is type(value)
            and _has_same_layout(value, previous_copy)
        ):
            return previous_copy.copy_(value, non_blocking=True)
        return value.to("cpu", copy=True)
    if isinstance(value, Mapping):
        previous_items = previous_copy if isinstance(previous_copy, Mapping) else {}
        return {key: copy_to_cpu(item, previous_items.get(key)) for key, item in value.items()}
    if isinstance(value, tuple) and not _has_tensors(value):
        return value  # for example a tuple that `pack` has already copied
    if isinstance(value, list | tuple):
        is_reusable = isinstance(previous_copy, list | tuple) and len(previous_copy) == len(value)
        earlier_items = previous_copy if is_reusable else [None] * len(value)
        items = [
            copy_to_cpu(item, previous_items)
            for item, previous_items in zip(value, earlier_items, strict=True)
        ]
        return items if isinstance(value, list) else tuple(items)
    return value


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, torch.Tensor) or (
        isinstance(value, list | tuple) and any(map(_has_tensors, value))
    )


def size_of(value: Any) -> int:
    """Return the bytes of all tensors in nested containers; a sharded tensor counts as a whole."""
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    return sum(map(size_of, value)) if isinstance(value, list | tuple) else 0


def _has_same_layout(value: torch.Tensor, previous_copy: torch.Tensor) -> bool:
    has_same_layout = (
        value.shape == previous_copy.shape
        and value.dtype == previous_copy.dtype
        and value.stride() == previous_copy.stride()
    )
    return bool(
        has_same_layout and getattr(value, "placements", None) == getattr(previous_copy, "placements", None)
    )


def get_rng_states() -> dict[str, torch.Tensor]:
    """Return the states of this process's random number generators: torch, Python, and NumPy if imported."""
    states = {"torch": torch.get_rng_state(), "python": _as_tensor(random.getstate())}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *remaining_values = sys.modules["numpy"].random.get_state()
        states["numpy"] = _as_tensor([kind, keys.tolist(), *remaining_values])
    return states


def set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    """Set the states of this process's random number generators."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = _from_tensor(states["python"])
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(_from_tensor(states["numpy"])))


def seed_generators(seed: int) -> None:
    """Seed the random number generators of torch and Python, and of NumPy if imported."""
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
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any, group: Any) -> Any:
    """Return rank 0's value, on every rank."""
    values = [value]
    if group is not None:
        dist.broadcast_object_list(values, src=0, group=group)
    return values[0]
