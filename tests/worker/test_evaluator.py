"""The evaluator of checkpoints: each checkpoint once, by one of several instances, also after restarts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker import evaluator


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory with two checkpoints, as seen by the first start of the first instance."""
    for name, value in {
        "DTSLURM_RUN_DIR": str(tmp_path),
        "DTSLURM_ARTIFACTS": str(tmp_path / "artifacts.jsonl"),
        "DTSLURM_ROLE": "evaluator",
        "DTSLURM_ROLE_INSTANCE": "0",
        "DTSLURM_ROLE_START": "0",
    }.items():
        monkeypatch.setenv(name, value)
    for step in (10, 20):
        register(tmp_path, path=f"checkpoints/step-{step}", kind="checkpoint", step=step)
        (tmp_path / f"checkpoints/step-{step}").mkdir(parents=True)
    return tmp_path


def register(run: Path, **entry: Any) -> None:
    with (run / "artifacts.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def results(run: Path) -> list[tuple[Any, Any]]:
    lines = (run / evaluator.RESULTS).read_text().splitlines()
    return [(record["step"], record["exit_code"]) for record in map(json.loads, lines)]


def test_every_checkpoint_is_evaluated_until_the_training_is_over(run: Path) -> None:
    for name, kind in (("model.pt", "output"), ("all.tar", "archive")):
        register(run, path=name, kind=kind)
        (run / name).touch()
    register(run, path="checkpoints/deleted", kind="checkpoint", step=5)
    register(run, path=3, kind="checkpoint")
    (run / evaluator.FINISHING).touch()
    program = (
        f"import os, sys; seen = open({str(run / 'seen')!r}, 'a');"
        "print(os.environ['DTSLURM_STEP'], *sys.argv[1:], file=seen)"
    )
    assert evaluator.main([sys.executable, "-c", program, "{checkpoint}", "~/{checkpoint}"]) == 0
    assert (run / "seen").read_text().splitlines() == [
        f"{step} {run}/checkpoints/step-{step} ~/{{checkpoint}}" for step in (10, 20)
    ]
    assert results(run) == [(10, 0), (20, 0)]
    assert evaluator.find_next(str(run)) is None


def test_failure_is_repeated_once_and_recorded(run: Path) -> None:
    (run / evaluator.FINISHING).touch()
    program = f"open({str(run / 'seen')!r}, 'a').write('x'); raise SystemExit(3)"
    assert evaluator.main([sys.executable, "-c", program]) == 0
    assert (run / "seen").read_text() == "xxxx"
    assert results(run) == [(10, 3), (20, 3)]


def test_checkpoint_that_is_deleted_during_its_evaluation_is_not_evaluated_again(run: Path) -> None:
    (run / evaluator.FINISHING).touch()
    program = (
        f"open({str(run / 'seen')!r}, 'a').write('x'); os.rmdir(os.environ['DTSLURM_CHECKPOINT']); 1 / 0"
    )
    assert evaluator.main([sys.executable, "-c", f"import os; {program}"]) == 0
    assert (run / "seen").read_text() == "xx"
    assert results(run) == [(10, 1), (20, 1)]


def test_result_has_the_time_of_its_end_and_its_duration(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((10.0, 30.25, 30.25))
    monkeypatch.setattr(evaluator, "time", SimpleNamespace(time=lambda: next(times)))
    monkeypatch.setattr(subprocess, "call", lambda _words, env: int(env["DTSLURM_STEP"] != ""))
    evaluator.evaluate(str(run), {"path": "checkpoints/step-10", "step": "10"}, ["evaluate"])
    assert json.loads((run / evaluator.RESULTS).read_text()) == {
        "time": 30.25, "checkpoint": "checkpoints/step-10", "step": None, "exit_code": 0, "seconds": 20.25,
    }  # fmt: skip


def test_evaluator_waits_for_checkpoints_while_the_training_runs(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            (run / "checkpoints/step-30").mkdir()
            register(run, path="checkpoints/step-30", kind="checkpoint", step=30)
            (run / evaluator.FINISHING).touch()

    monkeypatch.setattr(evaluator, "time", SimpleNamespace(time=lambda: 1000.0, sleep=wait))
    monkeypatch.setattr(subprocess, "call", lambda _words, env: 0)
    assert evaluator.main(["evaluate"]) == 0
    assert waits == [evaluator.POLL_S] * 2
    assert results(run) == [(10, 0), (20, 0), (30, 0)]


def test_failure_to_write_a_result_does_not_end_the_evaluator(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "call", lambda _words, env: 0)
    (run / evaluator.RESULTS).mkdir()
    evaluator.evaluate(str(run), {"path": "checkpoints/step-10", "step": 10}, ["evaluate"])
    assert list((run / evaluator.RESULTS).iterdir()) == []


def test_register_is_in_the_run_directory_unless_the_job_names_another(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "artifacts.jsonl").rename(run / "other.jsonl")
    register(run, path="checkpoints/step-20", kind="checkpoint", step=20)
    monkeypatch.setenv("DTSLURM_ARTIFACTS", str(run / "other.jsonl"))
    assert (evaluator.find_next(str(run)) or {})["step"] == 10
    monkeypatch.delenv("DTSLURM_ARTIFACTS")
    assert (evaluator.find_next(str(run)) or {})["step"] == 20


def test_claim_names_the_checkpoint_that_must_not_be_deleted(run: Path) -> None:
    evaluator.find_next(str(run))
    [claim] = (run / evaluator.CLAIMS).iterdir()
    assert json.loads(claim.read_text())["checkpoint"] == "checkpoints/step-10"


def test_command_that_does_not_exist_is_recorded(run: Path) -> None:
    (run / evaluator.FINISHING).touch()
    assert evaluator.main(["no such program"]) == 0
    assert results(run) == [(10, 127), (20, 127)]


def test_claim_of_another_instance_holds_and_that_of_an_earlier_start_does_not(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluator.find_next(str(run))
    assert first is not None
    assert first["step"] == 10
    monkeypatch.setenv("DTSLURM_ROLE_INSTANCE", "1")
    second = evaluator.find_next(str(run))
    assert second is not None
    assert second["step"] == 20
    assert evaluator.find_next(str(run)) is None
    monkeypatch.setenv("DTSLURM_ROLE_INSTANCE", "0")
    assert evaluator.find_next(str(run)) is None  # this start evaluates it
    monkeypatch.setenv("DTSLURM_ROLE_START", "1")
    again = evaluator.find_next(str(run))
    assert again is not None
    assert again["step"] == 10


def write_state(run: Path, state: str) -> None:
    instances = [{"instance": 0, "state": "ready", "start": 0}, {"instance": 1, "state": state, "start": 0}]
    other = {"name": "viewer", "instances": [{"instance": 1, "state": "removed", "start": 0}]}
    roles = [other, {"name": "evaluator", "instances": instances}]
    (run / "roles.json").write_text(json.dumps({"roles": roles}))


def test_claim_of_an_instance_that_was_removed_is_taken_over_by_one_other(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "checkpoints/step-10"
    monkeypatch.setenv("DTSLURM_ROLE_INSTANCE", "1")
    assert evaluator.claim(str(run), path)
    monkeypatch.setenv("DTSLURM_ROLE_INSTANCE", "0")
    for state in ("ready", "waiting", "unresponsive"):
        write_state(run, state)
        assert not evaluator.claim(str(run), path)
    write_state(run, "removed")
    [file] = (run / evaluator.CLAIMS).glob("*.json")
    stale = file.read_text()
    assert evaluator.claim(str(run), path)
    file.write_text(stale)  # what a third instance may have read at the same moment
    monkeypatch.setenv("DTSLURM_ROLE_INSTANCE", "2")
    assert not evaluator.claim(str(run), path)
