"""The embedded queue: which jobs start, why others wait, and which requests are refused."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.localslurm import machine as local_machine
from dtslurm.worker.localslurm import process
from dtslurm.worker.localslurm import queue as local_queue
from dtslurm.worker.localslurm.options import Refused
from dtslurm.worker.localslurm.state import LockTimeout, State, try_lock

ROOT = Path(__file__).parents[2]
MACHINE = {"cpus": 8, "memory_mib": 8000, "gpus": []}


class Queue:
    """A queue whose keepers are only noted; those in ``alive`` live."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = State(str(folder))
        self.state.prepare()
        self.started: list[list[str]] = []
        self.alive: set[int] = set()
        monkeypatch.setattr(process, "spawn_keeper", self.spawn)
        monkeypatch.setattr(process, "kill_strays", lambda _root, _job: 0)
        monkeypatch.setattr(self.state, "keeper_alive", lambda job: job in self.alive)
        self.refuses = False

    def spawn(self, argv: list[str], *_words: Any, **_more: Any) -> int:
        if self.refuses:
            raise OSError(12, "Cannot allocate memory")
        self.started.append(argv[argv.index(self.state.root) + 1 :])
        return 1

    def submit(self, **more: Any) -> int:
        common = {"host": local_machine.host(), "login": {}, "machine": MACHINE, "requeue_delay": 10.0}
        request = {
            "name": "job", "nodes": 1, "cpus_per_node": [1], "memory_mib": None, "gpus": 0, "held": False,
            "requeue": True, "dependency": [], "array_tasks": None, "array_limit": 0, **more,
        }  # fmt: skip
        return local_queue.add(self.state, request, "#!/bin/sh\n", common)

    def look(self) -> dict[int, tuple[str, str]]:
        """Let start what may start; return each job's state and why it waits."""
        local_queue.schedule(self.state)
        self.alive |= {int(words[0]) for words in self.started if words[0] != "wake"}
        return {job: (self[job]["state"], self[job]["reason"]) for job in self.state.all_ids()}

    def end(self, job: int, ended: str = "COMPLETED") -> None:
        self.alive.discard(job)
        local_queue.finish(self.state, self[job], ended, "None")

    def __getitem__(self, job: int) -> dict[str, Any]:
        record = self.state.load(job)
        assert record is not None
        return record


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(tmp_path, monkeypatch)


RUNS, PRIORITY, FULL = ("RUNNING", "None"), ("PENDING", "Priority"), ("PENDING", "Resources")
WAITS, NEVER = ("PENDING", "Dependency"), ("PENDING", "DependencyNeverSatisfied")


def test_jobs_start_in_order_while_cpus_are_free(queue: Queue) -> None:
    for cpus in (6, 4, 1):
        queue.submit(cpus_per_node=[cpus])
    assert queue.look() == {1: RUNS, 2: FULL, 3: PRIORITY}
    queue.end(1)
    assert queue.look() == {1: ("COMPLETED", "None"), 2: RUNS, 3: RUNS}
    assert [words[0] for words in queue.started] == ["1", "2", "3"]


def test_jobs_start_only_while_memory_and_gpus_are_free(queue: Queue) -> None:
    machine = {**MACHINE, "gpus": ["GPU-a", "GPU-b"]}
    queue.submit(memory_mib=0)  # all of it
    assert queue.look()[1] == RUNS
    queue.submit(memory_mib=1)
    assert queue.look()[2] == FULL
    queue.end(1)
    queue.end(2, "CANCELLED")
    for gpus in (1, 2):
        job = queue.submit(gpus=gpus)
        queue.state.save({**queue[job], "machine": machine})
    assert queue.look()[3] == RUNS
    assert queue[3]["gpu_ids"] == [["GPU-a"]]
    assert queue.look()[4] == FULL


@pytest.mark.parametrize(
    ("kind", "ended", "then"),
    [
        ("afterok", "COMPLETED", RUNS),
        ("afterok", "FAILED", NEVER),
        ("afternotok", "FAILED", RUNS),
        ("afternotok", "COMPLETED", NEVER),
        ("afternotok", "UNKNOWN", NEVER),
        ("afterok", "UNKNOWN", NEVER),  # nobody saw how it ended
        ("afterany", "UNKNOWN", RUNS),
        ("after", None, RUNS),
        ("afterany", None, WAITS),
    ],
)
def test_job_starts_according_to_the_result_of_its_dependency(
    queue: Queue, kind: str, ended: str | None, then: tuple[str, str]
) -> None:
    queue.submit()
    queue.submit(dependency=[(kind, "1")], held=True)
    queue.look()
    if ended:
        queue.end(1, ended)
    local_queue.release(queue.state, queue[2])
    assert queue.look()[2] == then


def test_job_with_an_unsatisfiable_dependency_is_cancelled_on_request(queue: Queue) -> None:
    queue.submit()
    queue.submit(dependency=[("afterok", "1")], kill_on_invalid_dep=True)
    queue.look()
    queue.end(1, "FAILED")
    assert queue.look()[2] == ("CANCELLED", "DependencyNeverSatisfied")


def test_dependency_on_an_unknown_job_is_refused(queue: Queue) -> None:
    with pytest.raises(Refused) as caught:
        queue.submit(dependency=[("afterok", "7"), ("singleton", "")])
    assert caught.value.problems == ["--dependency=afterok:7: there is no job 7"]
    assert queue.state.all_ids() == []


def test_singleton_job_waits_for_jobs_with_the_same_name(queue: Queue) -> None:
    queue.submit(name="a")
    queue.submit(name="b", dependency=[("singleton", "")])
    queue.submit(name="a", dependency=[("singleton", "")])
    assert queue.look() == {1: RUNS, 2: RUNS, 3: WAITS}
    queue.end(1)
    assert queue.look()[3] == RUNS


def test_array_tasks_are_separate_jobs_limited_to_a_number_at_once(queue: Queue) -> None:
    assert queue.submit(array_tasks=[3, 5, 7], array_limit=2) == 1
    assert queue.look() == {1: RUNS, 2: RUNS, 3: ("PENDING", "JobArrayTaskLimit")}
    assert [local_queue.shown_id(queue[job]) for job in (1, 2, 3)] == ["1_3", "1_5", "1_7"]
    words: dict[str, tuple[int, int | None]] = {
        "1": (1, None), "1_5": (1, 5), "1_4": (1, 4), "2": (2, None), "9": (9, None),
    }  # fmt: skip
    result = {text: local_queue.find_records(queue.state, *word) for text, word in words.items()}
    assert {text: [record["id"] for record in records] for text, records in result.items()} == {
        "1": [1, 2, 3], "1_5": [2], "1_4": [], "2": [2], "9": [],
    }  # fmt: skip
    queue.submit(dependency=[("afterok", "1_5")])
    queue.submit(dependency=[("afterany", "1")])
    queue.end(2)
    assert queue.look()[4] == RUNS
    assert queue.look()[5] == WAITS


def test_job_with_a_begin_time_waits_and_reports_the_time(queue: Queue) -> None:
    assert local_queue.next_begin(queue.state) is None
    job = queue.submit()
    begin = time.time() + 3600
    queue.state.save({**queue[job], "begin": begin})
    assert queue.look()[job] == ("PENDING", "BeginTime")
    assert local_queue.next_begin(queue.state) == begin


def test_job_with_a_dead_keeper_has_an_unknown_state(queue: Queue) -> None:
    queue.submit()
    queue.submit()
    queue.look()
    queue.alive.clear()
    assert queue.look() == dict.fromkeys((1, 2), ("UNKNOWN", local_queue.LOST))
    queue.state.enqueue(1)  # a crash came before it was removed
    queue.look()
    assert queue.state.active() == []


def test_job_fails_when_its_keeper_cannot_start(queue: Queue) -> None:
    queue.refuses = True
    queue.submit()
    assert queue.look()[1] == ("FAILED", "JobLaunchFailure: [Errno 12] Cannot allocate memory")


def test_job_waits_while_its_previous_keeper_holds_the_lock(queue: Queue) -> None:
    queue.submit()
    lock = try_lock(queue.state.job_dir(1, "keeper.lock"))
    assert lock is not None
    with lock:
        assert queue.look()[1] == FULL
    assert queue.look()[1] == RUNS


# ---- What is asked of jobs ----


def test_pending_job_is_cancelled_at_once_and_a_running_job_through_its_keeper(queue: Queue) -> None:
    queue.submit(cpus_per_node=[8])
    queue.submit()
    queue.look()
    for job in (1, 2):
        local_queue.cancel(queue.state, queue[job])
    assert queue.state.read_ask(1) == "cancel"
    assert queue[2]["state"] == "CANCELLED"
    local_queue.cancel(queue.state, queue[2])
    assert queue.look()[2] == ("CANCELLED", "None")


def test_requeue_asks_the_keeper_or_queues_an_ended_job(queue: Queue) -> None:
    queue.submit()
    queue.look()
    local_queue.requeue(queue.state, queue[1])
    assert queue.state.read_ask(1) == "requeue"
    queue.state.write_request(1, "cancel")
    local_queue.requeue(queue.state, queue[1])
    assert queue.state.read_ask(1) == "cancel"  # that stands
    queue.end(1)
    local_queue.requeue(queue.state, queue[1])
    assert queue.look()[1] == ("PENDING", "BeginTime")
    assert queue[1]["restarts"] == 1
    assert queue.started[-1] == ["wake"]  # somebody looks again when its delay is over


def test_scontrol_survives_the_signal_that_ends_the_job_it_requeues(queue: Queue) -> None:
    queue.submit()
    queue.look()
    # The job's end may begin before scontrol has exited, as on a busy machine.
    program = (
        "import os, signal, sys\n"
        "from dtslurm.worker.localslurm import queue, scontrol\n"
        "queue.schedule = lambda state: os.kill(os.getpid(), signal.SIGTERM)\n"
        "scontrol.main()\n"
    )
    arguments = ["scontrol", queue.state.root, "requeue", "1"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, check=False)
    assert done.returncode == 0
    assert queue.state.read_ask(1) == "requeue"


def test_requeue_hold_and_release_are_refused_with_the_reason(queue: Queue) -> None:
    queue.submit(requeue=False)
    queue.submit()
    for act, job, words in (
        (local_queue.requeue, 1, "job 1 was submitted with --no-requeue"),
        (local_queue.requeue, 2, "job 2 is pending already"),
    ):
        with pytest.raises(Refused) as caught:
            act(queue.state, queue[job])
        assert caught.value.problems == [words]
    queue.look()
    for act in (local_queue.hold, local_queue.release):
        with pytest.raises(Refused, match="job 2 is no longer pending: RUNNING"):
            act(queue.state, queue[2])


def test_held_job_stays_pending_until_release(queue: Queue) -> None:
    queue.submit()
    local_queue.hold(queue.state, queue[1])
    assert queue.look()[1] == ("PENDING", "JobHeldUser")
    local_queue.release(queue.state, queue[1])
    assert queue.look()[1] == RUNS


# ---- The state folder ----


def test_failed_queue_write_leaves_no_job(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    real = queue.state.enqueue

    def enqueue(job: int) -> None:
        if job == 2:
            raise OSError(28, "No space left on device")
        real(job)

    monkeypatch.setattr(queue.state, "enqueue", enqueue)
    with pytest.raises(OSError, match="No space left"):
        queue.submit(array_tasks=[0, 1])
    assert queue.state.all_ids() == []
    assert queue.state.active() == []


def test_job_ids_continue_after_the_counter_is_lost(queue: Queue) -> None:
    for _ in range(2):
        queue.submit()
    Path(queue.state.path("counter")).write_text("")
    assert queue.submit() == 3


def test_lock_timeout_reports_another_holder(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    from dtslurm.worker.localslurm import state

    monkeypatch.setattr(state, "LOCK_PATIENCE", 0.05)
    with queue.state.locked(), pytest.raises(LockTimeout, match="held by another process"), State(
        queue.state.root
    ).locked():  # fmt: skip
        pytest.fail("two hold it")
