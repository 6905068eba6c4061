"""Safe reading of checkpoints that other users could have written: torch's checkpoint index is a pickle.

A checkpoint that only this user can write is restored with torch's own reader. If a checkpoint belongs to
another user, or other users may write to it, the index is read with an unpickler that accepts only the
classes of an index. The values are then read with ``torch.load(weights_only=True)``, which accepts tensors
and plain values.
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
_WRITABLE_BY_OTHERS = 0o022
_INDEX_CLASSES = {
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
    """Return whether another user could have written a checkpoint or one of its files."""
    return any(
        status.st_uid not in {0, os.geteuid()} or status.st_mode & _WRITABLE_BY_OTHERS
        for status in _stats(checkpoint)
    )


def _stats(checkpoint: Path) -> Iterator[os.stat_result]:
    yield checkpoint.stat()
    for path in checkpoint.iterdir():
        yield path.stat()


def reader_of(checkpoint: Path) -> dcp.FileSystemReader:
    """Return a storage reader that does not execute code from a foreign checkpoint's index."""
    return PlainReader(str(checkpoint)) if is_foreign(checkpoint) else dcp.FileSystemReader(str(checkpoint))


def planner_of(checkpoint: Path) -> DefaultLoadPlanner:
    """Return a load planner that does not execute code from a foreign checkpoint's values."""
    return PlainPlanner() if is_foreign(checkpoint) else DefaultLoadPlanner()


def _find_enum_member(kind: Any, name: Any) -> Any:
    """Return an enumeration member, which Python 3.11.0 to 3.11.3 pickle as ``getattr(CLASS, NAME)``.

    Raises:
        pickle.UnpicklingError: the arguments are not an enumeration and the name of a member.
    """
    members: Mapping[str, Any] = kind.__members__ if isinstance(kind, enum.EnumMeta) else {}
    if not isinstance(name, str) or name not in members:
        raise pickle.UnpicklingError(f"the index of a checkpoint must not call getattr with {name!r}")
    return members[name]


class _Plain(pickle.Unpickler):
    """Unpickler that accepts only the classes of a checkpoint index."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _find_enum_member
        is_allowed = name in _INDEX_CLASSES.get(module, ())
        if module == "torch":
            is_allowed = name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        if not is_allowed:
            raise pickle.UnpicklingError(f"the index of a checkpoint must not contain {module}.{name}")
        return super().find_class(module, name)


class PlainReader(dcp.FileSystemReader):  # type: ignore[misc]
    """Storage reader that reads the index of a checkpoint with `_Plain`."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index.

        Raises:
            pickle.UnpicklingError: the index would call another function, or names a file outside the
                checkpoint.
        """
        with Path(self.path, _METADATA).open("rb") as file:
            index = _Plain(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError("the index of a checkpoint has another type")
        for storage_info in (index.storage_data or {}).values():
            name = getattr(storage_info, "relative_path", "/")
            if not isinstance(name, str) or "/" in name or name in {"", ".", ".."}:
                raise pickle.UnpicklingError(
                    f"the index of a checkpoint refers to a file outside the checkpoint: {name!r}"
                )
        if getattr(index, "storage_meta", None) is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = getattr(self, "load_id", None)
        return index


class PlainPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """Load planner that restores only tensors and plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Restore a value that is not a tensor.

        Raises:
            pickle.UnpicklingError: the value is not a plain value.
        """
        plain_bytes = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain_bytes)  # the copy contains no calls
        plain_bytes.seek(0)
        super().load_bytes(read_item, plain_bytes)
