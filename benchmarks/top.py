"""How soon the dashboard shows something, how fast it answers keys under a flood, and what it costs.

``python -m benchmarks.top [--ranks N]`` runs ``dtslurm top`` in a terminal of its own (80x24), on a made-up
run whose ranks write 50,000 lines a second, all of which it takes. One process of the lowest priority writes
them, a piece to each rank in turn, so that on few cores the dashboard is measured and not its input; how many
it wrote is printed. On a machine that does other things, too, the seconds of CPU tell more than those of the
clock.
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


LINES_A_SECOND = 50_000
KEPT = 1_000_000
KEPT_LINES = re.compile(rb"([0-9][0-9,]+) lines")
PIECE = 5  # lines that a rank writes at once
PRESSES = 200
IDLE_S = 20.0
LINE = b"step 1234 loss 0.4321 learning rate 3.0e-04 tokens/s 51234.5 ".ljust(99, b".") + b"\n"


def make_run(root: Path, ranks: int) -> Path:
    """Write a run as a job leaves it, and the index that names it."""
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


def flood(run: Path, ranks: int, rate: int, written: Synchronized[int]) -> None:
    """Write so many lines a second, to each rank's log in turn, and count them."""
    os.nice(19)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    names = [str(run / "logs" / "0" / f"rank-{rank}.log") for rank in range(ranks)]
    logs = [os.open(name, os.O_WRONLY | os.O_APPEND) for name in names]
    piece, pieces, begin = LINE * PIECE, 0, time.monotonic()
    while True:
        due = int((time.monotonic() - begin) * rate) // PIECE
        while pieces < due:
            os.write(logs[pieces % ranks], piece)
            pieces += 1
        written.value = pieces * PIECE
        time.sleep(0.01)


class Terminal:
    """A terminal of 80x24 in which the dashboard runs."""

    def __init__(self, root: Path, *words: str) -> None:
        env = {
            **os.environ,
            "XDG_STATE_HOME": str(root / "state"),
            "DTSLURM_LOCAL_STATE": str(root / "local"),
            "DTSLURM_RUN_ROOT": str(root / "runs"),
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
        }
        self.begin = time.perf_counter()
        self.pid, self.handle = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "dtslurm", "top", *words], env)
        fcntl.ioctl(self.handle, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = psutil.Process(self.pid)

    def until(self, text: str, limit: float = 60.0) -> float:
        """Return the seconds until the text was drawn."""
        begin, seen = time.perf_counter(), b""
        while text.encode() not in seen:
            if time.perf_counter() - begin > limit:
                raise TimeoutError(f"{text!r} was not drawn within {limit:g} s")
            ready, _, _ = select.select([self.handle], [], [], 0.5)
            if ready:
                seen = seen[-200_000:] + os.read(self.handle, 1 << 16)
        return time.perf_counter() - begin

    def drain(self, seconds: float) -> bytes:
        """Return what is drawn for so long."""
        end, seen = time.perf_counter() + seconds, b""
        while (left := end - time.perf_counter()) > 0:
            if select.select([self.handle], [], [], left)[0]:
                seen += os.read(self.handle, 1 << 16)
        return seen

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self.handle, keys.encode())

    def family(self) -> tuple[float, float]:
        """Return (seconds of CPU, MiB of memory) of the dashboard itself."""
        times = self.process.cpu_times()
        return times.user + times.system, self.process.memory_info().rss / 2**20

    def close(self) -> None:
        """End it."""
        self.process.kill()
        os.waitpid(self.pid, 0)
        os.close(self.handle)


def echoes(terminal: Terminal) -> list[float]:
    """Return how long each of many keys took until what it changes was drawn: the rank grid's metric."""
    legends = ("GPU %", "GPU memory %", "seconds silent", "state")
    found = []
    for number in range(PRESSES):
        terminal.drain(0.05)
        begin = time.perf_counter()
        terminal.press("m")
        terminal.until(f"· {legends[number % 4]}")
        found.append(time.perf_counter() - begin)
    return sorted(found)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=10_000)
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory(prefix="dtslurm-bench-") as name:
        root = Path(name)
        run = make_run(root, ranks)
        firsts, costs = [], []
        for _ in range(5):
            terminal = Terminal(root)
            firsts.append(terminal.until("flood"))
            costs.append(terminal.family()[0])
            terminal.close()
        median, cost = statistics.median(firsts), statistics.median(costs)
        print(f"first picture      {median:.2f} s, {cost:.2f} s of CPU (medians of 5)", flush=True)
        terminal = Terminal(root)
        terminal.until("flood")
        terminal.drain(5.0)
        before, _ = terminal.family()
        terminal.drain(IDLE_S)
        idle = (terminal.family()[0] - before) / IDLE_S
        print(f"idle, job list     {idle:.1%} of a core", flush=True)
        terminal.close()
        written: Synchronized[int] = multiprocessing.Value("q", 0)
        words = (run, ranks, LINES_A_SECOND, written)
        writer = multiprocessing.Process(target=flood, args=words, daemon=True)
        terminal = Terminal(root, "1")
        terminal.until("overview")
        terminal.drain(3.0)
        terminal.press("4")
        terminal.drain(1.0)
        terminal.press("r*\r")
        terminal.drain(1.0)
        terminal.press("2")
        writer.start()
        terminal.until("· state")
        terminal.drain(3.0)
        at, lines = time.perf_counter(), written.value
        took = echoes(terminal)
        rate = (written.value - lines) / (time.perf_counter() - at)
        middle, late = took[len(took) // 2], took[int(len(took) * 0.99)]
        print(f"key to screen      p50 {middle * 1e3:.0f} ms, p99 {late * 1e3:.0f} ms", end=" ")
        print(f"({PRESSES} keys at {rate:,.0f} lines/s)", flush=True)
        terminal.press("4")
        drawn = terminal.drain(KEPT / LINES_A_SECOND + 5)
        kept = max((int(found.replace(b",", b"")) for found in KEPT_LINES.findall(drawn)), default=0)
        print(f"memory afterwards  {terminal.family()[1]:.0f} MiB with {kept:,} lines kept", flush=True)
        writer.kill()
        terminal.close()


if __name__ == "__main__":
    main()
