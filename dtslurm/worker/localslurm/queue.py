"""The queue's decisions: which jobs may start, and why the others wait.

The caller of every function must hold the state's lock.
"""

import contextlib
import hashlib
import os
import shlex
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

from . import machine as local_machine
from . import process
from .options import Refused
from .state import Record, State, try_lock, write_file

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "UNKNOWN")
LOST = (
    "the keeper process of this job died without recording the job's end (killed, or the machine went down)"
)
PROGRAMS = ("srun", "scontrol")

_PROGRAM_CODE = "import sys; sys.path.append(sys.argv[1]); from worker.localslurm.{} import main; main()"


def package_dir() -> str:
    """Return the folder that contains these programs as the package ``worker``."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def program(module: str, root: str) -> List[str]:
    """Return the command that starts one of these programs, isolated from Python site and user settings."""
    return [sys.executable, "-I", "-S", "-B", "-c", _PROGRAM_CODE.format(module), package_dir(), root]


def bin_dir(state: State) -> str:
    """Return the folder that precedes all others in the jobs' PATH.

    Create its programs if they are missing.
    """
    texts = {
        name: '#!/bin/sh\nexec {} "$@"\n'.format(" ".join(map(shlex.quote, program(name, state.root))))
        for name in PROGRAMS
    }
    folder = state.path("bin", hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:12])
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for name, text in texts.items():
        if not os.path.exists(os.path.join(folder, name)):
            write_file(os.path.join(folder, name), text, 0o700)
    # Login profiles reset PATH; a batch shell sources this file after them, once.
    profile = os.path.join(folder, "profile")
    if not os.path.exists(profile):
        text = 'case $PATH in {0}:*) ;; *) PATH={0}:"$PATH" ;; esac\nunset BASH_ENV\n'
        write_file(profile, text.format(shlex.quote(folder)))
    return folder


def array_records(state: State, array: int) -> List[Record]:
    """Return the records of an array's tasks, or of a single job; empty if the job does not exist."""
    first_record = state.load(array)
    if first_record is None:
        return []
    if first_record.get("array_id") != array:
        return [first_record]
    other_records = [state.load(array + index) for index in range(1, first_record["array_count"])]
    return [first_record] + [record for record in other_records if record is not None]


def find_records(state: State, job: int, task: Optional[int]) -> List[Record]:
    """Return the records that a job id denotes: ``17`` (a job, or all tasks of an array) or ``17_3``."""
    records = array_records(state, job)
    if task is None:
        return records
    return [record for record in records if record.get("array_id") == job and record["array_task"] == task]


def shown_id(record: Record) -> str:
    """Return a job's id in Slurm's notation: ``17`` or ``17_3``."""
    if record.get("array_id") is None:
        return str(record["id"])
    return "{}_{}".format(record["array_id"], record["array_task"])


def _split_id(text: str) -> Tuple[int, Optional[int]]:
    job, _, task = text.partition("_")
    return int(job), int(task) if task else None


def find_unknown_dependencies(state: State, dependencies: List[Tuple[str, str]]) -> List[str]:
    """Return the problems of dependencies: jobs that do not exist."""
    return [
        "--dependency={}:{}: there is no job {}".format(kind, job, job)
        for kind, job in dependencies
        if kind != "singleton" and not find_records(state, *_split_id(job))
    ]


def add(state: State, request: Dict[str, Any], script: str, common: Dict[str, Any]) -> int:
    """Queue a job, or all tasks of an array, and return the job id. A failure leaves no job behind.

    Raises:
        Refused: the job depends on jobs that do not exist.
        OSError: the files could not be written; no job was created.
    """
    problems = find_unknown_dependencies(state, request["dependency"])
    if problems:
        raise Refused(problems)
    tasks: List[Optional[int]] = list(request["array_tasks"] or [None])
    first_id = state.new_ids(len(tasks))
    jobs = list(range(first_id, first_id + len(tasks)))
    try:
        for index, task in enumerate(tasks):
            job = first_id + index
            os.makedirs(state.job_dir(job), mode=0o700)
            write_file(state.job_dir(job, "script"), script, 0o700)
            record = dict(request, **common)
            record.update(
                id=job, state="PENDING", reason="None", restarts=0, submit_time=time.time(), begin=0
            )
            record["array_id"] = None if task is None else first_id
            record["array_task"] = task
            record["array_count"] = len(tasks)
            state.save(record)
        for job in jobs:
            state.enqueue(job)
    except BaseException:
        for job in jobs:
            state.dequeue(job)
            for name in ("job.json", "script"):
                with contextlib.suppress(OSError):
                    os.unlink(state.job_dir(job, name))
            with contextlib.suppress(OSError):
                os.rmdir(state.job_dir(job))
        raise
    return first_id


def _check_dependency(kind: str, record: Record) -> Optional[bool]:
    """Return whether a job satisfies a dependency: True, not yet (None), or never (False)."""
    job_state = record["state"]
    if kind == "after":
        return True if job_state != "PENDING" else None
    if job_state not in ENDED:
        return None
    if kind == "afterany":
        return True
    # The exit status of an UNKNOWN job was lost: assume neither success nor failure.
    return job_state == "COMPLETED" if kind == "afterok" else job_state not in ("COMPLETED", "UNKNOWN")


def _has_earlier_singleton(record: Record, active: List[Record]) -> bool:
    return any(
        other["id"] < record["id"] and other["name"] == record["name"] and other["state"] not in ENDED
        for other in active
        if record["array_id"] is None or other["array_id"] != record["array_id"]
    )


def _dependency_reason(state: State, record: Record, active: List[Record]) -> str:
    waiting = False
    for kind, job in record["dependency"]:
        if kind == "singleton":
            waiting = waiting or _has_earlier_singleton(record, active)
            continue
        satisfied = [
            _check_dependency(kind, dependency_record)
            for dependency_record in find_records(state, *_split_id(job))
        ]
        if not satisfied or False in satisfied:
            return "DependencyNeverSatisfied"
        waiting = waiting or None in satisfied
    return "Dependency" if waiting else ""


def _limit_reason(record: Record, active: List[Record]) -> str:
    if not record["array_limit"]:
        return ""
    running = sum(other["array_id"] == record["array_id"] and other["state"] == "RUNNING" for other in active)
    return "JobArrayTaskLimit" if running >= record["array_limit"] else ""


def _find_wait_reason(state: State, record: Record, active: List[Record]) -> str:
    """Return why a job may not start even on an idle machine, "" if it may."""
    if record["held"]:
        return "JobHeldUser"
    if record["begin"] > time.time():
        return "BeginTime"
    return _dependency_reason(state, record, active) or _limit_reason(record, active)


def cost(record: Record) -> Tuple[int, int]:
    """Return the CPUs and the memory (MiB) of a job; emulated nodes share the machine's resources."""
    machine = record["machine"]
    total = machine["memory_mib"] or 0
    memory = record["memory_mib"]
    requested_memory = 0 if memory is None else (memory or total) * record["nodes"]
    return min(sum(record["cpus_per_node"]), machine["cpus"]), min(requested_memory, total) if total else 0


def allocate_gpus(record: Record, running: List[Record]) -> Optional[List[List[str]]]:
    """Return GPUs for each node, none of them in use; None if too few are free.

    On a machine without GPUs the GPUs are only numbers, and there are always enough.
    """
    nodes, gpus_per_node, pool = record["nodes"], record["gpus"], record["machine"]["gpus"]
    if not pool:
        return [[str(index) for index in range(gpus_per_node)] for _ in range(nodes)]
    used = {gpu for other in running if other["machine"]["gpus"] for node in other["gpu_ids"] for gpu in node}
    free = [gpu for gpu in pool if gpu not in used]
    if len(free) < nodes * gpus_per_node:
        return None
    return [free[index * gpus_per_node : (index + 1) * gpus_per_node] for index in range(nodes)]


def _has_free_resources(record: Record, running: List[Record]) -> bool:
    cpus, memory = cost(record)
    machine = record["machine"]
    if cpus > machine["cpus"] - sum(cost(running_record)[0] for running_record in running):
        return False
    return not memory or memory <= machine["memory_mib"] - sum(
        cost(running_record)[1] for running_record in running
    )


def _start_keeper(state: State, record: Record) -> bool:
    """Start a job's keeper; return whether it was started."""
    job = record["id"]
    lock = try_lock(state.job_dir(job, "keeper.lock"))
    if lock is None:  # the keeper of the previous execution is still shutting down
        return False
    with lock:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(state.job_dir(job, "ask"))
        record.update(state="RUNNING", reason="None", start_time=time.time(), end_time=None)
        record.update(exit_code=None, signal_number=None, completing=False, keeper=0)
        state.save(record)
        argv = [*program("job_execution", state.root), str(job), str(lock.fileno())]
        env = dict(record["login"])
        try:
            # The keeper inherits the lock: from now on the lock is held exactly as long as the keeper lives.
            process.spawn_keeper(
                argv, state.root, env, state.job_dir(job, "keeper.log"), pass_fds=[lock.fileno()]
            )
        except OSError as error:
            finish(state, record, "FAILED", "JobLaunchFailure: {}".format(error))
            return False
    return True


def finish(state: State, record: Record, end_state: str, reason: str) -> None:
    """Record that a job has ended."""
    record.update(state=end_state, reason=reason, completing=False, end_time=time.time())
    state.save(record)
    state.dequeue(record["id"])


def _finish_lost_job(state: State, record: Record) -> None:
    """Record that a job's end is unknown, and free its resources."""
    process.kill_strays(state.root, record["id"])
    finish(state, record, "UNKNOWN", LOST)


def _clean_up_ended(state: State, active: List[Record]) -> None:
    for record in active:
        if record["state"] == "RUNNING" and not state.keeper_alive(record["id"]):
            _finish_lost_job(state, record)
        elif record["state"] in ENDED:  # a crash happened between recording the end and dequeuing
            state.dequeue(record["id"])


def _try_start(state: State, record: Record, running: List[Record]) -> bool:
    """Start a job if its resources are free; return whether the job is no longer pending."""
    gpus = allocate_gpus(record, running)
    if gpus is None or not _has_free_resources(record, running):
        return False
    record["gpu_ids"] = gpus
    return _start_keeper(state, record) or record["state"] != "PENDING"


def schedule(state: State) -> None:
    """Start every job that may start now, in the order of submission, and record why the others wait."""
    this_host = local_machine.host()
    active = [record for record in state.active() if record["host"] == this_host]
    _clean_up_ended(state, active)
    blocked = False
    for record in [record for record in active if record["state"] == "PENDING"]:
        reason = _find_wait_reason(state, record, active)
        if reason == "DependencyNeverSatisfied" and record.get("kill_on_invalid_dep"):
            finish(state, record, "CANCELLED", reason)
            continue
        if not reason and blocked:
            reason = "Priority"
        if not reason:
            if _try_start(state, record, [other for other in active if other["state"] == "RUNNING"]):
                continue
            reason = "Resources"
            blocked = True
        if reason != record["reason"]:
            record["reason"] = reason
            state.save(record)


def next_begin(state: State) -> Optional[float]:
    """Return the earliest begin time of the pending jobs, None if no job has one."""
    this_host = local_machine.host()
    begin_times = [
        record["begin"]
        for record in state.active()
        if record["host"] == this_host and record["state"] == "PENDING" and record["begin"] > time.time()
    ]
    return min(begin_times) if begin_times else None


def cancel(state: State, record: Record) -> None:
    """Cancel a job. A job that has ended is left unchanged."""
    if record["state"] == "PENDING":
        record["start_time"] = None
        record.update(exit_code=0, signal_number=None)
        finish(state, record, "CANCELLED", "None")
    elif record["state"] == "RUNNING":
        state.write_request(record["id"], "cancel")


def signal_steps(state: State, record: Record, name: str) -> None:
    """Send a signal (such as ``SIGUSR2``) to the tasks of a running job.

    Raises:
        Refused: the job is not running.
    """
    if record["state"] != "RUNNING":
        raise Refused(["job {} does not run".format(shown_id(record))])
    pending_request = state.read_ask(record["id"]) or "signal"
    if pending_request.startswith("signal"):  # otherwise the job is being cancelled or requeued
        state.write_request(record["id"], pending_request + " " + name)


def put_back(state: State, record: Record) -> None:
    """Make a job that has run pending again, with a short delay before its next start."""
    record.update(state="PENDING", reason="BeginTime", completing=False, restarts=record["restarts"] + 1)
    record.update(begin=time.time() + record["requeue_delay"], start_time=None, end_time=None)
    state.enqueue(record["id"])
    state.save(record)


def requeue(state: State, record: Record) -> None:
    """Requeue a running or ended job.

    Raises:
        Refused: the job is pending already, or was submitted with --no-requeue.
    """
    if not record["requeue"]:
        raise Refused(["job {} was submitted with --no-requeue".format(shown_id(record))])
    if record["state"] == "PENDING":
        raise Refused(["job {} is pending already".format(shown_id(record))])
    if record["state"] == "RUNNING":
        if state.read_ask(record["id"]) != "cancel":
            state.write_request(record["id"], "requeue")
        return
    put_back(state, record)
    wake_later(state, record)


def wake_later(state: State, record: Record) -> None:
    """Start a process that runs the scheduler again when a job's delay is over."""
    argv = [*program("job_execution", state.root), "wake"]
    process.spawn_keeper(argv, state.root, dict(record["login"]), state.job_dir(record["id"], "keeper.log"))


def hold(state: State, record: Record) -> None:
    """Hold a pending job.

    Raises:
        Refused: the job is not pending.
    """
    if record["state"] != "PENDING":
        raise Refused(["job {} is no longer pending: {}".format(shown_id(record), record["state"])])
    record.update(held=True, reason="JobHeldUser")
    state.save(record)


def release(state: State, record: Record) -> None:
    """Release a held job.

    Raises:
        Refused: the job is not pending.
    """
    if record["state"] != "PENDING":
        raise Refused(["job {} is no longer pending: {}".format(shown_id(record), record["state"])])
    record.update(held=False, reason="None")
    state.save(record)
