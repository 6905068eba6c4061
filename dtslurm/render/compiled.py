"""Remembers templates as jinja compiled them, which takes longer than to fill them in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from jinja2 import compiler
from jinja2.bccache import Bucket, BytecodeCache


class TemplateCache(Protocol):
    """Where bytes are kept by name; what is kept may get lost."""

    def __hash__(self) -> int:
        """Tell it from others."""
        ...

    def get(self, name: str) -> bytes | None:
        """Return what is kept under a name, None where nothing is."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Keep it."""
        ...


class Compiled(BytecodeCache):
    """Compiled templates. jinja compares their sources, this class what compiled them."""

    def __init__(self, keeper: TemplateCache, settings: Sequence[str]) -> None:
        """Take where they are kept; ``settings`` are the files whose code decides how they are compiled."""
        self._keeper = keeper
        stamps = [_stamp(path) for path in (compiler.__file__, *settings)]
        self._made_by = "\n".join([*stamps, ""]).encode("utf-8", "surrogateescape")

    def load_bytecode(self, bucket: Bucket) -> None:
        """Fill in what is kept of a template, if that is still true."""
        data = self._keeper.get(bucket.key)
        if data is not None and data.startswith(self._made_by):
            bucket.bytecode_from_string(data[len(self._made_by) :])

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep a template that was compiled."""
        self._keeper.put(bucket.key, self._made_by + bucket.bytecode_to_string())


def _stamp(path: str) -> str:
    found = os.stat(path)  # noqa: PTH116 - a module's own
    return f"{path} {found.st_size} {found.st_mtime_ns}"
