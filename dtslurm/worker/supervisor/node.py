"""On each node beside the ranks: says that the node is there, and ends ranks of an attempt that is over.

Every few seconds it writes ``ranks/<attempt>/beats/<node>.json``: how much CPU time each rank here has used,
how much it has read and written, and what its main thread waits in. When another attempt has the lease it
kills what is left of this one here.
"""

import json
import os
import re
import signal
import sys
import time
from typing import Any, Dict, List, Optional

from ..stacks import stacks
from . import lease
from .files import json_of, text_of, try_put
from .heartbeats import WANTED

BEAT_S = 3.0
TICK = float(os.sysconf("SC_CLK_TCK"))


def environment_of(pid: int) -> Dict[str, str]:
    """Return a process's environment as it was when it started, empty where it cannot be read."""
    found = {}
    for item in (text_of("/proc/{}/environ".format(pid)) or "").split("\0"):
        key, equals, value = item.partition("=")
        if equals:
            found[key] = value
    return found


def own_processes() -> List[int]:
    """Return the ids of this user's processes."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat("/proc/" + name).st_uid == os.getuid():
                    found.append(int(name))
            except OSError:
                continue
    return found


def left_here(run_dir: str, attempt: int) -> List[int]:
    """Return the processes of an attempt's ranks on this node, asked from outside of its step."""
    own = os.environ.get("SLURMD_NODENAME", "")
    wanted = {"DTSLURM_RUN_DIR": run_dir, "DTSLURM_ATTEMPT": str(attempt)}
    found = []
    for pid in own_processes():
        env = environment_of(pid)
        same = all(env.get(key) == value for key, value in wanted.items())
        if same and "SLURM_PROCID" in env and env.get("SLURMD_NODENAME", "") == own:
            found.append(pid)
    return found


def status_of(pid: int) -> Dict[str, Any]:
    """Return a process's state (R, S, D, T…), CPU seconds and what the kernel says it waits in."""
    text = text_of("/proc/{}/stat".format(pid)) or ""
    fields = text.rpartition(")")[2].split()
    if len(fields) < 13:
        return {}
    waits = re.sub(r"[^\w]", "", text_of("/proc/{}/wchan".format(pid)) or "")
    return {"state": fields[0], "cpu": (int(fields[11]) + int(fields[12])) / TICK, "waits": waits}


def bytes_of(pid: int) -> int:
    """Return the bytes that a process has read and written, files and pipes alike; 0 if that is hidden."""
    found = re.findall(r"^[rw]char: (\d+)$", text_of("/proc/{}/io".format(pid)) or "", re.MULTILINE)
    return sum(map(int, found))


class Watch:
    """The watch over one node's ranks of one attempt."""

    def __init__(self, *, restarted: bool = False) -> None:
        self.restarted = restarted  # by the supervisor, in a step of its own that no rank ends
        self.run_dir = os.environ["DTSLURM_RUN_DIR"]
        self.attempt = int(os.environ["DTSLURM_ATTEMPT"])
        self.node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
        # A node's index counts within a step, so that an agent in a step of its own needs the node's name.
        self.place = "SLURMD_NODENAME" if "SLURMD_NODENAME" in os.environ else "SLURM_NODEID"
        self.ranks = os.path.join(self.run_dir, "ranks", str(self.attempt))
        self.path = os.path.join(self.ranks, "beats", self.node + ".json")
        self.parent = os.getppid()
        self.told_to_end = False
        self.told = 0
        self.latest: Dict[str, Dict[str, Any]] = {}
        self.members: Dict[int, Optional[str]] = {}

    def ours(self) -> Dict[int, str]:
        """Return the processes of this attempt's ranks on this node, each with its rank."""
        alive = own_processes()
        self.members = {pid: rank for pid, rank in self.members.items() if pid in alive}
        for pid in alive:
            if pid not in self.members:
                self.members[pid] = self._rank_of(environment_of(pid))
        own = os.getpid()
        return {pid: rank for pid, rank in self.members.items() if rank is not None and pid != own}

    def _rank_of(self, env: Dict[str, str]) -> Optional[str]:
        same = env.get("DTSLURM_RUN_DIR") == self.run_dir and env.get("DTSLURM_ATTEMPT") == str(self.attempt)
        if not same or env.get(self.place) != os.environ.get(self.place):
            return None
        return env.get("RANK", "")

    def beat(self) -> None:
        """Write one sign of life."""
        ranks: Dict[str, Dict[str, Any]] = {}
        ours = self.ours()
        # Launcher single exports no RANK: in a step of one task, processes without a number are of rank 0.
        alone = os.environ.get("SLURM_NTASKS") == "1" and not any(ours.values())
        for pid, number in ours.items():
            rank = "0" if alone else number
            seen = status_of(pid)
            if not seen or not rank.isdigit():
                continue
            one = ranks.setdefault(rank, {"cpu": 0.0, "moved": 0})
            one["cpu"] = round(one["cpu"] + seen["cpu"], 2)
            one["moved"] += bytes_of(pid)
        for rank, one in ranks.items():
            main = json_of(os.path.join(self.ranks, rank + ".json")).get("pid")
            if isinstance(main, int):
                seen = status_of(main)
                one.update(pid=main, state=seen.get("state"), waits=seen.get("waits"))
        self.latest = ranks
        self._write("beat", ranks)

    def _write(self, kind: str, ranks: Dict[str, Any]) -> None:
        record = {"kind": kind, "time": time.time(), "node": self.node, "ranks": ranks}
        record.update({"restarted": True} if self.restarted else {})
        try_put(self.path, json.dumps(record))

    def tell(self) -> None:
        """Write what each rank's process does, once each time that the supervisor asks for it."""
        folder = os.path.join(self.ranks, "stacks")
        wanted = (text_of(os.path.join(folder, WANTED)) or "").strip()
        if not wanted.isdigit() or int(wanted) == self.told:
            return
        self.told = int(wanted)
        pids = {one["pid"]: int(rank) for rank, one in self.latest.items() if "pid" in one}
        found = stacks.look(sorted(pids), limit=8.0)
        words = ["rank {}\n{}".format(pids[pid], stacks.text({pid: one})) for pid, one in found.items()]
        try_put(os.path.join(folder, self.node + ".txt"), "\n".join(words))
        ranks = {str(pids[pid]): one for pid, one in found.items()}
        try_put(
            os.path.join(folder, self.node + ".json"),
            json.dumps({"node": self.node, "number": self.told, "ranks": ranks}),
        )

    def _is_replaced(self) -> bool:
        """Tell whether the ranks' first agent writes heartbeats again, or only seemed silent."""
        record = json_of(self.path)
        age = time.time() - float(record.get("time") or 0)  # of the same clock
        return record.get("kind") == "beat" and not record.get("restarted") and age < BEAT_S + 1.5

    def fence(self) -> None:
        """Kill what is left here of an attempt that is over: it must write nothing more."""
        for pid in self.ours():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue

    def run(self) -> None:
        """Watch until the ranks here are gone or the attempt is over."""
        signal.signal(signal.SIGTERM, self._end)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # early signals are for training code
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        while not self.told_to_end and os.getppid() == self.parent:
            if not lease.holds(self.run_dir, self.attempt):
                self.fence()
                return
            if self.restarted and self._is_replaced():
                return
            self.beat()
            if self.restarted and not self.ours():
                break
            self.tell()
            end = time.monotonic() + BEAT_S
            while time.monotonic() < end and not self.told_to_end and os.getppid() == self.parent:
                time.sleep(0.2)
        self._write("bye", {})
        # The ranks were told to end: see that they do, should this attempt be replaced meanwhile.
        end = time.monotonic() + 60.0
        while self.ours() and time.monotonic() < end:
            if not lease.holds(self.run_dir, self.attempt):
                self.fence()
                return
            time.sleep(1.0)

    def _end(self, number: int, _frame: Any) -> None:
        del number
        self.told_to_end = True


def main(*, restarted: bool) -> None:
    """Watch, saying nothing: the rank's log is the training code's."""
    try:
        Watch(restarted=restarted).run()
    except (OSError, KeyError, ValueError):
        sys.exit(1)
