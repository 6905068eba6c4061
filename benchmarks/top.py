"""The start time, the latency of keys, the CPU time and the memory of the dashboard ``dtslurm top``.

The dashboard runs in a pseudo-terminal of 80x24 on a generated run of 10,000 ranks, which write 50,000 log
lines per second in total while all logs are followed. One process of the lowest priority writes the lines, so
that a machine with few cores measures the dashboard and not the writer; its actual rate is printed. On a busy
machine the CPU time is more reliable than the wall-clock time. There is no peer.

Run it with ``python -m benchmarks.top [--ranks N]``.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import pty
import re
import resource
import select
import statistics
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized


LINES_PER_SECOND = 50_000
MAX_LINES = 1_000_000
LINE_COUNT = re.compile(rb"([0-9][0-9,]+) lines")
CHUNK_LINES = 5  # lines that a rank writes at once
PRESSES = 200
IDLE_S = 20.0
LINE = b"step 1234 loss 0.4321 learning rate 3.0e-04 tokens/s 51234.5 ".ljust(99, b".") + b"\n"


def create_run(root: Path, ranks: int) -> Path:
    """Write the run directory of a submitted run, and add the run to the index."""
    from dtslurm.model.jobs.job import JobRecord
    from dtslurm.store import codec
    from dtslurm.store.index import Index

    run = root / "runs" / "flood"
    (run / "logs" / "0").mkdir(parents=True)
    manifest = {"schema": 1, "job_id": "1", "attempt": 0, "nodes": "n1", "world_size": ranks}
    (run / "logs" / "0" / "manifest.json").write_text(json.dumps(manifest))
    record = JobRecord(
        token="0123456789ab",
        cluster="local",
        name="flood",
        run_dir=str(run),
        phase="submitted",
        created_at=time.time(),
        job_id="1",
        world_size=ranks,
    )
    (run / "job.json").write_bytes(codec.encode({"schema": 1, **codec.plain(record)}))
    Index(root / "state" / "dtslurm" / "runs.sqlite").put(record)
    for rank in range(ranks):
        (run / "logs" / "0" / f"rank-{rank}.log").touch()
    return run


def write_logs(run: Path, ranks: int, rate: int, written: Synchronized[int]) -> None:
    """Write this many lines per second to the logs of the ranks in turn, and count them in ``written``."""
    os.nice(19)
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    names = [str(run / "logs" / "0" / f"rank-{rank}.log") for rank in range(ranks)]
    logs = [os.open(name, os.O_WRONLY | os.O_APPEND) for name in names]
    chunk, chunks, start = LINE * CHUNK_LINES, 0, time.monotonic()
    while True:
        due = int((time.monotonic() - start) * rate) // CHUNK_LINES
        while chunks < due:
            os.write(logs[chunks % ranks], chunk)
            chunks += 1
        written.value = chunks * CHUNK_LINES
        time.sleep(0.01)


class Terminal:
    """A pseudo-terminal of 80x24 in which the dashboard runs."""

    def __init__(self, root: Path, *words: str) -> None:
        env = {
            **os.environ,
            "XDG_STATE_HOME": str(root / "state"),
            "DTSLURM_LOCAL_STATE": str(root / "local"),
            "DTSLURM_RUN_ROOT": str(root / "runs"),
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
        }
        self.pid, self.handle = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "dtslurm", "top", *words], env)
        fcntl.ioctl(self.handle, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = psutil.Process(self.pid)

    def wait_for_text(self, text: str, limit: float = 60.0) -> float:
        """Wait until the text is drawn; return the seconds."""
        start, output = time.perf_counter(), b""
        while text.encode() not in output:
            if time.perf_counter() - start > limit:
                raise TimeoutError(f"{text!r} was not drawn within {limit:g} s")
            ready, _, _ = select.select([self.handle], [], [], 0.5)
            if ready:
                output = output[-200_000:] + os.read(self.handle, 1 << 16)
        return time.perf_counter() - start

    def drain(self, seconds: float) -> bytes:
        """Return the output of the next seconds."""
        end, output = time.perf_counter() + seconds, b""
        while (remaining := end - time.perf_counter()) > 0:
            if select.select([self.handle], [], [], remaining)[0]:
                output += os.read(self.handle, 1 << 16)
        return output

    def press(self, keys: str) -> None:
        """Send keys to the dashboard."""
        os.write(self.handle, keys.encode())

    def measure_usage(self) -> tuple[float, float]:
        """Return the CPU seconds and the memory in MiB of the dashboard."""
        times = self.process.cpu_times()
        return times.user + times.system, self.process.memory_info().rss / 2**20

    def close(self) -> None:
        """End the dashboard."""
        self.process.kill()
        os.waitpid(self.pid, 0)
        os.close(self.handle)


def time_keys(terminal: Terminal) -> list[float]:
    """Return the sorted seconds from a key that changes the metric of the rank grid to the new grid."""
    legends = ("GPU %", "GPU memory %", "seconds without output", "state")
    latencies = []
    for number in range(PRESSES):
        terminal.drain(0.05)
        start = time.perf_counter()
        terminal.press("m")
        terminal.wait_for_text(f"· {legends[number % 4]}")
        latencies.append(time.perf_counter() - start)
    return sorted(latencies)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=10_000)
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory(prefix="dtslurm-bench-") as name:
        root = Path(name)
        run = create_run(root, ranks)
        start_times, start_cpu = [], []
        for _ in range(5):
            terminal = Terminal(root)
            start_times.append(terminal.wait_for_text("flood"))
            start_cpu.append(terminal.measure_usage()[0])
            terminal.close()
        seconds, cpu = statistics.median(start_times), statistics.median(start_cpu)
        print(f"first screen       {seconds:.2f} s, {cpu:.2f} s of CPU (medians of 5)", flush=True)
        terminal = Terminal(root)
        terminal.wait_for_text("flood")
        terminal.drain(5.0)
        before, _ = terminal.measure_usage()
        terminal.drain(IDLE_S)
        idle = (terminal.measure_usage()[0] - before) / IDLE_S
        print(f"idle, list of runs {idle:.1%} of a core", flush=True)
        terminal.close()
        written: Synchronized[int] = multiprocessing.Value("q", 0)
        arguments = (run, ranks, LINES_PER_SECOND, written)
        writer = multiprocessing.Process(target=write_logs, args=arguments, daemon=True)
        terminal = Terminal(root, "1")
        terminal.wait_for_text("overview")
        terminal.drain(3.0)
        terminal.press("4")
        terminal.drain(1.0)
        terminal.press("r*\r")
        terminal.drain(1.0)
        terminal.press("2")
        writer.start()
        terminal.wait_for_text("· state")
        terminal.drain(3.0)
        start, lines_before = time.perf_counter(), written.value
        latencies = time_keys(terminal)
        rate = (written.value - lines_before) / (time.perf_counter() - start)
        p50, p99 = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
        print(f"key to screen      p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms", end=" ")
        print(f"({PRESSES} keys at {rate:,.0f} lines/s)", flush=True)
        terminal.press("4")
        output = terminal.drain(MAX_LINES / LINES_PER_SECOND + 5)
        counts = [int(count.replace(b",", b"")) for count in LINE_COUNT.findall(output)]
        memory, lines = terminal.measure_usage()[1], max(counts, default=0)
        print(f"memory at the end  {memory:.0f} MiB with {lines:,} log lines", flush=True)
        writer.kill()
        terminal.close()


if __name__ == "__main__":
    main()
