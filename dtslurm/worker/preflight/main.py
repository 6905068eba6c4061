"""The preflight of a node: runs each check in its own process, so that a hanging check blocks no other."""

import json
import os
import re
import select
import signal
import sys
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Tuple

from . import framework, gpus, kernel, network, places, ports
from .findings import BAD, UNKNOWN, WARN, Finding, finding, line

LIMIT_S = 45.0


class Check(NamedTuple):
    """A check: its function, its time limit, and the level of its finding if it exceeds the limit."""

    name: str
    look: Callable[[], List[Finding]]
    limit_s: float = 30.0
    late: str = BAD


def checks(requirements: Mapping[str, Any], env: Mapping[str, str], head: str, port: int) -> List[Check]:
    """Return the checks for this node.

    Args:
        requirements: those of the job, and the profile's description of its nodes, as of the submission.
        env: ``DTSLURM_SYSFS`` replaces ``/sys``, with ``%N`` for the node's name.
    """
    sysfs = env.get("DTSLURM_SYSFS", "/sys").replace("%N", name_of(env))
    python, work_dir = str(requirements.get("python") or ""), str(requirements.get("work_dir") or "")
    node_checks = [
        Check("hca", lambda: ports.ports(requirements, sysfs)),
        Check("disk", lambda: places.disk(requirements, env)),
        Check("shm", places.shm),
        Check("run-dir", lambda: places.run_dir(env["DTSLURM_RUN_DIR"])),
        Check("dns", lambda: network.dns(head, bool(requirements.get("rendezvous"))), late=WARN),
        Check("clock", lambda: network.clock(head, port, env.get(network.KEY, "")), 20.0, UNKNOWN),
    ]
    if requirements.get("gpus"):
        node_checks.append(Check("gpus", lambda: gpus.gpus(requirements, env, sysfs)))
        if (requirements.get("vendor") or "nvidia") == "nvidia":
            node_checks.append(Check("xid", kernel.kernel_log, 15.0, UNKNOWN))
    if requirements.get("framework"):
        name = str(requirements["framework"])
        node_checks.append(
            Check("framework", lambda: framework.framework(python, name, work_dir), LIMIT_S - 2.0, WARN)
        )
    return node_checks


def name_of(env: Mapping[str, str]) -> str:
    """Return this node's name in Slurm."""
    return env.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]


def start(check: Check) -> Tuple[int, int]:
    """Start a check; return its process id and the descriptor that its findings are read from."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # a hanging check must not keep srun's pipes open
            os.dup2(null, descriptor)
        try:
            findings = check.look()
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing is known then
            findings = [finding(check.name, UNKNOWN, "the check itself failed: {!r}".format(error))]
        os.write(writing, json.dumps(findings).encode())
    finally:
        os._exit(0)


def run(requirements: List[Check], tell: Callable[[Finding], None]) -> None:
    """Run all checks at the same time, and pass on each finding as it arrives."""
    started_at = time.monotonic()
    waiting: Dict[int, Tuple[Check, int, bytes]] = {}
    for check in requirements:
        pid, descriptor = start(check)
        waiting[descriptor] = (check, pid, b"")
    while waiting:
        elapsed_s = time.monotonic() - started_at
        for descriptor, (check, pid, _) in list(waiting.items()):
            limit = min(check.limit_s, LIMIT_S)
            if elapsed_s > limit:
                tell(finding(check.name, check.late, "did not end within {:.0f} s".format(limit)))
                kill(pid)
                del waiting[descriptor]
        for descriptor in select.select(list(waiting), [], [], 0.5)[0]:
            check, pid, data = waiting[descriptor]
            chunk = os.read(descriptor, 1 << 16)
            if chunk:
                waiting[descriptor] = (check, pid, data + chunk)
                continue
            del waiting[descriptor]
            for entry in answer(check, data):
                tell(entry)


def answer(check: Check, data: bytes) -> List[Finding]:
    """Return the findings in the output of a check's process."""
    try:
        findings: List[Finding] = json.loads(data.decode())
    except ValueError:  # a crash in a library ends the process without output
        return [finding(check.name, UNKNOWN, "the check's process ended without an answer")]
    return findings


def kill(pid: int) -> None:
    """Kill a check and its child processes, without waiting: a process stuck in the kernel does not end."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        return


def main(words: List[str]) -> None:
    """Run as ``FILE HEAD PORT`` on a node; FILE has the requirements of its job.

    Prints each finding as one line; the last line marks the end.
    """
    path, head, port = words
    with open(path) as file:
        requirements = json.load(file)
    env = {key: value for key, value in os.environ.items() if re.match(r"^\w+$", key)}
    node = name_of(env)

    def say(**values: Any) -> None:
        os.write(1, line(dict(values, node=node)))

    say(begin=True)
    run(checks(requirements, env, head, int(port)), lambda finding: say(**finding))
    say(end=True)
    sys.stdout.flush()
    os._exit(0)
