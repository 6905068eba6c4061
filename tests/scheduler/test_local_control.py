"""The embedded scheduler's control of jobs: waiting, ending, requeuing, and a lost keeper."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtslurm.errors import SlurmError
from dtslurm.model.runs.state import JobState, StateFlag
from dtslurm.worker.localslurm import scontrol
from dtslurm.worker.localslurm.options import Refused
from dtslurm.worker.localslurm.state import State
from tests.processes import is_alive
from tests.scheduler.local_cluster import LocalCluster
from tests.waiting import busyness, wait_until

PENDING, RUNNING, CANCELLED = JobState.PENDING, JobState.RUNNING, JobState.CANCELLED
HOLD_ON = "until [ -e go ]; do sleep 0.02; done"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    # What ends by itself never waits so long; on a busy machine, less would kill it before.
    with LocalCluster(tmp_path, kill_wait=30.0) as local_cluster:
        yield local_cluster


def release_jobs(cluster: LocalCluster) -> None:
    (cluster.folder / "go").touch()


# ---- the queue ----


def test_jobs_start_in_the_order_of_submission(cluster: LocalCluster) -> None:
    first = cluster.submit(HOLD_ON, "-c 6")
    second = cluster.submit(HOLD_ON, "-c 6")
    third = cluster.submit("true")  # there would be room, but nobody overtakes
    assert cluster.status(first).state is RUNNING
    assert (cluster.status(second).state, cluster.status(second).reason) == (PENDING, "Resources")
    assert (cluster.status(third).state, cluster.status(third).reason) == (PENDING, "Priority")
    assert cluster.status(third).nodelist == ""
    release_jobs(cluster)
    ended = [cluster.wait(job) for job in (first, second, third)]
    assert all(status.ok for status in ended)
    starts = [cluster.state.load(int(job)) or {} for job in (first, second, third)]
    assert starts[0]["end_time"] <= starts[1]["start_time"] <= starts[2]["start_time"]


def test_emulated_nodes_use_at_most_the_machine(cluster: LocalCluster) -> None:
    first = cluster.submit(HOLD_ON, "-N4 --ntasks-per-node=8")
    assert cluster.status(first).state is RUNNING
    assert cluster.status(first).nodelist == "local[1-4]"
    second = cluster.submit("true")
    assert cluster.status(second).reason == "Resources"
    release_jobs(cluster)
    assert cluster.wait(second).ok


def test_memory_limits_concurrent_jobs(cluster: LocalCluster) -> None:
    first = cluster.submit(HOLD_ON, "--mem=5000")
    second = cluster.submit("true", "--mem=4000")
    assert (cluster.status(first).state, cluster.status(second).reason) == (RUNNING, "Resources")
    release_jobs(cluster)
    assert cluster.wait(second).ok


def test_held_job_waits_until_release(cluster: LocalCluster) -> None:
    blocker = cluster.submit(HOLD_ON, "-c 8")
    job = cluster.submit("true")
    held = cluster.submit("true", "--hold")
    cluster.scheduler.hold([job])
    release_jobs(cluster)
    assert cluster.wait(blocker).ok
    assert [cluster.status(item).reason for item in (job, held)] == ["JobHeldUser", "JobHeldUser"]
    with pytest.raises(SlurmError, match="refused") as caught:
        cluster.scheduler.hold([blocker])
    assert "no longer pending" in str(caught.value.evidence)
    cluster.scheduler.release([job, held])
    assert cluster.wait(job).ok
    assert cluster.wait(held).ok


# ---- dependencies ----


def test_dependent_job_starts_waits_or_is_cancelled_by_the_result(cluster: LocalCluster) -> None:
    good = cluster.submit(HOLD_ON)
    bad = cluster.submit(HOLD_ON + "; exit 1")
    waits = [
        cluster.submit("true", f"--dependency=afterok:{good}"),
        cluster.submit("true", f"-d afternotok:{bad}"),
        cluster.submit("true", f"-d afterany:{good}:{bad},afterok:{good}"),
    ]
    never = [cluster.submit("true", f"-d afterok:{bad}"), cluster.submit("true", f"-d afternotok:{good}")]
    given_up = cluster.submit("true", f"-d afterok:{bad} --kill-on-invalid-dep=yes")
    behind = [
        cluster.submit("true", f"-d afterok:{given_up} --kill-on-invalid-dep=yes"),
        cluster.submit("true", f"-d afterany:{given_up} --kill-on-invalid-dep=yes"),
    ]
    began = cluster.submit("true", f"-d after:{good}")
    assert cluster.wait(began).ok
    assert {cluster.status(job).reason for job in [*waits, *never, given_up, *behind]} == {"Dependency"}
    release_jobs(cluster)
    assert all(cluster.wait(job).ok for job in waits)
    assert [cluster.wait(job).state for job in (given_up, *behind)] == [
        CANCELLED,
        CANCELLED,
        JobState.COMPLETED,
    ]
    for job in never:
        status = cluster.status(job)
        assert (status.state, status.reason) == (PENDING, "DependencyNeverSatisfied")
        cluster.scheduler.cancel([job])


def test_singleton_job_waits_for_the_job_with_the_same_name(cluster: LocalCluster) -> None:
    first = cluster.submit(HOLD_ON)
    second = cluster.submit("true", "-d singleton")
    other = cluster.submit("true", "-d singleton -J other")
    assert cluster.wait(other).ok
    assert cluster.status(second).reason == "Dependency"
    release_jobs(cluster)
    assert cluster.wait(first).ok
    assert cluster.wait(second).ok


# ---- arrays ----


def test_array_tasks_run_within_the_limit_and_can_be_cancelled_individually(cluster: LocalCluster) -> None:
    job = cluster.submit(
        f"env | grep ^SLURM_ARRAY | sort; {HOLD_ON}; exit $SLURM_ARRAY_TASK_ID",
        "--array=0-4:2,7%2 -o a-%A_%a.out",
    )
    statuses = cluster.scheduler.query([job])[job]
    assert [status.job_id for status in statuses] == ["1_0", "1_2", "1_4", "1_7"]
    assert [status.raw_id for status in statuses] == ["1", "2", "3", "4"]
    assert [status.state for status in statuses] == [RUNNING, RUNNING, PENDING, PENDING]
    assert statuses[3].reason == "JobArrayTaskLimit"
    assert cluster.status("1_4").job_id == "1_4"
    assert cluster.status("3").job_id == "1_4"
    wait_until(
        lambda: (cluster.folder / "a-1_2.out").exists() and (cluster.folder / "a-1_2.out").stat().st_size
    )
    assert (cluster.folder / "a-1_2.out").read_text().split() == [
        "SLURM_ARRAY_JOB_ID=1",
        "SLURM_ARRAY_TASK_COUNT=4",
        "SLURM_ARRAY_TASK_ID=2",
        "SLURM_ARRAY_TASK_MAX=7",
        "SLURM_ARRAY_TASK_MIN=0",
        "SLURM_ARRAY_TASK_STEP=1",
    ]
    successor = cluster.submit("true", f"-d afterany:{job}")
    assert cluster.status(successor).reason == "Dependency"
    cluster.scheduler.cancel(["1_7"])
    assert [status.state for status in cluster.scheduler.query([job])[job]] == [
        RUNNING,
        RUNNING,
        PENDING,
        CANCELLED,
    ]
    release_jobs(cluster)
    ended = [cluster.wait(f"1_{task}") for task in (0, 2, 4, 7)]
    assert [status.exit_code for status in ended] == [0, 2, 4, 0]
    assert cluster.wait(successor).ok


def test_array_is_cancelled_as_a_whole(cluster: LocalCluster) -> None:
    job = cluster.submit("sleep 60", "--array=1-3%1")
    cluster.wait(f"{job}_1", RUNNING)
    cluster.scheduler.cancel([job])
    assert {cluster.wait(f"{job}_{task}").state for task in (1, 2, 3)} == {CANCELLED}


def test_array_output_file_contains_the_task_id(cluster: LocalCluster) -> None:
    script = cluster.folder / "s"
    job = cluster.submit("echo $SLURM_ARRAY_TASK_ID", "-a 5 -o slurm-%A_%a.out")
    assert cluster.wait(f"{job}_5").ok
    assert (cluster.folder / f"slurm-{job}_5.out").read_text() == "5\n"
    assert not script.exists()


# ---- cancel ----


def test_pending_job_is_cancelled(cluster: LocalCluster) -> None:
    job = cluster.submit("true", "--hold")
    cluster.scheduler.cancel([job])
    status = cluster.status(job)
    assert (status.state, status.terminal, status.start_time) == (CANCELLED, True, None)
    cluster.scheduler.cancel([job])  # twice is no error


def test_cancel_terminates_the_batch_shell_and_all_step_processes(cluster: LocalCluster) -> None:
    job = cluster.submit(
        """
        trap 'echo batch-term' TERM
        srun bash -c 'trap "echo task-term-$SLURM_PROCID" TERM
                      (trap "echo child-term-$SLURM_PROCID; exit" TERM
                       echo ready-$SLURM_PROCID; sleep 60 & wait) &
                      child=$!; wait; wait $child; exit 0' &
        step=$!
        while kill -0 $step 2>/dev/null; do wait $step; done
        exit 5
        """,
        "-N2",
    )
    cluster.saw(job, "ready-0")
    cluster.saw(job, "ready-1")
    cluster.scheduler.cancel([job])
    status = cluster.wait(job)
    assert (status.state, status.exit_code, status.signal) == (CANCELLED, 5, None)
    output = cluster.output(job)
    for word in ("batch-term", "task-term-0", "task-term-1", "child-term-0", "child-term-1"):
        assert output.count(word) == 1, output
    assert f"slurmstepd-local1: error: *** JOB {job} ON local1 CANCELLED AT 20" in output


def test_job_without_traps_ends_soon_after_cancel(cluster: LocalCluster) -> None:
    job = cluster.submit("echo ready; sleep 600")
    cluster.saw(job, "ready")
    before = time.monotonic()
    cluster.scheduler.cancel([job])
    status = cluster.wait(job)
    assert (status.state, status.exit_code, status.signal) == (CANCELLED, 0, signal.SIGTERM)
    assert time.monotonic() - before < 60 * busyness()


def test_process_that_ignores_sigterm_is_killed_after_kill_wait(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, kill_wait=5.0) as cluster:
        job = cluster.submit("""
            trap '' TERM
            srun -n1 bash -c 'trap "" TERM; echo pid=$$; while :; do sleep 0.05; done'
        """)
        cluster.saw(job, "pid=")
        pid = int(cluster.output(job).split("pid=")[1])
        before = time.monotonic()
        cluster.scheduler.cancel([job])
        wait_until(lambda: "CANCELLED" in cluster.output(job))
        assert is_alive(pid)
        status = cluster.wait(job)
        assert 4.5 < time.monotonic() - before < 60 * busyness()
        assert (status.state, status.signal) == (CANCELLED, signal.SIGKILL)
        assert not is_alive(pid)


def test_step_that_is_starting_during_a_cancel_is_terminated_too(cluster: LocalCluster) -> None:
    os.mkfifo(cluster.folder / "pipe")
    job = cluster.submit("srun -n1 -o pipe sleep 600")
    wait_until(Path(cluster.state.job_dir(int(job), "steps", "0")).exists)
    before = time.monotonic()
    cluster.scheduler.cancel([job])
    wait_until(lambda: "CANCELLED" in cluster.output(job))
    reader = os.open(cluster.folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # srun waits for it with its task
    try:
        assert cluster.wait(job).state is CANCELLED
    finally:
        os.close(reader)
    assert time.monotonic() - before < 25  # of the 30 s after which everything is killed


def test_stopped_process_is_continued_for_termination(cluster: LocalCluster) -> None:
    job = cluster.submit("trap 'echo woken; exit' TERM; echo ready; kill -STOP $$; sleep 60")
    cluster.saw(job, "ready")
    cluster.scheduler.cancel([job])
    assert cluster.wait(job).state is CANCELLED
    assert "woken" in cluster.output(job)


# ---- time ----


def test_time_limit_terminates_the_job(cluster: LocalCluster) -> None:
    job = cluster.submit(
        """
        trap 'echo batch-term; exit 7' TERM
        srun bash -c 'trap "echo task-term; exit" TERM; sleep 60 & wait' & wait
        """,
        "--time=0:06",
    )
    assert cluster.status(job).time_left in range(7)
    status = cluster.wait(job)
    assert (status.state, status.exit_code, status.reason) == (JobState.TIMEOUT, 7, "TimeLimit")
    output = cluster.output(job)
    assert "CANCELLED AT" in output
    assert "DUE TO TIME LIMIT ***" in output
    assert "batch-term" in output
    assert "task-term" in output


def test_early_signal_reaches_every_step_process_but_not_the_batch_shell(
    cluster: LocalCluster,
) -> None:
    status = cluster.run(
        """
        trap 'echo batch-usr1' USR1
        srun bash -c 'trap "echo task-usr1-$SLURM_PROCID" USR1
                      (trap "echo child-usr1; exit" USR1; sleep 60 & wait) & child=$!
                      wait; wait $child; exit 0'
        """,
        "-n2 --time=0:20 --signal=USR1@15",
    )
    assert status.state is JobState.COMPLETED
    output = cluster.output("1")
    assert sorted(output.split()) == ["child-usr1", "child-usr1", "task-usr1-0", "task-usr1-1"]


def test_early_signal_with_prefix_b_reaches_only_the_batch_shell(cluster: LocalCluster) -> None:
    status = cluster.run(
        """
        trap 'echo batch-usr2; kill $!; exit 3' SIGUSR2
        srun bash -c 'trap "echo task-usr2" USR2; sleep 60 & wait' & wait
        """,
        "--time=0:20 --signal=B:SIGUSR2@15",
    )
    assert (status.state, status.exit_code) == (JobState.FAILED, 3)
    assert "batch-usr2" in cluster.output("1")
    assert "task-usr2" not in cluster.output("1")


# ---- requeue ----


def test_job_requeues_itself_from_inside(cluster: LocalCluster) -> None:
    job = cluster.submit(
        """
        echo attempt=${SLURM_RESTART_COUNT-unset} step=$(srun -n1 printenv SLURM_STEP_ID)
        [ ${SLURM_RESTART_COUNT:-0} -ge 2 ] && exit 0
        scontrol requeue $SLURM_JOB_ID
        sleep 60
        """,
        "--open-mode=append",
    )
    status = cluster.wait(job)
    assert (status.state, status.restarts) == (JobState.COMPLETED, 2)
    lines = [line for line in cluster.output(job).splitlines() if line.startswith("attempt")]
    assert lines == ["attempt=unset step=0", "attempt=1 step=0", "attempt=2 step=0"]
    assert "DUE TO JOB REQUEUE" in cluster.output(job)


def test_array_task_requeues_itself_from_inside(cluster: LocalCluster) -> None:
    job = cluster.submit(
        """
        [ -n "$SLURM_RESTART_COUNT" ] && exit 0
        [ $SLURM_ARRAY_TASK_ID = 1 ] && exit 0
        scontrol requeue ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
        sleep 60
        """,
        "-a 1-2",
    )
    assert [cluster.wait(f"{job}_{task}").restarts for task in (1, 2)] == [0, 1]


def test_ended_job_is_requeued(cluster: LocalCluster) -> None:
    job = cluster.submit("exit 4")
    assert cluster.wait(job).exit_code == 4
    cluster.scheduler.requeue([job])
    status = cluster.status(job)
    assert (status.restarts, status.exit_code) == (1, None)
    # Somebody other than this test starts it when its delay is over.
    wait_until(lambda: (cluster.state.load(1) or {})["state"] == "FAILED", "the second run")
    assert cluster.status(job).restarts == 1


def test_requeue_of_a_pending_or_no_requeue_job_is_refused(cluster: LocalCluster) -> None:
    job = cluster.submit("true", "--no-requeue")
    cluster.wait(job)
    held = cluster.submit("true", "--hold")
    with pytest.raises(SlurmError) as caught:
        cluster.scheduler.requeue([job, held])
    assert caught.value.evidence == (
        "job 1 was submitted with --no-requeue",
        "job 2 is pending already",
    )
    cluster.scheduler.cancel([held])


def test_requeued_job_may_end_in_its_grace_time_before_pending(cluster: LocalCluster) -> None:
    job = cluster.submit("trap 'until [ -e go ]; do sleep 0.02; done' TERM; echo ready; sleep 60 & wait")
    cluster.saw(job, "ready")
    cluster.scheduler.requeue([job])
    wait_until(lambda: "REQUEUE" in cluster.output(job))
    assert cluster.status(job).state is RUNNING
    release_jobs(cluster)
    wait_until(lambda: cluster.status(job).restarts == 1)


def test_cancel_has_precedence_over_an_earlier_requeue(cluster: LocalCluster) -> None:
    job = cluster.submit("trap 'until [ -e go ]; do sleep 0.02; done' TERM; echo ready; sleep 60 & wait")
    cluster.saw(job, "ready")
    cluster.scheduler.requeue([job])
    wait_until(lambda: "REQUEUE" in cluster.output(job))
    cluster.scheduler.cancel([job])
    cluster.scheduler.requeue([job])
    release_jobs(cluster)
    assert cluster.wait(job).state is CANCELLED


def test_completing_job_has_the_completing_flag(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, kill_wait=3.0) as cluster:
        job = cluster.submit("""
            srun -n1 bash -c 'trap "" TERM; echo ready; while :; do sleep 0.05; done' &
            until grep -q ready job-1.out; do sleep 0.02; done
        """)
        wait_until(lambda: StateFlag.COMPLETING in cluster.status(job).flags)
        assert not cluster.status(job).terminal
        assert cluster.wait(job).ok


# ---- a keeper that dies ----


def test_job_with_a_lost_keeper_is_not_reported_as_completed(cluster: LocalCluster) -> None:
    job = cluster.submit("srun -n1 bash -c 'echo pid=$$; exec sleep 60'", "-c 8")
    cluster.saw(job, "pid=")
    pid = int(cluster.output(job).split("pid=")[1])
    waiting = cluster.submit("true", "-c 8")
    os.kill(cluster.keeper(job), signal.SIGKILL)
    wait_until(lambda: cluster.status(job).state is not RUNNING)
    status = cluster.status(job)
    assert (status.state, status.terminal, status.exit_code) == (JobState.UNKNOWN, False, None)
    assert "keeper process of this job died" in status.reason
    assert cluster.wait(waiting).ok
    wait_until(lambda: not is_alive(pid))
    after = cluster.submit("true", f"-d afterok:{job}")
    assert cluster.status(after).reason == "DependencyNeverSatisfied"
    cluster.scheduler.cancel([after])
    cluster.scheduler.requeue([job])
    cluster.wait(job, RUNNING)
    # A step that begins after the SIGTERM of a cancellation ends only after KillWait.
    wait_until(lambda: f"pid={pid}\n" not in cluster.output(job) and "pid=" in cluster.output(job))


def test_terminated_keeper_ends_its_job_as_node_fail(cluster: LocalCluster) -> None:
    job = cluster.submit("echo ready; sleep 60")
    cluster.saw(job, "ready")
    os.kill(cluster.keeper(job), signal.SIGTERM)
    status = cluster.wait(job)
    assert status.state is JobState.NODE_FAIL
    assert "DUE TO NODE FAILURE" in cluster.output(job)


def test_damaged_job_counter_is_rebuilt(cluster: LocalCluster) -> None:
    assert cluster.run("true").job_id == "1"
    (cluster.folder / "state" / "counter").write_text("")
    assert cluster.run("true").job_id == "2"


# ---- scontrol ----


def save_record(state: State, job: int, /, **values: Any) -> None:
    """Write the record of a job that has failed on two nodes."""
    state.prepare()
    Path(state.job_dir(job)).mkdir()
    begin = time.mktime((2026, 3, 4, 5, 6, 7, 0, 0, -1))
    common = {
        "id": job, "array_id": None, "array_task": None, "name": "train", "state": "FAILED", "nodes": 2,
        "reason": "NonZeroExitCode", "requeue": True, "restarts": 1, "exit_code": 3, "signal_number": None,
        "time_limit": 3 * 3600 + 4 * 60 + 5, "submit_time": begin, "start_time": begin + 60,
        "end_time": begin + 3600, "partition": "local", "cpus_per_node": [2, 1], "ntasks": 3,
        "cpus_per_task": None, "chdir": None, "submit_dir": "/home/me", "comment": "c", "array_count": 0,
    }  # fmt: skip
    state.save({**common, **values})


ENDED = """\
JobId=7 JobName=train
   JobState=FAILED Reason=NonZeroExitCode
   Requeue=1 Restarts=1 ExitCode=3:0
   TimeLimit=03:04:05
   SubmitTime=2026-03-04T05:06:07
   StartTime=2026-03-04T05:07:07 EndTime=2026-03-04T06:06:07
   Partition=local
   NodeList=local[1-2]
   NumNodes=2 NumCPUs=3 NumTasks=3 CPUs/Task=1
   WorkDir=/home/me
   Comment=c
"""
PENDING_TASK = """\
JobId=8 ArrayJobId=8 ArrayTaskId=4 JobName=train
   JobState=PENDING Reason=Job_LaunchFailure
   Requeue=0 Restarts=0 ExitCode=0:9
   TimeLimit=UNLIMITED
   SubmitTime=2026-03-04T05:06:07
   StartTime=Unknown EndTime=Unknown
   Partition=local
   NodeList=
   NumNodes=2 NumCPUs=3 NumTasks=3 CPUs/Task=4
   WorkDir=/x
   Comment=c
"""


def test_scontrol_shows_all_fields_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(str(tmp_path))
    save_record(state, 7)
    save_record(
        state, 8, array_id=8, array_task=4, state="PENDING", reason="Job LaunchFailure: no such file",
        requeue=False, restarts=0, exit_code=None, signal_number=9, time_limit=None, start_time=None,
        end_time=None, cpus_per_task=4, chdir="/x",
    )  # fmt: skip
    state.enqueue(8)
    assert scontrol.run(state, ["show", "job", "7"]) == [ENDED]
    assert scontrol.run(state, ["show", "job", "8_4"]) == [PENDING_TASK]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert scontrol.run(state, ["show", "job"]) == [ENDED]
    for job in ("9", "8_5", "7_0"):
        with pytest.raises(Refused, match=f"^Invalid job id specified: {job}$"):
            scontrol.run(state, ["show", "job", job])


def test_scontrol_expands_hostnames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setenv("SLURM_NODELIST", "n[1-2]")
    assert scontrol.run(state, ["show", "hostnames"]) == ["n1", "n2"]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a[1-2]")
    assert scontrol.run(state, ["show", "hostname"]) == ["a1", "a2"]
    assert scontrol.run(state, ["show", "hostnames", "b[1-2]"]) == ["b1", "b2"]
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name)
    with pytest.raises(Refused, match=r"^no host list is given, and SLURM_JOB_NODELIST is not set$"):
        scontrol.run(state, ["show", "hostnames"])


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("", "nothing"),
        ("show", "show"),
        ("show job 7 8", "show job 7 8"),
        ("show hostnames a b", "show hostnames a b"),
        ("requeue", "requeue"),
        ("requeue 7 8", "requeue 7 8"),
        ("hold 7", "hold 7"),
    ],
)
def test_scontrol_refuses_other_commands(tmp_path: Path, words: str, command: str) -> None:
    with pytest.raises(Refused) as caught:
        scontrol.run(State(str(tmp_path)), words.split())
    offered = "it offers: show hostnames [LIST], show job [ID], requeue ID"
    problem = f"the embedded scheduler's scontrol does not offer '{command}'; {offered}"
    assert caught.value.problems == [problem]
