"""``dtslurm artifacts show`` and ``pull`` for a run on cluster ``local``."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run

TRAIN = """\
import json, os, pathlib
(pathlib.Path(os.environ["DTSLURM_CHECKPOINT_DIR"]) / "a.pt").write_bytes(b"x")
with open(os.environ["DTSLURM_ARTIFACTS"], "a") as register:
    print(json.dumps({"path": "checkpoints/a.pt", "kind": "checkpoint", "step": 3}), file=register)
"""


def test_artifacts_show_lists_the_properties_line_by_line(run: Run, folder: Path, tmp_path: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    here = {"XDG_STATE_HOME": str(tmp_path), "DTSLURM_RUN_ROOT": str(tmp_path / "runs")}
    run("submit", "--cluster", "local", "-t", "5", "--wait", "train.py", code=0, **here)
    shown = run("artifacts", "show", "train", "latest", code=0, **here).stdout.splitlines()
    assert shown[:3] == ["checkpoints/a.pt", "  kind     checkpoint", "  step     3"]
    done = run("artifacts", "pull", "train", "--to", "mlfow:mine", code=2, **here)
    assert "--to mlfow:mine: write a folder (./mlfow:mine), hf:FOLDER or mlflow:NAME" in done.stderr
    run("artifacts", "pull", "train", "--to", "./mlfow:mine", code=0, **here)
    assert (folder / "mlfow:mine" / "checkpoints" / "a.pt").read_bytes() == b"x"
