"""Which launcher a training script wants, read from its text; it is never run."""

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


def suggested(
    context: Context, request: JobRequest, resolution: Resolution, *, auto: bool
) -> tuple[Launcher, list[str]]:
    """Return the launcher for a request that names none, and what to say about it."""
    layout = resolution.layout
    name = "single" if layout is None or layout.world_size == 1 else "torchrun"
    try:
        source, siblings, shown = _source(context, request)
        found = detect.detect(
            source,
            shown,
            request.args,
            nodes=layout.nodes if layout else request.nodes or 1,
            ranks_per_node=layout.ranks_per_node if layout else request.ntasks_per_node or 1,
            gpus_per_node=layout.gpus_per_node if layout else request.gpus_per_node or 0,
            siblings=siblings,
            known=registry.own(),  # it suggests no others
            ranks_asked=request.ntasks_per_node is not None,
            launcher=None if auto else name,
        )
        launcher = registry.load(found.launcher)
    except Exception as error:  # noqa: BLE001 - a job must not fail for want of advice
        return registry.load(name), [f"launcher {name}: the script tells nothing ({error})"] if auto else []
    return launcher, [*([f"launcher {launcher.name}: {found.why}"] if auto else []), *found.warnings]


def cautions(context: Context, request: JobRequest, layout: TaskLayout, launcher: Launcher) -> list[str]:
    """Return what a script will stumble over with the launcher that its user has named."""
    if not launcher.reads_sizes:
        return []
    try:
        source, siblings, shown = _source(context, request)
        return list(
            detect.other_sizes(
                source,
                shown,
                request.args,
                nodes=layout.nodes,
                ranks_per_node=layout.ranks_per_node,
                siblings=siblings,
            )
        )
    except Exception:  # noqa: BLE001 - a job must not fail for want of advice
        return []


def resumes_from_checkpoints(context: Context, request: JobRequest) -> bool:
    """Return whether the text of the training script loads the newest checkpoint when it starts."""
    try:
        source, siblings, shown = _source(context, request)
        return detect.resumes_from_checkpoints(source, shown, siblings)
    except Exception:  # noqa: BLE001 - as above
        return False


def _source(context: Context, request: JobRequest) -> tuple[str, dict[str, str], str]:
    """Return the text of the training script, of the files beside it that it imports, and its name."""
    path = context.cwd / request.script
    if request.module:
        path = context.cwd / request.script.replace(".", "/") / "__main__.py"
        path = path if path.is_file() else path.parent.with_suffix(".py")
    if not path.is_file():
        raise StoreError(f"no file {path}")
    source = _text(path)
    beside = [name for name in imported_files(source) if (path.parent / name).is_file()]
    return source, {name: _text(path.parent / name) for name in beside}, path.name


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(1 << 20).decode("utf-8", "replace")
