"""Split a nest of containers into named tensors and the rest, so that a checkpoint keeps it exactly.

torch.distributed.checkpoint restores into a nest that has every entry already, and turns the keys of
dictionaries into strings. A state that grows, or whose keys are numbers, would lose entries.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

VALUES = "_values"  # the key of everything that is not a tensor
_TENSOR = "__dtslurm_tensor__"  # begins a tuple that stands for a tensor
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
Replace = Callable[[Any, tuple[str, ...]], Any]


def pack(value: Any) -> dict[str, Any]:
    """Return a flat dictionary of a value's tensors by their paths, and the rest under `VALUES`.

    The rest is a copy, so training may change the value afterwards. It is wrapped in a tuple, because
    torch.distributed.checkpoint takes lists and dictionaries apart.
    """
    packed: dict[str, Any] = {VALUES: None}

    def replace(item: Any, path: tuple[str, ...]) -> Any:
        if isinstance(item, torch.Tensor):
            name = _choose_name(".".join(path), packed)
            packed[name] = item
            return _TENSOR, name, item.device.type
        return item if isinstance(item, _PLAIN) else copy.deepcopy(item)

    packed[VALUES] = (_rebuild(value, replace, ()),)
    return packed


def unpack(packed: Mapping[str, Any]) -> Any:
    """Return the value that was packed, with its tensors on a device of the kind that they came from.

    Raises:
        KeyError: one of its tensors is missing.
    """

    def replace(item: Any, _: tuple[str, ...]) -> Any:
        if not _is_mark(item):
            return item
        tensor = packed[item[1]]
        has_device = item[2] == "cpu" or torch.get_device_module(item[2]).is_available()
        return tensor.to(item[2]) if has_device and tensor.device.type != item[2] else tensor

    return _rebuild(packed[VALUES][0], replace, ())


def _rebuild(value: Any, replace: Replace, path: tuple[str, ...]) -> Any:
    """Return a copy of a nest of containers in which everything else is replaced."""
    if isinstance(value, dict):
        result = copy.copy(value)  # keeps the class, such as Counter or defaultdict
        for key, item in value.items():
            result[key] = _rebuild(item, replace, (*path, str(key)))
        return result
    if isinstance(value, list):
        return [_rebuild(item, replace, (*path, str(number))) for number, item in enumerate(value)]
    if isinstance(value, tuple) and not _is_mark(value):
        items = [_rebuild(item, replace, (*path, str(number))) for number, item in enumerate(value)]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    return replace(value, path)


def _is_mark(value: Any) -> bool:
    return type(value) is tuple and len(value) == 3 and isinstance(value[0], str) and value[0] == _TENSOR


def _choose_name(name: str, taken: Mapping[str, Any]) -> str:
    """Return a name that is not taken yet: {"a.b": …} and {"a": {"b": …}} have the same path."""
    numbered = (f"{name}#{number}" for number in itertools.count(1))
    return next(one for one in itertools.chain([name], numbered) if one not in taken)
