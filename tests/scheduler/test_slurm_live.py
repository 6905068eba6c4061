"""The scheduler against a real Slurm."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.errors import (
    CommandNotFound,
    JobNotFound,
    SlurmError,
    SlurmUnavailable,
    SubmitRejected,
    SubmitUnknown,
)
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.destination import choose_destination
from dtslurm.model.jobs.options import Placement
from dtslurm.model.runs.state import JobState
from dtslurm.scheduler.slurm import SlurmScheduler
from dtslurm.store.blob_cache import BlobCache
from dtslurm.transport.local import LocalTransport
from tests.lab.cluster import SlurmLab
from tests.scheduler.live_jobs import Counting, are_running, are_terminal, submission, submit_job, wait
from tests.waiting import busyness

pytestmark = pytest.mark.slurm


@pytest.fixture
def slurm(slurm_env: SlurmLab) -> Iterator[SlurmScheduler]:
    scheduler = SlurmScheduler(LocalTransport())
    yield scheduler
    live = [job.job_id for job in scheduler._slurm.jobs() if not job.terminal]
    if live:
        slurm_env.run(["scancel", *live], check=False)


def test_job_is_followed_from_submission_to_its_end(slurm: SlurmScheduler, tmp_path: Path) -> None:
    made, path = submission(tmp_path, "pwd > here; sleep 1; exit 3", "--job-name=a\\|b=c")
    job_id = slurm.submit(made, path)
    assert slurm.find(made.comment) == job_id
    (job,) = wait(slurm, job_id, are_terminal)
    assert (job.state, job.exit_code, job.signal, job.ok) == (JobState.FAILED, 3, None, False)
    assert (tmp_path / "here").read_text().strip() == str(tmp_path)
    assert job.comment in {made.comment, ""}
    assert job.submit_time is not None
    assert job.end_time is not None
    assert job.end_time >= job.submit_time
    assert job.restarts == 0
    assert slurm.find("no-such-token") is None


def test_states_of_many_jobs_are_read_with_few_commands(slurm: SlurmScheduler, tmp_path: Path) -> None:
    ok = submit_job(slurm, tmp_path, "true")
    bad = submit_job(slurm, tmp_path, "exit 7")
    killed = submit_job(slurm, tmp_path, "kill -9 $$")
    no_output = submit_job(slurm, tmp_path, "true", "--output=/dev/null/x.log")  # 26.05 makes missing folders
    for job_id in (ok, bad, killed, no_output):
        wait(slurm, job_id, are_terminal)
    transport = Counting()
    fresh = SlurmScheduler(transport)
    result = fresh.query([ok, bad, killed, no_output, "999999"])
    assert result["999999"] == []
    assert [result[i][0].exit_code for i in (ok, bad, killed)] == [0, 7, None]
    unopened = result[no_output][0]  # 20.11 says that it ended with 1
    assert (result[killed][0].signal, unopened.exit_code, unopened.signal) in [(9, None, 53), (9, 1, None)]
    assert transport.ran.count("squeue") == 1
    assert transport.ran.count("sacct") <= 2
    assert transport.ran.count("scontrol") <= 3
    fresh.query([ok, bad, killed, no_output])
    assert transport.ran.count("squeue") == 2
    assert transport.ran.count("sacct") <= 2


def test_array_tasks_are_reported_and_cancelled_individually(slurm: SlurmScheduler, tmp_path: Path) -> None:
    go = tmp_path / "go"
    body = f"until [ -e {go} ]; do sleep 0.1; done; exit $SLURM_ARRAY_TASK_ID"
    array = submit_job(slurm, tmp_path, body, "--array=0-5%2")
    jobs = wait(slurm, array, lambda jobs: any(job.state is JobState.RUNNING for job in jobs))
    assert jobs[-1].job_id.startswith(f"{array}_[")
    last = slurm.query([f"{array}_5"])[f"{array}_5"]
    assert [job.job_id for job in last] == [f"{array}_5"]
    assert last[0].state is JobState.PENDING
    slurm.cancel([f"{array}_5"])
    go.touch()
    jobs = wait(slurm, array, lambda jobs: len(jobs) >= 5 and are_terminal(jobs))
    assert [job.job_id for job in jobs] == [f"{array}_{task}" for task in range(5)]
    assert [job.exit_code for job in jobs] == [0, 1, 2, 3, 4]
    # Of a task cancelled before it was split off its array, Slurm keeps no record at all (22.05).
    assert slurm.query([f"{array}_5", f"{array}_4"])[f"{array}_5"] == []


def test_components_of_a_heterogeneous_job_are_reported_and_cancelled(
    slurm: SlurmScheduler, tmp_path: Path
) -> None:
    job_id = submit_job(slurm, tmp_path, "sleep 30", "--ntasks=1", "hetjob", "--ntasks=2")
    jobs = wait(slurm, job_id, lambda jobs: len(jobs) == 2 and are_running(jobs))
    assert [job.job_id for job in jobs] == [f"{job_id}+0", f"{job_id}+1"]
    slurm.cancel([job_id])
    assert [job.state for job in wait(slurm, job_id, are_terminal)] == [JobState.CANCELLED] * 2


def test_job_is_held_released_requeued_and_cancelled(slurm: SlurmScheduler, tmp_path: Path) -> None:
    job_id = submit_job(slurm, tmp_path, "sleep 60", "--begin=now+1hour", "--requeue")
    slurm.hold([job_id])
    (job,) = slurm.query([job_id])[job_id]
    assert (job.state, job.reason) in [(JobState.PENDING, "JobHeldUser"), (JobState.PENDING, "JobHeldAdmin")]
    slurm.release([job_id])
    assert not slurm.query([job_id])[job_id][0].reason.startswith("JobHeld")
    with pytest.raises(SlurmError, match="scontrol requeue") as refused:
        slurm.requeue([job_id])
    assert "pending" in refused.value.evidence[0]
    slurm.cancel([job_id])
    wait(slurm, job_id, are_terminal)
    slurm.cancel([job_id])  # over already: nothing to do, no error
    again = submit_job(slurm, tmp_path, "sleep 60", "--requeue")
    wait(slurm, again, are_running)
    slurm.requeue([again])
    (job,) = wait(slurm, again, lambda jobs: bool(jobs) and jobs[0].state is JobState.PENDING)
    assert not job.terminal


def test_waiting_array_tasks_do_not_prevent_the_requeue_of_other_tasks(
    slurm: SlurmScheduler, tmp_path: Path
) -> None:
    array = submit_job(
        slurm, tmp_path, "[ $SLURM_ARRAY_TASK_ID = 0 ] || sleep 60", "--requeue", "--array=0-3%1"
    )
    running_one = {f"{array}_1": JobState.RUNNING}
    wait(slurm, array, lambda jobs: running_one.items() <= {job.job_id: job.state for job in jobs}.items())
    waits = submit_job(slurm, tmp_path, "sleep 60", "--begin=now+1hour", "--requeue")
    partly = slurm.requeue([array, waits])
    assert partly is not None
    assert (partly.done, partly.refused) == ((array,), ())
    assert set(partly.waiting) == {waits, f"{array}_2-3"}
    with pytest.raises(SlurmError, match="scontrol requeue"):
        slurm.requeue([waits, f"{array}_3"])


def test_f53_unknown_job_ids_are_reported(slurm: SlurmScheduler, tmp_path: Path) -> None:
    job_id = submit_job(slurm, tmp_path, "sleep 60")
    with pytest.raises(JobNotFound, match="999999") as caught:
        slurm.cancel(["999999", job_id])
    assert job_id in caught.value.evidence[0]
    assert wait(slurm, job_id, are_terminal)[0].state is JobState.CANCELLED
    for change in (slurm.hold, slurm.release, slurm.requeue):
        with pytest.raises(JobNotFound):
            change(["999999"])
        with pytest.raises(JobNotFound):
            change(["--help"])


@pytest.mark.parametrize(
    ("option", "words", "hint"),
    [
        ("--partition=nowhere", "invalid partition", "sinfo"),
        ("--gpus-per-node=99", "node configuration is not available", "request less"),
        ("--time=1:2:3:4:5", "invalid --time", "HH:MM:SS"),
        ("--no-such-option", "no-such-option", ""),
    ],
)
def test_refused_submission_reports_the_reason_and_a_hint(
    slurm: SlurmScheduler, tmp_path: Path, option: str, words: str, hint: str
) -> None:
    with pytest.raises(SubmitRejected) as caught:
        submit_job(slurm, tmp_path, "true", option)
    assert words in "\n".join(caught.value.evidence).lower()
    assert hint in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may submit as somebody else")
def test_c28_job_of_another_user_with_the_same_token_is_ignored(
    slurm: SlurmScheduler, slurm_env: SlurmLab, tmp_path: Path
) -> None:
    made, path = submission(tmp_path, "sleep 30")
    done = slurm_env.run(
        ["sbatch", "--parsable", "--uid=65534", "--hold", "--chdir=/tmp", f"--comment={made.comment}", path]
    )
    foreign = done.stdout.strip()
    assert slurm.find(made.comment) is None
    assert slurm.query([foreign])[foreign] == []
    with pytest.raises(JobNotFound):
        slurm.cancel([foreign])
    slurm_env.run(["scancel", foreign])


def fake_sbatch(folder: Path, text: str) -> str:
    """Put a program before the real sbatch on PATH; return that PATH."""
    real = shutil.which("sbatch")
    program = folder / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nsbatch={real}\n{text}\n")
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    "answer",
    [
        "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1",
        "kill -9 $$",
        "echo 'Submitted, I think'",
        "exit 1",
    ],
)
def test_f1_job_is_found_by_its_token_after_a_lost_sbatch_answer(
    slurm: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setenv("PATH", fake_sbatch(tmp_path, f'"$sbatch" "$@" > number; {answer}'))
    made, path = submission(tmp_path, "sleep 30", "--hold")
    monkeypatch.chdir(tmp_path)
    job_id = slurm.submit(made, path)
    assert job_id == (tmp_path / "number").read_text().strip()


def test_f1_submission_without_answer_and_without_a_job_is_unknown(
    slurm: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", fake_sbatch(tmp_path, "exit 1"))
    with pytest.raises(SubmitUnknown) as caught:
        submit_job(slurm, tmp_path, "true")
    assert "dtslurm status" in caught.value.hint


def test_f4_f19_job_id_is_read_after_other_output(
    slurm: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'echo "Welcome to 2026"; echo "sbatch: error: just a warning of ours" >&2; exec "$sbatch" "$@"'
    monkeypatch.setenv("PATH", fake_sbatch(tmp_path, text))
    job_id = submit_job(slurm, tmp_path, "true")
    assert are_terminal(wait(slurm, job_id, are_terminal))


def test_f20_f52_slurm_variables_of_the_user_do_not_affect_commands(
    slurm: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "SBATCH_PARTITION": "nowhere", "SQUEUE_STATES": "FAILED", "SQUEUE_FORMAT": "%i",
        "SLURM_TIME_FORMAT": "relative", "SQUEUE_PARTITION": "x",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    job_id = submit_job(slurm, tmp_path, "sleep 30")
    (job,) = wait(slurm, job_id, are_running)
    assert job.start_time is not None


def test_missing_slurm_is_reported_at_once(
    slurm_env: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none.conf"))
    with pytest.raises(SlurmUnavailable, match=r"none\.conf"):
        SlurmScheduler(LocalTransport()).query(["1"])
    for name in ("sh", "id"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandNotFound, match="sbatch"):
        SlurmScheduler(LocalTransport()).validate(submission(tmp_path, "true")[0])
    assert time.monotonic() - start < 30 * busyness()


def test_slurm_validates_submissions_and_completes_the_profile(
    slurm: SlurmScheduler, slurm_env: SlurmLab, tmp_path: Path
) -> None:
    assert slurm.validate(submission(tmp_path, "true")[0]) == []
    (problem,) = slurm.validate(submission(tmp_path, "true", "--nodes=400")[0])
    assert "400 nodes" in problem
    done = slurm.profile(ClusterProfile(name="slurm"))
    assert done.slurm.partition in done.slurm.partitions
    assert done.default_node_type is None  # nobody asked for whole nodes
    kind = choose_destination(Placement(), done).node
    assert kind is not None
    assert kind.gpus is not None
    assert (kind.gpus.count, kind.gpus.slurm_type, kind.cpus) == (8, "a100", 8)
    assert done.slurm.gpu_request == "gpus-per-node"
    assert done.slurm.max_array_size
    assert slurm.profile(done) is done


def test_slurm_configuration_is_cached_and_refreshed_before_a_refusal(
    slurm: SlurmScheduler, slurm_env: SlurmLab, tmp_path: Path
) -> None:
    keeper = BlobCache(tmp_path / "kept")
    result, other = Counting(), Counting()
    fine, longer = submission(tmp_path, "true")[0], submission(tmp_path, "true", "--time=3")[0]
    first = SlurmScheduler(result, shared_cache=keeper, scope="lab")
    done = first.profile(ClusterProfile(name="slurm"))
    assert first.validate(fine) == []
    assert result.ran.count("scontrol") == 3
    second = SlurmScheduler(other, shared_cache=keeper, scope="lab")
    assert second.profile(ClusterProfile(name="slurm")) == done
    assert second.validate(fine) == []
    assert "scontrol" not in other.ran
    elsewhere = Counting()
    SlurmScheduler(elsewhere, shared_cache=keeper, scope="other").validate(fine)
    assert "scontrol" in elsewhere.ran

    partition = ["scontrol", "update", f"partition={done.slurm.partition}"]
    limit = slurm_env.run(["sinfo", "-h", "-o", "%l", "-p", str(done.slurm.partition)]).stdout.strip()
    slurm_env.run([*partition, "MaxTime=1"])
    try:
        assert SlurmScheduler(LocalTransport(), shared_cache=BlobCache(tmp_path / "k"), scope="lab").validate(
            longer
        )
        late = SlurmScheduler(LocalTransport(), shared_cache=BlobCache(tmp_path / "k"), scope="lab")
    finally:
        slurm_env.run([*partition, f"MaxTime={limit}"])
    assert late.validate(longer) == [], "what is refused by an old answer is asked again"
