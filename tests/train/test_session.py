"""A session in several processes: signals, stale attempts, metrics, slow ranks, launchers."""

from __future__ import annotations

import json
import signal

import pytest

from tests.train.conftest import Job, flat, same


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGUSR2, 0), (signal.SIGUSR2, 1), (signal.SIGTERM, 1)])
def test_f25_f26_f37_signal_to_a_single_rank_makes_all_ranks_save_and_exit_together(
    job: Job, undisturbed: Job, number: int, rank: int
) -> None:
    job.env = {"SIGNALLED_RANK": str(rank), "SIGNAL": str(int(number))}
    codes = job.run("dropout", 2, stop_at=6, fault="signal_one", save_every=None, agree_every=1)
    assert codes == [85, 85], job.text()
    [saved] = job.events("checkpoint")
    assert saved["step"] in {7, 8, 9}
    assert (
        f"received a signal: saved a checkpoint after step {saved['step']}, exits with code 85" in job.text()
    )
    job.done("dropout", 2)
    assert f"continues after step {saved['step']}" in job.text()
    assert same(job.final(), undisturbed.final())
    assert job.samples() == undisturbed.samples()


def test_signal_without_restored_objects_leaves_saving_to_the_training_code(job: Job) -> None:
    job.done("plain_signal", 1)
    assert (job.folder / "out-0" / "left").read_text() == "1"


@pytest.mark.parametrize("world", [1, 2])
def test_f40_f42_stale_attempt_commits_no_checkpoint_and_ends(job: Job, world: int) -> None:
    codes = job.run("dropout", world, stop_at=6, fault="new_attempt", save_every=4, agree_every=1)
    assert codes == [87] * world, job.text()
    assert [name for name in job.names() if "00000008" in name] == []
    assert job.text().count("attempt 0 ends: the run belongs to attempt 7 now") == 1
    assert (job.folder / "attempt").read_text() == "7\n"
    assert job.run("dropout", world) == [87] * world  # attempt 1 does not even begin
    assert set(job.names()) <= {"step-00000004-a0"}  # if it was committed before the other began


def test_f40_stale_attempt_ends_also_between_saves(job: Job) -> None:
    codes = job.run("dropout", 2, stop_at=6, fault="stale_for_the_tick", save_every=None, agree_every=1)
    assert codes == [87, 87], job.text()
    assert job.names() == []
    assert job.text().count("the run belongs to attempt 7 now") == 1


def test_f40_later_attempt_takes_the_lease(job: Job) -> None:
    job.attempt = 3
    job.done("idle", 2)
    assert (job.folder / "attempt").read_text() == "3\n"


def test_metrics_file_contains_steps_losses_and_rates(job: Job) -> None:
    job.done("measured", 1)
    first, second, extra, last = job.metrics(0)
    assert {**first, "time": 0} == {
        "time": 0, "rank": 0, "step": 1, "total_steps": 3, "loss": 2.5, "learning_rate": 0.001
    }  # fmt: skip
    assert (second["loss"], second["tokens_per_s"]) == ("nan", 7)
    assert second["step_time_s"] > 0
    assert (extra["step"], extra["eval_loss"]) == (2, 1.25)
    assert last["step"] == 3


def test_f46_slow_rank_is_reported(job: Job) -> None:
    job.done("slow_rank", 3, slow=1)
    assert "rank 1 is slow: " in job.text()
    named = [line["slowest_rank"] for line in job.metrics(0) if "slowest_rank" in line]
    assert named
    assert set(named) == {1}


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_form_a_process_group(job: Job, world: int) -> None:
    job.done("idle", world)
    places = [json.loads((job.folder / "out-0" / f"place-{rank}.json").read_text()) for rank in range(world)]
    assert [place["rank"] for place in places] == list(range(world))
    assert {place["total"] for place in places} == {world * (world + 1) // 2}
    assert {place["launcher"] for place in places} == {"none" if world == 1 else "torch"}


def test_batches_prefetched_by_workers_are_not_lost(job: Job) -> None:
    job.done("workers", 2, stop_at=3)
    job.done("workers", 2, stop_at=99)
    steps = job.samples()[0]
    assert sorted(steps) == list(range(1, 11))
    assert flat(steps) == list(range(40))
