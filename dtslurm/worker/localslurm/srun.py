"""``srun`` inside a job of the embedded scheduler: starts a step's tasks and collects their exit statuses."""

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from typing import IO, Dict, List, Mapping, Optional

from . import hostlist, process
from .environment import exported, gpu_variables
from .options import Refused
from .srun_options import LocalStep, Task, bind_gpus, plan, tasks_of, working_folder
from .srun_streams import Streams
from .state import Record, State, is_locked, read_file, try_lock

FORWARDED = (
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGCONT,
)


def say(text: str) -> None:
    """Write a message to standard error in srun's format."""
    with contextlib.suppress(OSError):
        os.write(2, "srun: {}\n".format(text).encode(errors="surrogateescape"))


def task_environment(
    step: LocalStep, number: int, record: Record, environ: Mapping[str, str]
) -> Dict[str, str]:
    """Return the environment that all tasks of a step have in common."""
    export = step.options.get("export") or "ALL"
    names = export.split(",")
    if "ALL" in names:
        env = dict(environ)
    else:
        env = {key: value for key, value in environ.items() if key.startswith(("SLURM_", "SLURMD_"))}
        env["DTSLURM_LOCAL_STATE"] = environ.get("DTSLURM_LOCAL_STATE", "")
        if "CUDA_VISIBLE_DEVICES" in environ:
            env["CUDA_VISIBLE_DEVICES"] = environ["CUDA_VISIBLE_DEVICES"]
    env.update(exported(export, environ))
    nodes = hostlist.fold([node.place + 1 for node in step.nodes])
    counts = hostlist.repeat([len(node.tasks) for node in step.nodes])
    env.update(
        SLURM_DISTRIBUTION=step.options.get("distribution") or "block",
        SLURM_LAUNCH_NODE_IPADDR="127.0.0.1",
        SLURM_NNODES=str(len(step.nodes)),
        SLURM_NPROCS=str(step.ntasks),
        SLURM_NTASKS=str(step.ntasks),
        SLURM_SRUN_COMM_HOST="127.0.0.1",
        SLURM_STEPID=str(number),
        SLURM_STEP_ID=str(number),
        SLURM_STEP_NODELIST=nodes,
        SLURM_STEP_NUM_NODES=str(len(step.nodes)),
        SLURM_STEP_NUM_TASKS=str(step.ntasks),
        SLURM_STEP_TASKS_PER_NODE=counts,
        SLURM_TASKS_PER_NODE=counts,
        SLURM_UMASK="{:04o}".format(_umask()),
    )
    if step.cpus_per_task:
        env["SLURM_CPUS_PER_TASK"] = str(step.cpus_per_task)
    if step.options.get("job-name"):
        env["SLURM_JOB_NAME"] = str(step.options["job-name"])
    return env


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class Launch(object):
    """The execution of one step, from its start until its last process has exited."""

    def __init__(self, state: State, record: Record, step: LocalStep) -> None:
        self.state, self.record, self.step = state, record, step
        self.tasks = tasks_of(step)
        self.number = 0
        self.registration: Optional[IO[str]] = None
        self.running: Dict[int, Task] = {}
        self.exit_code = 0
        self.signal_code = 0
        self.selector = selectors.PollSelector()  # poll supports regular files, unlike epoll
        self.streams = Streams(record, step, 0, self.selector)
        self.kill_at: Optional[float] = None
        self.wait_until: Optional[float] = None
        self.forced = False
        self.caught: List[int] = []

    # ---- options ----

    def option(self, name: str) -> Optional[str]:
        """Return an option's value."""
        return self.step.options.get(name)

    @property
    def no_kill(self) -> bool:
        """Whether the step continues when tasks fail."""
        return "no-kill" in self.step.options and self.option("no-kill") != "off"

    @property
    def kill_on_bad_exit(self) -> bool:
        """Whether the first failure terminates the step."""
        return (
            "kill-on-bad-exit" in self.step.options
            and self.option("kill-on-bad-exit") != "0"
            and not self.no_kill
        )

    @property
    def wait(self) -> float:
        """Seconds that other tasks may run after the first task has exited; 0 means without limit."""
        text = self.option("wait") or "0"
        if not text.isdecimal():
            raise Refused(["Invalid --wait specification: {}".format(text)])
        return 0.0 if self.no_kill else float(text)

    # ---- registration among the job's steps ----

    def _has_free_cpus(self, used_cpus: Mapping[int, int]) -> bool:
        return all(
            node.cpus <= self.record["cpus_per_node"][node.place] - used_cpus.get(node.place, 0)
            for node in self.step.nodes
        )

    def _count_used_cpus(self, folder: str) -> Dict[int, int]:
        cpus_by_node: Dict[int, int] = {}
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if name.isdecimal() and is_locked(path):
                with contextlib.suppress(ValueError):
                    for index, cpus in json.loads(read_file(path))["cpus"].items():
                        cpus_by_node[int(index)] = cpus_by_node.get(int(index), 0) + cpus
        return cpus_by_node

    def _try_register(self, folder: str) -> bool:
        overlap = "overlap" in self.step.options
        if not overlap and not self._has_free_cpus(self._count_used_cpus(folder)):
            return False
        self.number = max([int(name) for name in os.listdir(folder) if name.isdecimal()] or [-1]) + 1
        self.registration = try_lock(os.path.join(folder, str(self.number)))
        if self.registration is None:
            return False
        cpus = {} if overlap else {node.place: node.cpus for node in self.step.nodes}
        json.dump({"pid": os.getpid(), "cpus": cpus}, self.registration)
        self.registration.flush()
        return True

    def register(self) -> None:
        """Acquire a step number, waiting until earlier steps release the CPUs that this step needs."""
        folder = self.state.job_dir(self.record["id"], "steps")
        waiting_reported = False
        while True:
            with contextlib.ExitStack() as stack:
                lock = try_lock(os.path.join(folder, "lock"))
                if lock is not None:
                    stack.enter_context(lock)
                    if self._try_register(folder):
                        break
                    if not waiting_reported:
                        text = (
                            "Job {} step creation temporarily disabled, retrying (Requested nodes are busy)"
                        )
                        say(text.format(self.record["id"]))
                        waiting_reported = True
            time.sleep(0.1 if waiting_reported else 0.005)
            self._check_cancelled()
        if waiting_reported:
            say("Step created for job {}".format(self.record["id"]))

    def _check_cancelled(self) -> None:
        for number in self.caught:
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                raise Refused(["Cancelled pending job step"])
        self.caught.clear()

    # ---- execution ----

    def start(self) -> None:
        """Start every task."""
        common = task_environment(self.step, self.number, self.record, os.environ)
        cwd = working_folder(self.step)
        bind = self.option("gpu-bind")
        prepared = []
        self.streams.number = self.number
        for task in self.tasks:
            env = dict(
                common,
                SLURMD_NODENAME=task.node_name,
                SLURM_CPUS_ON_NODE=str(task.node.cpus),
                SLURM_GTIDS=",".join(map(str, task.node.tasks)),
                SLURM_LOCALID=str(task.local_id),
                SLURM_NODEID=str(task.node_id),
                SLURM_PROCID=str(task.id),
            )
            gpus = bind_gpus(bind, task.node.gpus, task.local_id)
            env.update(gpu_variables(gpus))
            if gpus:
                env["SLURM_STEP_GPUS"] = ",".join(task.node.gpus)
            prepared.append((task, env, self.streams.files_for(task)))
        for task, env, files in prepared:
            pid = process.start(self.step.command, env, cwd, files, task.node_name)
            self.running[pid] = task
        self.streams.close_task_streams([files for _, _, files in prepared])

    def terminate(self, number: int) -> None:
        """Send a signal to all processes of the step; SIGKILL follows after KillWait."""
        if self.kill_at is not None:
            return
        say("Terminating StepId={}.{}".format(self.record["id"], self.number))
        process.end(process.descendants([os.getpid()]), number)
        self.kill_at = time.monotonic() + self.record["kill_wait"]

    def _record_exit(self, pid: int, status: int) -> None:
        task = self.running.pop(pid, None)
        if task is None:
            return
        killed = os.WIFSIGNALED(status)
        number = os.WTERMSIG(status) if killed else os.WEXITSTATUS(status)
        if killed:
            self.signal_code = max(self.signal_code, 128 + number)
        else:
            self.exit_code = max(self.exit_code, number)
        if number:
            description = _describe_signal(number) if killed else "Exited with exit code {}".format(number)
            say("error: {}: task {}: {}".format(task.node_name, task.id, description))
        if number and self.kill_on_bad_exit and self.running:
            self.terminate(signal.SIGTERM)
        if self.wait_until is None and self.wait and self.running:
            self.wait_until = time.monotonic() + self.wait

    def _forward_signals(self) -> None:
        while self.caught:
            process.send(process.descendants([os.getpid()]), self.caught.pop(0))

    def _check_deadlines(self) -> float:
        """Apply expired deadlines; return the seconds until the next deadline."""
        now = time.monotonic()
        if self.wait_until is not None and now >= self.wait_until and self.running and self.kill_at is None:
            say("First task exited {:g}s ago".format(self.wait))
            self.terminate(signal.SIGKILL)
        if self.kill_at is not None and now >= self.kill_at and not self.forced:
            self.forced = True
            process.send(process.descendants([os.getpid()]), signal.SIGKILL)
        deadlines = [
            deadline
            for deadline in (self.wait_until, self.kill_at)
            if deadline is not None and deadline > now
        ]
        return min(deadlines) - now if deadlines else 60.0

    def _poll_streams(self, wake: int, timeout_s: float) -> None:
        if any(self.streams.pending_input.values()):
            timeout_s = min(timeout_s, 0.02)
        for key, _ in self.selector.select(timeout_s):
            if key.fd == wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            else:
                key.data(key.fd)

    def run(self, wake: int) -> int:
        """Monitor the tasks until all have exited; return srun's exit code."""
        self.selector.register(wake, selectors.EVENT_READ)
        while self.running:
            self._poll_streams(wake, self._check_deadlines())
            self._forward_signals()
            for pid, status in process.reap().items():
                self._record_exit(pid, status)
        process.kill_below()
        self.streams.drain()
        return self.signal_code or self.exit_code  # a signal takes precedence over any exit code


def _describe_signal(number: int) -> str:
    descriptions = {signal.SIGKILL: "Killed", signal.SIGTERM: "Terminated"}
    if number in descriptions:
        return descriptions[signal.Signals(number)]
    try:
        strsignal = getattr(signal, "strsignal", None)
        return str(strsignal(number)) if strsignal else signal.Signals(number).name
    except ValueError:
        return "signal {}".format(number)


def _load_own_job(state: State) -> Record:
    text = os.environ.get("SLURM_JOB_ID", "")
    record = state.load(int(text)) if text.isdecimal() else None
    if record is None:
        raise Refused(
            ["error: the embedded scheduler's srun works only inside one of its jobs (SLURM_JOB_ID)"]
        )
    return record


def _run_step(state: State, words: List[str]) -> int:
    record = _load_own_job(state)
    step = plan(words, os.environ, record)
    if "quiet" not in step.options:
        for warning in step.warnings:
            say(warning)
    launch = Launch(state, record, step)
    _ = launch.wait  # reject an invalid value before any task starts
    for name in FORWARDED:
        signal.signal(name, lambda number, _frame: launch.caught.append(number))
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    wake, wake_write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    process.become_subreaper()
    launch.register()
    try:
        launch.start()
        return launch.run(wake)
    finally:
        process.kill_below()


def main() -> None:
    """Run as ``STATE OPTIONS... COMMAND...``."""
    try:
        exit_code = _run_step(State(sys.argv[2]), sys.argv[3:])
    except Refused as error:
        for problem in error.problems:
            say(problem if problem.startswith(("error:", "No command")) else "error: " + problem)
        exit_code = 1
    sys.stdout.flush()
    os._exit(exit_code)
