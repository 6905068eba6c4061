"""A session of one process: its options, its refusals, and a run that a later attempt has taken over."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dtslurm import train
from dtslurm.errors import RequestInvalid
from dtslurm.train import place as places
from dtslurm.train.checkpoint import READ_PATIENCE, Checkpointer, CheckpointFailed
from dtslurm.train.run_files import RunFiles, StaleAttempt, append
from tests.train.test_state import same_dice

__all__ = ["same_dice"]

session: Any = sys.modules["dtslurm.train.session"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run's folder, as the job's environment names it."""
    folder = tmp_path / "run"
    folder.mkdir()
    for row in places._NAMES:
        for name in row[1:]:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DTSLURM_RUN_DIR", str(folder))
    monkeypatch.setenv("DTSLURM_CHECKPOINT_DIR", str(folder / "checkpoints"))
    monkeypatch.setenv("DTSLURM_METRICS", str(folder / "train.jsonl"))
    yield folder
    if dist.is_initialized():
        dist.destroy_process_group()


def recorded_events(run: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of that name."""
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


def checkpoint_names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_single_process_session_is_rank_0_of_1_and_restores_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with train.session() as result:
        assert (
            result.rank,
            result.world_size,
            result.local_rank,
            result.local_world_size,
            result.node_rank,
        ) == (
            0,
            1,
            0,
            1,
            0,
        )
        assert result.device == torch.device("cpu")
        assert dist.is_initialized()
        assert signal.getsignal(signal.SIGUSR2) != before
    assert not dist.is_initialized()
    assert signal.getsignal(signal.SIGUSR2) == before


def test_session_uses_an_existing_process_group_without_destroying_the_group(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with train.session(timeout=60, device="cpu") as result:
        assert (result.rank, result.world_size) == (0, 1)
    assert dist.is_initialized()


def test_session_in_another_thread_installs_no_signal_handler() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    answer: list[Any] = []

    def work() -> None:
        with train.session() as item:
            answer.append(signal.getsignal(signal.SIGUSR2))
            answer.append(item.end_step())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert answer == [before, False]


def test_unknown_signal_name_is_refused() -> None:
    with (
        pytest.raises(RequestInvalid, match="USR7 is not the name of a signal"),
        train.session(signals=["USR7"]),
    ):
        pass


def test_checkpoint_without_restored_objects_is_refused() -> None:
    with train.session() as result, pytest.raises(RequestInvalid, match="nothing to save"):
        result.checkpoint()


def test_session_uses_the_given_device() -> None:
    with train.session(device="meta", backend="gloo") as result:
        assert result.device == torch.device("meta")


def test_each_rank_of_a_node_uses_a_separate_gpu_even_if_a_rank_sees_a_single_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for seen, wanted in ((8, "cuda:3"), (2, "cuda:1"), (1, "cuda:0")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda seen=seen: seen)
        assert session._device(None, train.RankInfo(rank=3, world_size=4, local_rank=3)) == torch.device(
            wanted
        )
    assert session._device("cuda:5", train.RankInfo()) == torch.device("cuda:5")
    assert chosen == [torch.device(f"cuda:{number}") for number in (3, 1, 0, 5)]


def test_save_minutes_triggers_checkpoints_and_the_last_step_is_saved(run: Path) -> None:
    with train.session(save_minutes=0.0, keep=None) as result:
        result.restore(net=nn.Linear(2, 1))
        result.end_step(loss=1.0)
        result.checkpoints.wait()
        assert checkpoint_names(run) == ["step-00000001-a0"]
        result._options["save_minutes"] = 1e9
        result.end_step()
        result.end_step(loss=0.5)
    assert checkpoint_names(run) == ["step-00000001-a0", "step-00000003-a0"]
    lines = [json.loads(line) for line in (run / "artifacts.jsonl").read_text().splitlines()]
    assert [(line["step"], line["metrics"]) for line in lines] == [(1, {"loss": 1.0}), (3, {"loss": 0.5})]


def test_step_that_is_already_saved_is_not_saved_again(run: Path) -> None:
    with train.session(save_every=2) as result:
        result.restore(net=nn.Linear(2, 1))
        result.end_step()
        result.end_step()
        result.checkpoint(wait=True)  # the same step once more
    assert [event["step"] for event in recorded_events(run, "checkpoint")] == [2]


def test_training_error_ends_the_session_after_pending_checkpoints_and_metrics(run: Path) -> None:
    def work() -> None:
        with train.session(save_every=1, log_seconds=1e9) as item:
            item.restore(net=nn.Linear(2, 1))
            item.end_step(loss=2.0)
            item.end_step(loss=1.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert checkpoint_names(run) == ["step-00000001-a0", "step-00000002-a0"]
    losses = [json.loads(line)["loss"] for line in (run / "train.jsonl").read_text().splitlines()]
    assert losses == [2.0, 1.0]  # the last step is told, though it was not due


def test_restore_refuses_an_object_that_cannot_be_saved() -> None:
    with train.session() as here, pytest.raises(RequestInvalid, match="best is a float"):
        here.restore(best=0.5)


def test_seed_is_reproducible_and_random_numbers_change_after_restore() -> None:
    answer = []
    for _ in range(2):
        with train.session(seed=5, folder=None, save_minutes=None) as result:
            first = float(torch.rand(1))
            result.restore()
            answer.append((first, float(torch.rand(1))))
    assert answer[0] == answer[1]
    assert answer[0][0] != answer[0][1]


def test_later_attempt_ends_the_session_with_a_single_message(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "LEASE_S", 0.0)

    def work() -> None:
        with train.session(agree_every=1) as item:
            assert not item.end_step()
            (run / "attempt").write_text("4\n")
            item.end_step()

    with pytest.raises(StaleAttempt) as error:
        work()
    assert str(error.value) == "attempt 0 ends: the run belongs to attempt 4 now"
    assert error.value.code == 87
    assert capsys.readouterr().err == "attempt 0 ends: the run belongs to attempt 4 now\n"


def test_unreadable_lease_does_not_end_training(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LEASE_S", 0.0)
    with train.session(agree_every=1) as result:
        (run / "attempt").unlink()
        (run / "attempt").mkdir()  # an error that is not the absence of the file
        assert not result.end_step()
        (run / "attempt").rmdir()
        (run / "attempt").write_text("0\n")
        assert not result.end_step()


def test_lease_that_is_not_a_number_belongs_to_no_attempt(run: Path) -> None:
    (run / "attempt").write_text("me\n")
    assert RunFiles(folder=run, attempt=1).leased_to() is None
    assert RunFiles(folder=None).leased_to() is None


def test_session_outside_a_job_writes_only_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RUN_DIR", "METRICS", "CHECKPOINT_DIR", "ATTEMPT"):
        monkeypatch.delenv(f"DTSLURM_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    with train.session() as result:
        result.restore(net=nn.Linear(2, 1))
        result.end_step(loss=1.0)
        result.log(more=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "run"]
    assert list((tmp_path / "run").iterdir()) == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001-a0"]


def test_failed_event_write_does_not_end_training(run: Path) -> None:
    (run / "events.jsonl").mkdir()
    RunFiles(folder=run).event("checkpoint", step=1)
    assert not append(run / "events.jsonl", "line\n")
    assert append(run / "new" / "lines.jsonl", "line\n")
    assert (run / "new" / "lines.jsonl").read_text() == "line\n"


def test_keep_0_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="keep=0 would keep no checkpoint"):
        Checkpointer(keep=0)


def test_checkpoint_folder_that_cannot_be_created_is_reported(run: Path) -> None:
    (run / "checkpoints").touch()
    begin = time.monotonic()
    with pytest.raises(CheckpointFailed, match="checkpoints cannot be used") as error:
        Checkpointer().restore({"net": nn.Linear(2, 1)})
    assert "File exists" in error.value.evidence[0]
    assert time.monotonic() - begin < READ_PATIENCE / 2


def test_save_with_wait_raises_the_error_of_the_save(run: Path) -> None:
    keeper = Checkpointer()
    (run / "checkpoints").touch()
    with pytest.raises(
        CheckpointFailed, match="the checkpoint of step 1 was not written; there is no earlier checkpoint"
    ):
        keeper.save(1, {"net": nn.Linear(2, 1)}, wait=True)
    assert [event["step"] for event in recorded_events(run, "checkpoint_failed")] == [1]
    (run / "checkpoints").unlink()
    keeper.save(1, {"net": nn.Linear(2, 1)}, wait=True)  # what failed may be tried again
    assert checkpoint_names(run) == ["step-00000001-a0"]
    keeper.save(1, {"net": nn.Linear(2, 1)}, wait=True)
    assert len(recorded_events(run, "checkpoint")) == 1


def test_checkpoint_is_saved_when_torch_returns_no_file_index(
    monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    """Torch 2.11 returns metadata that names no files; the index on the disk does."""
    save = dcp.save

    def without_files(*words: Any, **options: Any) -> Any:
        metadata = save(*words, **options)
        metadata.storage_data = None
        return metadata

    monkeypatch.setattr(dcp, "save", without_files)
    with train.session(save_minutes=None) as training:
        model = nn.Linear(1, 1)
        training.restore(model=model)
        training.end_step()
    assert checkpoint_names(run) == ["step-00000001-a0"]
