"""What a node's sampler costs, beside a loop of psutil's that reads the same; and a look at 10,000 ranks.

``python -m benchmarks.sampler`` runs both for a minute each. Where there is a C compiler, the sampler looks
at eight GPUs of a library that answers at once: our own share of the cost is seen, not the driver's.
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
    found = {"cpu": psutil.cpu_percent(), "memory": psutil.virtual_memory()._asdict()}
    found["load"] = os.getloadavg()
    found["nics"] = {name: one._asdict() for name, one in psutil.net_io_counters(pernic=True).items()}
    found["disks"] = [psutil.disk_usage(path)._asdict() for path in ("/tmp", "/dev/shm", os.getcwd())]
    found["processes"] = [one.info for one in psutil.process_iter(["pid", "cpu_times", "memory_info"])]
    with open("peer.jsonl", "a") as file:
        file.write(json.dumps(found) + chr(10))
    time.sleep(5)
"""


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cost(argv: list[str], env: dict[str, str], folder: Path) -> dict[str, float]:
    """Return the share of a core that a program takes once it runs, in percent, its start, and its memory."""
    with subprocess.Popen(argv, env={**os.environ, **env}, cwd=folder) as running:
        time.sleep(2.5)  # its start, and the first look
        start, begin = cpu_s(running.pid), time.monotonic()
        time.sleep(SECONDS)
        used, took = cpu_s(running.pid) - start, time.monotonic() - begin
        status = Path(f"/proc/{running.pid}/status").read_text()
        running.kill()
    rss = int(status.partition("VmRSS:")[2].split()[0])
    share = round(100 * used / took, 3)
    return {"core_percent": share, "start_cpu_s": start, "rss_mib": round(rss / 1024, 1)}


def sampler(folder: Path) -> dict[str, object]:
    """Return the cost of the sampler and of its peer."""
    for name in SAMPLER:
        shutil.copy(assets.worker(name), folder)
    (folder / "metrics" / "0").mkdir(parents=True)
    env = {"DTSLURM_RUN_DIR": str(folder), "SLURM_JOB_ID": "1"}
    compiler = shutil.which("cc")
    if compiler:
        library = folder / "libnvidia-ml.so"
        source = Path(__file__).parents[1] / "tests" / "worker" / "data" / "nvml.c"
        words = [compiler, "-shared", "-fPIC", "-DNEW_NAMES", "-o", str(library), str(source)]
        subprocess.run(words, check=True)
        env |= {"DTSLURM_NVML": str(library), "FAKE_GPUS": "8"}
    argv = [sys.executable, "-BES", str(folder / "sampler.py"), str(os.getpid()), "8"]
    ours = cost(argv, env, folder)
    notes = (folder / "metrics" / "0" / "node-0.jsonl").read_bytes().splitlines()
    theirs = cost([sys.executable, "-c", PEER], {}, folder)
    ratio = ours["core_percent"] / theirs["core_percent"] if theirs["core_percent"] else None
    return {
        "sampler": ours,
        "psutil": theirs,
        "ratio": round(ratio, 2) if ratio is not None else None,
        "gpus": len(json.loads(notes[-1]).get("gpus", [])),
        "notes": len(notes),
        "bytes_per_note": len(notes[-1]),
        "load_average": os.getloadavg()[0],
    }


def look(folder: Path) -> dict[str, object]:
    """Return the seconds and bytes of a first and of a further look at a large job."""
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
    found: dict[str, object] = {"ranks": RANKS, "nodes": NODES}
    after = None
    for name in ("first", "next"):
        begin, cpu = time.perf_counter(), time.process_time()
        told = telemetry.answer({"run_dir": str(folder), "after": after})
        found[f"{name}_look_s"] = round(time.perf_counter() - begin, 2)
        found[f"{name}_look_cpu_s"] = round(time.process_time() - cpu, 2)
        found[f"{name}_kilobytes"] = len(zlib.compress(json.dumps(told).encode(), 1)) // 1000
        after = told["cursor"]
    return found


def main() -> None:
    """Print the figures as JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cost").mkdir()
        print(json.dumps({"sampler": sampler(folder / "cost"), "pulse": look(folder / "look")}, indent=2))


if __name__ == "__main__":
    main()
