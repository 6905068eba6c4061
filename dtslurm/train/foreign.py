"""Reads checkpoints that others could have written: torch.distributed.checkpoint's index is a pickle.

Of one's own checkpoints everything is restored as it was saved. One that belongs to somebody else, or that
others may write to, is read by the same reader with an unpickler that knows nothing but what an index is made
of, and its values by ``torch.load(weights_only=True)``, which knows tensors and plain values.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_METADATA = ".metadata"
_OTHERS_WRITE = 0o022
_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


def is_foreign(checkpoint: Path) -> bool:
    """Tell whether somebody else could have written a checkpoint, or a file of it."""
    return any(
        found.st_uid not in {0, os.geteuid()} or found.st_mode & _OTHERS_WRITE for found in _stats(checkpoint)
    )


def _stats(checkpoint: Path) -> Iterator[os.stat_result]:
    yield checkpoint.stat()
    for path in checkpoint.iterdir():
        yield path.stat()


def reader_of(checkpoint: Path) -> dcp.FileSystemReader:
    """Return what reads a checkpoint without running what others wrote into it."""
    return PlainReader(str(checkpoint)) if is_foreign(checkpoint) else dcp.FileSystemReader(str(checkpoint))


def planner_of(checkpoint: Path) -> DefaultLoadPlanner:
    """Return what restores the values of a checkpoint without running what others wrote into it."""
    return PlainPlanner() if is_foreign(checkpoint) else DefaultLoadPlanner()


def _find_enum_member(kind: Any, name: Any) -> Any:
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as ``getattr(CLASS, NAME)``.

    Raises:
        pickle.UnpicklingError: the arguments are not an enumeration and the name of a member.
    """
    members: Mapping[str, Any] = kind.__members__ if isinstance(kind, enum.EnumMeta) else {}
    if not isinstance(name, str) or name not in members:
        raise pickle.UnpicklingError(f"the index of a checkpoint holds no getattr of {name!r}")
    return members[name]


class _Plain(pickle.Unpickler):
    """Knows what an index is made of, and refuses whatever else would be called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _find_enum_member
        known = name in _NAMES.get(module, ())
        if module == "torch":
            known = name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise pickle.UnpicklingError(f"the index of a checkpoint holds no {module}.{name}")
        return super().find_class(module, name)


class PlainReader(dcp.FileSystemReader):  # type: ignore[misc]
    """Reads the index of a checkpoint without calling what stands in it."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index.

        Raises:
            pickle.UnpicklingError: it would call something, or name a file outside the checkpoint.
        """
        with Path(self.path, _METADATA).open("rb") as file:
            found = _Plain(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError("the index of a checkpoint is none")
        for place in (found.storage_data or {}).values():
            name = getattr(place, "relative_path", "/")
            if not isinstance(name, str) or "/" in name or name in {"", ".", ".."}:
                raise pickle.UnpicklingError(f"the index of a checkpoint names a file outside it: {name!r}")
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = getattr(self, "load_id", None)
        return found


class PlainPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """Restores tensors and plain values alone."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Restore a value that is no tensor.

        Raises:
            pickle.UnpicklingError: it is no plain value.
        """
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # nothing is left that calls anything
        plain.seek(0)
        super().load_bytes(read_item, plain)
