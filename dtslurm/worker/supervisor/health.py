"""The preflight on the job's nodes: a short step checks each node before training and excludes bad nodes."""

import contextlib
import os
import re
import socket
import subprocess
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

from ..lib.json_records import read_object
from ..preflight import network
from ..preflight.findings import BAD, OK, UNKNOWN, WARN, Finding, finding, parse_object
from . import lease, slurm
from .restart_policy import Decision

EXIT_CODE = 86  # the same code as that of a failed fabric check
LIMIT_S = 60.0
CLOCKS_S = 3.0  # tolerated difference between the first node's clock and the controller's whole seconds
REQUEUES = 3
SILENT = "did not answer"
_LAUNCH = re.compile(r"(?:launch .*failed on node|Node failure on) ([\w.-]+)")


class HealthReport(NamedTuple):
    """The output of the preflight step.

    Attributes:
        findings: the findings of each node that started its checks.
        done: the nodes that completed their checks.
        words: the output of srun.
        late: not empty if the step was ended because its time was up.
    """

    findings: Dict[str, List[Finding]]
    done: List[str]
    words: List[str]
    late: List[bool]


class Report(NamedTuple):
    """The health of one node."""

    node: str
    ok: bool
    findings: List[Finding]

    def faults(self) -> List[Finding]:
        """Return the findings of level bad."""
        return [entry for entry in self.findings if entry["level"] == BAD]

    def why(self) -> str:
        """Return the bad findings as text."""
        return "; ".join("{}: {}".format(fault["check"], fault["evidence"]) for fault in self.faults())


# ---- Running the checks ----


class Clock:
    """A UDP server that returns this node's time in response to signed requests.

    UDP has no connections, so idle clients cannot block it.

    Attributes:
        key: hexadecimal signing key; srun passes it in the environment, which other users cannot read.
    """

    def __init__(self, head: str) -> None:
        self.key = os.urandom(16).hex()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind((network.resolve_own_address(head), 0))
        except OSError:
            self._socket.bind(("", 0))  # the address is not on this node, for example because of NAT
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                question, peer = self._socket.recvfrom(network.MOST)
                if not question:
                    continue
                response = network.build_answer(question, self.key, time.time())
                if response:
                    self._socket.sendto(response, peer)
            except OSError:
                if self._socket.fileno() < 0:
                    return

    def close(self) -> None:
        """Stop the server."""
        with contextlib.suppress(OSError):  # raises without a peer, but wakes up the thread in recvfrom
            self._socket.shutdown(socket.SHUT_RD)
        self._socket.close()


def command(
    top: str, nodes: Sequence[str], more: Sequence[str], head: str, port: int, component: int = 0
) -> List[str]:
    """Return the srun command that starts the preflight once on each node of a component of the job."""
    size_options = ["--nodes={}".format(len(nodes)), "--ntasks={}".format(len(nodes)), "--ntasks-per-node=1"]
    placement_options = ["--nodelist=" + slurm.join_hostnames(nodes), "--overlap"]
    isolation_options = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none"]
    isolation_options += ["--het-group={}".format(component)] if component else []
    program = ["python3", top, "preflight", _requirements_path(top, component), head, str(port)]
    return ["srun", *placement_options, *size_options, *isolation_options, *more, *program]


def _requirements_path(top: str, component: int) -> str:
    """Return the path of the file with what the nodes of a component should have."""
    return os.path.join(top, "health-{}.json".format(component) if component else "health.json")


def look(
    argv: Sequence[str],
    limit_s: float = LIMIT_S,
    has_ended: Callable[[], bool] = lambda: False,
    env: Optional[Mapping[str, str]] = None,
) -> HealthReport:
    """Run the preflight step until its end, ``limit_s`` seconds or ``has_ended``, and return its output."""
    report = HealthReport({}, [], [], [])
    try:
        process: Any = subprocess.Popen(
            list(argv), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        report.words.append(str(error))
        return report
    reader = threading.Thread(target=_read_output, args=(process.stdout, report), daemon=True)
    reader.start()
    end = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < end and not has_ended():
        time.sleep(0.05)
    if process.poll() is None:
        report.late.append(True)
        process.terminate()  # srun ends its step on the first TERM; Slurm cleans up what hangs on a node
        reader.join(2.0)
        process.kill()
    reader.join(2.0)
    process.wait()
    return report


def _read_output(output: Any, report: HealthReport) -> None:
    with output:
        for text in output:
            _parse_line(text, report)


def _parse_line(text: bytes, report: HealthReport) -> None:
    values = parse_object(text)
    node = values.get("node")
    if not isinstance(node, str):
        report.words.append(text.decode("utf-8", "replace").strip()[:200])
        return
    findings = report.findings.setdefault(node, [])
    if values.get("end"):
        report.done.append(node)
    elif "check" in values:
        findings.append(finding(*(str(values.get(key, "")) for key in ("check", "level", "evidence"))))


# ---- Judging the findings: pure functions ----


def judge_nodes(nodes: Sequence[str], health_report: HealthReport) -> List[Report]:
    """Return the health of each node; nothing if no node answered at all, because nothing is known then.

    A node that did not complete its checks in time is bad. If srun ended the step early, as it does when it
    cannot start on a node, only the nodes that its output names are bad.
    """
    named_nodes = {
        match.group(1): text for text in health_report.words for match in [_LAUNCH.search(text)] if match
    }
    if not health_report.findings and not set(named_nodes) & set(nodes):
        return []
    reports = []
    for node in nodes:
        findings = list(health_report.findings.get(node, []))
        if node in named_nodes:
            findings.append(finding("answer", BAD, named_nodes[node]))
        elif node not in health_report.done:
            findings.append(finding("answer", BAD if health_report.late else UNKNOWN, SILENT))
        reports.append(Report(node, all(entry["level"] != BAD for entry in findings), findings))
    return reports


def decide(
    reports: Sequence[Report],
    earlier_reports: Sequence[Report],
    requeues: int,
    may_requeue: bool,
    *,
    are_enough: bool,
) -> Decision:
    """Return the action: go, requeue without the bad nodes, or stop.

    Args:
        earlier_reports: the reports of earlier starts of this run.
        requeues: number of earlier requeues because of bad nodes.
        are_enough: the healthy nodes suffice for the run.
    """
    bad = [report for report in reports if not report.ok]
    names = [report.node for report in bad]
    if are_enough or not bad:
        return Decision(
            "go",
            "{} {} excluded".format(", ".join(names), "are" if len(names) > 1 else "is")
            if names
            else "all nodes passed the checks",
            names,
        )
    common_fault = _find_common_fault([*earlier_reports, *reports])
    if common_fault:
        text = "every node failed the same check, so the nodes are not the cause: {}: {}"
        return Decision("stop", text.format(common_fault["check"], common_fault["evidence"]), [])
    found_again = sorted(set(names) & {report.node for report in earlier_reports if not report.ok})
    if found_again:
        text = "{} failed the checks before, and Slurm allocated {} again"
        found = text.format(", ".join(found_again), "them" if len(found_again) > 1 else "it")
        return Decision("stop", found, names)
    if requeues >= REQUEUES:
        return Decision(
            "stop", "bad nodes were excluded {} times, and other nodes are bad too".format(requeues), names
        )
    if not may_requeue:
        return Decision("stop", "no other node is available", names)
    return Decision("requeue", "no node is left to replace {}".format(", ".join(names)), names)


def are_enough(reports: Sequence[Report], components: Sequence[Sequence[str]], needed: Sequence[int]) -> bool:
    """Return whether the healthy nodes suffice: in each component, as many as it needs.

    Args:
        needed: for each component, the number of nodes that the run needs there.
    """
    bad = {report.node for report in reports if not report.ok}
    return all(len(set(nodes) - bad) >= needed[component] for component, nodes in enumerate(components))


def _find_common_fault(reports: Sequence[Report]) -> Optional[Finding]:
    """Return the fault that every checked node has, None without one.

    A single node counts only for a missing Python module.
    """
    common = set.intersection(*({entry["check"] for entry in report.faults()} for report in reports))
    fault = next((entry for entry in reports[-1].faults() if entry["check"] in common), None)
    if fault is None or len({report.node for report in reports}) > 1:
        return fault
    return fault if fault["check"] == "framework" and "No module named" in fault["evidence"] else None


def of_events(events: Sequence[Dict[str, Any]]) -> List[Report]:
    """Return the reports of earlier preflights from the run's events."""
    reports = []
    for event in events:
        if event.get("node") and isinstance(event.get("findings"), list):
            entries = [entry for entry in event["findings"] if isinstance(entry, dict) and "check" in entry]
            findings = [
                finding(*(str(entry.get(key, "")) for key in ("check", "level", "evidence")))
                for entry in entries
            ]
            reports.append(Report(str(event["node"]), bool(event.get("ok")), findings))
    return reports


# ---- Acting on the reports ----


def before_training(supervisor: Any) -> Optional[int]:
    """Check the job's nodes; return None if training may begin, else the exit code of the job.

    Bad nodes are recorded as excluded. An inconclusive check does not block training.
    """
    ledger, nodes = supervisor.ledger, supervisor.nodes
    earlier_reports = of_events(ledger.events("health"))
    began = time.monotonic()
    reports = _check_components(supervisor)
    if not reports or supervisor.term_at is not None:
        return None
    reports = [
        _with_clock(report, slurm.clock_skew()) if report.node == nodes[0] else report for report in reports
    ]
    for report in reports:
        notable = [entry for entry in report.findings if entry["level"] != OK]
        ledger.event("health", node=report.node, ok=report.ok, findings=notable)
        if not report.ok:
            supervisor.say("health: node {} is bad: {}".format(report.node, report.why()))
        for entry in notable:
            if entry["level"] == WARN:
                supervisor.say(
                    "health: node {}, {}: {}".format(report.node, entry["check"], entry["evidence"])
                )
    requeues = sum(1 for event in ledger.events("decision") if event.get("cause") == "health")
    may_requeue = slurm.can_requeue()
    suffices = are_enough(reports, supervisor.components, _count_needed_nodes(supervisor))
    decision = decide(reports, earlier_reports, requeues, may_requeue, are_enough=suffices)
    reasons = {report.node: report.why() for report in reports}
    for name in decision.exclude:
        supervisor.exclude(name, "health: " + reasons.get(name, ""))
    elapsed_s = time.monotonic() - began
    if decision.action == "go":
        bad_count = sum(1 for report in reports if not report.ok)
        nodes = "1 node" if len(reports) == 1 else "{} nodes".format(len(reports))
        text = "{} in {:.1f} s, {} bad".format(nodes, elapsed_s, bad_count)
        supervisor.say("health: {}{}".format(text, "; " + decision.reason if bad_count else ""))
        return None
    ledger.event(
        "decision", action=decision.action, reason=decision.reason, excluded=list(decision.exclude),
        wait_s=0.0, counted=False, cause="health",
    )  # fmt: skip
    supervisor.say("health: {}: {}".format(decision.action, decision.reason))
    holder = lease.holder(supervisor.run_dir)
    if decision.action == "stop" or not supervisor.onward(holder or 0):
        ledger.close_open()
        ledger.begin()  # so that the job's output is found where attempts have their logs
        ledger.event("ended", holder, exit_code=EXIT_CODE)
    return EXIT_CODE


def _with_clock(report: Report, skew: Optional[float]) -> Report:
    """Return the first node's report with its clock: the clocks of other nodes are compared with this one."""
    if skew is None:
        return report
    text = "{:.0f} s {} the controller's".format(abs(skew), "ahead of" if skew > 0 else "behind")
    clock_finding = finding("clock", WARN if abs(skew) > CLOCKS_S else OK, text)
    return report._replace(
        findings=[*(entry for entry in report.findings if entry["check"] != "clock"), clock_finding]
    )


def head_of(top: str, nodes: Sequence[str]) -> str:
    """Return the name under which other nodes reach the first node."""
    expected = read_object(os.path.join(top, "health.json"))
    return str(expected.get("head") or nodes[0] + str(expected.get("host_suffix") or ""))


def _count_needed_nodes(supervisor: Any) -> List[int]:
    """Return for each component of the job the number of nodes that the run needs there."""
    needed = [0] * len(supervisor.components)
    needed[0] = supervisor.settings.least_nodes
    for role in supervisor.roles.plan.roles if supervisor.roles is not None else ():
        needed[role.component] += role.nodes  # none for a role that shares nodes
    return needed


def _check_components(supervisor: Any) -> List[Report]:
    """Return the health of all nodes that could be checked; the components are checked one after another."""
    reports: List[Report] = []
    for number, nodes in enumerate(supervisor.components):
        if supervisor.term_at is None:
            reports += judge_nodes(nodes, _run_preflight(supervisor, number))
    return reports


def _run_preflight(supervisor: Any, component: int) -> HealthReport:
    top, nodes = supervisor.top, supervisor.components[component]
    expected = read_object(_requirements_path(top, component))
    head = head_of(top, supervisor.nodes)
    profile_options = [str(word) for word in expected.get("srun_options") or []]
    try:
        clock = Clock(head)
    except OSError as error:
        return HealthReport({}, [], [str(error)], [])
    env = {**os.environ, network.KEY: clock.key}
    if component:  # the CPUs of a rank are those of other nodes
        env = {name: value for name, value in env.items() if not name.endswith("_CPUS_PER_TASK")}
    report = look(
        command(top, nodes, profile_options, head, clock.port, component),
        has_ended=lambda: supervisor.term_at is not None,
        env=env,
    )
    clock.close()
    if not report.findings and supervisor.term_at is None:
        last_line = [word for word in report.words if word][-1:] or ["the nodes sent no answer"]
        supervisor.say("health: the nodes could not be checked; training starts anyway: " + last_line[0])
    return report
