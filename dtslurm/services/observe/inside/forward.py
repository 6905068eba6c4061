"""Forward ports of this machine to the node where a rank or an instance of a role of a run is.

The forwarding follows the run: after a lost connection, a restart or a requeue, the same ports lead to the
node where the same rank or instance runs then.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections.abc import Callable

from dtslurm.errors import HostUnavailable, RequestInvalid, TransportError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.values import dataclass
from dtslurm.remote.worker_program import encode_request, inline_program, run_with_any_python
from dtslurm.services.observe.inside.local_ports import HOST, LocalPort, PortMapping, comes_from_own_user
from dtslurm.services.observe.inside.relay_link import RelayLink
from dtslurm.services.observe.inside.running_process import ProcessFinder, RunningProcess
from dtslurm.services.observe.inside.session import SessionServer
from dtslurm.services.observe.inside.target_process import ProcessSelector, TargetProcess
from dtslurm.services.wiring.context import Context
from dtslurm.slurm import commands
from dtslurm.suggestions import suggest_name
from dtslurm.transport.base import CommandFailed
from dtslurm.worker.probe.execute import GONE

_MODULES = (
    "lib.sockets", "stacks.readers", "stacks.stacks", "probe.execute", "relay.connections", "relay.relay",
)  # fmt: skip
_READ_S = 0.5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_LINK_WAIT_S = 60.0  # a connection waits so long for the relay
_LISTEN_POLL_S = 1.0
_MOST_FAILURES = 3  # steps in a row that do not start

Say = Callable[[str], None]


@dataclass(frozen=True)
class ForwardRequest:
    """What to forward.

    Attributes:
        selector: the rank or the instance whose node has the ports.
        ports: the ports; empty for all ports of an instance of a role that have a name, or for the port of a
            notebook or an editor.
        task: the task of a job array; None for the first one that runs.
    """

    selector: ProcessSelector
    ports: tuple[PortMapping, ...] = ()
    task: str | None = None

    @property
    def has_names(self) -> bool:
        """Whether the number of a port is known only to the run."""
        return not self.ports or any(isinstance(mapping.remote, str) for mapping in self.ports)


@dataclass(frozen=True)
class ForwardOutput:
    """Where the forwarding reports what happens; called from several threads.

    Attributes:
        show: receives each port of this machine, and where it leads to.
        say: receives messages.
        browse: receives the URL of the first port as soon as the job listens there; None to ignore it.
        show_session: receives the session whose port was requested, and the port of this machine, each time
            that the server has started.
    """

    show: Say
    say: Say
    browse: Say | None = None
    show_session: Callable[[SessionServer, int], None] | None = None


def forward(context: Context, record: JobRecord, request: ForwardRequest, output: ForwardOutput) -> None:
    """Forward ports until the run ends.

    Raises:
        RequestInvalid: the run has ended, a port is in use, or the run has no such part.
        HostUnavailable: the first connection failed.
        TransportError: the relay cannot be started on the node.
    """
    if record.holds_allocation:
        raise RequestInvalid(
            [f"job {record.job_id} holds an allocation and has no ranks"],
            hint="name the run in the allocation, such as its first one: "
            f"dtslurm forward {record.job_id}.0 PORT",
        )
    forwarding = _Forwarding(context, record, request, output)
    try:
        forwarding.run()
    finally:
        forwarding.close()


class _Forwarding:
    """The forwarding of one command: the ports of this machine, and the present link to the node."""

    def __init__(
        self, context: Context, record: JobRecord, request: ForwardRequest, output: ForwardOutput
    ) -> None:
        self._context, self._record = context, record
        self._cluster = context.cluster_of(record)
        self._request, self._output = request, output
        self._finder = ProcessFinder(
            context, record, request.selector, task=request.task,
            needs_port_names=request.has_names, say=output.say,
        )  # fmt: skip
        self._ports: dict[PortMapping, LocalPort] = {}
        self._numbers: dict[PortMapping, int] = {}
        self._link: RelayLink | None = None
        self._changed = threading.Condition()
        self._problems: dict[int, str] = {}
        self._node = ""
        self._session: SessionServer | None = None
        self._began_browsing = False

    # ---- The life of the forwarding ----

    def run(self) -> None:
        """Forward until the run has ended."""
        for mapping in self._request.ports:
            if isinstance(mapping.remote, int):
                self._listen(mapping, mapping.remote if mapping.local is None else mapping.local)
        lost_at, loss = 0.0, ""
        failures, pause = 0, _FIRST_PAUSE_S
        while (running := self._finder.wait(newer_than=lost_at)) is not None:
            self._find_numbers(running.process)
            if loss:
                self._output.say(f"the connection was lost ({loss}); connecting again")
            link = RelayLink(
                self._cluster.transport, self._make_argv(running), running.process.node, self._report_problem
            )
            try:
                with link:
                    self._serve(link, running)
            except TransportError as error:
                failures = 0 if link.is_greeted else failures + 1
                pause = _FIRST_PAUSE_S if link.is_greeted else min(_LONGEST_PAUSE_S, 2 * pause)
                loss = self._explain_loss(error, failures)
            finally:
                with self._changed:
                    self._link = None
            lost_at = self._context.clock()
            time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311

    def close(self) -> None:
        """Stop listening, and end the forwardings of the SSH connection."""
        for port in self._ports.values():
            port.close()
        self._cluster.transport.close()

    def _make_argv(self, running: RunningProcess) -> list[str]:
        """Return the command that starts the relay on the node."""
        is_local = self._cluster.profile.scheduler == "local"
        request = {
            "run_dir": running.run_dir,
            "by_node": not is_local,
            "process": running.process.as_json(),
        }
        program = inline_program(_MODULES, "sys.exit(module.main())")
        pythons = [sys.executable] if is_local else []
        argv = run_with_any_python("dtslurm-forward", program, encode_request(request), pythons)
        return argv if is_local else commands.step_for_ports(running.job_id, running.process.node, argv)

    def _serve(self, link: RelayLink, running: RunningProcess) -> None:
        """Use a link until it ends, which is an error."""
        while not link.is_greeted:
            link.read(_READ_S)
        self._announce(running.process)
        self._announce_session(running.session)
        with self._changed:
            self._link = link
            self._changed.notify_all()
        if self._output.browse is not None and not self._began_browsing:
            self._began_browsing = True
            threading.Thread(target=self._browse, daemon=True, name="dtslurm-browse").start()
        while True:
            link.read(_READ_S)

    def _explain_loss(self, error: TransportError, failures: int) -> str:
        """Return why a link ended, empty if the process of the job has ended.

        Raises:
            TransportError: another link would end in the same way.
        """
        if not error.transient or (isinstance(error, HostUnavailable) and not self._node):
            raise error
        if isinstance(error, CommandFailed):
            if error.code == GONE:
                return ""
            if failures >= _MOST_FAILURES:
                raise TransportError(
                    "the step that forwards the ports does not start", evidence=error.evidence
                ) from None
        return ": ".join([error.message, *error.evidence[-1:]])

    def _announce(self, process: TargetProcess) -> None:
        if not self._node:
            for mapping, port in self._ports.items():
                self._output.show(f"{HOST}:{port.number} -> {process.node}:{self._numbers[mapping]}")
                port.accept(self._handle)
            self._output.say("forwarding; Ctrl-C ends it")
        elif self._node != process.node:
            self._output.say(f"connected: the ports lead to {process.node} now")
        else:
            self._output.say(f"connected to {process.node} again")
        self._node = process.node
        self._problems.clear()

    def _announce_session(self, session: SessionServer | None) -> None:
        if session is not None and session != self._session and self._output.show_session is not None:
            self._output.show_session(session, next(iter(self._ports.values())).number)
        self._session = session

    # ---- The ports ----

    def _listen(self, mapping: PortMapping, number: int) -> None:
        try:
            self._ports[mapping] = LocalPort(mapping, number)
        except RequestInvalid as error:
            if self._cluster.profile.scheduler == "local" and number == mapping.remote:
                error.hint = (
                    f"cluster local runs jobs on this machine: http://{HOST}:{number} may be the job's"
                )
                error.hint += f", or 0:{number} takes a free port"
            raise

    def _find_numbers(self, process: TargetProcess) -> None:
        """Note the number of each port on the node, and listen at a port of this machine for it."""
        mappings = self._request.ports or tuple(PortMapping(name) for name in process.ports)
        if not mappings:
            raise RequestInvalid(
                [f"{process.label} has no port with a name"], hint="give the number of a port"
            )
        for mapping in mappings:
            number = mapping.remote if isinstance(mapping.remote, int) else process.ports.get(mapping.remote)
            if number is None:
                names = ", ".join(process.ports) or "none"
                suggestion = suggest_name(str(mapping.remote), list(process.ports)) or f" (ports: {names})"
                raise RequestInvalid([f"{process.label} has no port {mapping.remote!r}{suggestion}"])
            self._numbers[mapping] = number
            if mapping in self._ports:
                continue
            if mapping.local is not None:
                self._listen(mapping, mapping.local)
                continue
            try:
                self._ports[mapping] = LocalPort(mapping, number)
            except RequestInvalid:  # the user did not choose this number
                self._ports[mapping] = LocalPort(mapping, 0)

    def _handle(self, port: LocalPort, connection: socket.socket) -> None:
        """Connect a connection to this machine's port to the port of the node."""
        if not comes_from_own_user(connection):
            connection.close()
            self._output.say(f"refused a connection of another user to port {port.number}")
            return
        link = self._wait_for_link()
        if link is None:
            connection.close()
            return
        number = self._numbers[port.mapping]
        self._report_problem(number, link.carry(connection, number))

    def _wait_for_link(self) -> RelayLink | None:
        with self._changed:
            self._changed.wait_for(lambda: self._link is not None, _LINK_WAIT_S)
            return self._link

    def _report_problem(self, number: int, problem: str) -> None:
        """Report a problem of a port once, until a connection to it succeeds."""
        with self._changed:
            is_known = self._problems.get(number, "") == problem
            self._problems[number] = problem
        if problem and not is_known:
            self._output.say(problem)

    def _browse(self) -> None:
        """Pass on the URL of the first port as soon as the job listens there."""
        mapping, port = next(iter(self._ports.items()))
        while True:
            link = self._wait_for_link()
            if link is not None and not link.ask(self._numbers[mapping]).problem:
                if self._output.browse is not None:
                    path = "/" if self._session is None else self._session.path
                    self._output.browse(f"http://{HOST}:{port.number}{path}")
                return
            time.sleep(_LISTEN_POLL_S)
