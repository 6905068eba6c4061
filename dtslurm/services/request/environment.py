"""Selects the Python environment of a job's ranks: the active one, else the project's own that uv made."""

from __future__ import annotations

from pathlib import Path

from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.paths import expand_home
from dtslurm.model.values import dataclass
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import Context


@dataclass(frozen=True)
class Environment:
    """An environment to activate in the job.

    Attributes:
        folder: the folder of the venv or conda environment; None if the job activates none.
        notices: messages to the user about the choice.
        problems: why no environment can be used.
    """

    folder: str | None = None
    notices: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def environment(context: Context, request: JobRequest, profile: ClusterProfile | None) -> Environment:
    """Return the environment for a request: none if the request names an interpreter or an image.

    ``uv run`` and ``uv pip`` need no activated environment, so a job does not either. As with uv, the nearest
    ``.venv`` in this folder and those above it is used if uv made it or ``uv.lock`` is beside it.
    """
    if request.python is not None:
        return Environment(problems=_command_line_problems(context, request.python))
    if request.container is not None:
        return Environment()
    if active := context.env.get("VIRTUAL_ENV") or context.env.get("CONDA_PREFIX"):
        return Environment(active)
    for folder in (context.cwd, *context.cwd.parents):
        has_lock_file = (folder / "uv.lock").is_file()
        venv = folder / ".venv"
        if has_lock_file:  # uv reads this variable for projects, relative to the project's folder
            venv = folder / (context.env.get("UV_PROJECT_ENVIRONMENT") or ".venv")
        if (venv / "bin" / "activate").is_file() and (has_lock_file or _is_made_by_uv(venv)):
            return Environment(str(venv), (f"no environment is active: the job uses uv's {venv}",))
        if has_lock_file:
            return _unsynced_environment(folder, venv, profile)
    return Environment()


def _is_made_by_uv(venv: Path) -> bool:
    try:
        lines = (venv / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.partition("=")[0].strip() == "uv" for line in lines)


def _unsynced_environment(project: Path, venv: Path, profile: ClusterProfile | None) -> Environment:
    if profile is not None and (profile.environment.modules or profile.environment.setup):
        return Environment()  # modules or setup lines may provide a Python
    return Environment(
        problems=(f"{project / 'uv.lock'} has no environment {venv}: run uv sync, or give --python",)
    )


def _command_line_problems(context: Context, python: str) -> tuple[str, ...]:
    words = python.split()
    if len(words) < 2 or (context.cwd / expand_home(python)).exists():
        return ()
    hint = (
        "without --python, the job uses the project's .venv" if words[0] == "uv" else "--setup may prepare it"
    )
    return (f"--python {python!r} is a command line, not an interpreter: {hint}",)
