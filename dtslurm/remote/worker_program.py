"""Modules of `dtslurm.worker` as one program that is sent to the interpreter that runs it."""

from __future__ import annotations

import zlib
from functools import cache

from dtslurm import assets

# Reads as many bytes of source from standard input as the first argument says, and runs it.
BOOT = (
    "import sys,zlib;"
    "exec(compile(zlib.decompress(sys.stdin.buffer.read(int(sys.argv[1]))),'dtslurm-worker','exec'))"
)

_PROGRAM = """import sys, types
package = sys.modules["far"] = types.ModuleType("far")
package.__path__ = []
for name, source in {sources!r}:
    module = sys.modules["far." + name] = types.ModuleType("far." + name)
    module.__package__ = "far"
    exec(compile(source, "dtslurm/worker/" + name + ".py", "exec"), module.__dict__)
sys.exit(sys.modules["far.{last}"].main())
"""


@cache
def worker_source(*modules: str) -> bytes:
    """Return modules of `dtslurm.worker` as one packed program for `BOOT`; it runs the last one's ``main``.

    Each may import those before it by ``from .name import ...``.
    """
    sources = [(name, assets.worker(f"{name}.py").read_text("utf-8")) for name in modules]
    return zlib.compress(_PROGRAM.format(sources=sources, last=modules[-1]).encode("utf-8"), 9)
