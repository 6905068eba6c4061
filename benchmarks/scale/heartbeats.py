"""What the heartbeats of 12,500 nodes cost their supervisor, and how soon it notices a lost node.

``python -m benchmarks.scale.heartbeats [--nodes N]`` runs the supervisor's own monitor and its end of the
heartbeat tree in this process. A second process plays the nodes. All nodes register with the supervisor over
TCP, as their agents do, and the nodes next to the supervisor are real relays. The nodes below these hand
their heartbeats to their relay inside the process, because one machine has too few processors for 12,500
relays: the supervisor receives what it would receive from a cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dtslurm.worker.supervisor import attempt_monitor, lease, node
from dtslurm.worker.supervisor.attempts import Ledger
from dtslurm.worker.supervisor.heartbeat_tree import beats, frames, relay
from dtslurm.worker.supervisor.heartbeat_tree.relay import Relay
from dtslurm.worker.supervisor.heartbeat_tree.tree import TreeHeartbeats

RANKS_PER_NODE = 8
NODES = 12_500
WINDOW_S = 60.0
LONGEST_S = 120.0


# ---- The nodes ----


class EmulatedNodes:
    """Nodes that register with a supervisor and send it heartbeats every few seconds.

    Attributes:
        parents: the relay of each node, empty for the relays themselves.
        silent: nodes that have stopped.
    """

    def __init__(self, folder: str, count: int) -> None:
        self.folder = folder
        self.names = [f"n{number:05}" for number in range(count)]
        self.relays: dict[str, Relay] = {}
        self.parents: dict[str, str] = {}
        self.silent: set[str] = set()
        self.lock = threading.Lock()

    def join(self) -> float:
        """Let all nodes join the tree; return how many seconds that took."""
        begin = time.monotonic()
        for name in self.names[: beats.FAN_OUT]:
            self.relays[name] = Relay(self.folder, name)
        while any(item.orders is None for item in self.relays.values()):
            if time.monotonic() > begin + LONGEST_S:
                raise RuntimeError("not all relays joined the tree as children of the supervisor")
            for item in self.relays.values():
                item.join_if_due()
            self.serve(0.0)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self.register, self.names[beats.FAN_OUT :]))
        return time.monotonic() - begin

    def register(self, name: str, failed: str = "") -> None:
        """Let one node ask the supervisor for its parent."""
        target = json.loads(Path(self.folder, beats.ADDRESS).read_text())
        link = frames.connect(target["hosts"], target["port"], LONGEST_S)
        connection = frames.Connection(link, bytes.fromhex(target["key"]), accepted=False)
        request = {"node": name, "port": 1, "failed": failed, "beat": ""}
        connection.send(frames.REGISTER + json.dumps(request).encode())
        answer = json.loads(relay.await_message(connection, frames.PLACE)[1:])
        connection.close()
        with self.lock:
            # A tree of three levels begins with more nodes than any computer has today.
            self.parents[name] = answer["parent"] if answer["parent"] in self.relays else self.names[0]

    def run(self) -> None:
        """Send heartbeats until the supervisor closes its port; obey commands on standard input."""
        threading.Thread(target=self.obey, daemon=True).start()
        number = 0
        while any(item.orders is not None for name, item in self.relays.items() if name not in self.silent):
            number += 1
            begin = time.monotonic()
            for part in range(10):  # not all nodes at the same moment
                for name in self.names[part::10]:
                    if name not in self.silent:
                        self.beat(name, number)
                self.serve(begin + (part + 1) * node.BEAT_S / 10)

    def beat(self, name: str, number: int) -> None:
        """Let one node send a heartbeat."""
        first = int(name[1:]) * RANKS_PER_NODE
        ranks = {
            str(first + local): {
                "cpu": round(123.45 + 2.9 * number, 2), "moved": 98_765_432 + number, "pid": 100_000 + local,
                "state": "S", "waits": "futex_wait_queue", "output": 4_711,
            }
            for local in range(RANKS_PER_NODE)
        }  # fmt: skip
        record = {"kind": "beat", "time": time.time(), "ranks": ranks, "activity": "c"}
        if name in self.relays:
            self.relays[name].put(beats.beat_of(record))
            return
        line = beats.pack_beat(name, beats.beat_of(record))
        if self.parents[name] not in self.silent:
            self.relays[self.parents[name]].pass_on([line])

    def serve(self, until: float) -> None:
        """Let the relays work until a moment."""
        while True:
            for name, item in self.relays.items():
                if name not in self.silent:
                    item.handle([event for event, _ in item.selector.select(0)])
                    item.tick()
            if time.monotonic() >= until:
                return
            time.sleep(0.05)

    def obey(self) -> None:
        """Let the nodes that standard input names fall silent; their children find other parents."""
        for text in sys.stdin:
            name = text.strip()
            self.silent.add(name)
            orphans = [child for child, parent in self.parents.items() if parent == name]
            if orphans:
                time.sleep(relay.LINK_S)
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda child, lost=name: self.register(child, lost), orphans))


# ---- The supervisor ----


class EmulatedStep:
    """A step without processes, which runs until the benchmark sets `exit_code`."""

    def __init__(self, folder: Path) -> None:
        self.ranks, self.logs = str(folder / "ranks/0"), str(folder / "logs/0")
        self.exit_code: int | None = None
        self.restarted_agents: list[str] = []

    def code(self) -> int | None:
        """Return the exit code, None while the step runs."""
        return self.exit_code

    def start_agent(self, _program: str, name: str, _log: str) -> None:
        """Record the request, and start no agent."""
        self.restarted_agents.append(name)


class SupervisedAttempt:
    """The parts of a supervisor that watch a running attempt."""

    def __init__(self, folder: Path, nodes: list[str]) -> None:
        self.run_dir, self.nodes, self.top = str(folder), nodes, str(folder)
        self.told, self.longest_pause, self.in_doubt = None, 0.0, False
        self.asked = argparse.Namespace(hang_timeout=0.0)
        self.ledger = Ledger(str(folder))
        (folder / "ranks/0").mkdir(parents=True)
        lease.take(self.run_dir, 0)
        self.step = EmulatedStep(folder)
        self.beats = TreeHeartbeats(self.step.ranks, "127.0.0.1")
        step: Any = self.step
        self.monitor = attempt_monitor.AttemptMonitor(self, step, 0, nodes, self.beats)

    def limit_is_near(self) -> bool:
        """Return whether the time limit is near."""
        return False

    def say(self, text: str) -> None:
        """Print a message."""
        print(f"  {text}")

    def silent(self, name: str, _seconds: float, _words: str) -> Mapping[str, Any]:
        """Return the loss of a node, as Slurm would confirm it."""
        return {"cause": "node-failure", "node": name}

    def cut_off(self, _nodes: list[str], _idle: bool) -> Mapping[str, Any]:
        """Return that Slurm reports no lost node."""
        return {}

    def watch(self, seconds: float) -> dict[str, Any]:
        """Watch the attempt for some time; return why it must end, empty if it need not."""
        self.step.exit_code = None
        timer = threading.Timer(seconds, lambda: setattr(self.step, "exit_code", 0))
        timer.start()
        cause = self.monitor.until_the_end()
        timer.cancel()
        return cause


def resident_mb() -> float:
    """Return the memory of this process in MB."""
    [line] = [text for text in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in text]
    return int(line.split()[1]) / 1000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.heartbeats")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--emulate", metavar="FOLDER", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.emulate:
        emulated = EmulatedNodes(chosen.emulate, chosen.nodes)
        print(emulated.join(), flush=True)
        emulated.run()
        return
    names = [f"n{number:05}" for number in range(chosen.nodes)]
    with tempfile.TemporaryDirectory(prefix="dtslurm-heartbeats-") as name:
        before_mb = resident_mb()
        attempt = SupervisedAttempt(Path(name), names)
        command = [sys.executable, "-m", "benchmarks.scale.heartbeats", f"--nodes={chosen.nodes}"]
        begin = time.process_time()
        nodes = subprocess.Popen(
            [*command, f"--emulate={attempt.beats.folder}"], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        assert nodes.stdin is not None
        assert nodes.stdout is not None
        joined_s = float(nodes.stdout.readline())
        print(f"{chosen.nodes:,} nodes of {RANKS_PER_NODE} ranks")
        print(f"all nodes have joined the tree after {joined_s:.1f} s of one emulating process;")
        print(f"  the supervisor used {time.process_time() - begin:.1f} s of CPU for that")
        attempt.watch(12.0)
        begin, began_at = time.process_time(), time.monotonic()
        attempt.watch(WINDOW_S)
        share = 100 * (time.process_time() - begin) / (time.monotonic() - began_at)
        count = len(attempt.beats.last_seen)
        print(f"supervisor: {share:.1f} % of a core while {count:,} nodes train and print nothing")
        print(f"supervisor: {resident_mb():.0f} MB resident, {before_mb:.0f} MB before the first node")
        print(f"files for heartbeats: {sorted(os.listdir(attempt.beats.folder))}")  # noqa: PTH208
        for kind, lost in (("leaf", names[-1]), ("relay", names[5])):
            nodes.stdin.write(lost + "\n")
            nodes.stdin.flush()
            lost_at, restarted = time.monotonic(), len(attempt.step.restarted_agents)
            cause = attempt.watch(LONGEST_S)
            noticed_s = time.monotonic() - lost_at
            restarted_agents = set(attempt.step.restarted_agents[restarted:]) - {lost}
            print(
                f"a lost {kind}: {cause.get('node')} was noticed after {noticed_s:.1f} s; "
                f"agents restarted on other nodes: {len(restarted_agents)}"
            )
            attempt.beats.last[lost]["kind"] = "bye"  # the next attempt has other nodes
        attempt.beats.close()
        nodes.wait(60)


if __name__ == "__main__":
    main()
