"""Exports of artifacts to a model registry and to a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.results import export
from dtslurm.services.results.artifacts import Artifact

RECORD = JobRecord(
    token="t", cluster="hpc", name="llama", run_dir="/r", phase="submitted", created_at=0.0, job_id="17"
)


def artifact(path: str, **values: Any) -> Artifact:
    known: dict[str, Any] = {
        "kind": "checkpoint", "bytes": 4, "files": 1, "sha256": "5" * 64, "step": 3, "time": 1.0,
        "attempt": 0, "there": True, "pinned": False, **values,
    }  # fmt: skip
    return Artifact(path=path, **known)


class Refused(Exception):
    error_code = "PERMISSION_DENIED"


class Known(Refused):
    error_code = "RESOURCE_ALREADY_EXISTS"


class Registry:
    """What mlflow's module and its client do, remembered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.refuse: dict[str, Exception] = {}
        self.exceptions = SimpleNamespace(MlflowException=Refused)
        monkeypatch.setitem(sys.modules, "mlflow", self)

    def MlflowClient(self) -> Registry:  # noqa: N802 - mlflow's name
        return self

    def set_tracking_uri(self, uri: str) -> None:
        self.done.append(("uri", uri))

    def set_experiment(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=f"of {name}")

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.done.append(("run", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1", artifact_uri="mlflow:/r1"))

    def create_model_version(self, name: str, uri: str, run: str, tags: dict[str, str]) -> Any:
        self.done.append(("version", name, uri, run, tags["path"], tags["sha256"][:4]))
        return SimpleNamespace(version=len([item for item in self.done if item[0] == "version"]))

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any, **more: Any) -> None:
            if error := self.refuse.get(name):
                raise error
            self.done.append((name, *words, *more.values()))

        return call


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    return Registry(monkeypatch)


def test_mlflow_export_registers_a_version_per_artifact(registry: Registry, tmp_path: Path) -> None:
    registry.refuse["create_registered_model"] = Known()  # as from the second time on
    (tmp_path / "step-3").mkdir()
    (tmp_path / "model.bin").write_bytes(b"1234")
    artifacts = [
        artifact("checkpoints/step-3", metrics={"loss": 0.5, "note": "good"}),
        artifact("model.bin", sha256=None, step=None, metrics={"f1": 1}),
    ]
    places = [tmp_path / "step-3", tmp_path / "model.bin"]
    assert export.mlflow(RECORD, artifacts, places, "llm", {"MLFLOW_TRACKING_URI": "sqlite:///x"}) == [
        "1",
        "2",
    ]
    assert registry.done == [
        ("uri", "sqlite:///x"),
        ("run", "of dtslurm", "llama-17"),
        ("log_artifacts", "r1", str(places[0]), "checkpoints/step-3"),
        ("log_metric", "r1", "loss", 0.5, 3),
        ("version", "llm", "mlflow:/r1/checkpoints/step-3", "r1", "checkpoints/step-3", "5555"),
        ("log_artifact", "r1", str(places[1]), "."),
        ("log_metric", "r1", "f1", 1, 0),
        ("version", "llm", "mlflow:/r1/model.bin", "r1", "model.bin", "03ac"),
        ("set_terminated", "r1"),
    ]


def test_a_failed_mlflow_upload_marks_the_mlflow_run_as_failed(registry: Registry, tmp_path: Path) -> None:
    registry.refuse["log_artifacts"] = Refused("no space")
    with pytest.raises(RequestInvalid, match="mlflow failed: no space"):
        export.mlflow(RECORD, [artifact("a")], [tmp_path], "llm", {})
    assert registry.done[-1] == ("set_terminated", "r1", "FAILED")


def test_mlflow_export_uploads_nothing_if_the_registry_refuses_the_model(
    registry: Registry, tmp_path: Path
) -> None:
    registry.refuse["create_registered_model"] = Refused("read only")
    with pytest.raises(RequestInvalid, match="mlflow failed: read only"):
        export.mlflow(RECORD, [artifact("a")], [tmp_path], "llm", {})
    assert registry.done == []


def test_hugging_face_export_keeps_the_files_of_the_artifact(tmp_path: Path) -> None:
    place = tmp_path / "step-3"
    (place / "deep").mkdir(parents=True)
    for name in ("README.md", ".gitattributes", "deep/weights.bin"):
        (place / name).write_text("mine")
    laid = export.hugging_face(RECORD, artifact("checkpoints/step-3"), place, tmp_path / "hub")
    assert [str(path.relative_to(tmp_path / "hub")) for path in laid] == [
        ".gitattributes", "README.md", "deep/weights.bin",
    ]  # fmt: skip
    assert (tmp_path / "hub" / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("here", ("folder", "here")),
        ("./hf:x", ("folder", "./hf:x")),
        ("hf:out", ("hf", "out")),
        ("mlflow:my:model", ("mlflow", "my:model")),
    ],
)
def test_the_export_target_is_parsed_from_its_prefix(text: str, target: tuple[str, str]) -> None:
    assert export.target_of(text) == target


def test_an_artifact_is_described_line_by_line() -> None:
    result = export.document(
        artifact("a.pt", pinned=True, problem="it is gone", files=None, metrics={"loss": 1})
    )
    assert result[0] == "a.pt"
    assert [line.split()[0] for line in result[1:]] == [
        "kind", "step", "attempt", "sha256", "pinned", "problem", "metrics",
    ]  # fmt: skip
