"""The cost of the telemetry sampler of a node, and of reading the telemetry of 10,000 ranks.

- ``sampler``: the CPU time and the memory of the sampler during one minute, beside a loop that reads the same
  values with psutil. If a C compiler is installed, the sampler also reads eight GPUs through a mock of NVML
  that answers immediately, so that the cost of the sampler is measured and not the cost of the driver.
- ``telemetry``: the seconds and the bytes of the first and of the next query of a run with 10,000 ranks on
  1,250 nodes.

Run it with ``python -m benchmarks.sampler``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

from dtslurm import assets
from dtslurm.services.submit.submit import SAMPLER
from dtslurm.worker.telemetry import telemetry

SECONDS, RANKS, NODES = 60.0, 10_000, 1_250
PEER = """\
import json, os, time, psutil
while True:
    sample = {"cpu": psutil.cpu_percent(), "memory": psutil.virtual_memory()._asdict()}
    sample["load"] = os.getloadavg()
    sample["nics"] = {name: nic._asdict() for name, nic in psutil.net_io_counters(pernic=True).items()}
    sample["disks"] = [psutil.disk_usage(path)._asdict() for path in ("/tmp", "/dev/shm", os.getcwd())]
    processes = psutil.process_iter(["pid", "cpu_times", "memory_info"])
    sample["processes"] = [process.info for process in processes]
    with open("peer.jsonl", "a") as file:
        file.write(json.dumps(sample) + chr(10))
    time.sleep(5)
"""


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_cost(argv: list[str], env: dict[str, str], folder: Path) -> dict[str, float]:
    """Return the CPU time of a program in percent of a core, the CPU seconds of its start, and its memory."""
    with subprocess.Popen(argv, env={**os.environ, **env}, cwd=folder) as running:
        time.sleep(2.5)  # until the program has started and written its first sample
        start_cpu_s, start = cpu_s(running.pid), time.monotonic()
        time.sleep(SECONDS)
        used, seconds = cpu_s(running.pid) - start_cpu_s, time.monotonic() - start
        status = Path(f"/proc/{running.pid}/status").read_text()
        running.kill()
    rss = int(status.partition("VmRSS:")[2].split()[0])
    percent = round(100 * used / seconds, 3)
    return {"core_percent": percent, "start_cpu_s": start_cpu_s, "rss_mib": round(rss / 1024, 1)}


def compare_samplers(folder: Path) -> dict[str, object]:
    """Return the cost of the sampler and of the loop with psutil."""
    for name in SAMPLER:
        shutil.copy(assets.worker(name), folder)
    (folder / "metrics" / "0").mkdir(parents=True)
    env = {"DTSLURM_RUN_DIR": str(folder), "SLURM_JOB_ID": "1"}
    compiler = shutil.which("cc")
    if compiler:
        library = folder / "libnvidia-ml.so"
        source = Path(__file__).parents[1] / "tests" / "worker" / "data" / "nvml.c"
        command = [compiler, "-shared", "-fPIC", "-DNEW_NAMES", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        env |= {"DTSLURM_NVML": str(library), "FAKE_GPUS": "8"}
    argv = [sys.executable, "-BES", str(folder / "sampler.py"), str(os.getpid()), "8"]
    own = measure_cost(argv, env, folder)
    samples = (folder / "metrics" / "0" / "node-0.jsonl").read_bytes().splitlines()
    peer = measure_cost([sys.executable, "-c", PEER], {}, folder)
    ratio = own["core_percent"] / peer["core_percent"] if peer["core_percent"] else None
    return {
        "sampler": own,
        "psutil": peer,
        "ratio": round(ratio, 2) if ratio is not None else None,
        "gpus": len(json.loads(samples[-1]).get("gpus", [])),
        "samples": len(samples),
        "bytes_per_sample": len(samples[-1]),
        "load_average": os.getloadavg()[0],
    }


def measure_queries(folder: Path) -> dict[str, object]:
    """Return the seconds and bytes of a first and of a next query of the telemetry of a large run."""
    for name in ("logs", "ranks", "metrics"):
        (folder / name / "0").mkdir(parents=True)
    record = {
        "node_rank": 0,
        "host": "n",
        "pid": 1,
        "started": 1,
        "ended": None,
        "exit_code": None,
        "signal": None,
    }
    for rank in range(RANKS):
        (folder / "logs" / "0" / f"rank-{rank}.log").write_text("training\n")
        path = folder / "ranks" / "0" / f"{rank}.json"
        path.write_text(json.dumps(record))
        os.utime(path, (time.time() - 1000,) * 2)
    gpu = {
        "index": 0,
        "uuid": "GPU-" + "a" * 36,
        "util": 97,
        "memory_used": 1,
        "power_w": 650.5,
        "throttle": [],
    }
    for node in range(NODES):
        lines = [
            json.dumps({"time": 5.0 * number, "node": "n", "node_rank": node, "gpus": [gpu] * 8, "nics": {}})
            for number in range(40)
        ]
        (folder / "metrics" / "0" / f"node-{node}.jsonl").write_text("\n".join(lines) + "\n")
    results: dict[str, object] = {"ranks": RANKS, "nodes": NODES}
    cursor = None
    for name in ("first", "next"):
        start, cpu_start = time.perf_counter(), time.process_time()
        answer = telemetry.answer({"run_dir": str(folder), "after": cursor})
        results[f"{name}_query_s"] = round(time.perf_counter() - start, 2)
        results[f"{name}_query_cpu_s"] = round(time.process_time() - cpu_start, 2)
        results[f"{name}_kilobytes"] = len(zlib.compress(json.dumps(answer).encode(), 1)) // 1000
        cursor = answer["cursor"]
    return results


def main() -> None:
    """Print the figures as JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cost").mkdir()
        print(
            json.dumps(
                {
                    "sampler": compare_samplers(folder / "cost"),
                    "telemetry": measure_queries(folder / "queries"),
                },
                indent=2,
            )
        )


if __name__ == "__main__":
    main()
