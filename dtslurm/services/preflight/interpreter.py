"""Whether the job's interpreter has what its launcher starts, where that can be known before the job runs."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from dtslurm.errors import RequestInvalid
from dtslurm.launch import registry
from dtslurm.model.jobs.job import JobSpec
from dtslurm.services.wiring.context import ActiveCluster

_ABSENT = 3
_PROGRAM = (
    f"import importlib.util, sys; sys.exit({_ABSENT} * (importlib.util.find_spec(sys.argv[1]) is None))"
)
_PATHS = {"PYTHONPATH", "PYTHONHOME", "PATH", "LD_LIBRARY_PATH"}


def look(spec: JobSpec, cluster: ActiveCluster) -> str:
    """Return shell lines that tell of a missing module, none where only the job itself can tell.

    Containers, modules and set-up lines make another environment than the one that is asked here.
    """
    site = cluster.profile.environment
    changed = spec.setup or site.setup or site.modules or spec.container
    if changed or _PATHS & ({name for name, _ in spec.env} | set(site.variables)):
        return ""
    python = f"{spec.activate}/bin/python" if spec.activate else spec.python
    module = _module(spec)
    if not module or not python.startswith("/"):
        return ""
    return (
        f"{quote(python)} -c {quote(_PROGRAM)} {quote(module)} >/dev/null 2>&1\n"
        f"[ $? -ne {_ABSENT} ] || printf 'absent=%s\\n' {quote(python)}\n"
    )


def problems(spec: JobSpec, found: str) -> Iterator[str]:
    """Yield what the look found; ``found`` is the interpreter that lacks the launcher's module, if any."""
    if found:
        module = _module(spec)
        yield (
            f"{found} has no module {module}, which launcher {spec.launcher} needs: install it there, "
            "activate the environment that has it before submitting, or name its interpreter by --python"
        )


def _module(spec: JobSpec) -> str:
    try:
        return registry.load(spec.launcher).framework
    except RequestInvalid:
        return ""
