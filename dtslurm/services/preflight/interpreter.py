"""Checks, before the job runs, whether its interpreter has the modules of its launcher or of its notebook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from shlex import quote

from dtslurm.errors import RequestInvalid
from dtslurm.launch import registry
from dtslurm.model.jobs.job import JobSpec
from dtslurm.model.runs.record import SESSION_PROGRAM
from dtslurm.services.wiring.context import ActiveCluster
from dtslurm.worker.session import JUPYTERS

_NOTEBOOK_MODULES = [module for module, _ in JUPYTERS]
_EXIT_ABSENT = 3
# Each argument is a module, or several of which one is enough: a|b. The program ends without running exit
# handlers, so the names are the last text that the interpreter prints.
_PROGRAM = f"""\
import importlib.util, os, sys
absent = [names for names in sys.argv[1:] if not any(map(importlib.util.find_spec, names.split("|")))]
os.write(1, ("absent=" + " ".join(absent)).encode())
os._exit({_EXIT_ABSENT} if absent else 0)
"""
_PATH_VARIABLES = {"PYTHONPATH", "PYTHONHOME", "PATH", "LD_LIBRARY_PATH"}


def look(spec: JobSpec, cluster: ActiveCluster) -> str:
    """Return shell lines that report missing modules; empty if only the job itself can find out.

    Containers, modules and setup lines give the job another environment than the one that these lines run in.
    """
    profile_environment = cluster.profile.environment
    has_other_environment = (
        spec.setup or profile_environment.setup or profile_environment.modules or spec.container
    )
    if has_other_environment or _PATH_VARIABLES & (
        {name for name, _ in spec.env} | set(profile_environment.variables)
    ):
        return ""
    python = _interpreter(spec)
    modules = ["|".join(_NOTEBOOK_MODULES)] if _is_notebook(spec) else _launcher_modules(spec)
    if not modules or not python.startswith("/"):
        return ""
    return (
        f"lines=$({quote(python)} -c {quote(_PROGRAM)} {' '.join(map(quote, modules))} 2>/dev/null)\n"
        f"[ $? -ne {_EXIT_ABSENT} ] || printf 'absent=%s\\n' \"${{lines##*absent=}}\"\n"
    )


def problems(spec: JobSpec, absent_modules: str) -> Iterator[str]:
    """Yield the problem; ``absent_modules`` are the names of the needed modules that are missing."""
    absent_names = absent_modules.split()
    if not absent_names:
        return
    if _is_notebook(spec):
        yield (
            f"{_interpreter(spec)} has neither {' nor '.join(_NOTEBOOK_MODULES)}, which a notebook needs: "
            f"install {_NOTEBOOK_MODULES[0]} for this interpreter, activate an environment that has it "
            "before you submit, or name another interpreter with --python"
        )
        return
    is_one = len(absent_names) == 1
    yield (
        f"{_interpreter(spec)} has no {'module' if is_one else 'modules'} {' and '.join(absent_names)}, "
        f"which launcher {spec.launcher} needs: install the {'module' if is_one else 'modules'} for this "
        f"interpreter, activate an environment that has {'it' if is_one else 'them'} before you submit, "
        "or name another interpreter with --python"
    )


def _is_notebook(spec: JobSpec) -> bool:
    return PurePosixPath(spec.script).name == SESSION_PROGRAM and spec.args[:1] == ("notebook",)


def _interpreter(spec: JobSpec) -> str:
    return f"{spec.activate}/bin/python" if spec.activate else spec.python


def _launcher_modules(spec: JobSpec) -> list[str]:
    """Return the modules that the launcher needs, each once."""
    try:
        launcher = registry.load(spec.launcher)
    except RequestInvalid:
        return []
    modules = (launcher.framework, *launcher.chosen(spec).start_modules)
    return [module for module in dict.fromkeys(modules) if module]
