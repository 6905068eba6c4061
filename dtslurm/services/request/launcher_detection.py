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
        source, siblings, script_name = _read_source(context, request)
        detection = detect.detect(
            source,
            script_name,
            request.args,
            nodes=layout.nodes if layout else request.nodes or 1,
            ranks_per_node=layout.ranks_per_node if layout else request.ntasks_per_node or 1,
            gpus_per_node=layout.gpus_per_node if layout else request.gpus_per_node or 0,
            siblings=siblings,
            launchers=registry.own(),  # only dtslurm's own launchers are suggested
            ranks_asked=request.ntasks_per_node is not None,
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
        source, siblings, script_name = _read_source(context, request)
        return list(
            detect.find_size_conflicts(
                source,
                script_name,
                request.args,
                nodes=layout.nodes,
                ranks_per_node=layout.ranks_per_node,
                siblings=siblings,
            )
        )
    except Exception:  # noqa: BLE001 - failed advice must not fail the job
        return []


def resumes_from_checkpoints(context: Context, request: JobRequest) -> bool:
    """Return whether the training script loads the newest checkpoint when it starts."""
    try:
        source, siblings, script_name = _read_source(context, request)
        return detect.resumes_from_checkpoints(source, script_name, siblings)
    except Exception:  # noqa: BLE001 - as above
        return False


def _read_source(context: Context, request: JobRequest) -> tuple[str, dict[str, str], str]:
    """Return the text of the training script, the texts of local files that it imports, and its name."""
    path = context.cwd / request.script
    if request.module:
        path = context.cwd / request.script.replace(".", "/") / "__main__.py"
        path = path if path.is_file() else path.parent.with_suffix(".py")
    if not path.is_file():
        raise StoreError(f"file {path} does not exist")
    source = _read_text(path)
    imported_names = [name for name in imported_files(source) if (path.parent / name).is_file()]
    return source, {name: _read_text(path.parent / name) for name in imported_names}, path.name


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(1 << 20).decode("utf-8", "replace")
