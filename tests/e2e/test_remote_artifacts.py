"""Artifacts of a run on a cluster behind SSH: registered and pruned there, pulled to this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli

pytestmark = pytest.mark.slurm

SAVE = """\
import json, os, pathlib
run = pathlib.Path(os.environ["DTSLURM_RUN_DIR"])
with open(os.environ["DTSLURM_ARTIFACTS"], "a") as told:
    for step, loss in ((1, 0.9), (2, 0.2), (3, 0.7), (4, 0.8)):
        folder = run / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "weights.bin").write_bytes(bytes([step]) * 300_000)
        row = {"path": str(folder), "kind": "checkpoint", "step": step, "metrics": {"loss": loss}}
        told.write(json.dumps(row) + "\\n")
"""


def test_remote_artifacts_are_registered_pruned_and_pulled(far: Cli, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "words.txt").write_text("some")
    far.script('import os\nopen(os.environ["DTSLURM_STAGED_WORDS"] + "/words.txt").read()\n' + SAVE)
    stage = ["--stage", f"{tmp_path}/shared:{tmp_path}/local:name=words"]
    job = far.submit("-l", "single", *stage, "--artifact", "checkpoints/*/weights.bin", "train.py")
    assert far.wait_for_end(job, limit=180)["statuses"][0]["state"] == "COMPLETED"
    there = far.run_dir(job).path / "checkpoints"

    def listed() -> dict[str, dict[str, object]]:
        answer = json.loads(far("artifacts", "list", job, "--json").stdout)["artifacts"]
        return {item["path"]: item for item in answer}

    steps = [f"checkpoints/step-{step}" for step in (1, 2, 3, 4)]
    first = listed()
    assert [path for path in first if not path.endswith(".bin")] == steps
    assert all(len(str(first[path]["sha256"])) == 64 for path in steps)

    assert "step-1" in far("artifacts", "pin", job, steps[0]).stderr
    result = far("artifacts", "prune", job, "--keep", "1", "--best", "loss", "--yes")
    assert "step-3" in result.stdout + result.stderr
    assert sorted(path.name for path in there.iterdir()) == ["step-1", "step-2", "step-4"]
    second = listed()
    assert [path for path in steps if second[path]["there"]] == [steps[0], steps[1], steps[3]]
    assert second[steps[0]]["pinned"] is True

    far("artifacts", "pull", job, "latest", steps[1], "--to", "here")
    for step in (2, 4):
        assert (far.folder / f"here/checkpoints/step-{step}/weights.bin").read_bytes() == bytes(
            [step]
        ) * 300_000
    assert not (far.folder / "here/checkpoints/step-1").exists()
    far("artifacts", "pull", job, "latest", "--to", "hf:./repository")
    assert (far.folder / "repository" / "weights.bin").stat().st_size == 300_000

    # What was written to there since is not what was registered.
    (there / "step-2" / "weights.bin").write_bytes(b"x" * 300_000)
    assert "its SHA-256 has changed" in far("artifacts", "show", job, steps[1], "--check", code=None).stdout
    assert "SHA-256 differs" in far("artifacts", "pull", job, steps[1], "--to", "again", code=5).stderr
    assert "it no longer exists" in far("artifacts", "pull", job, steps[2], "--to", "again", code=2).stderr
