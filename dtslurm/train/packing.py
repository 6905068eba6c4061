"""Split nested containers into named tensors and other values, so that a checkpoint preserves them exactly.

torch.distributed.checkpoint restores only into entries that already exist, and turns dictionary keys into
strings. A state that grows, or whose keys are numbers, would lose entries.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

VALUES = "_values"  # the key of everything that is not a tensor
_TENSOR_MARKER = "__dtslurm_tensor__"  # first element of a tuple that represents a tensor
_IMMUTABLE_TYPES = (bool, int, float, complex, str, bytes, type(None))
Replace = Callable[[Any, tuple[str, ...]], Any]


def pack(value: Any) -> dict[str, Any]:
    """Return a flat dictionary with a value's tensors by their paths, and the other values under `VALUES`.

    The other values are copies, so training may change the originals afterwards. They are wrapped in a tuple,
    because torch.distributed.checkpoint flattens lists and dictionaries.
    """
    flat_values: dict[str, Any] = {VALUES: None}

    def replace(item: Any, path: tuple[str, ...]) -> Any:
        if isinstance(item, torch.Tensor):
            name = _choose_name(".".join(path), flat_values)
            flat_values[name] = item
            return _TENSOR_MARKER, name, item.device.type
        return item if isinstance(item, _IMMUTABLE_TYPES) else copy.deepcopy(item)

    flat_values[VALUES] = (_rebuild(value, replace, ()),)
    return flat_values


def unpack(flat_values: Mapping[str, Any]) -> Any:
    """Return the value that was packed, with each tensor on the device type that it was packed from.

    Raises:
        KeyError: a tensor of the value is missing.
    """

    def replace(item: Any, _: tuple[str, ...]) -> Any:
        if not _is_tensor_marker(item):
            return item
        tensor = flat_values[item[1]]
        has_device = item[2] == "cpu" or torch.get_device_module(item[2]).is_available()
        return tensor.to(item[2]) if has_device and tensor.device.type != item[2] else tensor

    return _rebuild(flat_values[VALUES][0], replace, ())


def _rebuild(value: Any, replace: Replace, path: tuple[str, ...]) -> Any:
    """Return a copy of nested containers in which ``replace`` has replaced every other value."""
    if isinstance(value, dict):
        new_container = copy.copy(value)  # keeps the class, such as Counter or defaultdict
        for key, item in value.items():
            new_container[key] = _rebuild(item, replace, (*path, str(key)))
        return new_container
    if isinstance(value, list):
        return [_rebuild(item, replace, (*path, str(number))) for number, item in enumerate(value)]
    if isinstance(value, tuple) and not _is_tensor_marker(value):
        items = [_rebuild(item, replace, (*path, str(number))) for number, item in enumerate(value)]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    return replace(value, path)


def _is_tensor_marker(value: Any) -> bool:
    return (
        type(value) is tuple and len(value) == 3 and isinstance(value[0], str) and value[0] == _TENSOR_MARKER
    )


def _choose_name(name: str, taken_names: Mapping[str, Any]) -> str:
    """Return a name that is not taken yet, because {"a.b": …} and {"a": {"b": …}} have the same path."""
    numbered_names = (f"{name}#{number}" for number in itertools.count(1))
    return next(
        candidate for candidate in itertools.chain([name], numbered_names) if candidate not in taken_names
    )
