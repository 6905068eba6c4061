"""Programs of `dtslurm.worker` as they travel to the interpreter that runs them; nothing is left there.

A program is a list of modules, each after those that it imports; the last one is what runs. There they are
the package ``far``, and import each other as they do here, by ``from .name import ...``.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from functools import cache

from dtslurm import assets

# What a host's Python may be called, the usual ones first: 3.6 is what the oldest login nodes in use have.
PYTHONS = (
    "python3",
    "/usr/libexec/platform-python",
    "python3.12",
    "python3.11",
    "python3.9",
    "python3.6",
    "python",
)
NO_PYTHON = "dtslurm: no Python 3.6 or later"
_FIND_PYTHON = f"""\
boot=$1 argument=$2
shift 2
for python in "$@"; do
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null &&
    exec "$python" -I -S -c "$boot" "$argument"
done
echo '{NO_PYTHON}'
"""

# Reads as many bytes as the first argument says, and none of what follows them.
_READ = """
import os, sys, zlib
size, data = int(sys.argv[1]), b""
while len(data) < size:
    piece = os.read(0, size - len(data))
    if not piece:
        sys.exit(1)
    data += piece
exec(compile(zlib.decompress(data), "dtslurm-worker", "exec"))
"""
BOOT = f"exec({_READ!r})"  # one line, as some login shells take no other in quotes

# Makes packages and modules of (name, text) pairs named `texts`; the last module stays as `module`.
_LOADER = """
import sys, types
for name, text in texts:
    packages = ["far"]
    for word in name.split(".")[:-1]:
        packages.append(packages[-1] + "." + word)
    for package in packages:
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = []
    module = sys.modules["far." + name] = types.ModuleType("far." + name)
    module.__package__ = packages[-1]
    exec(compile(text, "dtslurm/worker/" + name.replace(".", "/") + ".py", "exec"), module.__dict__)
"""


@cache
def worker_source(*modules: str) -> bytes:
    """Return a program as `BOOT` reads it from standard input; the last module's ``main`` is run.

    Args:
        modules: names below `dtslurm.worker`, like ``logtail.frames``.
    """
    return zlib.compress(f"{_load(modules)}sys.exit(module.main())\n".encode(), 9)


def inline_program(modules: Sequence[str], call: str) -> str:
    """Return a program as text for ``python -`` or ``python -c``; ``call`` is run after loading.

    Args:
        modules: as for `worker_source`. ``call`` has `json`, `sys`, and the last of them as `module`.
    """
    packed = _packed(tuple(modules))
    return f"import base64, json, sys, zlib\nexec(zlib.decompress(base64.b64decode({packed!r})))\n{call}\n"


@cache
def _packed(modules: tuple[str, ...]) -> str:
    return base64.b64encode(zlib.compress(_load(modules).encode(), 9)).decode()


def _load(modules: Sequence[str]) -> str:
    texts = [(name, assets.worker(name.replace(".", "/") + ".py").read_text("utf-8")) for name in modules]
    return f"texts = {texts!r}\n{_LOADER}"


def run_with_any_python(name: str, boot: str, argument: str, first: Sequence[str] = ()) -> list[str]:
    """Return a command that runs the Python program ``boot`` by the first Python that is good enough.

    Where there is none, it prints `NO_PYTHON`.

    Args:
        name: what the command calls itself in a list of processes.
        first: Pythons to try before the usual ones.
    """
    return ["sh", "-c", _FIND_PYTHON, name, boot, argument, *first, *PYTHONS]
