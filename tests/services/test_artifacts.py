"""Artifacts of runs: registered, pinned, pruned, pulled and exported."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtslurm.errors import RequestInvalid, StoreError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.results import artifacts, export
from dtslurm.services.wiring.context import Context
from dtslurm.worker import artifacts as register
from dtslurm.worker.delivery import reclaim


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "train-1"
    for step, loss in ((1, 0.9), (2, 0.5), (3, 0.7), (4, 0.8)):
        path = folder / "checkpoints" / f"step-{step}"
        path.mkdir(parents=True)
        (path / "weights.bin").write_bytes(bytes([step]) * 100)
        result = register.measure(str(path), checksum=True)
        register.add(
            str(folder), path=str(path), kind="checkpoint", step=step, metrics={"loss": loss}, **result
        )
    (folder / "model.safetensors").write_bytes(b"m" * 10)
    with (folder / register.FILE).open("a") as file:  # as a plain program does by echo
        file.write('{"path": "model.safetensors", "step": 4, "metrics": {"accuracy": 0.5}}\n')
        file.write('{"path": "model.safetensors", "metrics": {"f1": 0.25}}\nnot json\n[1]\n')
    return folder


@pytest.fixture
def record(run: Path) -> JobRecord:
    return JobRecord(
        token="t",
        cluster="local",
        name="train",
        run_dir=str(run),
        phase="submitted",
        created_at=0.0,
        job_id="1",
    )


def file_names(artifacts_of_run: list[artifacts.Artifact]) -> list[str]:
    return [Path(item.path).name for item in artifacts_of_run]


def test_the_artifact_list_merges_entries_and_skips_malformed_lines(record: JobRecord) -> None:
    result = artifacts.listing(Context(), record)
    assert file_names(result) == ["step-1", "step-2", "step-3", "step-4", "model.safetensors"]
    model = result[-1]
    assert (model.bytes, model.step, model.metrics) == (10, 4, {"accuracy": 0.5, "f1": 0.25})
    assert result[0].path == "checkpoints/step-1"
    assert not any(item.problem for item in result)


def test_collect_registers_matching_files_once_and_adds_checksums(run: Path, record: JobRecord) -> None:
    (run / "export").mkdir()
    (run / "export" / "x.onnx").write_text("x")
    for _ in range(2):  # a second end registers nothing twice
        register.collect(str(run), ["export/*.onnx"])
    entry = register.read_entries(str(run))["model.safetensors"]
    assert entry["sha256"] == register.measure(str(run / "model.safetensors"), checksum=True)["sha256"]
    assert entry["metrics"]["f1"] == 0.25
    lines = [item for item in register.lines(str(run)) if item["path"] == "export/x.onnx"]
    assert len(lines) == 1


def test_collect_registers_a_file_again_only_if_a_later_attempt_rewrote_the_file(
    run: Path, record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    register.collect(str(run), ["*.safetensors"])
    (run / "model.safetensors").write_bytes(b"n" * 10)  # of the same size
    monkeypatch.setenv("DTSLURM_ATTEMPT", "1")
    register.collect(str(run), ["*.safetensors"])
    again = artifacts.listing(Context(), record, check=["model.safetensors"])[-1]
    assert (again.attempt, again.problem) == (1, "")
    long_ago = time.time() - 3600
    os.utime(run / "model.safetensors", (long_ago, long_ago))
    monkeypatch.setenv("DTSLURM_ATTEMPT", "2")
    entries = (run / register.FILE).read_text()
    register.collect(str(run), ["*.safetensors"])
    assert (run / register.FILE).read_text() == entries  # of what is as it was nothing is said


def test_collect_omits_a_checksum_that_takes_too_long(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 10**6, 20))
    monkeypatch.setattr(register, "time", SimpleNamespace(monotonic=lambda: next(ticks), time=time.time))
    monkeypatch.setattr(register, "CHUNK", 10)
    (run / "large.bin").write_bytes(bytes(1000))
    register.collect(str(run), ["large.bin"])
    entry = register.read_entries(str(run))["large.bin"]
    assert (entry["bytes"], entry.get("sha256")) == (1000, None)


def test_the_artifact_list_reports_missing_and_changed_files(run: Path, record: JobRecord) -> None:
    (run / "checkpoints/step-2/weights.bin").write_bytes(b"x" * 100)
    (run / "checkpoints/step-3/weights.bin").write_bytes(b"x")
    (run / "checkpoints/step-1/weights.bin").unlink()
    (run / "checkpoints/step-1").rmdir()
    paths = [f"checkpoints/step-{step}" for step in (1, 2, 3, 4)]
    problems = [item.problem for item in artifacts.listing(Context(), record, check=paths)]
    assert problems == [
        "it no longer exists",
        "its SHA-256 has changed",
        "its size is 1 bytes now, not 100",
        "",
        "",
    ]


def test_selecting_artifacts_by_a_pattern_without_a_match_is_an_error(record: JobRecord) -> None:
    result = artifacts.listing(Context(), record)
    assert file_names(artifacts.select_artifacts(result, ["latest"])) == ["step-4"]
    assert file_names(artifacts.select_artifacts(result, ["checkpoints/step-[12]", "latest"])) == [
        "step-1",
        "step-2",
        "step-4",
    ]
    with pytest.raises(RequestInvalid, match="no artifact matches 'nothing'"):
        artifacts.select_artifacts(result, ["nothing"])


def test_prune_keeps_the_newest_the_best_and_the_pinned_checkpoints(run: Path, record: JobRecord) -> None:
    context = Context()
    assert artifacts.pin(context, record, ["checkpoints/step-1"], keep=True) == ["checkpoints/step-1"]
    gone = artifacts.prune(context, record, 1, "loss", largest=False, remove=False)
    assert file_names(gone) == ["step-3"]  # 2 is the best, 4 the newest
    assert (run / "checkpoints/step-3").exists()
    assert file_names(artifacts.prune(context, record, 2, None, largest=False, remove=True)) == ["step-2"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-1", "step-3", "step-4"]
    assert artifacts.pin(context, record, ["checkpoints/step-1"], keep=False) == []
    assert file_names(artifacts.prune(context, record, 1, "loss", largest=True, remove=True)) == ["step-3"]


def test_prune_deletes_nothing_if_the_pins_file_is_damaged(run: Path, record: JobRecord) -> None:
    (run / register.PINS).write_text('{"pinned": ["check')
    with pytest.raises(RequestInvalid, match=r"pins\.json: the file is damaged"):
        artifacts.prune(Context(), record, 1, None, largest=False, remove=True)
    assert len(list((run / "checkpoints").iterdir())) == 4


def test_prune_never_takes_a_nan_loss_as_the_best(run: Path, record: JobRecord) -> None:
    path = run / "checkpoints" / "step-1"
    register.add(str(run), path=str(path), metrics={"loss": float("nan")}, time="yesterday")
    removed = artifacts.prune(Context(), record, 1, "loss", largest=False, remove=False)
    assert file_names(removed) == ["step-3", "step-1"]
    removed = artifacts.prune(Context(), record, 1, "loss", largest=True, remove=False)
    assert file_names(removed) == ["step-3", "step-2", "step-1"]


def test_prune_completes_an_interrupted_deletion(run: Path, record: JobRecord) -> None:
    left = run / "checkpoints" / ".deleting-step-1"
    left.mkdir()
    (left / "rest").write_bytes(b"1")
    artifacts.prune(Context(), record, 3, None, largest=False, remove=True)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-2", "step-3", "step-4"]


def test_pull_compares_checksums(run: Path, record: JobRecord, tmp_path: Path) -> None:
    context = Context(cwd=tmp_path)
    result = artifacts.select_artifacts(artifacts.listing(context, record), ["latest"])
    [place] = artifacts.pull(context, record, result, tmp_path / "here")
    assert (place / "weights.bin").read_bytes() == bytes([4]) * 100
    (run / "checkpoints/step-4/weights.bin").write_bytes(b"y" * 100)
    with pytest.raises(StoreError, match="SHA-256 differs"):
        artifacts.pull(context, record, result, tmp_path / "again")


def test_hugging_face_export_writes_a_model_card_and_refuses_a_filled_folder(
    run: Path, record: JobRecord, tmp_path: Path
) -> None:
    result = artifacts.select_artifacts(artifacts.listing(Context(), record), ["model.safetensors"])
    target = tmp_path / "hub"
    laid = export.hugging_face(record, result[0], run / "model.safetensors", target)
    assert [path.name for path in laid] == [".gitattributes", "README.md", "model.safetensors"]
    card = (target / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: pytorch\n")
    assert "| accuracy | 0.5 |" in card
    assert "*.safetensors filter=lfs" in (target / ".gitattributes").read_text()
    with pytest.raises(RequestInvalid, match="not empty"):
        export.hugging_face(record, result[0], run / "model.safetensors", target)


def test_mlflow_export_requires_the_mlflow_package(
    record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(RequestInvalid, match="mlflow is not installed"):
        export.mlflow(record, [], [], "model", {})


@pytest.mark.parametrize("pins", ['{"pinned": ["a"]}', "damaged"])
def test_clean_keeps_runs_with_pinned_results_or_a_damaged_pins_file(run: Path, pins: str) -> None:
    (run / "job.json").write_text("{}")
    request = {
        "root": str(run.parent), "objects": str(run.parent / ".objects"), "runs": [run.name], "whole": True,
        "remove": True,
    }  # fmt: skip
    (run / "pins.json").write_text(pins)
    assert reclaim.reclaim(request)["pinned"] == [run.name]
    assert run.exists()
    (run / "pins.json").write_text(json.dumps({"pinned": []}))
    assert reclaim.reclaim(request)["pinned"] == []
    assert not run.exists()
