"""Training with loader workers, killed at random moments, resumes exactly."""

from __future__ import annotations

import random

import pytest

from tests.train.conftest import Job, Zygote, run_undisturbed, same

STEPS = 12  # of two epochs


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_undisturbed(zygote, tmp_path_factory.mktemp("undisturbed"), "noisy")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(200))
def test_f39_training_killed_at_a_random_moment_with_workers_resumes_exactly(
    job: Job, undisturbed: Job, seed: int
) -> None:
    dice = random.Random(seed)
    step = dice.randint(4, STEPS)  # the first checkpoint is that of step 3
    victim, delay = dice.choice(["0", "1", "both", "worker"]), dice.uniform(0, 0.05)
    codes = job.run("noisy", 2, kill_step=step, delay=delay, victim=victim)
    ended_before = codes == [0, 0]  # a kill in the last step may come too late
    assert ended_before <= (step == STEPS or victim == "worker")
    if not ended_before:
        job.done("noisy", 2)
    assert same(job.final(), undisturbed.final())
    assert job.samples() == undisturbed.samples()
