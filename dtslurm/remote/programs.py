"""Programs of ``worker/`` made of several parts, as they travel to where they run; nothing is left there."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from functools import lru_cache

from dtslurm import assets

NO_PYTHON = "dtslurm: no Python 3.6 or later"
_PYTHONS = (
    "python3",
    "/usr/libexec/platform-python",
    "python3.12",
    "python3.11",
    "python3.9",
    "python3.6",
    "python",
)
_FIND_PYTHON = """\
boot=$1 argument=$2
shift 2
for python in "$@"; do
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null &&
    exec "$python" -I -S -c "$boot" "$argument"
done
echo 'dtslurm: no Python 3.6 or later'
"""

# Makes modules of ``far`` out of (name, text) pairs named `texts`; the last one stays as `module`.
LOADER = """
far = sys.modules["far"] = types.ModuleType("far")
far.__path__ = []
for name, text in texts:
    module = sys.modules["far." + name] = types.ModuleType("far." + name)
    module.__package__ = "far"
    exec(compile(text, name + ".py", "exec"), module.__dict__)
"""


def packed(names: Sequence[str]) -> bytes:
    """Return parts of a program, each after those that it imports, as packed JSON."""
    return _packed(tuple(names))


@lru_cache(maxsize=16)
def _packed(names: tuple[str, ...]) -> bytes:
    texts = [(name, assets.worker(f"{name}.py").read_text("utf-8")) for name in names]
    return zlib.compress(json.dumps(texts).encode(), 9)


def script(names: Sequence[str], call: str) -> str:
    """Return a Python script that loads the parts and runs ``call``, where `module` is the last of them."""
    data = base64.b64encode(packed(names)).decode()
    return f"""\
import base64, json, sys, types, zlib
texts = json.loads(zlib.decompress(base64.b64decode({data!r})).decode())
{LOADER}{call}
"""


def by_any_python(name: str, boot: str, argument: str, first: Sequence[str] = ()) -> list[str]:
    """Return a command that runs the Python program ``boot`` by the first Python that is good enough.

    Where there is none, it prints `NO_PYTHON`.

    Args:
        name: what the command calls itself in a list of processes.
        first: Pythons to try before the usual ones.
    """
    return ["sh", "-c", _FIND_PYTHON, name, boot, argument, *first, *_PYTHONS]
