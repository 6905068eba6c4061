"""Pinned checkpoints are kept, even if the list of pins cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from dtslurm.train.checkpoint import Checkpointer
from dtslurm.train.metrics import Metrics
from dtslurm.train.run_files import RunFiles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_steps(folder: Path, run: Path, steps: range) -> list[str]:
    """Save at some steps, keeping one, and return what is there then."""
    checkpoints = Checkpointer(folder, keep=1, run=RunFiles(folder=run))
    for step in steps:
        checkpoints.save(step, {"model": torch.nn.Linear(2, 2)}, wait=True)
    return sorted(path.name for path in folder.iterdir())


def test_pinned_checkpoint_is_kept_also_by_a_run_that_resumes_from_the_checkpoint(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    folder = old / "checkpoints"
    new.mkdir()
    first = save_steps(folder, old, range(1, 2))
    (old / "pins.json").write_text(json.dumps({"schema": 1, "pinned": [f"checkpoints/{first[0]}"]}))
    assert save_steps(folder, old, range(2, 4)) == [first[0], "step-00000003-a0"]
    assert save_steps(folder, new, range(4, 6)) == [
        first[0],
        "step-00000005-a0",
    ]  # as resubmit --from-checkpoint


def test_checkpoint_is_kept_until_its_evaluation_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    [first] = save_steps(folder, tmp_path, range(1, 2))
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "begun.json").write_text("")
    claim = {"checkpoint": str(folder / first), "instance": "evaluator-0", "start": "0"}
    (tmp_path / "evaluations" / "first.json").write_text(json.dumps(claim))
    assert save_steps(folder, tmp_path, range(2, 4)) == [first, "step-00000003-a0"]
    result = {"checkpoint": claim["checkpoint"], "exit_code": 0}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(result) + "\n" + '{"checkp')
    assert save_steps(folder, tmp_path, range(4, 5)) == ["step-00000004-a0"]


@pytest.mark.parametrize(("state", "is_kept"), [("ready", True), ("ended", False), ("removed", False)])
def test_checkpoint_whose_evaluator_was_ended_in_the_middle_is_not_kept(
    tmp_path: Path, state: str, is_kept: bool
) -> None:
    folder = tmp_path / "old" / "checkpoints"
    [first] = save_steps(folder, tmp_path / "old", range(1, 2))
    claim = {"checkpoint": f"checkpoints/{first}", "instance": "evaluator-0", "start": "0"}
    (tmp_path / "old" / "evaluations").mkdir()
    (tmp_path / "old" / "evaluations" / "first.json").write_text(json.dumps(claim))
    instances = [{"instance": 0, "state": state, "start": 0}]
    roles = {"roles": [{"name": "evaluator", "instances": instances}]}
    (tmp_path / "old" / "roles.json").write_text(json.dumps(roles))
    assert (first in save_steps(folder, tmp_path / "new", range(2, 3))) is is_kept


@pytest.mark.parametrize("text", ['{"pinned": ["check', "[]", '{"schema": 1}'])
def test_nothing_is_removed_when_the_pin_list_cannot_be_read(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    save_steps(folder, tmp_path, range(1, 2))
    (tmp_path / "pins.json").write_text(text)
    assert len(save_steps(folder, tmp_path, range(2, 4))) == 3
    assert "pins.json" in capsys.readouterr().err


def test_value_that_json_cannot_encode_does_not_stop_the_metrics(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "train.jsonl")
    metrics.write({"step": 1, "shapes": [torch.Size([2]), object()], "by": {(0, 1): 2}})
    metrics.write({"step": 2})
    metrics.close(timeout=60)
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
