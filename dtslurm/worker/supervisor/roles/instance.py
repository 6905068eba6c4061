"""One instance of a role: a step of the job, which outlives a supervisor that is killed."""

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

from ...lib.json_records import read_object, whole_number
from .. import agents, slurm
from ..files import names_in, text_of
from ..step import RUNNER
from .plan import RolePlan

WAITING, STARTING, READY = "waiting", "starting", "ready"
UNRESPONSIVE, ENDED, FAILED, REMOVED = "unresponsive", "ended", "failed", "removed"
ALIVE = (STARTING, READY, UNRESPONSIVE)
KILL_AFTER_S = 3.0
SCANCEL_S = 5.0
_STEP = re.compile(r"\d+\.\d+")


class Instance:
    """An instance of a role.

    Attributes:
        slot: the number of the first port of this instance among all ports of the job.
        nodes: the nodes that it runs on, empty before its first start.
        gpus: the numbers of the GPUs that it may use, None for all GPUs of the node.
        start: the number of its current or last start, -1 before the first. Numbers are never reused.
        restarts: how many of its starts followed a failure.
        was_ready: whether one of its starts has become ready.
        state: one of the constants above.
        started_at, changed_at: when it was started, and when its state changed (epoch seconds).
        answered_at: when it last passed its readiness check (monotonic clock).
        host, ports: its address, as its task has written it; empty while unknown.
        not_before: when it may start again (monotonic clock).
        load: running and waiting requests, and requests per second, as far as known.
    """

    def __init__(self, run_dir: str, role: RolePlan, number: int, slot: int) -> None:
        self.run_dir, self.role, self.number, self.slot = run_dir, role, number, slot
        self.name = "{}-{}".format(role.name, number)
        self.folder = os.path.join(run_dir, "roles", self.name)
        self.nodes: List[str] = []
        self.gpus: Optional[List[int]] = None
        starts = [int(name) for name in names_in(os.path.join(self.folder, "ranks")) if name.isdigit()]
        self.start = max(starts) if starts else -1  # an earlier start of the job has used these numbers
        self.restarts = 0
        self.was_ready = False
        self.state = WAITING
        self.started_at = self.changed_at = 0.0
        self.answered_at = self.not_before = 0.0
        self.host = ""
        self.ports: Dict[str, int] = {}
        self.load: Dict[str, float] = {}
        self.requests: Optional[List[float]] = None
        self._process: Any = None

    @property
    def node(self) -> str:
        """The names of its nodes, separated by commas."""
        return ",".join(self.nodes)

    @property
    def log(self) -> str:
        """The path of the log of the current start."""
        return os.path.join(self.folder, "logs", str(self.start), "rank-0.log")

    @property
    def url(self) -> str:
        """The URL of the first port, empty while it is unknown or without ports."""
        names = [name for name in self.role.ports if name in self.ports]
        return "http://{}:{}".format(self.host, self.ports[names[0]]) if names and self.host else ""

    @property
    def _record_path(self) -> str:
        return os.path.join(self.folder, "ranks", str(self.start), "step.json")

    @property
    def _address_path(self) -> str:
        return os.path.join(self.folder, "ranks", str(self.start), "address.json")

    def set_state(self, state: str) -> None:
        """Change the state."""
        self.state, self.changed_at = state, time.time()
        self.was_ready = self.was_ready or state == READY

    def begin(
        self, top: str, nodes: List[str], ports: Dict[str, int], port_step: int, env: Dict[str, str]
    ) -> None:
        """Start the instance.

        Args:
            top: the path of the supervisor's own files.
            ports: the port to try first, by name.
            port_step: the distance to the next port to try.
            env: the addresses of other roles.

        Raises:
            OSError: the instance's files cannot be written.
        """
        self.start, self.nodes = self.start + 1, nodes
        self.host, self.ports, self.load, self.requests = "", {}, {}, None
        for kind in ("logs", "ranks"):
            os.makedirs(os.path.join(self.folder, kind, str(self.start)), exist_ok=True)
        step_env = dict(agents.step_on(top, self.node)[1], **env)
        step_env.update(
            DTSLURM_ROLE=self.role.name,
            DTSLURM_ROLE_INSTANCE=str(self.number),
            DTSLURM_ROLE_START=str(self.start),
            DTSLURM_ROLE_LOG=self.log,
            DTSLURM_ROLE_FILE=self._address_path,
            DTSLURM_ROLE_GPUS="all" if self.gpus is None else ",".join(map(str, self.gpus)),
            DTSLURM_PORT_STEP=str(port_step),
        )
        for name, port in ports.items():
            step_env["DTSLURM_PORT_" + name.upper()] = str(port)
        script = os.path.join(self.run_dir, "role-{}.sh".format(self.role.name))
        log = os.path.join(os.path.dirname(self.log), "step.log")
        self.started_at = time.time()
        self.set_state(STARTING)
        self.answered_at = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, RUNNER, self._record_path, log, script, self.node],
            env=step_env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def adopt(self, values: Dict[str, Any]) -> None:
        """Take over an instance that a killed supervisor had started, from what it recorded."""
        self.nodes = [name for name in str(values.get("node") or "").split(",") if name]
        self.start = whole_number(values.get("start")) or 0
        gpus = values.get("gpus")
        self.gpus = (
            [number for number in gpus if whole_number(number) is not None]
            if isinstance(gpus, list)
            else None
        )
        self.restarts = whole_number(values.get("restarts")) or 0
        self.started_at = float(values.get("started") or 0.0)
        state = str(values.get("state") or WAITING)
        self.set_state(state)
        if state == READY:
            self.set_state(UNRESPONSIVE)  # until the next check
        self.answered_at = time.monotonic()

    def find_address(self) -> bool:
        """Return whether the instance's task has begun; its address is known then."""
        if self.host:
            return True
        address = read_object(self._address_path)
        ports = address.get("ports")
        if not isinstance(address.get("host"), str) or not isinstance(ports, dict):
            return False
        self.host = address["host"]
        self.ports = {name: port for name, port in ports.items() if whole_number(port)}
        return True

    def code(self) -> Optional[int]:
        """Return the exit code, None while the instance runs; 137 if nothing recorded it."""
        if self._process is not None:
            code: Optional[int] = self._process.poll()
            return code if code is None or code >= 0 else 128 - code
        record = read_object(self._record_path)
        exit_code = whole_number(record.get("exit_code"))
        if exit_code is not None:
            return exit_code
        arguments = (text_of("/proc/{}/cmdline".format(record.get("runner"))) or "").split("\0")
        return None if self._record_path in arguments else 128 + signal.SIGKILL

    def terminate(self) -> None:
        """Ask Slurm to end the instance's step; srun sends KILL to a step that TERM does not end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the processes that started the step; Slurm then ends the step."""
        self._signal(signal.SIGKILL)
        runner = read_object(self._record_path).get("runner")
        _send(runner or getattr(self._process, "pid", None), signal.SIGKILL)
        step = str(read_object(self._address_path).get("step"))
        if _STEP.fullmatch(step) and "SLURM_LOCAL_STATE" not in os.environ:
            if self.role.component:  # the step was started with the id of the whole job
                step = "{}.{}".format(slurm.component_id(self.role.component), step.partition(".")[2])
            slurm.call(["scancel", "--signal=KILL", step], SCANCEL_S)  # a step outlives its srun

    def _signal(self, number: int) -> None:
        _send(read_object(self._record_path).get("pid"), number)

    def describe(self) -> Dict[str, Any]:
        """Return what roles.json states about the instance."""
        values: Dict[str, Any] = {
            "instance": self.number, "state": self.state, "node": self.node, "gpus": self.gpus,
            "start": self.start, "restarts": self.restarts, "started": round(self.started_at, 1),
            "changed": round(self.changed_at, 1), "host": self.host, "ports": self.ports, "url": self.url,
        }  # fmt: skip
        return dict(values, load=self.load) if self.load else values


def _send(pid: Any, number: int) -> None:
    """Send a signal to a process that may no longer exist."""
    if isinstance(pid, int):
        try:
            os.kill(pid, number)
        except OSError:
            return
