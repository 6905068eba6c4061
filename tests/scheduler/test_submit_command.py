"""The command that queues a script, and what its result shows of the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtslurm.errors import (
    CommandNotFound,
    CommandTimeout,
    HostUnavailable,
    SlurmUnavailable,
    SubmitRejected,
    SubmitUnknown,
    TransportError,
)
from dtslurm.model.jobs.job import Submission
from dtslurm.scheduler.base import CommandScheduler
from dtslurm.scheduler.local import LocalScheduler
from dtslurm.scheduler.slurm import SlurmScheduler
from dtslurm.transport.base import Completed
from dtslurm.transport.local import LocalTransport
from tests.scheduler.live_jobs import submission


class EmptyQueue(SlurmScheduler):
    """A scheduler in whose queue no job has any comment."""

    def find(self, comment: str) -> str | None:
        del comment
        return None


@pytest.fixture
def prepared(tmp_path: Path) -> Submission:
    return submission(tmp_path, "true")[0]


@pytest.fixture
def scheduler() -> SlurmScheduler:
    return EmptyQueue(LocalTransport())


def test_slurm_queues_by_a_command_and_this_machine_by_itself(
    scheduler: SlurmScheduler, prepared: Submission
) -> None:
    assert isinstance(scheduler, CommandScheduler)
    assert not isinstance(LocalScheduler(), CommandScheduler)
    argv = scheduler.submit_command(prepared, "/runs/a/script.sbatch")
    assert (argv[0], argv[-1]) == ("sbatch", "/runs/a/script.sbatch")
    assert any(prepared.full_comment in word for word in argv)


def test_the_answer_of_sbatch_names_the_job(scheduler: SlurmScheduler, prepared: Submission) -> None:
    assert scheduler.read_submit_answer(prepared, Completed(("sbatch",), 0, "17;cluster\n", "")) == "17"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Completed(("sbatch",), 1, "", "sbatch: error: Invalid account"), SubmitRejected),
        (Completed(("sbatch",), 1, "", "Unable to contact slurm controller"), SlurmUnavailable),
        (Completed(("sbatch",), 1, "", ""), SubmitUnknown),
        (Completed(("sbatch",), 0, "Submitted, I think", ""), SubmitUnknown),
        (CommandTimeout("sbatch did not end in time"), SubmitUnknown),
        (TransportError("the connection was lost"), SubmitUnknown),
        (CommandNotFound("the cluster has no program sbatch"), CommandNotFound),
        (HostUnavailable("login1 cannot be reached"), HostUnavailable),
    ],
)
def test_only_an_answer_that_may_hide_a_job_is_unknown(
    scheduler: SlurmScheduler,
    prepared: Submission,
    answer: Completed | TransportError,
    error: type[Exception],
) -> None:
    with pytest.raises(error) as caught:
        scheduler.read_submit_answer(prepared, answer)
    assert type(caught.value) is error
