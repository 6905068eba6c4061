"""Keeps one job: runs its batch script, enforces its time limit, and records how it ended.

Started detached by the queue, with the job's lock inherited; the lock tells everybody that it lives.
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

POLL = 0.2  # seconds between looks at what others ask; ends of processes wake it at once


class JobExecution(object):
    """One run of one job."""

    def __init__(self, state: State, record: Record) -> None:
        self.state = state
        self.record = record
        self.job: int = record["id"]
        self.began = time.monotonic()
        self.batch = 0
        self.error_file = 2
        self.ended_as = ""  # the state that something other than the script's exit decided
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

    def _files(self) -> process.Files:
        record = self.record
        default = "slurm-%A_%a.out" if record["array_id"] is not None else "slurm-%j.out"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if record["append"] else os.O_TRUNC)
        stdin = self._open(record["input"] or os.devnull, os.O_RDONLY)
        stdout = self._open(record["output"] or default, flags)
        stderr = self._open(record["error"], flags) if record["error"] else stdout
        return process.Files(stdin, stdout, stderr)

    def _command(self) -> List[str]:
        # As the kernel reads it; asking the kernel would fail where the state lies on a noexec disk.
        script = self.state.job_dir(self.job, "script")
        line = read_file(script).split("\n", 1)[0][2:].strip()
        interpreter, _, argument = line.partition(" ")
        return [interpreter] + ([argument.strip()] if argument.strip() else []) + [script]

    def start(self) -> None:
        """Start the batch script."""
        record = self.record
        files = self._files()
        self.error_file = files.stderr
        env = environment.batch_environment(self.state, record, queue.bin_dir(self.state))
        steps = self.state.job_dir(self.job, "steps")
        os.makedirs(steps, mode=0o700, exist_ok=True)
        for name in os.listdir(steps):
            os.unlink(os.path.join(steps, name))
        cwd = record["chdir"] or record["submit_dir"]
        self.batch = process.start(self._command(), env, cwd, files, node_name(1))

    # ---- who is who ----

    def _steps(self) -> Set[int]:
        """Return the live srun programs."""
        found = set()
        folder = self.state.job_dir(self.job, "steps")
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if name.isdecimal() and is_locked(path):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    found.add(int(json.loads(read_file(path))["pid"]))
        return found

    def _processes(self) -> Dict[str, Set[int]]:
        """Return the job's processes: those of ``steps``, the ``srun`` programs, and the ``batch`` rest."""
        table = process.parents()
        everyone = process.descendants([os.getpid()], table)
        clients = self._steps() & everyone
        tasks = process.descendants(clients, table)
        tasks |= {pid for pid in everyone - tasks - clients if process.in_step(pid)}
        tasks |= process.descendants(tasks, table)
        return {"steps": tasks, "srun": clients - tasks, "batch": everyone - tasks - clients}

    # ---- ending ----

    def _say(self, why: str) -> None:
        text = "slurmstepd-{}: error: *** JOB {} ON {} CANCELLED AT {}{} ***\n".format(
            node_name(1), self.job, node_name(1), time.strftime("%Y-%m-%dT%H:%M:%S"), why
        )
        with contextlib.suppress(OSError):
            os.write(self.error_file, text.encode())

    def terminate(self, ended_as: str, why: str = "") -> None:
        """Ask every process to end; what is left after KillWait is killed."""
        if self.kill_at is not None:
            return
        self.ended_as = ended_as
        self._say(why)
        everyone = self._processes()
        # srun stays to collect its tasks' ends; it would only pass the same signal on a second time.
        process.end(everyone["steps"] | everyone["batch"])
        self.kill_at = time.monotonic() + self.record["kill_wait"]

    def _drain(self) -> None:
        """End what the batch script left behind: its own at once, steps as at a cancel."""
        asked = self.kill_at is not None
        while True:
            process.reap()
            left = self._processes()
            if not any(left.values()):
                return
            if not self.record["completing"]:
                self._set_completing()
            if self.kill_at is None:
                self.kill_at = time.monotonic() + self.record["kill_wait"]
            if not asked:
                process.end(left["steps"])
                asked = True
            process.send(left["batch"], signal.SIGKILL)
            if time.monotonic() >= self.kill_at or not (left["steps"] or left["srun"]):
                process.kill_below()
                return
            self._sleep(0.05)

    def _set_completing(self) -> None:
        with self.state.locked():
            self.record["completing"] = True
            self.state.save(self.record)

    def _outcome(self) -> str:
        status = self.status or 0
        killed = os.WIFSIGNALED(status)
        self.record["signal_number"] = os.WTERMSIG(status) if killed else None
        self.record["exit_code"] = 0 if killed else os.WEXITSTATUS(status)
        return self.ended_as or ("FAILED" if status else "COMPLETED")

    def finish(self, reason: str = "") -> None:
        """Record the end, and let the next job start."""
        ended = self._outcome()
        with self.state.locked():
            ask = self.state.read_ask(self.job)
            if ended == "REQUEUE" and ask == "cancel":  # somebody changed their mind meanwhile
                ended = "CANCELLED"
            if ended == "REQUEUE" or (ask == "requeue" and ended != "NODE_FAIL"):
                queue.put_back(self.state, self.record)
                return
            reasons = {"FAILED": "NonZeroExitCode", "TIMEOUT": "TimeLimit"}
            queue.finish(self.state, self.record, ended, reason or reasons.get(ended, "None"))

    def fail_to_start(self, error: OSError) -> None:
        """Record that the script could not be run."""
        self.status = 1 << 8
        self.finish("JobLaunchFailure: {}".format(error))

    # ---- running ----

    def _sleep(self, seconds: float) -> None:
        select.select([self.wake], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)

    def _obey(self) -> None:
        ask = self.state.read_ask(self.job)
        if ask == "cancel":
            self.terminate("CANCELLED")
        elif ask == "requeue":
            self.terminate("REQUEUE", " DUE TO JOB REQUEUE")
        elif ask.startswith("signal "):
            for name in ask.split()[1:]:
                process.send(self._processes()["steps"], getattr(signal, name))
            with self.state.locked():
                if self.state.read_ask(self.job) == ask:
                    self.state.write_ask(self.job, "")
        elif self.told_to_stop:
            self.terminate("NODE_FAIL", " DUE TO NODE FAILURE")

    def _watch_clock(self) -> None:
        limit = self.record["time_limit"]
        if limit is None:
            return
        left = self.began + limit - time.monotonic()
        early = self.record["signal"]
        if early and not self.signalled and left <= early["before"]:
            self.signalled = True
            targets = {self.batch} if early["batch"] else self._processes()["steps"]
            process.send(targets, early["number"])
        if left <= 0:
            self.terminate("TIMEOUT", " DUE TO TIME LIMIT")

    def _end_orphans(self) -> None:
        """Kill tasks whose srun was killed: nobody would collect them."""
        orphans = [pid for pid in process.direct_children(os.getpid()) if pid != self.batch]
        orphans = [pid for pid in orphans if process.in_step(pid)]
        if orphans and self.kill_at is None:
            process.send(set(orphans) | process.descendants(orphans), signal.SIGKILL)

    def run(self) -> None:
        """Watch over the batch script until it ends."""
        while self.status is None:
            self._sleep(POLL)
            ended = process.reap()
            if self.batch in ended:
                self.status = ended[self.batch]
                return
            self._end_orphans()
            self._obey()
            self._watch_clock()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                ended = process.kill_below()
                self.status = ended.get(self.batch, signal.SIGKILL)

    def end(self) -> None:
        """Clear up after the batch script and record its end."""
        self._drain()
        self.finish()

    def stop(self, _number: int, _frame: object) -> None:
        """Note that this machine wants its processes gone: it is going down, or the login session ended."""
        self.told_to_stop = True


def _watch_queue(state: State) -> None:
    """Start what may start, now and when delays are over."""
    while True:
        with state.locked():
            queue.schedule(state)
            begin = queue.next_begin(state)
        if begin is None:
            return
        time.sleep(max(0.01, min(begin - time.time(), 60.0)))


def _keep(state: State, job: int) -> None:
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
        # Without its keeper the job is lost; nothing of it may go on unseen.
        process.kill_below()
        raise


def main() -> None:
    """Run as ``STATE JOB LOCK_FD`` or ``STATE wake``."""
    state = State(sys.argv[2])
    if sys.argv[3] != "wake":
        _keep(state, int(sys.argv[3]))
        os.close(int(sys.argv[4]))
    _watch_queue(state)
