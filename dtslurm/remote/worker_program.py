"""Programs of `dtslurm.worker`, encoded for a remote interpreter, without installing files there.

A program is a list of modules, each after the modules that it imports; the last module is run. On the remote
host the modules form the package ``far``, and import each other as here, with ``from .name import ...``.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from dtslurm import assets

# Names of Python on login nodes, the most common ones first. The oldest login nodes in use have Python 3.6.
PYTHONS = (
    "python3",
    "/usr/libexec/platform-python",
    "python3.12",
    "python3.11",
    "python3.9",
    "python3.6",
    "python",
)
_PYTHON_OF_NODE = "/usr/bin/python3"  # on the node's disk; that of the user may be on a slow file system
NO_PYTHON = "dtslurm: no Python 3.6 or later"
_FIND_PYTHON = f"""\
boot=$1 argument=$2
shift 2
for python in "$@"; do
  "$python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null &&
    exec "$python" -I -S -c "$boot" "$argument"
done
echo '{NO_PYTHON}'
"""

# Reads exactly as many bytes as the first argument states, because the worker's input follows.
_READ_PROGRAM = """
import os, sys, zlib
size, data = int(sys.argv[1]), b""
while len(data) < size:
    piece = os.read(0, size - len(data))
    if not piece:
        sys.exit(1)
    data += piece
exec(compile(zlib.decompress(data), "dtslurm-worker", "exec"))
"""
BOOT = f"exec({_READ_PROGRAM!r})"  # one line, because some login shells accept no line ends in quotes

# Creates packages and modules from the (name, text) pairs in `texts`; `module` is the last module.
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
    """Return a program in the form that `BOOT` reads from standard input; it runs the last module's ``main``.

    Args:
        modules: names below `dtslurm.worker`, such as ``logtail.frames``.
    """
    return zlib.compress(f"{_render_loader(modules)}sys.exit(module.main())\n".encode(), 9)


def inline_program(modules: Sequence[str], statement: str) -> str:
    """Return a program for ``python -`` or ``python -c`` that loads the modules and runs ``statement``.

    Args:
        modules: as for `worker_source`.
        statement: Python code, in which `json`, `sys`, and the last module as `module` are defined.
    """
    packed = _pack_modules(tuple(modules))
    return (
        f"import base64, json, sys, zlib\nexec(zlib.decompress(base64.b64decode({packed!r})))\n{statement}\n"
    )


@cache
def _pack_modules(modules: tuple[str, ...]) -> str:
    return base64.b64encode(zlib.compress(_render_loader(modules).encode(), 9)).decode()


def _render_loader(modules: Sequence[str]) -> str:
    texts = [(name, assets.worker(name.replace(".", "/") + ".py").read_text("utf-8")) for name in modules]
    return f"texts = {texts!r}\n{_LOADER}"


def encode_request(request: Mapping[str, Any]) -> str:
    """Return a request as the argument of a program of `inline_program`: compressed JSON in base 64."""
    return base64.b64encode(zlib.compress(json.dumps(request).encode(), 9)).decode()


def run_with_any_python(
    name: str, boot: str, argument: str, preferred_pythons: Sequence[str] = ()
) -> list[str]:
    """Return a command that runs the Python program ``boot`` with the first Python of version 3.6 or later.

    If there is none, the command prints `NO_PYTHON`.

    Args:
        name: the command's name in a process list.
        preferred_pythons: Python interpreters to try before `PYTHONS`.
    """
    return ["sh", "-c", _FIND_PYTHON, name, boot, argument, *preferred_pythons, _PYTHON_OF_NODE, *PYTHONS]
