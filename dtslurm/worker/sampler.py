"""Sample the state of one node of a job every few seconds: GPUs, network, CPU, memory, disks.

The job script starts ``python3 sampler.py PID GPUS [--if-apart=EVENT]`` once per node; the sampler exits when
process PID exits. It appends one line of JSON per sample to ``metrics/<attempt>/node-<node_rank>.jsonl`` in
the run directory. If torch's ranks train without forming a process group, it appends the event EVENT to
``events.jsonl``. The activity of the ranks is in ``activity-<node_rank>.json`` in the same folder as the
samples (``sampler_ranks.py``). In a job of many nodes it writes its samples every two minutes.

Values that cannot be read are absent, never 0. The sampler uses less than 0.4 % of a core: it pauses longer
if sampling is expensive. A week of samples stays below about 40 MB per node: the pauses grow with the file.
Requires Python 3.6 or later and nothing else.
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
    from .sampler_values import (
        HIP,
        LARGE_JOB_S,
        Record,
        contents,
        counter,
        drop_none,
        is_large_job,
        numbers,
        processes,
    )
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
        LARGE_JOB_S,
        Record,
        contents,
        counter,
        drop_none,
        is_large_job,
        numbers,
        processes,
    )

TOLD = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", *HIP)
EVERY_S = 5.0
LONGEST_S = 60.0
UNWRITTEN = 100  # samples of a large job that wait for a full disk
SHARE = 0.004  # fraction of a core
# (file size in bytes, factor by which pauses are longer from that size on).
GROWN = ((8 << 20, 2), (16 << 20, 4), (32 << 20, 8))
HUGE = 1 << 60  # cgroups report "no limit" as a number of at least this size
VIRTUAL = re.compile(r"lo$|docker|veth|br-|virbr|ifb|dummy|tun|tap|cali|flannel|cni")
# ---- The node ----


def nics() -> Dict[str, Record]:
    """Return the counters of each network port: InfiniBand-like ports and physical interfaces."""
    counters = {}
    for port in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        device, number = port.split("/")[4], os.path.basename(port)
        raw_counts = [
            counter(os.path.join(port, "counters", name)) for name in ("port_rcv_data", "port_xmit_data")
        ]
        # The counters are in units of 4 bytes.
        received, sent = (None if count is None else count * 4 for count in raw_counts)
        if received is None:  # AWS EFA
            received = counter(os.path.join(port, "hw_counters", "rx_bytes"))
            sent = counter(os.path.join(port, "hw_counters", "tx_bytes"))
        error_counts = [
            counter(os.path.join(port, "counters", name))
            for name in ("symbol_error", "port_rcv_errors", "link_downed", "port_xmit_discards")
        ]
        errors = [value for value in error_counts if value is not None]
        values = {"rx_bytes": received, "tx_bytes": sent, "errors": sum(errors) if errors else None}
        counters[device if number == "1" else device + "/" + number] = drop_none(values)
    for path in sorted(glob.glob("/sys/class/net/*")):
        name = os.path.basename(path)
        if VIRTUAL.match(name) or contents(os.path.join(path, "operstate")) == "down":
            continue
        received, sent, rx_errors, tx_errors = (
            counter(os.path.join(path, "statistics", file))
            for file in ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors")
        )
        if received is not None and sent is not None:
            counters[name] = {
                "rx_bytes": received,
                "tx_bytes": sent,
                "errors": (rx_errors or 0) + (tx_errors or 0),
            }
    return dict(list(counters.items())[:64])


def memory() -> Record:
    """Return the node's total and used memory in bytes."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", contents("/proc/meminfo"), re.M))
    if "MemTotal" not in fields or "MemAvailable" not in fields:
        return {}
    total = int(fields["MemTotal"]) * 1024
    return {"memory_total": total, "memory_used": total - int(fields["MemAvailable"]) * 1024}


def disks(paths: List[str]) -> Dict[str, Record]:
    """Return the used and total bytes of the file system of each path."""
    usage_by_path = {}
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.statvfs(path)
            used = (status.f_blocks - status.f_bfree) * status.f_frsize
            usage_by_path[path] = {"used": used, "total": status.f_blocks * status.f_frsize}
    return usage_by_path


def job_cgroup(text: str, job: str, top: str = "/sys/fs/cgroup") -> Dict[str, str]:
    """Return the job's cgroup folders by controller; the key "" is the folder of cgroup version 2.

    Args:
        text: the content of ``/proc/self/cgroup``; paths of Slurm's cgroups contain a part ``job_<id>``.
    """
    folders = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        path_parts = path.split("/")
        if "job_" + job not in path_parts:
            continue
        below = "/".join(path_parts[: path_parts.index("job_" + job) + 1]).lstrip("/")
        for name in names.split(","):
            folder = os.path.join(top, name if name else "", below)
            if not name and not os.path.isdir(folder):
                folder = os.path.join(top, "unified", below)
            if os.path.isdir(folder):
                folders[name] = folder
    return folders


class JobResources:
    """The job's CPU and memory use on this node, from Slurm's cgroup or, without one, from /proc."""

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
        """Return the CPU use since the previous sample, and the memory use."""
        now, seconds = time.monotonic(), self.cpu_seconds()
        record = self.memory()
        if self.before is not None and seconds is not None and now > self.before[0]:
            share = (seconds - self.before[1]) / (now - self.before[0]) / self.cpus
            record["cpu_percent"] = round(max(0.0, min(100.0, 100 * share)), 1)
        self.before = (now, seconds) if seconds is not None else None
        return record

    def memory(self) -> Record:
        """Return the cgroup's memory use without reclaimable file cache, and the cgroup's limit."""
        folder = self.folders.get("", self.folders.get("memory", ""))
        is_v2 = "" in self.folders
        used = counter(os.path.join(folder, "memory.current" if is_v2 else "memory.usage_in_bytes"))
        if not folder or used is None:
            return {}
        key = "inactive_file" if is_v2 else "total_inactive_file"
        reclaimable = re.search("^%s ([0-9]+)$" % key, contents(os.path.join(folder, "memory.stat")), re.M)
        limit = counter(os.path.join(folder, "memory.max" if is_v2 else "memory.limit_in_bytes"))
        limit = limit if limit is not None and limit < HUGE else None
        return drop_none(
            {
                "cgroup_memory": max(0, used - int(reclaimable.group(1) if reclaimable else 0)),
                "cgroup_limit": limit,
            }
        )

    def cpu_seconds(self) -> Optional[float]:
        """Return the CPU time in seconds that the job has used on this node, None if unknown."""
        if "" in self.folders:
            usage = re.search(
                r"^usage_usec (\d+)", contents(os.path.join(self.folders[""], "cpu.stat")), re.M
            )
            if usage:
                return int(usage.group(1)) / 1e6
        if "cpuacct" in self.folders:
            nanoseconds = counter(os.path.join(self.folders["cpuacct"], "cpuacct.usage"))
            if nanoseconds is not None:
                return nanoseconds / 1e9
        return self.by_processes()

    def by_processes(self) -> Optional[float]:
        """Return the CPU time of all job processes seen so far, each as of its latest sample."""
        if not self.job:
            return None
        is_own, cpu_by_process = {}, {}
        for pid, stat in processes():
            key = (pid, stat[19])  # a pid may be reused: the start time distinguishes the processes
            is_own[key] = self.own[key] if key in self.own else belongs_to_job(pid, self.job)
            if is_own[key]:
                cpu_by_process[key] = (int(stat[11]) + int(stat[12])) / self.ticks
                self.total += max(0.0, cpu_by_process[key] - self.spent.get(key, 0.0))
        self.own, self.spent = is_own, cpu_by_process
        return self.total


def belongs_to_job(pid: int, job: str) -> bool:
    """Return whether a process was started by a job."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return b"SLURM_JOB_ID=" + job.encode() in file.read().split(b"\0")
    except OSError:
        return False


# ---- The sampling loop ----


def gpu_reader(env: Mapping[str, str], gpu_count: int) -> Any:
    """Return the first reader that can see this job's GPUs, None if there is none."""
    if not gpu_count and not any(env.get(name) for name in TOLD):
        return None
    with contextlib.suppress(OSError, AttributeError):
        nvml = Nvml(env, gpu_count)
        return nvml if nvml.gpus else None
    reader_classes: Tuple[Any, ...] = (Amdgpu, NvidiaSmi, AmdSmi, RocmSmi)
    for reader_class in reader_classes:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return reader_class(env, gpu_count)
    return None


def process_start_time(pid: int) -> str:
    """Return a process's start time, which detects a reused pid; "" if the process has exited."""
    fields = contents("/proc/%d/stat" % pid).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def measure_own_cpu() -> float:
    """Return the CPU seconds used by this process and its exited children."""
    times = os.times()
    return time.process_time() + times[2] + times[3]


def pause(cost: float, size: int) -> float:
    """Return the seconds until the next sample, from the last sample's CPU seconds and the file's size."""
    factor = max([size_factor for min_size, size_factor in GROWN if size >= min_size] or [1])
    return min(max(EVERY_S * factor, cost / SHARE), LONGEST_S)


def append(path: str, *records: Record) -> Optional[int]:
    """Append lines and close the file, so that NFS clients see them; return its size, None on failure."""
    try:
        with open(path, "ab", 0) as file:
            lines = [json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records]
            file.write(b"".join(lines))
            return file.tell()
    except OSError:
        return None


def watch_group(group: GroupWatch) -> None:
    """Record in the run's events a change in whether the ranks form a process group."""
    with contextlib.suppress(OSError, ValueError):
        event = group.look(time.monotonic())
        if event is not None:
            append(os.path.join(group.run, "events.jsonl"), event)


def run(pid: int, gpu_count: int, env: Mapping[str, str], apart: str = "") -> None:
    """Sample until process ``pid`` has exited.

    Args:
        apart: the event to record if the ranks train without a process group; empty disables this check.
    """
    parent = process_start_time(pid)
    folder = os.path.join(env["DTSLURM_RUN_DIR"], "metrics", env.get("DTSLURM_ATTEMPT", "0"))
    rank = int(env.get("SLURM_NODEID", "0"))
    path = os.path.join(folder, "node-%d.jsonl" % rank)
    header = {"schema": 1, "node": env.get("SLURMD_NODENAME") or os.uname()[1], "node_rank": rank}
    gpus, job, group = (
        gpu_reader(env, gpu_count),
        JobResources(env),
        GroupWatch(env, str(header["node"]), apart),
    )
    ranks = Ranks(env, env["DTSLURM_RUN_DIR"], env.get("DTSLURM_ATTEMPT", "0"), rank)
    local_paths = dict.fromkeys(["/tmp", env.get("TMPDIR") or "/tmp", "/dev/shm"])
    shared_disks: Dict[str, Record] = {}
    shared_disks_read_at = 0.0
    unwritten: List[Record] = []
    size: Optional[int] = 0
    write_every_s, written_at = LARGE_JOB_S if is_large_job(env) else 0.0, -LARGE_JOB_S
    while parent and process_start_time(pid) == parent:
        cpu_before = measure_own_cpu()
        # statvfs on a shared file system is expensive.
        if time.monotonic() - shared_disks_read_at >= 60 or not shared_disks:
            shared_disks, shared_disks_read_at = disks([env["DTSLURM_RUN_DIR"]]), time.monotonic()
        record: Record = dict(
            header,
            time=round(time.time(), 3),
            nics=nics(),
            disks=dict(disks(list(local_paths)), **shared_disks),
        )
        record.update(memory())
        record.update(job.sample())
        with contextlib.suppress(OSError):
            record["load"] = round(os.getloadavg()[0], 2)
        if gpus is not None:
            with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
                record.update(drop_none({"gpus": gpus.sample() or None}))
        with contextlib.suppress(OSError, ValueError):
            ranks.note(time.time(), record.get("gpus") or [])
        unwritten.append(record)
        if time.monotonic() - written_at >= write_every_s:
            size = append(path, *unwritten)
            written_at = time.monotonic()
            unwritten = unwritten[-UNWRITTEN:] if size is None and write_every_s else []
            if size is None and not os.path.isdir(folder):
                return
        pause_s = pause(measure_own_cpu() - cpu_before, size or 0)
        next_sample_at = time.monotonic() + pause_s
        while parent and process_start_time(pid) == parent and time.monotonic() < next_sample_at:
            watch_group(group)
            time.sleep(min(1.0, max(0.0, next_sample_at - time.monotonic())))
    if unwritten:
        append(path, *unwritten)
    watch_group(group)  # evaluate the logs of runs that are shorter than one pause
    with contextlib.suppress(OSError, ValueError):
        ranks.end(time.time())


def main() -> NoReturn:
    """Run next to a job without output: a failure of the sampler must not fail the job."""
    for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGCONT"):
        # These signals are meant for the ranks; the sampler exits when PID exits.
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(19)
    run(int(sys.argv[1]), int(sys.argv[2]), os.environ, *(word.partition("=")[2] for word in sys.argv[3:]))
    os._exit(0)


if __name__ == "__main__":
    main()
