"""``dtslurm artifacts``: list, show, pin, prune and pull."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtslurm.model.jobs.job import JobRecord
from dtslurm.worker import artifacts as register
from tests.cli.conftest import Run
from tests.cli.sample_runs import Runs


@pytest.fixture
def run_with_artifacts(runs: Runs) -> JobRecord:
    record = runs.add("train", "7")
    folder = Path(record.run_dir)
    for step in (1, 2, 3):
        path = folder / "checkpoints" / f"step-{step}"
        runs.write(path / "weights.bin", "w" * 2048 * step)
        result = register.measure(str(path), checksum=True)
        register.add(str(folder), path=str(path), kind="checkpoint", step=step, **result)
    runs.write(folder / "out.txt", "done\n")
    with (folder / register.FILE).open("a") as file:  # as a plain program does by echo
        file.write('{"path": "out.txt", "metrics": {"loss": 0.123456789, "epoch": 3}}\n')
        file.write('{"path": "gone.bin", "kind": "output"}\n')
    return record


def table_rows(text: str) -> dict[str, list[str]]:
    return {line.split()[-1]: line.split() for line in text.splitlines()[1:]}


def test_the_artifact_table_shows_sizes_metrics_pins_and_problems(
    invoke: Run, run_with_artifacts: JobRecord
) -> None:
    del run_with_artifacts
    invoke("artifacts", "pin", "train", "checkpoints/step-1", code=0)
    shown = invoke("artifacts", "list", "train", code=0).stdout
    assert shown.splitlines()[0].split() == ["KIND", "STEP", "SIZE", "METRICS", "NOTE", "PATH"]
    result = table_rows(shown)
    assert result["checkpoints/step-1"][:6] == ["checkpoint", "1", "2.0", "KiB", "-", "pinned"]
    assert result["out.txt"][:6] == ["output", "-", "5", "B", "loss=0.1235", "epoch=3"]
    assert result["gone.bin"] == ["output", "-", "-", "-", "it", "no", "longer", "exists", "gone.bin"]


def test_artifacts_list_and_show_print_json(invoke: Run, run_with_artifacts: JobRecord) -> None:
    del run_with_artifacts
    listed = json.loads(invoke("artifacts", "list", "--json", "train", code=0).stdout)["artifacts"]
    assert [(item["path"], item["step"]) for item in listed][:2] == [
        ("checkpoints/step-1", 1),
        ("checkpoints/step-2", 2),
    ]
    [artifact] = json.loads(invoke("artifacts", "show", "--json", "train", "latest", code=0).stdout)[
        "artifacts"
    ]
    assert (artifact["path"], artifact["problem"]) == ("checkpoints/step-3", "")


def test_a_run_without_artifacts_explains_how_to_register_them(invoke: Run, runs: Runs) -> None:
    runs.add("bare", "8")
    done = invoke("artifacts", "list", "bare", code=0)
    assert (done.stdout, "--artifact PATTERN" in done.stderr) == ("", True)
    assert "no artifact matches 'latest'" in invoke("artifacts", "show", "bare", "latest", code=2).stderr
    assert "no artifact to delete" in invoke("artifacts", "prune", "bare", code=0).stderr


def test_artifacts_show_with_check_compares_checksums(invoke: Run, run_with_artifacts: JobRecord) -> None:
    (Path(run_with_artifacts.run_dir) / "checkpoints" / "step-2" / "weights.bin").write_text("x" * 4096)
    asked = ("artifacts", "show", "train", "checkpoints/step-2")
    assert "problem" not in invoke(*asked, code=0).stdout
    checked = invoke(*asked, "--check", code=0).stdout
    assert "  problem  its SHA-256 has changed" in checked
    assert "step-1" not in checked


def test_prune_keeps_pinned_artifacts_until_they_are_unpinned(
    invoke: Run, run_with_artifacts: JobRecord
) -> None:
    assert invoke("artifacts", "pin", "train", "*/step-1", code=0).stderr == "pinned: checkpoints/step-1\n"
    stdout = invoke("artifacts", "pin", "--json", "train", "*/step-2", code=0).stdout
    assert json.loads(stdout)["pinned"] == ["checkpoints/step-1", "checkpoints/step-2"]
    done = invoke("artifacts", "prune", "--yes", "train", code=0)
    assert (done.stdout, "no artifact to delete" in done.stderr) == ("", True)
    assert (
        invoke("artifacts", "unpin", "train", "*/step-1", code=0).stderr == "unpinned: checkpoints/step-1\n"
    )
    shown = invoke("artifacts", "prune", "train", code=0)
    assert shown.stdout == "checkpoints/step-1\n"
    assert shown.stderr == "2.0 KiB would be freed; nothing was deleted, because --yes was not given\n"
    assert (Path(run_with_artifacts.run_dir) / "checkpoints" / "step-1").exists()
    deleted = invoke("artifacts", "prune", "--yes", "train", code=0)
    assert deleted.stderr == "deleted; 2.0 KiB freed\n"
    assert not (Path(run_with_artifacts.run_dir) / "checkpoints" / "step-1").exists()


def test_prune_json_shows_whether_artifacts_were_deleted(invoke: Run, run_with_artifacts: JobRecord) -> None:
    del run_with_artifacts
    document = json.loads(invoke("artifacts", "prune", "--json", "--keep", "2", "train", code=0).stdout)
    assert (document["deleted"], [artifact["step"] for artifact in document["artifacts"]]) == (False, [1])


def test_artifacts_pull_copies_the_latest_checkpoint_by_default(
    invoke: Run, run_with_artifacts: JobRecord, folder: Path
) -> None:
    del run_with_artifacts
    place = folder / "train-7-artifacts" / "checkpoints" / "step-3"
    assert invoke("artifacts", "pull", "train", code=0).stdout == f"{place}\n"
    assert (place / "weights.bin").read_text() == "w" * 6144
    document = json.loads(
        invoke("artifacts", "pull", "--json", "--to", "b", "train", "out.txt", code=0).stdout
    )
    assert (document["to"], document["files"]) == ("b", [str(folder / "b" / "out.txt")])


def test_a_hugging_face_export_takes_a_single_artifact(
    invoke: Run, run_with_artifacts: JobRecord, folder: Path
) -> None:
    del run_with_artifacts
    several = invoke("artifacts", "pull", "train", "--to", "hf:hub", "checkpoints/*", code=2)
    assert "--to hf: needs a single artifact, and 3 match" in several.stderr
    assert not (folder / "hub").exists()
    laid = invoke("artifacts", "pull", "train", "--to", "hf:hub", "latest", code=0).stdout.splitlines()
    assert [Path(line).name for line in laid] == [".gitattributes", "README.md", "weights.bin"]
    assert (folder / "hub" / "weights.bin").stat().st_size == 6144


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "gone.bin"), "gone.bin: it no longer exists"),
        (("train", "nothing"), "no artifact matches 'nothing'"),
        (("train", "--to", "hf:"), "--to hf:: write hf:FOLDER"),
        (("train", "--to", "mlflow:"), "--to mlflow:: write mlflow:NAME"),
    ],
)
def test_a_missing_artifact_or_an_invalid_destination_is_reported(
    invoke: Run, run_with_artifacts: JobRecord, words: tuple[str, ...], message: str
) -> None:
    del run_with_artifacts
    assert message in invoke("artifacts", "pull", *words, code=2).stderr
