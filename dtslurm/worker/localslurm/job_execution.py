"""The keeper process of one job: runs the batch script, enforces the time limit, and records the job's end.

The queue starts the keeper detached, with the job's lock inherited; the lock shows that the keeper is alive.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Dict, List, Optional, Set

from . import environment, process, queue
from .hostlist import name as node_name
from .state import Record, State, is_locked, read_file
from .values import expand_name

POLL = 0.2  # seconds between checks for requests; the exit of a process wakes the keeper at once


class JobExecution(object):
    """One execution of one job."""

    def __init__(self, state: State, record: Record) -> None:
        self.state = state
        self.record = record
        self.job: int = record["id"]
        self.began = time.monotonic()
        self.batch = 0
        self.error_file = 2
        self.ended_as = ""  # the job state if something other than the script's exit decided it
        self.kill_at: Optional[float] = None
        self.signalled = False
        self.status: Optional[int] = None
        self.wake, wake_write = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        self.told_to_stop = False

    # ---- starting ----

    def _open(self, pattern: str, flags: int) -> int:
        folder = self.record["chdir"] or self.record["submit_dir"]
        path = expand_name(pattern, environment.name_fields(self.record))
        return os.open(os.path.join(folder, path), flags, 0o666)

    def _open_streams(self) -> process.Files:
        record = self.record
        default = "slurm-%A_%a.out" if record["array_id"] is not None else "slurm-%j.out"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if record["append"] else os.O_TRUNC)
        stdin = self._open(record["input"] or os.devnull, os.O_RDONLY)
        stdout = self._open(record["output"] or default, flags)
        stderr = self._open(record["error"], flags) if record["error"] else stdout
        return process.Files(stdin, stdout, stderr)

    def _script_command(self) -> List[str]:
        # Parse the #! line as the kernel does; exec of the script would fail on a disk mounted noexec.
        script = self.state.job_dir(self.job, "script")
        line = read_file(script).split("\n", 1)[0][2:].strip()
        interpreter, _, argument = line.partition(" ")
        return [interpreter] + ([argument.strip()] if argument.strip() else []) + [script]

    def start(self) -> None:
        """Start the batch script."""
        record = self.record
        files = self._open_streams()
        self.error_file = files.stderr
        env = environment.batch_environment(self.state, record, queue.bin_dir(self.state))
        steps = self.state.job_dir(self.job, "steps")
        os.makedirs(steps, mode=0o700, exist_ok=True)
        for name in os.listdir(steps):
            os.unlink(os.path.join(steps, name))
        cwd = record["chdir"] or record["submit_dir"]
        self.batch = process.start(self._script_command(), env, cwd, files, node_name(1))

    # ---- processes ----

    def _srun_pids(self) -> Set[int]:
        """Return the pids of the running srun programs."""
        srun_pids = set()
        folder = self.state.job_dir(self.job, "steps")
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if name.isdecimal() and is_locked(path):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    srun_pids.add(int(json.loads(read_file(path))["pid"]))
        return srun_pids

    def _processes(self) -> Dict[str, Set[int]]:
        """Return the job's processes by kind.

        The kinds are ``steps`` (tasks), ``srun`` programs, those of them that are ``starting`` (without a
        task yet), and ``batch`` (the rest).
        """
        parent_by_pid = process.parents()
        all_pids = process.descendants([os.getpid()], parent_by_pid)
        srun_pids = self._srun_pids() & all_pids
        task_pids = process.descendants(srun_pids, parent_by_pid)
        task_pids |= {pid for pid in all_pids - task_pids - srun_pids if process.in_step(pid)}
        task_pids |= process.descendants(task_pids, parent_by_pid)
        parent_pids = {parent_by_pid.get(pid) for pid in task_pids}
        return {
            "steps": task_pids,
            "srun": srun_pids - task_pids,
            "starting": srun_pids - task_pids - parent_pids,
            "batch": all_pids - task_pids - srun_pids,
        }

    # ---- ending ----

    def _log_cancellation(self, reason: str) -> None:
        text = "slurmstepd-{}: error: *** JOB {} ON {} CANCELLED AT {}{} ***\n".format(
            node_name(1), self.job, node_name(1), time.strftime("%Y-%m-%dT%H:%M:%S"), reason
        )
        with contextlib.suppress(OSError):
            os.write(self.error_file, text.encode())

    def terminate(self, ended_as: str, reason: str = "") -> None:
        """Send SIGTERM to every process; processes still running after KillWait are killed."""
        if self.kill_at is not None:
            return
        self.ended_as = ended_as
        self._log_cancellation(reason)
        pids = self._processes()
        # srun keeps running to collect the exits of its tasks; it would forward the same signal a second
        # time. An srun whose tasks have not started yet forwards it to them.
        process.end(pids["steps"] | pids["batch"] | pids["starting"])
        self.kill_at = time.monotonic() + self.record["kill_wait"]

    def _drain(self) -> None:
        """Terminate the processes that remain after the batch script.

        The script's own processes are killed at once; steps are terminated as by scancel.
        """
        steps_signalled = self.kill_at is not None
        while True:
            process.reap()
            remaining = self._processes()
            if not any(remaining.values()):
                return
            if not self.record["completing"]:
                self._save_completing()
            if self.kill_at is None:
                self.kill_at = time.monotonic() + self.record["kill_wait"]
            if not steps_signalled:
                process.end(remaining["steps"])
                steps_signalled = True
            process.send(remaining["batch"], signal.SIGKILL)
            if time.monotonic() >= self.kill_at or not (remaining["steps"] or remaining["srun"]):
                process.kill_below()
                return
            self._sleep(0.05)

    def _save_completing(self) -> None:
        with self.state.locked():
            self.record["completing"] = True
            self.state.save(self.record)

    def _record_exit_status(self) -> str:
        status = self.status or 0
        killed = os.WIFSIGNALED(status)
        self.record["signal_number"] = os.WTERMSIG(status) if killed else None
        self.record["exit_code"] = 0 if killed else os.WEXITSTATUS(status)
        return self.ended_as or ("FAILED" if status else "COMPLETED")

    def finish(self, reason: str = "") -> None:
        """Record the job's end, and schedule the next job."""
        end_state = self._record_exit_status()
        with self.state.locked():
            pending_request = self.state.read_ask(self.job)
            # The user cancelled the job after the requeue request.
            if end_state == "REQUEUE" and pending_request == "cancel":
                end_state = "CANCELLED"
            if end_state == "REQUEUE" or (pending_request == "requeue" and end_state != "NODE_FAIL"):
                queue.put_back(self.state, self.record)
                return
            reasons = {"FAILED": "NonZeroExitCode", "TIMEOUT": "TimeLimit"}
            queue.finish(self.state, self.record, end_state, reason or reasons.get(end_state, "None"))

    def fail_to_start(self, error: OSError) -> None:
        """Record that the script could not be started."""
        self.status = 1 << 8
        self.finish("JobLaunchFailure: {}".format(error))

    # ---- running ----

    def _sleep(self, seconds: float) -> None:
        select.select([self.wake], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)

    def _handle_requests(self) -> None:
        pending_request = self.state.read_ask(self.job)
        if pending_request == "cancel":
            self.terminate("CANCELLED")
        elif pending_request == "requeue":
            self.terminate("REQUEUE", " DUE TO JOB REQUEUE")
        elif pending_request.startswith("signal "):
            for name in pending_request.split()[1:]:
                process.send(self._processes()["steps"], getattr(signal, name))
            with self.state.locked():
                if self.state.read_ask(self.job) == pending_request:
                    self.state.write_request(self.job, "")
        elif self.told_to_stop:
            self.terminate("NODE_FAIL", " DUE TO NODE FAILURE")

    def _check_time_limit(self) -> None:
        limit = self.record["time_limit"]
        if limit is None:
            return
        remaining_s = self.began + limit - time.monotonic()
        early_signal = self.record["signal"]
        if early_signal and not self.signalled and remaining_s <= early_signal["before"]:
            self.signalled = True
            targets = {self.batch} if early_signal["batch"] else self._processes()["steps"]
            process.send(targets, early_signal["number"])
        if remaining_s <= 0:
            self.terminate("TIMEOUT", " DUE TO TIME LIMIT")

    def _kill_orphans(self) -> None:
        """Kill tasks whose srun was killed: no process would collect their exit status."""
        orphans = [pid for pid in process.direct_children(os.getpid()) if pid != self.batch]
        orphans = [pid for pid in orphans if process.in_step(pid)]
        if orphans and self.kill_at is None:
            process.send(set(orphans) | process.descendants(orphans), signal.SIGKILL)

    def run(self) -> None:
        """Monitor the batch script until it exits."""
        while self.status is None:
            self._sleep(POLL)
            status_by_pid = process.reap()
            if self.batch in status_by_pid:
                self.status = status_by_pid[self.batch]
                return
            self._kill_orphans()
            self._handle_requests()
            self._check_time_limit()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                status_by_pid = process.kill_below()
                self.status = status_by_pid.get(self.batch, signal.SIGKILL)

    def end(self) -> None:
        """Terminate remaining processes and record the job's end."""
        self._drain()
        self.finish()

    def stop(self, _number: int, _frame: object) -> None:
        """Handle SIGTERM: the machine shuts down, or the login session has ended."""
        self.told_to_stop = True


def _run_scheduler_loop(state: State) -> None:
    """Start all jobs that may start, now and whenever a begin time is reached."""
    while True:
        with state.locked():
            queue.schedule(state)
            begin_time = queue.next_begin(state)
        if begin_time is None:
            return
        time.sleep(max(0.01, min(begin_time - time.time(), 60.0)))


def _run_job(state: State, job: int) -> None:
    process.become_subreaper()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    with state.locked():
        record = state.load(job)
        if record is None or record["state"] != "RUNNING":
            return
        record["keeper"] = os.getpid()
        state.save(record)
    keeper = JobExecution(state, record)
    signal.signal(signal.SIGTERM, keeper.stop)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    try:
        keeper.start()
    except OSError as error:
        keeper.fail_to_start(error)
        return
    try:
        keeper.run()
        keeper.end()
    except BaseException:
        # Without its keeper the job is lost; no process of the job may continue unmonitored.
        process.kill_below()
        raise


def main() -> None:
    """Run as ``STATE JOB LOCK_FD`` or ``STATE wake``."""
    state = State(sys.argv[2])
    if sys.argv[3] != "wake":
        _run_job(state, int(sys.argv[3]))
        os.close(int(sys.argv[4]))
    _run_scheduler_loop(state)
