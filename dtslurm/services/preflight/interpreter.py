"""Checks, before the job runs, whether its interpreter has the module that its launcher starts."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from dtslurm.errors import RequestInvalid
from dtslurm.launch import registry
from dtslurm.model.jobs.job import JobSpec
from dtslurm.services.wiring.context import ActiveCluster

_EXIT_ABSENT = 3
_PROGRAM = (
    f"import importlib.util, sys; sys.exit({_EXIT_ABSENT} * (importlib.util.find_spec(sys.argv[1]) is None))"
)
_PATH_VARIABLES = {"PYTHONPATH", "PYTHONHOME", "PATH", "LD_LIBRARY_PATH"}


def look(spec: JobSpec, cluster: ActiveCluster) -> str:
    """Return shell lines that report a missing module; empty if only the job itself can find out.

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
    python = f"{spec.activate}/bin/python" if spec.activate else spec.python
    module = _launcher_module(spec)
    if not module or not python.startswith("/"):
        return ""
    return (
        f"{quote(python)} -c {quote(_PROGRAM)} {quote(module)} >/dev/null 2>&1\n"
        f"[ $? -ne {_EXIT_ABSENT} ] || printf 'absent=%s\\n' {quote(python)}\n"
    )


def problems(spec: JobSpec, interpreter: str) -> Iterator[str]:
    """Yield the problem; ``interpreter`` lacks the launcher's module, and is empty if there is no problem."""
    if interpreter:
        module = _launcher_module(spec)
        yield (
            f"{interpreter} has no module {module}, which launcher {spec.launcher} needs: install the "
            "module for this interpreter, activate an environment that has it before you submit, or "
            "name another interpreter with --python"
        )


def _launcher_module(spec: JobSpec) -> str:
    try:
        return registry.load(spec.launcher).framework
    except RequestInvalid:
        return ""
