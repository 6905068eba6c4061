"""Notes every few seconds how one node of a job is doing: GPUs, network, CPU, memory, disks.

Started by the job's script as ``python3 sampler.py PID GPUS [--if-apart=EVENT]`` once on each node, and ends
with process PID. It appends one line of JSON at a time to ``metrics/<attempt>/node-<node_rank>.jsonl`` in the
run directory, and the event EVENT to ``events.jsonl`` where ranks of torch train apart from each other. What
the ranks do is in ``activity-<node_rank>.json`` beside the samples (``sampler_ranks.py``).
What cannot be known is absent, never 0. It stays below 0.4 % of a core by pausing longer where looking is
dear, and a week's notes below some 40 MB a node by pausing longer as the file grows. Python 3.6 or later,
nothing else.
"""

import contextlib
import glob
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Mapping, NoReturn, Optional, Tuple

try:
    from .sampler_amd import Amdgpu, AmdSmi, RocmSmi
    from .sampler_group import GroupWatch
    from .sampler_nvidia import NvidiaSmi, Nvml
    from .sampler_ranks import Ranks
    from .sampler_values import HIP, Record, contents, counter, known, numbers, processes
except ImportError:  # beside this file, in a run directory
    from sampler_amd import (  # type: ignore[import-not-found,no-redef]
        Amdgpu,
        AmdSmi,
        RocmSmi,
    )
    from sampler_group import GroupWatch  # type: ignore[import-not-found,no-redef]
    from sampler_nvidia import (  # type: ignore[import-not-found,no-redef]
        NvidiaSmi,
        Nvml,
    )
    from sampler_ranks import Ranks  # type: ignore[import-not-found,no-redef]
    from sampler_values import (  # type: ignore[import-not-found,no-redef]
        HIP,
        Record,
        contents,
        counter,
        known,
        numbers,
        processes,
    )

TOLD = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", *HIP)
EVERY_S = 5.0
LONGEST_S = 60.0
SHARE = 0.004  # of a core
GROWN = ((8 << 20, 2), (16 << 20, 4), (32 << 20, 8))  # from so many bytes on, pauses are so many times longer
HUGE = 1 << 60  # a cgroup's way to say that there is no limit
VIRTUAL = re.compile(r"lo$|docker|veth|br-|virbr|ifb|dummy|tun|tap|cali|flannel|cni")
# ---- The node ----


def nics() -> Dict[str, Record]:
    """Return every network port's counters: InfiniBand and its kin, and what has an address of its own."""
    found = {}
    for port in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        device, number = port.split("/")[4], os.path.basename(port)
        words = [
            counter(os.path.join(port, "counters", name)) for name in ("port_rcv_data", "port_xmit_data")
        ]
        received, sent = (None if word is None else word * 4 for word in words)  # counted in units of 4 bytes
        if received is None:  # as AWS's EFA has them
            received = counter(os.path.join(port, "hw_counters", "rx_bytes"))
            sent = counter(os.path.join(port, "hw_counters", "tx_bytes"))
        bad = [
            counter(os.path.join(port, "counters", name))
            for name in ("symbol_error", "port_rcv_errors", "link_downed", "port_xmit_discards")
        ]
        errors = [value for value in bad if value is not None]
        values = {"rx_bytes": received, "tx_bytes": sent, "errors": sum(errors) if errors else None}
        found[device if number == "1" else device + "/" + number] = known(values)
    for path in sorted(glob.glob("/sys/class/net/*")):
        name = os.path.basename(path)
        if VIRTUAL.match(name) or contents(os.path.join(path, "operstate")) == "down":
            continue
        received, sent, first, second = (
            counter(os.path.join(path, "statistics", file))
            for file in ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors")
        )
        if received is not None and sent is not None:
            found[name] = {"rx_bytes": received, "tx_bytes": sent, "errors": (first or 0) + (second or 0)}
    return dict(list(found.items())[:64])


def memory() -> Record:
    """Return the node's memory in bytes."""
    words = dict(re.findall(r"^(\w+):\s+(\d+) kB", contents("/proc/meminfo"), re.M))
    if "MemTotal" not in words or "MemAvailable" not in words:
        return {}
    total = int(words["MemTotal"]) * 1024
    return {"memory_total": total, "memory_used": total - int(words["MemAvailable"]) * 1024}


def disks(paths: List[str]) -> Dict[str, Record]:
    """Return how full file systems are."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.statvfs(path)
            used = (status.f_blocks - status.f_bfree) * status.f_frsize
            found[path] = {"used": used, "total": status.f_blocks * status.f_frsize}
    return found


def job_cgroup(text: str, job: str, top: str = "/sys/fs/cgroup") -> Dict[str, str]:
    """Return the folders of the job's own control group, by controller; "" is that of version 2.

    Args:
        text: what ``/proc/self/cgroup`` says; Slurm's groups have a part ``job_<id>``.
    """
    found = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        parts = path.split("/")
        if "job_" + job not in parts:
            continue
        below = "/".join(parts[: parts.index("job_" + job) + 1]).lstrip("/")
        for name in names.split(","):
            folder = os.path.join(top, name if name else "", below)
            if not name and not os.path.isdir(folder):
                folder = os.path.join(top, "unified", below)
            if os.path.isdir(folder):
                found[name] = folder
    return found


class JobResources:
    """What Slurm's control group, or else /proc, tells of the job on this node."""

    def __init__(self, env: Mapping[str, str], cgroup: str = "/proc/self/cgroup") -> None:
        self.job = env.get("SLURM_JOB_ID", "")
        self.folders = job_cgroup(contents(cgroup), self.job) if self.job else {}
        cpus = numbers(env.get("SLURM_CPUS_ON_NODE", ""))
        self.cpus = cpus[0] if cpus else os.cpu_count() or 1
        self.ticks = float(os.sysconf("SC_CLK_TCK"))
        self.own: Dict[Tuple[int, str], bool] = {}
        self.spent: Dict[Tuple[int, str], float] = {}
        self.total = 0.0
        self.before: Optional[Tuple[float, float]] = None

    def sample(self) -> Record:
        """Return CPU use since the last look, and memory."""
        now, seconds = time.monotonic(), self.cpu_seconds()
        found = self.memory()
        if self.before is not None and seconds is not None and now > self.before[0]:
            share = (seconds - self.before[1]) / (now - self.before[0]) / self.cpus
            found["cpu_percent"] = round(max(0.0, min(100.0, 100 * share)), 1)
        self.before = (now, seconds) if seconds is not None else None
        return found

    def memory(self) -> Record:
        """Return what the control group holds, less files that could be dropped, and its limit."""
        folder = self.folders.get("", self.folders.get("memory", ""))
        new = "" in self.folders
        used = counter(os.path.join(folder, "memory.current" if new else "memory.usage_in_bytes"))
        if not folder or used is None:
            return {}
        key = "inactive_file" if new else "total_inactive_file"
        idle = re.search("^%s ([0-9]+)$" % key, contents(os.path.join(folder, "memory.stat")), re.M)
        limit = counter(os.path.join(folder, "memory.max" if new else "memory.limit_in_bytes"))
        limit = limit if limit is not None and limit < HUGE else None
        return known(
            {"cgroup_memory": max(0, used - int(idle.group(1) if idle else 0)), "cgroup_limit": limit}
        )

    def cpu_seconds(self) -> Optional[float]:
        """Return how much CPU time the job has used on this node, as far as that is known."""
        if "" in self.folders:
            spent = re.search(
                r"^usage_usec (\d+)", contents(os.path.join(self.folders[""], "cpu.stat")), re.M
            )
            if spent:
                return int(spent.group(1)) / 1e6
        if "cpuacct" in self.folders:
            nanoseconds = counter(os.path.join(self.folders["cpuacct"], "cpuacct.usage"))
            if nanoseconds is not None:
                return nanoseconds / 1e9
        return self.by_processes()

    def by_processes(self) -> Optional[float]:
        """Return the CPU time of the job's processes that were seen, each as of the last time."""
        if not self.job:
            return None
        own, spent = {}, {}
        for pid, stat in processes():
            key = (pid, stat[19])  # a number may come again: with another start time
            own[key] = self.own[key] if key in self.own else is_of(pid, self.job)
            if own[key]:
                spent[key] = (int(stat[11]) + int(stat[12])) / self.ticks
                self.total += max(0.0, spent[key] - self.spent.get(key, 0.0))
        self.own, self.spent = own, spent
        return self.total


def is_of(pid: int, job: str) -> bool:
    """Tell whether a process was started by a job."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return b"SLURM_JOB_ID=" + job.encode() in file.read().split(b"\0")
    except OSError:
        return False


# ---- The loop ----


def gpu_reader(env: Mapping[str, str], asked: int) -> Any:
    """Return the first way to look at this job's GPUs that works, None where it has none."""
    if not asked and not any(env.get(name) for name in TOLD):
        return None
    with contextlib.suppress(OSError, AttributeError):
        found = Nvml(env, asked)
        return found if found.gpus else None
    readers: Tuple[Any, ...] = (Amdgpu, NvidiaSmi, AmdSmi, RocmSmi)
    for reader in readers:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return reader(env, asked)
    return None


def started(pid: int) -> str:
    """Return when a process started, which tells it from a later one of its number; "" if it is gone."""
    fields = contents("/proc/%d/stat" % pid).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def spent() -> float:
    """Return the CPU seconds of this process and its ended children."""
    times = os.times()
    return time.process_time() + times[2] + times[3]


def pause(cost: float, size: int) -> float:
    """Return the seconds to the next look, given the CPU seconds of the last one and the file's size."""
    longer = max([factor for grown, factor in GROWN if size >= grown] or [1])
    return min(max(EVERY_S * longer, cost / SHARE), LONGEST_S)


def append(path: str, record: Record) -> Optional[int]:
    """Add a line to a file and close it, as others read it over NFS; return its size, None if that fails."""
    try:
        with open(path, "ab", 0) as file:
            file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
            return file.tell()
    except OSError:
        return None


def watch_group(group: GroupWatch) -> None:
    """Record in the run's events whether the ranks form a group, where that is news."""
    with contextlib.suppress(OSError, ValueError):
        event = group.look(time.monotonic())
        if event is not None:
            append(os.path.join(group.run, "events.jsonl"), event)


def run(pid: int, asked: int, env: Mapping[str, str], apart: str = "") -> None:
    """Sample until process ``pid`` has ended.

    Args:
        apart: the event to record where ranks train apart; empty if that is not looked at.
    """
    parent = started(pid)
    folder = os.path.join(env["DTSLURM_RUN_DIR"], "metrics", env.get("DTSLURM_ATTEMPT", "0"))
    rank = int(env.get("SLURM_NODEID", "0"))
    path = os.path.join(folder, "node-%d.jsonl" % rank)
    head = {"schema": 1, "node": env.get("SLURMD_NODENAME") or os.uname()[1], "node_rank": rank}
    gpus, job, group = gpu_reader(env, asked), JobResources(env), GroupWatch(env, str(head["node"]), apart)
    ranks = Ranks(env, env["DTSLURM_RUN_DIR"], env.get("DTSLURM_ATTEMPT", "0"), rank)
    local = dict.fromkeys(["/tmp", env.get("TMPDIR") or "/tmp", "/dev/shm"])
    far: Dict[str, Record] = {}
    far_at = 0.0
    while parent and started(pid) == parent:
        before = spent()
        if time.monotonic() - far_at >= 60 or not far:  # on a shared file system: seldom
            far, far_at = disks([env["DTSLURM_RUN_DIR"]]), time.monotonic()
        record: Record = dict(
            head, time=round(time.time(), 3), nics=nics(), disks=dict(disks(list(local)), **far)
        )
        record.update(memory())
        record.update(job.sample())
        with contextlib.suppress(OSError):
            record["load"] = round(os.getloadavg()[0], 2)
        if gpus is not None:
            with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
                record.update(known({"gpus": gpus.sample() or None}))
        with contextlib.suppress(OSError, ValueError):
            ranks.note(time.time(), record.get("gpus") or [])
        size = append(path, record)
        if size is None and not os.path.isdir(folder):
            return
        rest = pause(spent() - before, size or 0)
        end = time.monotonic() + rest
        while parent and started(pid) == parent and time.monotonic() < end:
            watch_group(group)
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
    watch_group(group)  # what the logs of a short run tell
    with contextlib.suppress(OSError, ValueError):
        ranks.end(time.time())


def main() -> NoReturn:
    """Run beside a job, unheard: what is wrong here is no failure of the job's."""
    for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGCONT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # for the ranks; PID's end is this one's
    with contextlib.suppress(OSError):
        os.nice(19)
    run(int(sys.argv[1]), int(sys.argv[2]), os.environ, *(word.partition("=")[2] for word in sys.argv[3:]))
    os._exit(0)


if __name__ == "__main__":
    main()
