"""The register of artifacts in the run directory: lists, pins and pruning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker import artifacts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with five checkpoints, the third the best, and an output."""
    for step, loss in enumerate((0.9, 0.8, 0.1, 0.7, float("nan"))):
        folder = tmp_path / f"checkpoints/step-{step}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(step + 1))
        path = f"checkpoints/step-{step}"
        artifacts.add(str(tmp_path), path=path, kind="checkpoint", step=step, metrics={"loss": loss})
    (tmp_path / "model.bin").write_bytes(b"model")
    artifacts.add(str(tmp_path), path="model.bin")
    return tmp_path


def ask(run: Path, op: str, **values: Any) -> dict[str, Any]:
    return artifacts.answer({"op": op, "run_dir": str(run), **values})


def prune(run: Path, **values: Any) -> list[str]:
    request = {"keep": 2, "best": "", "largest": False, "remove": False, **values}
    return [item["path"].rpartition("-")[2] for item in ask(run, "prune", **request)["removed"]]


def test_artifact_list_reports_current_files_and_pins(run: Path) -> None:
    (run / "checkpoints/step-0/weights").unlink()
    (run / "checkpoints/step-0").rmdir()
    (run / "checkpoints/step-1/more").write_bytes(b"12345")
    ask(run, "pin", paths=["checkpoints/step-2"])
    rows = {artifact["path"]: artifact for artifact in ask(run, "list", checksums=["model.bin"])["artifacts"]}
    gone, grown, pinned = (rows[f"checkpoints/step-{step}"] for step in range(3))
    assert (gone["there"], "now_bytes" in gone) == (False, False)
    assert (grown["now_bytes"], grown["files"], "now_sha256" in grown) == (7, 2, False)
    assert (pinned["pinned"], grown["pinned"]) == (True, False)
    assert rows["model.bin"]["kind"] == "output"
    assert rows["model.bin"]["now_sha256"] == artifacts.digest_of(str(run / "model.bin"))
    assert "now_sha256" not in ask(run, "list")["artifacts"][-1]


def test_pin_stays_until_unpin(run: Path) -> None:
    assert ask(run, "pin", paths=["b", "a"]) == {"pinned": ["a", "b"]}
    assert ask(run, "unpin", paths=["b", "c"]) == {"pinned": ["a"]}
    assert artifacts.pins(str(run)) == ["a"]


@pytest.mark.parametrize(
    ("more", "removed_paths"),
    [
        ({}, ["2", "1", "0"]),  # the newest two stay
        ({"keep": 9}, []),
        ({"keep": 1, "best": "loss"}, ["3", "1", "0"]),  # the best and the newest stay; NaN is no best
        ({"keep": 1, "best": "loss", "largest": True}, ["3", "2", "1"]),
        ({"keep": 1, "best": "accuracy"}, ["3", "2", "1", "0"]),
    ],
)
def test_prune_removes_superfluous_checkpoints_only_with_remove(
    run: Path, more: dict[str, Any], removed_paths: list[str]
) -> None:
    assert prune(run, **more) == removed_paths
    assert len(list((run / "checkpoints").iterdir())) == 5
    assert prune(run, remove=True, **more) == removed_paths
    left = {path.name.rpartition("-")[2] for path in (run / "checkpoints").iterdir()}
    assert left == set("01234") - set(removed_paths)
    assert (run / "model.bin").exists()


def test_prune_keeps_pinned_and_external_checkpoints(run: Path, tmp_path_factory: Any) -> None:
    far = tmp_path_factory.mktemp("far") / "step-7"
    far.mkdir()
    artifacts.add(str(run), path=str(far), kind="checkpoint", step=-7)
    ask(run, "pin", paths=["checkpoints/step-1"])
    assert prune(run, remove=True) == ["2", "0"]
    assert far.exists()


def test_prune_completes_an_interrupted_prune(run: Path) -> None:
    left = run / "checkpoints/.deleting-step-0"
    left.mkdir()
    (left / "weights").touch()
    link = run / "checkpoints/.deleting-step-1"
    link.symlink_to(run / "model.bin")
    assert prune(run, remove=True) == ["2", "1", "0"]
    assert sorted(os.listdir(run / "checkpoints")) == ["step-3", "step-4"]  # noqa: PTH208 - hidden ones, too
    assert (run / "model.bin").read_bytes() == b"model"


def test_register_refuses_a_missing_run_directory_and_a_damaged_pin_file(run: Path) -> None:
    assert ask(run / "none", "list") == {"refused": f"the run directory {run}/none no longer exists"}
    (run / artifacts.PINS).write_text("{half")
    answer = ask(run, "list")
    advice = "the file is damaged; repair it, or remove it and pin the artifacts again"
    assert answer == {"refused": f"{run}/pins.json: {advice}"}
