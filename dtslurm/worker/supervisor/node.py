"""The agent on each node beside the ranks: writes heartbeats, and kills the ranks of an ended attempt.

Every few seconds it writes ``ranks/<attempt>/beats/<node>.json``: the CPU time of each rank on this node, the
bytes that the rank has read and written, and what its main thread waits in. In a large job it sends this over
TCP instead, see `heartbeat_tree`, and copies the output and the records of its ranks to the files of the
node, see `rank_collector`. When another attempt holds the lease, it kills the remaining processes of its own
attempt on this node.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

from ..lib.json_records import read_object
from ..lib.rank_collector import RankCollector
from ..sampler_values import output_position
from ..stacks import stacks
from . import lease
from .files import text_of, try_put
from .hangs import BYTES_PER_S, IDLE, WINDOW_S
from .hangs import STOPPED as STOPPED_STATES
from .heartbeat_tree.beats import ADDRESS, COMPUTING, FILE_EVERY_S, STOPPED, TRANSFERRING, beat_of
from .heartbeat_tree.relay import Relay
from .heartbeats import WANTED

BEAT_S = 3.0
UNLINKED_S = 6.0  # without a link to the supervisor: then the heartbeats go into a file
COLLECT_EVERY_S = 0.5  # between two looks for new output and records of the ranks
LINGERING_LEASE_S = 10.0  # between readings of the lease while the last ranks of a node in a large job end
LEASE_S = 60.0  # between readings of the lease while the supervisor confirms it over TCP
NODE_FILES = "DTSLURM_NODE_FILES"  # the folder of this node into which the ranks write
TICK = float(os.sysconf("SC_CLK_TCK"))


def environment_of(pid: int) -> Dict[str, str]:
    """Return the environment that a process was started with, empty if it cannot be read."""
    environment = {}
    for entry in (text_of("/proc/{}/environ".format(pid)) or "").split("\0"):
        key, equals, value = entry.partition("=")
        if equals:
            environment[key] = value
    return environment


def own_processes() -> List[int]:
    """Return the process ids of this user's processes."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat("/proc/" + name).st_uid == os.getuid():
                    pids.append(int(name))
            except OSError:
                continue
    return pids


def find_rank_processes(run_dir: str, attempt: int) -> List[int]:
    """Return the processes of an attempt's ranks on this node; for callers outside the attempt's step."""
    own_node = os.environ.get("SLURMD_NODENAME", "")
    required = {"DTSLURM_RUN_DIR": run_dir, "DTSLURM_ATTEMPT": str(attempt)}
    pids = []
    for pid in own_processes():
        env = environment_of(pid)
        same = all(env.get(key) == value for key, value in required.items())
        if same and "SLURM_PROCID" in env and env.get("SLURMD_NODENAME", "") == own_node:
            pids.append(pid)
    return pids


def status_of(pid: int) -> Dict[str, Any]:
    """Return a process's state (R, S, D, T…), its CPU seconds and its wait channel in the kernel."""
    text = text_of("/proc/{}/stat".format(pid)) or ""
    fields = text.rpartition(")")[2].split()
    if len(fields) < 13:
        return {}
    wait_channel = re.sub(r"[^\w]", "", text_of("/proc/{}/wchan".format(pid)) or "")
    return {"state": fields[0], "cpu": (int(fields[11]) + int(fields[12])) / TICK, "waits": wait_channel}


def bytes_of(pid: int) -> int:
    """Return the bytes that a process has read and written, files and pipes alike; 0 if not readable."""
    counts = re.findall(r"^[rw]char: (\d+)$", text_of("/proc/{}/io".format(pid)) or "", re.MULTILINE)
    return sum(map(int, counts))


class NodeAgent:
    """The agent of one attempt on one node.

    Attributes:
        restarted: whether the supervisor restarted it, in a step of its own that outlives the ranks.
        place: the environment variable that identifies this node's processes. A node's index counts within a
            step, so an agent in a step of its own needs the node's name.
        answered_request: number of the last snapshot of the stacks that it wrote.
        latest: the ranks' state in the last heartbeat.
        members: the rank of each process of this user, None for processes of other attempts.
        relay: the node's end of the tree of heartbeats; None in small jobs, which write files only.
    """

    def __init__(self, *, restarted: bool = False) -> None:
        self.restarted = restarted
        self.run_dir = os.environ["DTSLURM_RUN_DIR"]
        self.attempt = int(os.environ["DTSLURM_ATTEMPT"])
        self.node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
        self.place = "SLURMD_NODENAME" if "SLURMD_NODENAME" in os.environ else "SLURM_NODEID"
        self.ranks = os.path.join(self.run_dir, "ranks", str(self.attempt))
        self.logs = os.path.join(self.run_dir, "logs", str(self.attempt))
        self.path = os.path.join(self.ranks, "beats", self.node + ".json")
        self.parent = os.getppid()
        self.told_to_end = False
        self.answered_request = 0
        self.latest: Dict[str, Dict[str, Any]] = {}
        self.members: Dict[int, Optional[str]] = {}
        self.relay: Optional[Relay] = None
        if os.path.exists(os.path.join(self.ranks, "beats", ADDRESS)):
            self.relay = Relay(os.path.join(self.ranks, "beats"), self.node)
        self.collector: Optional[RankCollector] = None
        self.is_over = threading.Event()
        self._collection: Optional[threading.Thread] = None
        self._main_pids: Dict[str, Any] = {}
        self._usage: List[Tuple[float, Dict[str, Tuple[float, int]]]] = []
        self._linked_at = time.monotonic()
        self._file_at, self._lease_at = self._linked_at - FILE_EVERY_S, self._linked_at - LEASE_S

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
        if self.collector is None and env.get(NODE_FILES):
            self.collect_from(env[NODE_FILES])
        return env.get("RANK", "")

    def beat(self) -> None:
        """Write one heartbeat."""
        ranks: Dict[str, Dict[str, Any]] = {}
        ours = self.ours()
        # Launcher single exports no RANK: in a step with one task, processes without a rank belong to rank 0.
        is_single_task = os.environ.get("SLURM_NTASKS") == "1" and not any(ours.values())
        for pid, recorded_rank in ours.items():
            rank = "0" if is_single_task else recorded_rank
            status = status_of(pid)
            if not status or not rank.isdigit():
                continue
            process = ranks.setdefault(rank, {"cpu": 0.0, "moved": 0})
            process["cpu"] = round(process["cpu"] + status["cpu"], 2)
            process["moved"] += bytes_of(pid)
            if status["state"] == "D":
                process["blocked"] = True
        for rank, process in ranks.items():
            main_pid = self._main_pid_of(rank, ours)
            if isinstance(main_pid, int):
                status = status_of(main_pid)
                process.update(pid=main_pid, state=status.get("state"), waits=status.get("waits"))
                if self.relay:
                    process["output"] = self._output_of(rank, main_pid)
        self.latest = ranks
        self._write("beat", ranks)

    def collect_from(self, folder: str) -> None:
        """Start to copy the files of the ranks that write into a folder of this node."""
        self.collector = RankCollector(folder, self.logs, self.ranks)
        self._collection = threading.Thread(target=self._collect, args=(self.collector,), daemon=True)
        self._collection.start()

    def _collect(self, collector: RankCollector) -> None:
        """Copy output and records, and first those of earlier attempts whose agent was killed.

        Heartbeats must not wait for a slow file system, so a thread does this.
        """
        for attempt in range(self.attempt):
            own_end, end = ("-{}-{}".format(number, self.node) for number in (self.attempt, attempt))
            if collector.folder.endswith(own_end):
                folder = collector.folder[: -len(own_end)] + end
                parents = (os.path.dirname(path) for path in (self.logs, self.ranks))
                leftover = RankCollector(folder, *(os.path.join(parent, str(attempt)) for parent in parents))
                if leftover.collect(final=True):
                    leftover.clear()
        while not self.is_over.wait(COLLECT_EVERY_S):
            collector.collect()

    def finish_collection(self) -> None:
        """Copy the rest, once no rank of this node runs."""
        end = time.monotonic() + 2.0
        while self.collector and self.ours() and time.monotonic() < end:  # ranks that were just killed
            time.sleep(0.1)
        self.is_over.set()
        if self._collection:
            self._collection.join(10.0)
        if self.collector and not self.ours() and self.collector.collect(final=True):
            self.collector.clear()

    def _main_pid_of(self, rank: str, ours: Dict[int, str]) -> Any:
        """Return the process id in a rank's record, which is read again when that process is gone."""
        if self._main_pids.get(rank) not in ours:
            folder = self.collector.folder if self.collector else self.ranks
            self._main_pids[rank] = read_object(os.path.join(folder, rank + ".json")).get("pid")
        return self._main_pids[rank]

    def _write(self, kind: str, ranks: Dict[str, Any]) -> None:
        record = {"kind": kind, "time": time.time(), "node": self.node, "ranks": ranks}
        record.update({"restarted": True} if self.restarted else {})
        if self.relay:
            record["activity"] = self._find_activity(ranks) if kind == "beat" else "-"
        if not self.relay or not self._send(kind, record):
            try_put(self.path, json.dumps(record))

    def _output_of(self, rank: str, main_pid: int) -> int:
        """Return how much a rank has written to its log."""
        position = output_position(main_pid)
        if position is None:
            log = os.path.join(self.logs, "rank-{}.log".format(rank))
            if self.collector:
                log = os.path.join(self.collector.folder, "{}.log".format(rank))
            position = os.stat(log).st_size if os.path.exists(log) else 0
        return position

    def _find_activity(self, ranks: Dict[str, Dict[str, Any]]) -> str:
        """Return what any rank of this node did in the last seconds; see `Beat.activity`.

        Ranks that have just started count as computing.
        """
        now = time.monotonic()
        usage = {rank: (process["cpu"], process["moved"]) for rank, process in ranks.items()}
        self._usage.append((now, usage))
        while len(self._usage) > 2 and now - self._usage[1][0] >= WINDOW_S:
            del self._usage[0]
        since, before = self._usage[0]
        elapsed_s = now - since
        has_stopped = any(process.get("state") in STOPPED_STATES for process in ranks.values())
        letters = STOPPED if has_stopped else ""
        if elapsed_s < WINDOW_S:
            return letters + COMPUTING
        growth = [
            (cpu - before[rank][0], moved - before[rank][1])
            for rank, (cpu, moved) in usage.items()
            if rank in before
        ]
        letters += COMPUTING if any(cpu / elapsed_s >= IDLE for cpu, _ in growth) else ""
        return letters + (
            TRANSFERRING if any(moved / elapsed_s >= BYTES_PER_S for _, moved in growth) else ""
        )

    def _send(self, kind: str, record: Dict[str, Any]) -> bool:
        """Send a heartbeat over TCP; return whether no file is needed."""
        relay, now = self.relay, time.monotonic()
        is_linked = relay is not None and relay.put(beat_of(record))
        if relay is not None and kind == "bye":
            return relay.leave()
        self._linked_at = now if is_linked else self._linked_at
        if is_linked or now - self._linked_at < UNLINKED_S or now - self._file_at < FILE_EVERY_S:
            return True
        self._file_at = now
        return False

    def _holds_lease(self) -> bool:
        """Return whether no later attempt holds the lease, as read or as the supervisor confirmed."""
        now = time.monotonic()
        if self.relay and self.relay.confirms_lease() and now - self._lease_at < LEASE_S:
            return True
        self._lease_at = now
        return lease.holds(self.run_dir, self.attempt)

    def tell(self) -> None:
        """Write the stacks of each rank's process, once for each request of the supervisor."""
        folder = os.path.join(self.ranks, "stacks")
        orders = self.relay.orders if self.relay else None
        request_number = (
            str(orders.stacks) if orders else (text_of(os.path.join(folder, WANTED)) or "").strip()
        )
        if not request_number.isdigit() or int(request_number) == self.answered_request:
            return
        self.answered_request = int(request_number)
        pids = {process["pid"]: int(rank) for rank, process in self.latest.items() if "pid" in process}
        process_by_pid = stacks.look(sorted(pids), limit=8.0)
        paragraphs = [
            "rank {}\n{}".format(pids[pid], stacks.text({pid: process}))
            for pid, process in process_by_pid.items()
        ]
        try_put(os.path.join(folder, self.node + ".txt"), "\n".join(paragraphs))
        ranks = {str(pids[pid]): process for pid, process in process_by_pid.items()}
        try_put(
            os.path.join(folder, self.node + ".json"),
            json.dumps({"node": self.node, "number": self.answered_request, "ranks": ranks}),
        )

    def _is_replaced(self) -> bool:
        """Return whether the node's first agent, which had seemed silent, writes heartbeats again."""
        orders = self.relay.orders if self.relay else None
        if orders:
            return self.node in orders.back
        record = read_object(self.path)
        age = time.time() - float(record.get("time") or 0)  # the record has a time of the same clock
        return record.get("kind") == "beat" and not record.get("restarted") and age < BEAT_S + 1.5

    def fence(self) -> None:
        """Kill this node's remaining processes of an ended attempt, so that they write nothing more."""
        for pid in self.ours():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue

    def run(self) -> None:
        """Write heartbeats until the ranks on this node have ended or the attempt is over."""
        signal.signal(signal.SIGTERM, self._on_term)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # early signals are for training code
        if os.environ.get(NODE_FILES):
            self.collect_from(os.environ[NODE_FILES])
        if self.relay:
            self.relay.start()
        else:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
        while not self.told_to_end and os.getppid() == self.parent:
            if not self._holds_lease():
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
        self._stay_with_ranks()

    def _stay_with_ranks(self) -> None:
        """Wait for the last ranks of this node, and for as long as their output must be copied."""
        # The ranks received TERM; kill those that remain if a later attempt takes over meanwhile.
        end = time.monotonic() + 60.0
        while self.ours() and (self.collector or time.monotonic() < end):
            now = time.monotonic()
            if not self.collector or now - self._lease_at >= LINGERING_LEASE_S:
                self._lease_at = now
                if not lease.holds(self.run_dir, self.attempt):
                    self.fence()
                    return
            time.sleep(1.0)

    def _on_term(self, number: int, _frame: Any) -> None:
        del number
        self.told_to_end = True


def main(*, restarted: bool) -> None:
    """Run the agent without output, because the rank's log belongs to the training code."""
    try:
        agent = NodeAgent(restarted=restarted)
        agent.run()
        agent.finish_collection()
    except (OSError, KeyError, ValueError):
        sys.exit(1)


def collect_files() -> None:
    """Copy the files of this node's ranks once, for a rank that ends while no agent does so."""
    agent = NodeAgent()
    collector = RankCollector(os.environ[NODE_FILES], agent.logs, agent.ranks)
    end = time.monotonic() + 5.0
    while not collector.collect() and time.monotonic() < end:  # another rank that has ended may be copying
        time.sleep(0.2)
