"""Export artifacts: as a Hugging Face model repository, or to the MLflow model registry."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.results.artifacts import Artifact
from dtslurm.worker import artifacts as artifact_worker

_LFS_PATTERNS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.distcp",
    "*.gguf",
    "*.onnx",
    "*.tar",
    "*.npz",
)


def hugging_face(record: JobRecord, artifact: Artifact, source: Path, folder: Path) -> list[Path]:
    """Write an artifact as a Hugging Face model repository into ``folder``, and return its files.

    The artifact's files go to the top level. ``README.md`` (a model card that describes the run) and
    ``.gitattributes`` (the patterns of large files) are added unless the artifact contains them. Files are
    not converted: a sharded checkpoint is not merged into one file of weights.

    Raises:
        RequestInvalid: the folder exists and is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RequestInvalid([f"folder {folder} exists and is not empty"], hint="name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, folder, dirs_exist_ok=True)
    else:
        shutil.copy2(source, folder / source.name)
    if not (folder / "README.md").exists():
        (folder / "README.md").write_text(_render_model_card(record, artifact), encoding="utf-8")
    if not (folder / ".gitattributes").exists():
        lines = [f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in _LFS_PATTERNS]
        (folder / ".gitattributes").write_text("".join(lines), encoding="utf-8")
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _render_model_card(record: JobRecord, artifact: Artifact) -> str:
    """Return a model card: YAML metadata for the Hugging Face Hub, then a table that describes the run."""
    values = {
        "run": record.name,
        "job": record.job_id,
        "cluster": record.cluster,
        "command": record.command,
        "ranks": record.world_size,
        "artifact": artifact.path,
        "step": artifact.step,
        "sha256": artifact.sha256,
    }
    rows = [f"| {key} | `{value}` |" for key, value in values.items() if value not in (None, "")]
    rows += [f"| {key} | {value} |" for key, value in artifact.metrics.items()]
    front_matter = "---\nlibrary_name: pytorch\ntags:\n- dtslurm\n---\n"
    return f"{front_matter}\n# {record.name}\n\n| | |\n|---|---|\n" + "\n".join(rows) + "\n"


def mlflow(
    record: JobRecord,
    artifacts: Sequence[Artifact],
    sources: Sequence[Path],
    name: str,
    settings: Mapping[str, str],
) -> list[str]:
    """Register each artifact as a version of a model in the MLflow registry; return the versions.

    ``MLFLOW_TRACKING_URI`` in ``settings`` selects the registry.

    Raises:
        RequestInvalid: mlflow is not installed, or it refuses a request.
    """
    try:
        mlflow_module: Any = importlib.import_module("mlflow")
    except ImportError:
        raise RequestInvalid(["mlflow is not installed on this machine"], hint="pip install mlflow") from None
    if uri := settings.get("MLFLOW_TRACKING_URI"):
        mlflow_module.set_tracking_uri(uri)
    client = mlflow_module.MlflowClient()
    mlflow_error = mlflow_module.exceptions.MlflowException
    run_id = None
    try:
        try:
            client.create_registered_model(name)
        except mlflow_error as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment_id = mlflow_module.set_experiment("dtslurm").experiment_id
        run = client.create_run(experiment_id, run_name=f"{record.name}-{record.job_id}")
        run_id = run.info.run_id
        versions = [
            _create_version(client, run.info, artifact, source, name, record)
            for artifact, source in zip(artifacts, sources, strict=True)
        ]
        client.set_terminated(run_id)
    except mlflow_error as error:
        if run_id is not None:
            with contextlib.suppress(mlflow_error):
                client.set_terminated(run_id, "FAILED")
        raise RequestInvalid([f"mlflow failed: {error}"]) from None
    return versions


def _create_version(
    client: Any, run_info: Any, artifact: Artifact, source: Path, name: str, record: JobRecord
) -> str:
    """Log an artifact to an MLflow run, and create a model version from it; return the version."""
    if source.is_dir():
        client.log_artifacts(run_info.run_id, str(source), artifact_path=artifact.path)
    else:
        client.log_artifact(run_info.run_id, str(source), artifact_path=str(Path(artifact.path).parent))
    for key, value in artifact.metrics.items():
        if isinstance(value, int | float):
            client.log_metric(run_info.run_id, key, value, step=artifact.step or 0)
    sha256 = artifact.sha256 or artifact_worker.measure(str(source), checksum=True)["sha256"]
    tags = {"job_id": str(record.job_id), "path": artifact.path, "sha256": sha256}
    version = client.create_model_version(
        name, f"{run_info.artifact_uri}/{artifact.path}", run_info.run_id, tags=tags
    )
    return str(version.version)


def target_of(text: str) -> tuple[str, str]:
    """Parse the value of ``--to`` (``hf:FOLDER``, ``mlflow:NAME`` or a folder) into (kind, folder or name).

    Raises:
        RequestInvalid: the part after the colon is empty, or the part before it is unknown.
    """
    kind, colon, value = text.partition(":")
    if colon and kind in ("hf", "mlflow"):
        if not value:
            raise RequestInvalid([f"--to {text}: write {kind}:{'FOLDER' if kind == 'hf' else 'NAME'}"])
        return kind, value
    if colon and "/" not in kind:
        raise RequestInvalid([f"--to {text}: write a folder (./{text}), hf:FOLDER or mlflow:NAME"])
    return "folder", text


def document(artifact: Artifact) -> list[str]:
    """Return the lines that describe an artifact to the user: its path, then one line per known value."""
    rows = {
        "kind": artifact.kind,
        "step": artifact.step,
        "attempt": artifact.attempt,
        "files": artifact.files,
        "sha256": artifact.sha256,
        "pinned": "yes" if artifact.pinned else None,
        "problem": artifact.problem or None,
        "metrics": json.dumps(dict(artifact.metrics)) if artifact.metrics else None,
    }
    lines = [f"  {key:8} {value}" for key, value in rows.items() if value is not None]
    return [artifact.path, *lines]
