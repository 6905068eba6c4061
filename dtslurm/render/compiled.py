"""Cache compiled jinja templates, because compiling takes longer than rendering."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from jinja2 import compiler
from jinja2.bccache import Bucket, BytecodeCache


class TemplateCache(Protocol):
    """A cache of bytes by name; entries may be evicted."""

    def __hash__(self) -> int:
        """Return the hash that identifies this cache."""
        ...

    def get(self, name: str) -> bytes | None:
        """Return the cached bytes of a name, None if there are none."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Store bytes under a name."""
        ...


class Compiled(BytecodeCache):
    """A bytecode cache for jinja. jinja compares the template sources, this class the compiler's version."""

    def __init__(self, cache: TemplateCache, settings: Sequence[str]) -> None:
        """Store bytecode in ``cache``; ``settings`` are the files whose code affects compilation."""
        self._cache = cache
        stamps = [_file_stamp(path) for path in (compiler.__file__, *settings)]
        self._compiler_stamp = "\n".join([*stamps, ""]).encode("utf-8", "surrogateescape")

    def load_bytecode(self, bucket: Bucket) -> None:
        """Load the cached bytecode of a template, if the same compiler produced it."""
        data = self._cache.get(bucket.key)
        if data is not None and data.startswith(self._compiler_stamp):
            bucket.bytecode_from_string(data[len(self._compiler_stamp) :])

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Store the bytecode of a compiled template."""
        self._cache.put(bucket.key, self._compiler_stamp + bucket.bytecode_to_string())


def _file_stamp(path: str) -> str:
    status = os.stat(path)  # noqa: PTH116 - the file of a module
    return f"{path} {status.st_size} {status.st_mtime_ns}"
