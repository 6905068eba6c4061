"""One node's look at itself: every check in a process of its own, for one that hangs must keep no other."""

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
    """A check: what it does, how long it may take, and what it means if it does not answer in time."""

    name: str
    look: Callable[[], List[Finding]]
    limit_s: float = 30.0
    late: str = BAD


def checks(wanted: Mapping[str, Any], env: Mapping[str, str], head: str, port: int) -> List[Check]:
    """Return what is to be looked at on this node.

    Args:
        wanted: what submit wrote down of the job and its nodes.
        env: ``DTSLURM_SYSFS`` stands for ``/sys``, with ``%N`` as the node's name.
    """
    sysfs = env.get("DTSLURM_SYSFS", "/sys").replace("%N", name_of(env))
    python, work_dir = str(wanted.get("python") or ""), str(wanted.get("work_dir") or "")
    found = [
        Check("hca", lambda: ports.ports(wanted, sysfs)),
        Check("disk", lambda: places.disk(wanted, env)),
        Check("shm", places.shm),
        Check("run-dir", lambda: places.run_dir(env["DTSLURM_RUN_DIR"])),
        Check("dns", lambda: network.dns(head, bool(wanted.get("rendezvous"))), late=WARN),
        Check("clock", lambda: network.clock(head, port, env.get(network.KEY, "")), 20.0, UNKNOWN),
    ]
    if wanted.get("gpus"):
        found.append(Check("gpus", lambda: gpus.gpus(wanted, env, sysfs)))
        if (wanted.get("vendor") or "nvidia") == "nvidia":
            found.append(Check("xid", kernel.kernel_log, 15.0, UNKNOWN))
    if wanted.get("framework"):
        name = str(wanted["framework"])
        found.append(
            Check("framework", lambda: framework.framework(python, name, work_dir), LIMIT_S - 2.0, WARN)
        )
    return found


def name_of(env: Mapping[str, str]) -> str:
    """Return this node's name in Slurm."""
    return env.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]


def start(check: Check) -> Tuple[int, int]:
    """Start a check; return its process id and where its answer comes from."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # one that hangs must not hold srun's pipes
            os.dup2(null, descriptor)
        try:
            found = check.look()
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing is known then
            found = [finding(check.name, UNKNOWN, "the check itself failed: {!r}".format(error))]
        os.write(writing, json.dumps(found).encode())
    finally:
        os._exit(0)


def run(wanted: List[Check], tell: Callable[[Finding], None]) -> None:
    """Make all checks at the same time, and tell each finding as it comes."""
    begin = time.monotonic()
    waiting: Dict[int, Tuple[Check, int, bytes]] = {}
    for check in wanted:
        pid, descriptor = start(check)
        waiting[descriptor] = (check, pid, b"")
    while waiting:
        passed = time.monotonic() - begin
        for descriptor, (check, pid, _) in list(waiting.items()):
            limit = min(check.limit_s, LIMIT_S)
            if passed > limit:
                tell(finding(check.name, check.late, "did not answer within {:.0f} s".format(limit)))
                kill(pid)
                del waiting[descriptor]
        for descriptor in select.select(list(waiting), [], [], 0.5)[0]:
            check, pid, data = waiting[descriptor]
            more = os.read(descriptor, 1 << 16)
            if more:
                waiting[descriptor] = (check, pid, data + more)
                continue
            del waiting[descriptor]
            for one in answer(check, data):
                tell(one)


def answer(check: Check, data: bytes) -> List[Finding]:
    """Return the findings in what a check's process wrote."""
    try:
        found: List[Finding] = json.loads(data.decode())
    except ValueError:  # a library that crashes takes its process with it
        return [finding(check.name, UNKNOWN, "the check's process ended without an answer")]
    return found


def kill(pid: int) -> None:
    """End a check and what it started; one stuck in the kernel cannot be waited for."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        return


def main(words: List[str]) -> None:
    """Run as ``FILE HEAD PORT`` on a node; FILE tells what its job needs.

    Every finding is one line on stdout, the last line says that there are no more.
    """
    path, head, port = words
    with open(path) as file:
        wanted = json.load(file)
    env = {key: value for key, value in os.environ.items() if re.match(r"^\w+$", key)}
    node = name_of(env)

    def say(**values: Any) -> None:
        os.write(1, line(dict(values, node=node)))

    say(begin=True)
    run(checks(wanted, env, head, int(port)), lambda found: say(**found))
    say(end=True)
    sys.stdout.flush()
    os._exit(0)
