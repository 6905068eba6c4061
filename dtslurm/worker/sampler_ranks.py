"""What the ranks of one node do, and when each kind of work was last seen: part of ``sampler.py``.

The newest look is in ``metrics/<attempt>/activity-<node_rank>.json``, one object with

- ``time``: seconds since the epoch on this node, as all times here;
- ``ranks``: the ranks that run here, ``seen``: those that ever ran here, ``world_size``: as they know it;
- ``output``: when a rank's log, or ``train.jsonl``, last grew;
- ``cpu``: when a rank last used a CPU itself, ``children``: when processes that it started did;
- ``io``: when ranks or their children last read or wrote much, ``gpu``: when a GPU last computed;
- ``learned``: whether training has begun, ``longest``: seconds of its longest pause in output since;
- ``waits``: by rank, what it waits for: ``["child", NAME]``, ``["stopped", ""]``, ``["blocked", ""]``.

While work is seen the file is replaced once a minute only. The thresholds are those of the supervisor's
``quiet.py``: both must call the same silence a hang.
"""

import contextlib
import json
import os
import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

try:
    from .sampler_values import Record, contents, processes
except ImportError:  # beside this file, in a run directory
    from sampler_values import Record, contents, processes  # type: ignore[import-not-found,no-redef]

STEPS, PAUSES = 3, 10  # training has begun when steps were told so often, or something was written so often
BUSY = 0.1  # of a CPU
BYTES_PER_S = 1e5  # read and written by a rank and its children: it loads or saves
GPU_BUSY = 5.0  # % of the time
POWER = 0.5  # of what a GPU drew at most: one that waits in a collective is busy and draws little
QUIET_S, SELDOM_S = 45.0, 60.0
KINDS = ("output", "cpu", "children", "io", "gpu")
TICK = float(os.sysconf("SC_CLK_TCK"))
RAY = "RAY_USAGE_STATS_ENABLED"  # the script of launcher ray sets it
NOT_IN_A_NAME = re.compile(r"[^\w.+-]")

Process = Tuple[int, str]  # a number may come again: with another start time


class Family(NamedTuple):
    """A rank's process and all that it started: what each has used so far.

    Attributes:
        own: CPU seconds of the rank's process itself.
        below: CPU seconds of each process below it, by name and number.
        reaped: CPU seconds of processes below it that have ended.
        moved: bytes that each of them has read and written.
    """

    own: float
    below: Dict[Tuple[int, str], float]
    reaped: float
    moved: Dict[int, float]


class Ranks:
    """The ranks of one attempt on this node."""

    def __init__(self, env: Mapping[str, str], run_dir: str, attempt: str, node_rank: int) -> None:
        self.run_dir, self.attempt, self.node_id = run_dir, attempt, env.get("SLURM_NODEID", "0")
        self.node = env.get("SLURMD_NODENAME") or os.uname()[1]
        self.path = os.path.join(run_dir, "metrics", attempt, "activity-%d.json" % node_rank)
        self.members: Dict[Process, Optional[str]] = {}
        self.mains: Dict[int, Process] = {}
        self.seen: Set[int] = set()
        self.world_size: Optional[int] = None
        self.before: Tuple[float, Dict[int, Family]] = (0.0, {})
        self.last: Dict[str, float] = {}
        self.sizes: Dict[str, int] = {}
        self.drew: Dict[Any, float] = {}
        self.outputs = self.steps = 0
        self.longest = 0.0
        self.written = 0.0
        self.was_quiet = False

    # ---- Looking

    def look(self, now: float, gpus: List[Record]) -> Record:
        """Return what the ranks here do; nothing before the first of them has started."""
        table = dict(processes())
        alive = self.living(table)
        if not self.seen:
            return {}
        below: Dict[int, List[int]] = {}
        for pid, fields in table.items():
            below.setdefault(int(fields[1]), []).append(pid)
        families = {rank: family(main[0], table, below) for rank, main in alive.items()}
        if not self.last:
            self.last = dict.fromkeys(KINDS, now)
        waits = self.work(families, now)
        for rank, (pid, _) in alive.items():
            waits.setdefault(str(rank), waits_for(pid, table[pid][0], below.get(pid, [])))
        self.output(now)
        if self.gpus_work(gpus):
            self.last["gpu"] = now
        self.before = now, families
        return dict(
            self.last,
            schema=1,
            time=round(now, 3),
            node=self.node,
            ranks=sorted(alive),
            seen=sorted(self.seen),
            world_size=self.world_size,
            learned=self.learned(),
            longest=round(self.longest, 1),
            waits={rank: list(what) for rank, what in waits.items() if what[0]},
        )

    def living(self, table: Dict[int, List[str]]) -> Dict[int, Process]:
        """Return the process of each rank that runs here."""
        keys = {(pid, fields[19]) for pid, fields in table.items()}
        self.members = {key: rank for key, rank in self.members.items() if key in keys}
        for key in keys:
            if key not in self.members:
                self.members[key] = self.rank_of(key[0])
        # A rank that is alone need not know its number; agents that start others have none either.
        ranks = {int(rank) for rank in self.members.values() if rank}
        if not ranks and "" in self.members.values():
            ranks = {0}
        for rank in ranks:
            if self.mains.get(rank) not in keys:
                self.mains.pop(rank, None)
                text = contents(os.path.join(self.run_dir, "ranks", self.attempt, "%d.json" % rank))
                with contextlib.suppress(ValueError, AttributeError, TypeError):
                    record = json.loads(text)
                    pid = int(record["pid"])
                    if pid in table and record.get("host") == self.node and record.get("ended") is None:
                        self.mains[rank] = pid, table[pid][19]
                        self.seen.add(rank)
        return {rank: main for rank, main in self.mains.items() if main in keys and rank in ranks}

    def rank_of(self, pid: int) -> Optional[str]:
        """Return the rank in a process's environment, "" if it has none, None for one of another attempt."""
        try:
            with open("/proc/%d/environ" % pid, "rb") as file:
                words = file.read().decode("utf-8", "replace").split("\0")
        except OSError:
            return None
        env = dict(word.partition("=")[::2] for word in words)
        same = env.get("DTSLURM_RUN_DIR") == self.run_dir and env.get("DTSLURM_ATTEMPT") == self.attempt
        if not same or env.get("SLURM_NODEID", "0") != self.node_id:
            return None
        if env.get("WORLD_SIZE", "").isdigit():
            self.world_size = int(env["WORLD_SIZE"])
        rank = env.get("RANK", "")
        if not rank and RAY in env:  # its workers are not below its driver: what they do would not be seen
            return None
        return rank if rank.isdigit() else ""

    # ---- Work

    def work(self, families: Dict[int, Family], now: float) -> Dict[str, Tuple[str, str]]:
        """Note the work since the last look; return the children that ranks wait for."""
        then, before = self.before
        passed = max(now - then, 1e-3)
        waits = {}
        for rank, family_now in families.items():
            known = before.get(rank)
            if known is None or family_now.own < known.own:  # it has just started
                self.last.update(dict.fromkeys(KINDS, now))
                continue
            if family_now.own - known.own >= BUSY * passed:
                self.last["cpu"] = now
            used = {
                process: seconds - known.below.get(process, 0.0)
                for process, seconds in family_now.below.items()
            }
            in_all = family_now.reaped - known.reaped + sum(family_now.below.values())
            if in_all - sum(known.below.values()) >= BUSY * passed:
                self.last["children"] = now
                busiest = max(used, key=lambda process: (used[process], process), default=(0, ""))
                waits[str(rank)] = ("child", name_of(busiest[0]))
            moved = [count - known.moved.get(pid, 0.0) for pid, count in family_now.moved.items()]
            if sum(count for count in moved if count > 0) >= BYTES_PER_S * passed:
                self.last["io"] = now
        return waits

    def output(self, now: float) -> None:
        """Note whether a log or the metrics grew, and how long the pause was before."""
        sizes = {}
        names = ["logs/%s/rank-%d.log" % (self.attempt, rank) for rank in sorted(self.seen)]
        train = "metrics/%s/train.jsonl" % self.attempt
        for name in [*names, *([train] if 0 in self.seen else [])]:
            with contextlib.suppress(OSError):
                sizes[name] = os.stat(os.path.join(self.run_dir, name)).st_size
        if sizes == self.sizes:
            return
        if self.sizes:
            if self.learned():
                self.longest = max(self.longest, self.before[0] - self.last["output"])
            self.outputs += 1
            self.steps += sizes.get(train, 0) > self.sizes.get(train, 0)
        self.sizes = sizes
        self.last["output"] = now

    def learned(self) -> bool:
        """Tell whether training has begun, so that its pauses tell how long one may be."""
        return self.steps >= STEPS or self.outputs >= PAUSES

    def gpus_work(self, gpus: List[Record]) -> bool:
        """Tell whether a GPU computes: the power that it drew before tells it from one that only waits."""
        works = False
        for gpu in gpus:
            key, draws = gpu.get("index"), gpu.get("power_w")
            most = self.drew.get(key)
            if gpu.get("util", 0.0) >= GPU_BUSY:
                works = works or draws is None or not most or draws >= POWER * most
            if draws is not None:
                self.drew[key] = max(most or 0.0, draws)
        return works

    # ---- Writing

    def note(self, now: float, gpus: List[Record]) -> None:
        """Look, and write down what was seen where it is news: in a pause each time, else once a minute."""
        record = self.look(now, gpus)
        if not record:
            return
        quiet = now - self.last["output"] >= QUIET_S
        if quiet or self.was_quiet or now - self.written >= SELDOM_S:
            self.write(record)
            self.written = now
        self.was_quiet = quiet

    def end(self, now: float) -> None:
        """Write down that no rank runs here any more, if none does: nobody looks from now on."""
        record = self.look(now, [])
        if record and not record["ranks"]:
            self.write(dict(record, over=True))

    def write(self, record: Record) -> None:
        """Replace the file."""
        temporary = "%s.%d" % (self.path, os.getpid())
        with contextlib.suppress(OSError):
            with open(temporary, "w") as file:
                file.write(json.dumps(record, separators=(",", ":")))
            os.rename(temporary, self.path)


def family(main: int, table: Dict[int, List[str]], below: Dict[int, List[int]]) -> Family:
    """Return what a process and all those below it have used."""
    found: Dict[Tuple[int, str], float] = {}
    reaped = (int(table[main][13]) + int(table[main][14])) / TICK
    moved = {main: bytes_of(main)}
    waiting = list(below.get(main, []))
    while waiting:
        pid = waiting.pop()
        fields = table[pid]
        found[pid, fields[19]] = (int(fields[11]) + int(fields[12])) / TICK
        reaped += (int(fields[13]) + int(fields[14])) / TICK
        moved[pid] = bytes_of(pid)
        waiting += below.get(pid, [])
    own = (int(table[main][11]) + int(table[main][12])) / TICK
    return Family(own, found, reaped, moved)


def bytes_of(pid: int) -> float:
    """Return the bytes that a process has read and written, files and pipes alike; 0 if that is hidden."""
    found = re.findall(r"^[rw]char: (\d+)$", contents("/proc/%d/io" % pid), re.MULTILINE)
    return float(sum(map(int, found)))


def name_of(pid: int) -> str:
    """Return the name of a process's program, without what would not be one."""
    return NOT_IN_A_NAME.sub("_", contents("/proc/%d/comm" % pid))[:32]


def waits_for(pid: int, state: str, children: List[int]) -> Tuple[str, str]:
    """Return what the kernel says that a process waits for, where that is not others' or its own work."""
    if state in "Tt":
        return ("stopped", "")
    if state == "D":
        return ("blocked", "")
    if children and contents("/proc/%d/wchan" % pid) in ("do_wait", "do_wait4", "kernel_wait4"):
        return ("child", name_of(max(children)))
    return ("", "")
