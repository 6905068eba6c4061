"""Where a run keeps its files, and where templates are looked for."""

from __future__ import annotations

import re
import secrets
from datetime import datetime
from pathlib import Path

from dtslurm import assets
from dtslurm.errors import RequestInvalid
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.job import JobSpec
from dtslurm.model.shell import Sh
from dtslurm.render.script import RunPlace
from dtslurm.services.context import Context
from dtslurm.services.request import JobRequest


def template_folders(context: Context, template: str | None) -> list[Path]:
    """Return where templates are looked for: the one asked for, the project, the user, the packaged."""
    config = context.env.get("XDG_CONFIG_HOME") or str(Path(context.env.get("HOME", "~")) / ".config")
    folders = [context.cwd / "templates", Path(config) / "dtslurm" / "templates", assets.templates()]
    return [(context.cwd / template).parent, *folders] if template else folders


def place(
    context: Context, request: JobRequest, profile: ClusterProfile, spec: JobSpec, *, standalone: bool
) -> RunPlace:
    """Return where this run goes: a fixed new folder, or for plain sbatch one named after the job's id.

    Raises:
        RequestInvalid: the run root cannot be used.
    """
    root = request.run_root or context.env.get("DTSLURM_RUN_ROOT") or profile.paths.run_root
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", spec.name).strip(".-")[:60] or "run"
    token = secrets.token_hex(6)
    if standalone:
        job = "$SLURM_ARRAY_JOB_ID" if spec.array else "$SLURM_JOB_ID"
        return RunPlace(Sh(f'"{_in_double_quotes(_shell_root(root, context))}/{slug}-{job}"'), None, token)
    stamp = datetime.fromtimestamp(context.clock()).strftime("%Y%m%d-%H%M%S")
    directory = f"{run_root(context, root)}/{slug}-{stamp}-{token}"
    log = "batch-%a.log" if spec.array else "batch.log"
    return RunPlace(directory, f"{directory}/logs/{log}", token)


def run_root(context: Context, text: str) -> str:
    """Return the absolute run root, with ``~`` and variables of this side filled in.

    Raises:
        RequestInvalid: a variable in it is not set, or Slurm cannot hold the path.
    """
    unfit = re.search(r"[%\x00-\x1f\x7f]", text)
    if unfit:
        raise RequestInvalid(
            [f"the run root {text!r} holds {unfit[0]!r}, which Slurm does not keep in file names"]
        )
    home = context.env.get("HOME", "~")
    filled = re.sub(r"^~(?=/|$)", lambda _: home, text)
    missing = [name for name in _names_in(filled) if name not in context.env]
    if missing:
        raise RequestInvalid([f"the run root {text!r} needs ${missing[0]}, which is not set here"])
    filled = re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: context.env[found[1] or found[2]], filled)
    return str(context.cwd / filled).rstrip("/")


def _names_in(text: str) -> list[str]:
    return [a or b for a, b in re.findall(r"\$(?:\{(\w+)\}|(\w+))", text)]


def _shell_root(text: str, context: Context) -> str:
    """Return the run root with ``~`` as $HOME and relative paths made absolute; variables stay."""
    text = re.sub(r"^~(?=/|$)", "$HOME", text)
    return text if text.startswith(("/", "$")) else str(context.cwd / text)


def _in_double_quotes(text: str) -> str:
    """Escape for double quotes, leaving plain ``$NAME`` and ``${NAME}`` to the shell."""
    text = re.sub(r'([\\"`])', r"\\\1", text)
    return re.sub(r"\$(?!\w|\{\w+\})", r"\\$", text)
