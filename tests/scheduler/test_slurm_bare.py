"""The scheduler against a Slurm without accounting, whose controller dies or freezes."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.errors import SlurmUnavailable, SubmitUnknown
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.scheduler.slurm import SlurmScheduler
from dtslurm.transport.local import LocalTransport
from tests.lab.cluster import SlurmLab
from tests.lab.software import Software
from tests.scheduler.live_jobs import Counting, are_running, are_terminal, submission, submit_job, wait
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def bare_lab(slurm_software: Software) -> Iterator[SlurmLab]:
    """A cluster of its own, without accounting, that forgets ended jobs soon and may be hurt."""
    root = Path(tempfile.mkdtemp(prefix="dtslurm-bare-", dir="/tmp"))
    extra = ("MessageTimeout=10", "TCPTimeout=5")
    try:
        with SlurmLab(root, nodes=1, min_job_age=15, extra_conf=extra, software=slurm_software) as lab:
            yield lab
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def bare(bare_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch, isolated: None) -> SlurmScheduler:
    for name, value in bare_lab.env.items():
        monkeypatch.setenv(name, value)
    return SlurmScheduler(LocalTransport())


def test_exit_codes_are_known_without_accounting(bare: SlurmScheduler, tmp_path: Path) -> None:
    job_id = submit_job(bare, tmp_path, "sleep 1; exit 4")
    (job,) = wait(bare, job_id, are_terminal)
    assert (job.exit_code, job.source) == (4, "scontrol")
    array = submit_job(bare, tmp_path, "exit $SLURM_ARRAY_TASK_ID", "--array=1-2")
    jobs = wait(bare, array, lambda jobs: len(jobs) == 2 and are_terminal(jobs))
    assert [job.exit_code for job in jobs] == [1, 2]


def test_f54_job_forgotten_by_slurm_is_not_reported_as_completed(
    bare: SlurmScheduler, tmp_path: Path
) -> None:
    job_id = submit_job(bare, tmp_path, "true")
    # A fresh scheduler has seen nothing: once Slurm has forgotten the job there is no evidence.
    wait_until(lambda: SlurmScheduler(LocalTransport()).query([job_id])[job_id] == [])


def test_f54_disabled_accounting_is_queried_once(bare: SlurmScheduler) -> None:
    transport = Counting()
    scheduler = SlurmScheduler(transport)
    nothing: dict[str, list[JobStatus]] = {"999999": [], "999998": []}
    assert scheduler.query(list(nothing)) == nothing
    result = transport.ran.count("sacct")
    assert result in {1, 2}  # 26.05 names its columns even so, and is then asked for jobs
    for _ in range(2):
        assert scheduler.query(list(nothing)) == nothing
    assert transport.ran.count("sacct") == result


def test_f5_f55_dead_controller_gives_no_job_states(
    bare: SlurmScheduler, bare_lab: SlurmLab, tmp_path: Path
) -> None:
    bare_lab.kill_controller()
    try:
        with pytest.raises(SlurmUnavailable):
            bare.query(["1"])
        with pytest.raises(SlurmUnavailable) as caught:
            submit_job(bare, tmp_path, "true")
        assert "connect failure" in caught.value.evidence[0]
        with pytest.raises(SlurmUnavailable):
            bare.cancel(["1"])
    finally:
        bare_lab.start_controller()
    bare_lab.wait_idle()


def test_f56_job_that_ended_while_the_controller_was_down_is_reported_after_the_restart(
    bare: SlurmScheduler, bare_lab: SlurmLab, tmp_path: Path
) -> None:
    bare_lab.wait_idle()
    go_on = tmp_path / "go-on"
    body = f"while [ ! -e {go_on} ]; do sleep 0.1; done; echo > {go_on}.done; exit 5"
    job_id = submit_job(bare, tmp_path, body, "--no-requeue")  # else some Slurms run it again
    wait(bare, job_id, are_running)
    saved, now = bare_lab.root / "state/job_state", time.time()
    bare_lab.run(["scontrol", "update", f"JobId={job_id}", "Comment=runs"])  # what changes is saved
    bare_lab.wait_for("the controller to save it", lambda: saved.exists() and saved.stat().st_mtime > now)
    bare_lab.kill_controller()
    try:
        go_on.touch()
        bare_lab.wait_for("the script", go_on.with_suffix(".done").exists)
        with pytest.raises(SlurmUnavailable):
            bare.query([job_id])
        assert bare.recall([job_id])[job_id][0].state is JobState.RUNNING  # as last heard: no false end
    finally:
        bare_lab.start_controller()
    (job,) = wait(bare, job_id, are_terminal)
    assert not job.ok
    assert job.exit_code in {5, None}  # Slurm may only know that it lost sight of it
    bare_lab.run(["scontrol", "update", "NodeName=ALL", "State=RESUME"], check=False)  # where it was drained
    bare_lab.wait_idle()


def test_f1_f55_submission_to_a_frozen_controller_is_unknown_until_found(
    bare: SlurmScheduler, bare_lab: SlurmLab, tmp_path: Path
) -> None:
    bare_lab.wait_idle()
    made, path = submission(tmp_path, "sleep 5")
    bare_lab.pause_controller()
    try:
        with pytest.raises(SubmitUnknown) as caught:
            bare.submit(made, path)
        assert "Socket timed out" in caught.value.evidence[0]
    finally:
        bare_lab.resume_controller()
    wait_until(lambda: bare.find(made.comment), "the job's start")
    result = bare.find(made.comment)
    assert result is not None
    assert bare.query([result])[result]
