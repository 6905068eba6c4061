"""Detects the launcher that a training script needs, from its text; the script is never run."""

from __future__ import annotations

from pathlib import Path

from dtslurm.errors import StoreError
from dtslurm.launch import registry
from dtslurm.launch.base import Launcher
from dtslurm.launch.detection import detect
from dtslurm.launch.detection.evidence import imported_files
from dtslurm.launch.layout import Resolution
from dtslurm.model.jobs.job import TaskLayout
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import Context


def suggest_launcher(
    context: Context, request: JobRequest, resolution: Resolution, *, auto: bool
) -> tuple[Launcher, list[str]]:
    """Return the launcher for a request that names none, and messages about the choice."""
    layout = resolution.layout
    fallback_launcher = "single" if layout is None or layout.world_size == 1 else "torchrun"
    try:
        ranks = detect.RequestedRanks(
            nodes=layout.nodes if layout else request.nodes or 1,
            per_node=layout.ranks_per_node if layout else request.ntasks_per_node or 1,
            gpus_per_node=layout.gpus_per_node if layout else request.gpus_per_node or 0,
            are_chosen=request.ntasks_per_node is not None,
        )
        detection = detect.detect(
            _read_script(context, request),
            ranks,
            launchers=registry.own(),  # only dtslurm's own launchers are suggested
            launcher=None if auto else fallback_launcher,
        )
        launcher = registry.load(detection.launcher)
    except Exception as error:  # noqa: BLE001 - failed advice must not fail the job
        return registry.load(fallback_launcher), [
            f"launcher {fallback_launcher}: the script cannot be examined ({error})"
        ] if auto else []
    return launcher, [*([f"launcher {launcher.name}: {detection.why}"] if auto else []), *detection.warnings]


def cautions(context: Context, request: JobRequest, layout: TaskLayout, launcher: Launcher) -> list[str]:
    """Return warnings where the script's sizes differ from the job's, for a launcher that the user named."""
    if not launcher.reads_sizes:
        return []
    try:
        ranks = detect.RequestedRanks(layout.nodes, layout.ranks_per_node)
        return list(detect.find_size_conflicts(_read_script(context, request), ranks))
    except Exception:  # noqa: BLE001 - failed advice must not fail the job
        return []


def resumes_from_checkpoints(context: Context, request: JobRequest) -> bool:
    """Return whether the training script loads the newest checkpoint when it starts."""
    try:
        return detect.resumes_from_checkpoints(_read_script(context, request))
    except Exception:  # noqa: BLE001 - as above
        return False


def _read_script(context: Context, request: JobRequest) -> detect.ScriptText:
    """Return the text of the training script, and the texts of local files that it imports."""
    path = context.cwd / request.script
    if request.module:
        path = context.cwd / request.script.replace(".", "/") / "__main__.py"
        path = path if path.is_file() else path.parent.with_suffix(".py")
    if not path.is_file():
        raise StoreError(f"file {path} does not exist")
    source = _read_text(path)
    imported_names = [name for name in imported_files(source) if (path.parent / name).is_file()]
    siblings = {name: _read_text(path.parent / name) for name in imported_names}
    return detect.ScriptText(source, path.name, request.args, siblings)


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(1 << 20).decode("utf-8", "replace")
