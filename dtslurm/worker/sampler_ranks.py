"""Record the activity of one node's ranks, and when each kind of work was last seen: part of ``sampler.py``.

The newest record is in ``metrics/<attempt>/activity-<node_rank>.json``, one object with

- ``time``: seconds since the epoch on this node, as are all times here;
- ``ranks``: the ranks running here, ``seen``: all ranks that ever ran here, ``world_size``: as in their
  environment;
- ``output``: when a rank's log, or ``train.jsonl``, last grew;
- ``cpu``: when a rank's own process last used a CPU, ``children``: when its child processes did;
- ``io``: when ranks or their children last read or wrote much, ``gpu``: when a GPU last computed;
- ``learned``: whether training has begun, ``longest``: the longest pause in output since then, in seconds;
- ``waits``: by rank, what it waits for: ``["child", NAME]``, ``["stopped", ""]``, ``["blocked", ""]``.

While the ranks work, the file is replaced only once a minute; in a large job every two minutes, whatever the
ranks do. The thresholds equal those of the supervisor's
``hangs/detector.py``: both must classify the same silence as a hang.
"""

import contextlib
import json
import os
import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

try:
    from .lib.json_records import whole_number, write_atomically
    from .sampler_values import (
        LARGE_JOB_S,
        Record,
        contents,
        is_large_job,
        output_position,
        processes,
        rank_record,
    )
except ImportError:  # beside this file, in a run directory
    from json_records import (  # type: ignore[import-not-found,no-redef]
        whole_number,
        write_atomically,
    )
    from sampler_values import (  # type: ignore[import-not-found,no-redef]
        LARGE_JOB_S,
        Record,
        contents,
        is_large_job,
        output_position,
        processes,
        rank_record,
    )

STEPS, PAUSES = 3, 10  # training has begun after this many recorded steps, or after this many outputs
BUSY = 0.1  # CPUs
BYTES_PER_S = 1e5  # a rank and its children that move this much are loading or saving
GPU_BUSY = 5.0  # percent
# Fraction of the GPU's maximum power so far: a GPU waiting in a collective is "busy" at low power
POWER = 0.5
QUIET_S, SELDOM_S = 45.0, 60.0
KINDS = ("output", "cpu", "children", "io", "gpu")
TICK = float(os.sysconf("SC_CLK_TCK"))
RAY = "RAY_USAGE_STATS_ENABLED"  # set by the job script of launcher ray
NOT_IN_A_NAME = re.compile(r"[^\w.+-]")

Process = Tuple[int, str]  # pid and start time: a pid may be reused


class Family(NamedTuple):
    """The resources that a rank's process and its descendants have used so far.

    Attributes:
        own: CPU seconds of the rank's process itself.
        below: CPU seconds of each descendant, by pid and start time.
        reaped: CPU seconds of descendants that have exited.
        moved: bytes read and written, by pid.
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
        self.is_large_job = is_large_job(env)

    # ---- Reading the processes

    def look(self, now: float, gpus: List[Record]) -> Record:
        """Return the activity record of this node's ranks, empty until the first rank has started."""
        stat_by_pid = dict(processes())
        alive = self.living(stat_by_pid)
        if not self.seen:
            return {}
        children: Dict[int, List[int]] = {}
        for pid, fields in stat_by_pid.items():
            children.setdefault(int(fields[1]), []).append(pid)
        families = {rank: family(main[0], stat_by_pid, children) for rank, main in alive.items()}
        if not self.last:
            self.last = dict.fromkeys(KINDS, now)
        waits = self.work(families, now)
        for rank, (pid, _) in alive.items():
            waits.setdefault(str(rank), waits_for(pid, stat_by_pid[pid][0], children.get(pid, [])))
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
            waits={rank: list(reason) for rank, reason in waits.items() if reason[0]},
        )

    def living(self, table: Dict[int, List[str]]) -> Dict[int, Process]:
        """Return the process of each rank that runs here."""
        processes_now = {(pid, fields[19]) for pid, fields in table.items()}
        self.members = {process: rank for process, rank in self.members.items() if process in processes_now}
        for process in processes_now:
            if process not in self.members:
                self.members[process] = self.rank_of(process[0])
        # A single rank may have no RANK variable; the agents that start ranks have none either.
        ranks = {int(rank) for rank in self.members.values() if rank}
        if not ranks and "" in self.members.values():
            ranks = {0}
        for rank in ranks:
            if self.mains.get(rank) not in processes_now:
                self.mains.pop(rank, None)
                folder = os.path.join(self.run_dir, "ranks", self.attempt)
                record = rank_record(folder, rank, min(ranks) if self.is_large_job else None)
                pid = whole_number(record.get("pid"))
                if pid in table and record.get("host") == self.node and record.get("ended") is None:
                    self.mains[rank] = pid, table[pid][19]
                    self.seen.add(rank)
        return {rank: main for rank, main in self.mains.items() if main in processes_now and rank in ranks}

    def rank_of(self, pid: int) -> Optional[str]:
        """Return the RANK of a process, "" if it has none, None if it does not belong to this attempt."""
        try:
            with open("/proc/%d/environ" % pid, "rb") as file:
                variables = file.read().decode("utf-8", "replace").split("\0")
        except OSError:
            return None
        env = dict(variable.partition("=")[::2] for variable in variables)
        same_attempt = (
            env.get("DTSLURM_RUN_DIR") == self.run_dir and env.get("DTSLURM_ATTEMPT") == self.attempt
        )
        if not same_attempt or env.get("SLURM_NODEID", "0") != self.node_id:
            return None
        if env.get("WORLD_SIZE", "").isdigit():
            self.world_size = int(env["WORLD_SIZE"])
        rank = env.get("RANK", "")
        # Ray's workers are not descendants of its driver, so their work would be invisible
        if not rank and RAY in env:
            return None
        return rank if rank.isdigit() else ""

    # ---- Detecting work

    def work(self, families: Dict[int, Family], now: float) -> Dict[str, Tuple[str, str]]:
        """Record the work since the previous look; return the child processes that ranks wait for."""
        previous_time, previous_families = self.before
        elapsed = max(now - previous_time, 1e-3)
        waits = {}
        for rank, family_now in families.items():
            previous = previous_families.get(rank)
            if previous is None or family_now.own < previous.own:  # the rank has just started
                self.last.update(dict.fromkeys(KINDS, now))
                continue
            if family_now.own - previous.own >= BUSY * elapsed:
                self.last["cpu"] = now
            used_seconds = {
                process: seconds - previous.below.get(process, 0.0)
                for process, seconds in family_now.below.items()
            }
            descendant_seconds = family_now.reaped - previous.reaped + sum(family_now.below.values())
            if descendant_seconds - sum(previous.below.values()) >= BUSY * elapsed:
                self.last["children"] = now
                busiest = max(
                    used_seconds, key=lambda process: (used_seconds[process], process), default=(0, "")
                )
                waits[str(rank)] = ("child", name_of(busiest[0]))
            new_bytes = [count - previous.moved.get(pid, 0.0) for pid, count in family_now.moved.items()]
            if sum(count for count in new_bytes if count > 0) >= BYTES_PER_S * elapsed:
                self.last["io"] = now
        return waits

    def output(self, now: float) -> None:
        """Record whether a log or the metrics file grew, and the length of the preceding pause."""
        sizes = {}
        names = ["logs/%s/rank-%d.log" % (self.attempt, rank) for rank in sorted(self.seen)]
        if self.is_large_job:
            positions = {str(rank): output_position(main[0]) for rank, main in self.mains.items()}
            sizes = {rank: position for rank, position in positions.items() if position is not None}
            names = []
        metrics_file = "metrics/%s/train.jsonl" % self.attempt
        for name in [*names, *([metrics_file] if 0 in self.seen else [])]:
            with contextlib.suppress(OSError):
                sizes[name] = os.stat(os.path.join(self.run_dir, name)).st_size
        if sizes == self.sizes:
            return
        if self.sizes:
            if self.learned():
                self.longest = max(self.longest, self.before[0] - self.last["output"])
            self.outputs += 1
            self.steps += sizes.get(metrics_file, 0) > self.sizes.get(metrics_file, 0)
        self.sizes = sizes
        self.last["output"] = now

    def learned(self) -> bool:
        """Return whether training has begun, so that its pauses show how long a normal pause is."""
        return self.steps >= STEPS or self.outputs >= PAUSES

    def gpus_work(self, gpus: List[Record]) -> bool:
        """Return whether a GPU computes; a GPU that only waits draws much less than its maximum power."""
        is_computing = False
        for gpu in gpus:
            key, power = gpu.get("index"), gpu.get("power_w")
            max_power = self.drew.get(key)
            if gpu.get("util", 0.0) >= GPU_BUSY:
                is_computing = is_computing or power is None or not max_power or power >= POWER * max_power
            if power is not None:
                self.drew[key] = max(max_power or 0.0, power)
        return is_computing

    # ---- Writing the record

    def note(self, now: float, gpus: List[Record]) -> None:
        """Look, and write the record: at every look during a pause in output, otherwise once a minute."""
        record = self.look(now, gpus)
        if not record:
            return
        if self.is_large_job:
            if now - self.written >= LARGE_JOB_S:
                self.write(record)
                # The second record comes sooner: then samples and records are written in alternate minutes.
                self.written = now if self.written else now - LARGE_JOB_S / 2
            return
        quiet = now - self.last["output"] >= QUIET_S
        if quiet or self.was_quiet or now - self.written >= SELDOM_S:
            self.write(record)
            self.written = now
        self.was_quiet = quiet

    def end(self, now: float) -> None:
        """Write that all ranks here have ended, if they have: no process updates the file from now on."""
        record = self.look(now, [])
        if record and not record["ranks"]:
            self.write(dict(record, over=True))

    def write(self, record: Record) -> None:
        """Replace the file atomically."""
        with contextlib.suppress(OSError):
            write_atomically(self.path, json.dumps(record, separators=(",", ":")), sync=False)


def family(main: int, table: Dict[int, List[str]], children: Dict[int, List[int]]) -> Family:
    """Return the resources that a process and its descendants have used."""
    below_seconds: Dict[Tuple[int, str], float] = {}
    reaped = (int(table[main][13]) + int(table[main][14])) / TICK
    moved = {main: bytes_of(main)}
    pending = list(children.get(main, []))
    while pending:
        pid = pending.pop()
        fields = table[pid]
        below_seconds[pid, fields[19]] = (int(fields[11]) + int(fields[12])) / TICK
        reaped += (int(fields[13]) + int(fields[14])) / TICK
        moved[pid] = bytes_of(pid)
        pending += children.get(pid, [])
    own_seconds = (int(table[main][11]) + int(table[main][12])) / TICK
    return Family(own_seconds, below_seconds, reaped, moved)


def bytes_of(pid: int) -> float:
    """Return the bytes that a process has read and written, including pipes; 0 if not readable."""
    counts = re.findall(r"^[rw]char: (\d+)$", contents("/proc/%d/io" % pid), re.MULTILINE)
    return float(sum(map(int, counts)))


def name_of(pid: int) -> str:
    """Return the name of a process's program, with unusual characters replaced."""
    return NOT_IN_A_NAME.sub("_", contents("/proc/%d/comm" % pid))[:32]


def waits_for(pid: int, state: str, children: List[int]) -> Tuple[str, str]:
    """Return what the kernel reports a process as waiting for: stopped, blocked or a child; else ""."""
    if state in "Tt":
        return ("stopped", "")
    if state == "D":
        return ("blocked", "")
    if children and contents("/proc/%d/wchan" % pid) in ("do_wait", "do_wait4", "kernel_wait4"):
        return ("child", name_of(max(children)))
    return ("", "")
