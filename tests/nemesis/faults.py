"""The faults: each is injected for some time and then removed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from dtslurm.model.runs.record import JobRecord
from tests.lab.keeper import descendants, send
from tests.lab.network import NetworkLab
from tests.nemesis.history import History, of_bodies
from tests.nemesis.schedule import Fault
from tests.nemesis.site import Site

PATIENCE_S = 6.0  # until a supervisor has started
START_PATIENCE_S = 40.0  # until a run has a job
TRAINING_PATIENCE_S = 400.0  # until training has saved; the import of torch takes long on a busy machine
HOSTILE = {
    "escape": "\x1b]0;x\x07\x1b[2J",
    "bars": "a|1|COMPLETED|0:0|dtslurm:000000000000:000000000000",
    "lines": "a\nJobId=1 JobState=COMPLETED\n",
    "bytes": os.fsdecode(b"\xff\xfe\x80"),
}


class Owner(Protocol):
    """A client of the runs' owner, which acts while a run directory or its record is out of reach."""

    def open_runs(self) -> list[JobRecord]:
        """Return the runs of the schedule that have a job and have not ended."""

    def check_list(self, record: JobRecord) -> None:
        """List all jobs, and note whether the run's job is among them."""

    def cancel_by_job_id(self, record: JobRecord) -> None:
        """Cancel the run's job by its id, and note the result."""


class Nemesis:
    """Injects the faults of a schedule, in threads of their own."""

    def __init__(self, site: Site, history: History, bodies: Path, owner: Owner) -> None:
        self.site, self.history, self.bodies, self.owner = site, history, bodies, owner
        self.clock_off = 0.0
        self.trouble: list[str] = []
        self._lock = threading.Lock()  # the keeper of the cluster does one thing at a time

    def break_it(self, fault: Fault, begin: float) -> None:
        """Wait for the start of a fault, inject it, and remove it when its time is over."""
        time.sleep(max(0.0, begin + fault.at - time.time()))
        since = time.time()
        acts = {
            "N1": self._controller_stopped,
            "N2": self._controller_killed,
            "N3": self._slurmd_killed,
            "N4": self._cut,
            "N6": self._munge,
            "N7": self._stepd,
            "N8": self._rank,
            "N9": self._full,
            "N11": self._program,
            "N12": self._clock,
            "N13": self._preempted,
            "N14": self._prolog,
            "N16": self._hostile,
            "N17": self._supervisor,
            "N18": self._agent,
            "N19": self._file_server,
            "N21": self._unreadable_checkpoints,
            "N22": self._moved_run,
            "N23": self._later_record,
            "N24": self._bad_node,
            "N25": self._no_links,
            "N26": self._home,
            "N27": self._server,
        }
        if fault.kind not in acts:
            return  # N15 and N20 are the clients' and the jobs' own
        try:
            with acts[fault.kind](fault):
                time.sleep(fault.seconds)
        except Exception as error:  # noqa: BLE001 (the schedule goes on; its result says so)
            self.trouble.append(f"{fault.kind} {fault.target}: {error}")
        self.history.add("nemesis", "fault", since=since, kind=fault.kind, target=fault.target)

    @contextlib.contextmanager
    def _pair(self, worse: Callable[[], object], better: Callable[[], object]) -> Iterator[None]:
        with self._lock:
            worse()
        try:
            yield
        finally:
            with self._lock:
                better()

    def _controller_stopped(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        lab = self.site.lab
        return self._pair(lab.pause_controller, lab.resume_controller)

    def _controller_killed(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        lab = self.site.lab
        return self._pair(lab.kill_controller, lab.start_controller)

    def _slurmd_killed(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        lab, name = self.site.lab, fault.target
        return self._pair(lambda: lab.kill_slurmd(name), lambda: lab.start_slurmd(name))

    def _cut(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        lab, name = self.site.lab, fault.target
        if not isinstance(lab, NetworkLab):
            return contextlib.nullcontext()
        return self._pair(lambda: lab.cut(name), lambda: lab.mend(name))

    def _munge(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        lab = self.site.lab
        if fault.target == "stopped":
            return self._pair(lab.pause_munge, lab.resume_munge)
        return self._pair(lab.kill_munge, lab.start_munge)

    def _full(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        return self._pair(self.site.fill_disk, self.site.free_disk)

    def _file_server(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        switch = self.site.switch
        return self._pair(lambda: switch.write_text(fault.target), switch.unlink)

    @contextlib.contextmanager
    def _unreadable_checkpoints(self, fault: Fault) -> Iterator[None]:
        """Wait for a checkpoint, then kill the rank that wrote it, so that an attempt starts meanwhile."""
        end = time.time() + TRAINING_PATIENCE_S
        while time.time() < end:
            if any(event.what in {"saved", "trained"} for event in of_bodies(self.bodies)):
                break
            time.sleep(0.1)
        with self._file_server(fault):
            self._kill_training()
            yield

    def _kill_training(self) -> None:
        below = set(descendants(self._keeper()))
        events = of_bodies(self.bodies)
        training = {event.run for event in events if event.what == "restored"}
        for event in events:
            if event.what == "begin" and event.run in training and event.get("pid") in below:
                send(event.get("pid"), signal.SIGKILL)

    def _wait_for_open_run(self) -> JobRecord | None:
        end = time.time() + START_PATIENCE_S
        while time.time() < end:
            if runs := self.owner.open_runs():
                return runs[0]
            time.sleep(0.2)
        return None

    def _act_on_hidden_run(self, record: JobRecord, fault: Fault) -> None:
        self.owner.check_list(record)
        if fault.target == "cancel":
            self.owner.cancel_by_job_id(record)

    @contextlib.contextmanager
    def _moved_run(self, fault: Fault) -> Iterator[None]:
        """Move the directory of a run away, let the owner act, and move it back."""
        record = self._wait_for_open_run()
        if record is None:
            yield
            return
        folder, away = Path(record.run_dir), self.site.disk / "moved-run"
        folder.rename(away)
        try:
            self._act_on_hidden_run(record, fault)
            yield
        finally:
            if folder.exists():  # a program of the job has created a directory in its place
                folder.rename(self.site.disk / f"created-{folder.name}")
                self.history.add("nemesis", "created", record.name)
            away.rename(folder)

    @contextlib.contextmanager
    def _later_record(self, fault: Fault) -> Iterator[None]:
        """Give the record of a run a later schema, let the owner act, and give it its schema back."""
        record = self._wait_for_open_run()
        if record is None:
            yield
            return
        path = Path(record.run_dir) / "job.json"
        schema = _replace_schema(path, 99)
        try:
            self._act_on_hidden_run(record, fault)
            yield
        finally:
            _replace_schema(path, schema)

    @contextlib.contextmanager
    def _bad_node(self, fault: Fault) -> Iterator[None]:
        """Let the health check of the node fail until the first training begins, and for the fault's time."""
        self.site.switch.write_text(f"bad node {fault.target}")
        try:
            end = time.time() + START_PATIENCE_S
            while not of_bodies(self.bodies) and time.time() < end:
                time.sleep(0.2)
            yield
        finally:
            self.site.switch.unlink()

    @contextlib.contextmanager
    def _no_links(self, fault: Fault) -> Iterator[None]:
        """Refuse symbolic links until a job starts, and for the fault's time."""
        self.site.switch.write_text(fault.target)
        try:
            end = time.time() + START_PATIENCE_S
            words = ["squeue", "-h", "-t", "R", "-o", "%i"]
            while not self.site.lab.run(words, check=False).stdout.split() and time.time() < end:
                time.sleep(0.2)
            yield
        finally:
            self.site.switch.unlink()

    def _home(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        return self._pair(lambda: self.site.damage_home(fault.target), self.site.repair_home)

    def _program(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        program, _, way = fault.target.partition(" ")
        return self._pair(lambda: self.site.spoil(program, way), lambda: self.site.mend(program))

    @contextlib.contextmanager
    def _clock(self, fault: Fault) -> Iterator[None]:
        self.clock_off = float(fault.target)
        yield
        self.clock_off = 0.0

    @contextlib.contextmanager
    def _stepd(self, fault: Fault) -> Iterator[None]:
        result = [pid for pid in descendants(self._keeper()) if b"slurmstepd: [" in _words(pid)]
        if result:
            send(min(result) if fault.target == "first" else max(result), signal.SIGKILL)
        yield

    def _keeper(self) -> int:
        process = self.site.lab._keeper
        return process.pid if process is not None else os.getpid()

    def _rank(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        """Stop or kill a rank that works now; only one that is below this cluster."""
        events = of_bodies(self.bodies)
        ended = {event.get("job") for event in events if event.what == "end"}
        below = set(descendants(self._keeper()))
        pids = [
            event.get("pid")
            for event in events
            if event.what == "begin" and event.get("job") not in ended and event.get("pid") in below
        ]
        return self._struck(pids, fault)

    def _server(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        """Stop or kill a server, once one serves; only one that is below this cluster."""
        end = time.time() + START_PATIENCE_S
        while time.time() < end:
            below = set(descendants(self._keeper()))
            events = [event for event in of_bodies(self.bodies) if event.what == "serve"]
            if pids := [event.get("pid") for event in events if event.get("pid") in below]:
                return self._struck(pids, fault)
            time.sleep(0.2)
        return contextlib.nullcontext()

    def _supervisor(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        return self._struck(self._wait_for_program("--nodes="), fault)

    def _agent(self, fault: Fault) -> contextlib.AbstractContextManager[None]:
        return self._struck(self._wait_for_program("node"), fault)

    def _wait_for_program(self, option: str) -> list[int]:
        """Return the processes with a run's supervisor and this option, as soon as there is one."""
        end = time.time() + PATIENCE_S
        while True:
            pids = [pid for pid in descendants(self._keeper()) if _runs_supervisor(pid, option)]
            if pids or time.time() > end:
                return pids
            time.sleep(0.1)

    @contextlib.contextmanager
    def _struck(self, pids: Sequence[int], fault: Fault) -> Iterator[None]:
        """Stop the first of these processes for a while, or kill it; nothing if there is none."""
        if pids:
            send(pids[0], signal.SIGSTOP if fault.target == "stopped" else signal.SIGKILL)
        yield
        if pids and fault.target == "stopped" and pids[0] in descendants(self._keeper()):
            send(pids[0], signal.SIGCONT)

    @contextlib.contextmanager
    def _preempted(self, fault: Fault) -> Iterator[None]:
        words = ["-p", "urgent", "-w", fault.target, "--exclusive", "-t", "1", "-o", "/dev/null"]
        self.site.lab.run(["sbatch", *words, "--wrap", f"sleep {fault.seconds}"], check=False)
        yield

    @contextlib.contextmanager
    def _prolog(self, fault: Fault) -> Iterator[None]:
        self.site.flag.touch()
        try:
            yield
        finally:
            self.site.flag.unlink()

    @contextlib.contextmanager
    def _hostile(self, fault: Fault) -> Iterator[None]:
        name = HOSTILE[fault.target]
        words = ["--job-name", name, "--comment", name, "-t", "1", "-o", "/dev/null", "--mem", "10"]
        self.site.lab.run(["sbatch", *words, "--wrap", f"sleep {fault.seconds}"], check=False)
        yield


def _runs_supervisor(pid: int, option: str) -> bool:
    """Tell whether a process is Python with a run's supervisor, and this as its first option."""
    words = _words(pid).decode("utf-8", "replace").split("\0")
    programs = [number for number, word in enumerate(words[:3]) if word.endswith("/supervisor")]
    return bool(programs) and "".join(words[programs[0] + 1 : programs[0] + 2]).startswith(option)


def _replace_schema(path: Path, schema: int) -> int:
    """Write another schema number into a record; return the one before."""
    document = json.loads(path.read_text())
    before = int(document["schema"])
    unfinished = path.with_name("job.json.nemesis")
    unfinished.write_text(json.dumps({**document, "schema": schema}))
    unfinished.replace(path)
    return before


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
