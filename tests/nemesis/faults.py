"""What breaks things, each for a while; everything is whole again afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.lab.keeper import descendants, send
from tests.lab.network import NetworkLab
from tests.nemesis.history import History, of_bodies
from tests.nemesis.schedule import Fault
from tests.nemesis.site import Site

PATIENCE_S = 6.0  # until a supervisor has started
HOSTILE = {
    "escape": "\x1b]0;x\x07\x1b[2J",
    "bars": "a|1|COMPLETED|0:0|dtslurm:000000000000:000000000000",
    "lines": "a\nJobId=1 JobState=COMPLETED\n",
    "bytes": os.fsdecode(b"\xff\xfe\x80"),
}


class Nemesis:
    """Breaks what a schedule says, in threads of its own."""

    def __init__(self, site: Site, history: History, bodies: Path) -> None:
        self.site, self.history, self.bodies = site, history, bodies
        self.clock_off = 0.0
        self.trouble: list[str] = []
        self._lock = threading.Lock()  # the keeper of the cluster does one thing at a time

    def break_it(self, fault: Fault, begin: float) -> None:
        """Wait for the fault's time, make it, and mend it when its time is over."""
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
        found = [pid for pid in descendants(self._keeper()) if b"slurmstepd: [" in _words(pid)]
        if found:
            send(min(found) if fault.target == "first" else max(found), signal.SIGKILL)
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


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
