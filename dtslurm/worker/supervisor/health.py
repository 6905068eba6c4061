"""The nodes' health before training: one short step looks, what is bad is left out."""

import contextlib
import os
import re
import socket
import subprocess
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

from ..preflight import network
from ..preflight.findings import BAD, OK, UNKNOWN, WARN, Finding, finding, parse_object
from . import lease, slurm
from .files import json_of
from .restart_policy import Decision

EXIT_CODE = 86  # as of a fabric check that finds it bad
LIMIT_S = 60.0
CLOCKS_S = 3.0  # by which the first node's clock may differ from the controller's, which tells whole seconds
REQUEUES = 3
SILENT = "did not answer"
_LAUNCH = re.compile(r"(?:launch .*failed on node|Node failure on) ([\w.-]+)")


class HealthReport(NamedTuple):
    """What a look brought.

    Attributes:
        findings: by node, of those that began.
        done: the nodes that told everything.
        words: what srun said.
        late: whether the look was ended because its time was up; empty if not.
    """

    findings: Dict[str, List[Finding]]
    done: List[str]
    words: List[str]
    late: List[bool]


class Report(NamedTuple):
    """One node's health."""

    node: str
    ok: bool
    findings: List[Finding]

    def faults(self) -> List[Finding]:
        """Return what is bad."""
        return [one for one in self.findings if one["level"] == BAD]

    def why(self) -> str:
        """Return what is bad in words."""
        return "; ".join("{}: {}".format(one["check"], one["evidence"]) for one in self.faults())


# ---- Looking ----


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
                asked, peer = self._socket.recvfrom(network.MOST)
                if not asked:
                    continue
                said = network.build_answer(asked, self.key, time.time())
                if said:
                    self._socket.sendto(said, peer)
            except OSError:
                if self._socket.fileno() < 0:
                    return

    def close(self) -> None:
        """Stop the server."""
        with contextlib.suppress(OSError):  # raises without a peer, but wakes up the thread in recvfrom
            self._socket.shutdown(socket.SHUT_RD)
        self._socket.close()


def command(top: str, nodes: Sequence[str], more: Sequence[str], head: str, port: int) -> List[str]:
    """Return what starts the look on each node, once."""
    size = ["--nodes={}".format(len(nodes)), "--ntasks={}".format(len(nodes)), "--ntasks-per-node=1"]
    where = ["--nodelist=" + ",".join(nodes), "--overlap"]
    apart = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none"]
    program = ["python3", top, "preflight", os.path.join(top, "health.json"), head, str(port)]
    return ["srun", *where, *size, *apart, *more, *program]


def look(
    argv: Sequence[str],
    limit_s: float = LIMIT_S,
    ended: Callable[[], bool] = lambda: False,
    env: Optional[Mapping[str, str]] = None,
) -> HealthReport:
    """Run the look, for so long at most and until ``ended``, and return what was told."""
    seen = HealthReport({}, [], [], [])
    try:
        process: Any = subprocess.Popen(
            list(argv), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        seen.words.append(str(error))
        return seen
    reader = threading.Thread(target=_read, args=(process.stdout, seen), daemon=True)
    reader.start()
    end = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < end and not ended():
        time.sleep(0.05)
    if process.poll() is None:
        seen.late.append(True)  # srun ends its step at the first; what hangs on a node is left to Slurm
        process.terminate()
        reader.join(2.0)
        process.kill()
    reader.join(2.0)
    process.wait()
    return seen


def _read(output: Any, seen: HealthReport) -> None:
    with output:
        for text in output:
            _take(text, seen)


def _take(text: bytes, seen: HealthReport) -> None:
    values = parse_object(text)
    node = values.get("node")
    if not isinstance(node, str):
        seen.words.append(text.decode("utf-8", "replace").strip()[:200])
        return
    found = seen.findings.setdefault(node, [])
    if values.get("end"):
        seen.done.append(node)
    elif "check" in values:
        found.append(finding(*(str(values.get(key, "")) for key in ("check", "level", "evidence"))))


# ---- Judging: pure ----


def judged(nodes: Sequence[str], seen: HealthReport) -> List[Report]:
    """Return each node's health. Where no node answered at all nothing is known, and nothing is said.

    A node that did not tell everything in time is bad by that. If srun ended the look before its time, as it
    does when it cannot start on one node, only those nodes are that it names.
    """
    named = {match.group(1): text for text in seen.words for match in [_LAUNCH.search(text)] if match}
    if not seen.findings and not set(named) & set(nodes):
        return []
    reports = []
    for node in nodes:
        findings = list(seen.findings.get(node, []))
        if node in named:
            findings.append(finding("answer", BAD, named[node]))
        elif node not in seen.done:
            findings.append(finding("answer", BAD if seen.late else UNKNOWN, SILENT))
        reports.append(Report(node, all(one["level"] != BAD for one in findings), findings))
    return reports


def decide(
    reports: Sequence[Report], before: Sequence[Report], requeues: int, wanted: int, may_requeue: bool
) -> Decision:
    """Return what to do: go, requeue without the bad nodes, or stop.

    Args:
        before: what earlier starts of this run saw.
        requeues: how many requeues were made for bad nodes.
        wanted: nodes that training needs.
    """
    bad = [one for one in reports if not one.ok]
    out = [one.node for one in bad]
    if len(reports) - len(bad) >= wanted or not bad:
        return Decision("go", "{} is left out".format(", ".join(out)) if out else "all nodes are fit", out)
    everywhere = _everywhere([*before, *reports])
    if everywhere:
        text = "every node is bad by the same check, so it is not the node: {}: {}"
        return Decision("stop", text.format(everywhere["check"], everywhere["evidence"]), [])
    again = sorted(set(out) & {one.node for one in before if not one.ok})
    if again:
        text = "{} was found bad before, and this job got it again".format(", ".join(again))
        return Decision("stop", text, out)
    if requeues >= REQUEUES:
        return Decision(
            "stop", "bad nodes were left out {} times, and others are bad too".format(requeues), out
        )
    if not may_requeue:
        return Decision("stop", "no other node is to be had", out)
    return Decision("requeue", "no node is left to take the place of {}".format(", ".join(out)), out)


def _everywhere(reports: Sequence[Report]) -> Optional[Finding]:
    """Return what is bad on every node ever looked at, if these are several; of a missing module, on one."""
    common = set.intersection(*({one["check"] for one in report.faults()} for report in reports))
    found = next((one for one in reports[-1].faults() if one["check"] in common), None)
    if found is None or len({one.node for one in reports}) > 1:
        return found
    return found if found["check"] == "framework" and "No module named" in found["evidence"] else None


def of_events(events: Sequence[Dict[str, Any]]) -> List[Report]:
    """Return what earlier looks saw, out of the run's events."""
    found = []
    for event in events:
        if event.get("node") and isinstance(event.get("findings"), list):
            findings = [one for one in event["findings"] if isinstance(one, dict) and "check" in one]
            clean = [
                finding(*(str(one.get(key, "")) for key in ("check", "level", "evidence")))
                for one in findings
            ]
            found.append(Report(str(event["node"]), bool(event.get("ok")), clean))
    return found


# ---- Acting ----


def before_training(supervisor: Any) -> Optional[int]:
    """Look at the job's nodes; return None if training may begin, else the exit code to end with.

    Bad ones are noted as excluded. A look that brings nothing keeps nobody from training.
    """
    ledger, nodes = supervisor.ledger, supervisor.nodes
    before = of_events(ledger.events("health"))
    began = time.monotonic()
    reports = judged(nodes, _looked_at(supervisor))
    if not reports or supervisor.told is not None:
        return None
    reports = [_with_clock(one, slurm.clock_skew()) if one.node == nodes[0] else one for one in reports]
    for one in reports:
        notable = [found for found in one.findings if found["level"] != OK]
        ledger.event("health", node=one.node, ok=one.ok, findings=notable)
        if not one.ok:
            supervisor.say("health: node {} is bad: {}".format(one.node, one.why()))
        for found in notable:
            if found["level"] == WARN:
                supervisor.say("health: node {}, {}: {}".format(one.node, found["check"], found["evidence"]))
    requeues = sum(1 for one in ledger.events("decision") if one.get("cause") == "health")
    can = os.environ.get("SLURM_JOB_ID") is not None
    least = supervisor.asked.least_nodes
    made = decide(reports, before, requeues, least, can)
    whys = {one.node: one.why() for one in reports}
    for name in made.exclude:
        supervisor.exclude(name, "health: " + whys.get(name, ""))
    took = time.monotonic() - began
    if made.action == "go":
        bad = sum(1 for one in reports if not one.ok)
        text = "{} nodes in {:.1f} s, {} bad".format(len(reports), took, bad)
        supervisor.say("health: {}{}".format(text, "; " + made.reason if bad else ""))
        return None
    ledger.event(
        "decision", action=made.action, reason=made.reason, excluded=list(made.exclude), wait_s=0.0,
        counted=False, cause="health",
    )  # fmt: skip
    supervisor.say("health: {}: {}".format(made.action, made.reason))
    holder = lease.holder(supervisor.run_dir)
    if made.action == "stop" or not supervisor.onward(holder or 0):
        ledger.close_open()
        ledger.begin()  # so that what the job said is found where the words of an attempt are
        ledger.event("ended", holder, exit_code=EXIT_CODE)
    return EXIT_CODE


def _with_clock(report: Report, skew: Optional[float]) -> Report:
    """Return the first node's health with its clock: other nodes' clocks are compared with this one's."""
    if skew is None:
        return report
    text = "{:.0f} s {} the controller's".format(abs(skew), "ahead of" if skew > 0 else "behind")
    found = finding("clock", WARN if abs(skew) > CLOCKS_S else OK, text)
    return report._replace(findings=[*(one for one in report.findings if one["check"] != "clock"), found])


def _looked_at(supervisor: Any) -> HealthReport:
    top, nodes = supervisor.top, supervisor.nodes
    wanted = json_of(os.path.join(top, "health.json"))
    head = str(wanted.get("head") or nodes[0] + str(wanted.get("host_suffix") or ""))
    more = [str(word) for word in wanted.get("srun_options") or []]
    try:
        clock = Clock(head)
    except OSError as error:
        return HealthReport({}, [], [str(error)], [])
    env = {**os.environ, network.KEY: clock.key}
    seen = look(
        command(top, nodes, more, head, clock.port), ended=lambda: supervisor.told is not None, env=env
    )
    clock.close()
    if not seen.findings and supervisor.told is None:
        said = [word for word in seen.words if word][-1:] or ["it told nothing"]
        supervisor.say("health: the nodes could not be looked at, training begins all the same: " + said[0])
    return seen
