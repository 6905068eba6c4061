"""The throughput, latency and CPU cost of following the logs of many ranks, beside ``tail`` on the files.

The benchmark writes one log file for each rank and follows all files over an SSH server on this machine. It
prints three tables:

- the throughput, and the CPU time on the local side, for 200 MB in all files: dtslurm's merged stream, the
  same stream printed as by `dtslurm logs`, one ``tail`` over all files, and one ``tail`` for each file. Each
  line contains its rank, a number and a checksum; the column faults counts lines that are lost, torn,
  duplicated or out of order. On a busy machine the CPU time is more reliable than the throughput.
- the latency from the write of a line to its arrival.
- the CPU time and the memory of the log tailer, the process that reads the files, while they do not grow.

Run it with ``python -m benchmarks.logs [--local | --ssh HOST] [--files N]...``. HOST must be a name for this
machine that ssh knows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import psutil

from dtslurm.cli.printing.screen import prefix_lines
from dtslurm.logs.lines import LogBlock
from dtslurm.services.logs.log_stream import LogRequest, LogStream, Mark
from dtslurm.transport.base import Transport
from dtslurm.transport.connect import connect
from tests.sshd.servers import ssh_lab

TOTAL = 200_000_000
ROUNDS = 3
MAX_TAILS = 1000  # processes


@contextmanager
def run_folder(files: int) -> Iterator[tuple[Path, list[Path]]]:
    """Yield an empty run directory on the local disk, and the log files of this many ranks."""
    with tempfile.TemporaryDirectory(prefix="dtslurm-bench-") as name:
        run = Path(name)
        logs = run / "logs" / "0"
        logs.mkdir(parents=True)
        paths = [logs / f"rank-{rank}.log" for rank in range(files)]
        for path in paths:
            path.touch()
        yield run, paths


def line(rank: int, number: int) -> bytes:
    """Return a line of 100 bytes."""
    body = f"{rank} {number} ".encode().ljust(90, b".")
    return b"%s %08x\n" % (body, zlib.crc32(body))


def fill(paths: Sequence[Path], total: int) -> int:
    """Write this many bytes in total; return the number of lines of each file."""
    each = total // len(paths) // 100
    for rank, path in enumerate(paths):
        path.write_bytes(b"".join(line(rank, number) for number in range(each)))
    return each


def count_faults(lines: Iterator[bytes], files: int, each: int) -> int:
    """Return the number of lines that are torn, duplicated, out of order or missing."""
    count = 0
    expected = [0] * files
    for text in lines:
        body, _, crc = text.rpartition(b" ")
        words = body.split(b" ", 2)
        if f"{zlib.crc32(body):08x}".encode() != crc:
            count += 1
            continue
        rank, number = int(words[0]), int(words[1])
        count += number != expected[rank]
        expected[rank] = number + 1
    return count + sum(each - lines_read for lines_read in expected)


def ssh_prefix(ssh: str | None) -> list[str]:
    """Return the arguments that precede the command of a peer."""
    return [] if ssh is None else ["ssh", *_ssh_options(), ssh, "--"]


def _ssh_options() -> list[str]:
    config = os.environ.get("DTSLURM_SSH_CONFIG")
    return ["-o", "BatchMode=yes", *(["-F", config] if config else [])]


# ---- Throughput: files that are complete when the follower starts ----


def read_all(transport: Transport, run: Path, total: int, use: Callable[[LogBlock], object]) -> float:
    """Pass all bytes of the logs to ``use``; return the seconds that this takes."""
    start = time.perf_counter()
    got = 0
    with LogStream(transport, LogRequest(str(run))) as stream:
        while got < total:
            for item in stream.read(1.0):
                if isinstance(item, LogBlock):
                    got += len(item.data)
                    use(item)
    return time.perf_counter() - start


def read_all_with_peer(argv: Sequence[str], files: int, total: int) -> tuple[float, int | None]:
    """Return the seconds and the faults of a command that prints all files."""
    start = time.perf_counter()
    with subprocess.Popen(list(argv), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        chunks, got = [], 0
        while got < total and (chunk := process.stdout.read1(1 << 20)):  # type: ignore[attr-defined]
            chunks.append(chunk)
            got += len(chunk)
        seconds = time.perf_counter() - start
        process.terminate()
    return seconds, count_faults(iter(b"".join(chunks).splitlines()), files, total // files // 100)


def measure_throughput(transport: Transport, ssh: str | None, files: int) -> list[dict[str, Any]]:
    """Return the throughput of each method, the best of several alternating rounds."""
    rows: dict[str, dict[str, Any]] = {}

    def note(name: str, work: Callable[[], tuple[float, int | None]]) -> None:
        empty = {"method": name, "files": files, "MB/s": 0.0, "CPU s for 100 MB": 1e9, "faults": None}
        row = rows.setdefault(name, empty)
        before = cpu_seconds()
        seconds, faults = work()
        cost = (cpu_seconds() - before) / total * 1e8
        row["MB/s"] = max(row["MB/s"], round(total / seconds / 1e6, 1))
        row["CPU s for 100 MB"] = min(row["CPU s for 100 MB"], round(cost, 2))
        if faults is not None:
            row["faults"] = faults

    with run_folder(files) as (run, paths):
        each = fill(paths, TOTAL)
        total = each * files * 100
        list_file = run / "names"
        list_file.write_bytes(b"\0".join(os.fsencode(path) for path in paths))
        prefix = ssh_prefix(ssh)
        one_tail = [*prefix, *_shell(f"xargs -s 1900000 -0 -a {list_file} -n {files} tail -qF -n +1", ssh)]
        many_tails = [*prefix, *_shell(f"xargs -0 -a {list_file} -n 1 -P {files} tail -F -n +1", ssh)]
        with Path(os.devnull).open("w") as sink:
            blocks: list[LogBlock] = []
            read_all(transport, run, total, blocks.append)
            faults = count_faults((text for block in blocks for text in block.data.splitlines()), files, each)
            blocks.clear()
            for _ in range(ROUNDS):
                note("dtslurm, merged", lambda: (read_all(transport, run, total, discard), faults))
                note("dtslurm, printed", lambda: (read_all(transport, run, total, printer(sink)), None))
                note("tail -qF (lines without rank)", lambda: read_all_with_peer(one_tail, files, total))
                if files <= MAX_TAILS:
                    note("N x tail -F", lambda: read_all_with_peer(many_tails, files, total))
    return list(rows.values())


def discard(block: LogBlock) -> None:
    """Discard lines."""


def printer(sink: TextIO) -> Callable[[LogBlock], object]:
    """Return a function that prints lines as `dtslurm logs` does if its output is a pipe."""
    return lambda block: sink.write(prefix_lines(block))


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its ended children, which over SSH are the local ones."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def _shell(script: str, ssh: str | None) -> list[str]:
    return ["sh", "-c", script] if ssh is None else [f"sh -c '{script}'"]


# ---- Latency: from the write of a line to its arrival ----


def stamped_writer(paths: Sequence[Path], stop: threading.Event, period: float) -> None:
    """Write a line with the current time to every file once in ``period`` seconds, at regular intervals."""
    files = [path.open("ab", buffering=0) for path in paths]
    start, count = time.monotonic(), 0
    while not stop.is_set():
        file = files[count % len(files)]
        file.write(b"at %d\n" % time.monotonic_ns())
        count += 1
        ahead = start + count * period / len(files) - time.monotonic()
        if ahead > 0.002:
            time.sleep(ahead)
    for file in files:
        file.close()


def ages_in_ms(lines: Iterator[bytes]) -> list[float]:
    """Return the age of each line in milliseconds."""
    now = time.monotonic_ns()
    return [(now - int(text[3:])) / 1e6 for text in lines if text.startswith(b"at ")]


def measure_latency(
    transport: Transport, ssh: str | None, files: int, seconds: float = 15.0
) -> list[dict[str, Any]]:
    """Return p50 and p99 in milliseconds while a line is written to every file once in two seconds."""
    rows = []
    for name in ("dtslurm", "tail -qF"):
        with run_folder(files) as (run, paths):
            stop = threading.Event()
            writer = threading.Thread(target=stamped_writer, args=[paths, stop, 2.0])
            ages: list[float] = []
            end = time.monotonic() + seconds
            try:
                if name == "dtslurm":
                    with LogStream(transport, LogRequest(str(run))) as stream:
                        while Mark.CAUGHT_UP not in stream.read(1.0):
                            pass
                        writer.start()
                        while time.monotonic() < end:
                            for item in stream.read(0.1):
                                if isinstance(item, LogBlock):
                                    ages += ages_in_ms(iter(item.data.splitlines()))
                else:
                    (run / "names").write_bytes(b"\0".join(os.fsencode(path) for path in paths))
                    script = f"xargs -s 1900000 -0 -a {run / 'names'} -n {files} tail -qF -n 0"
                    argv = [*ssh_prefix(ssh), *_shell(script, ssh)]
                    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
                        assert process.stdout is not None
                        os.set_blocking(process.stdout.fileno(), False)
                        time.sleep(1.0)
                        writer.start()
                        while time.monotonic() < end:
                            ages += ages_in_ms(iter((process.stdout.read() or b"").splitlines()))
                            time.sleep(0.005)
                        process.kill()
            finally:
                stop.set()
                if writer.is_alive():
                    writer.join()
        cuts = statistics.quantiles(ages, n=100)
        rows.append(
            {
                "method": name,
                "files": files,
                "lines": len(ages),
                "p50 ms": round(cuts[49]),
                "p99 ms": round(cuts[98]),
            }
        )
    return rows


# ---- Idle: files that do not grow ----


def measure_idle_tailer(files: int, seconds: float = 20.0, settle_s: float = 8.0) -> dict[str, Any]:
    """Return the CPU time and the memory of the log tailer while the files do not grow.

    The tailer checks files more often for a while after it opens them; ``settle_s`` excludes this time.
    """
    with run_folder(files) as (run, paths):
        for path in paths:
            path.write_bytes(b"one line\n")
        children_before = set(psutil.Process().children())
        with LogStream(connect(None), LogRequest(str(run))) as stream:
            while Mark.CAUGHT_UP not in stream.read(1.0):
                pass
            # The local transport starts the tailer as `python -I -S -c PROGRAM`.
            new_children = set(psutil.Process().children()) - children_before
            (tailer,) = (child for child in new_children if "-S" in child.cmdline())
            settled = time.monotonic() + settle_s
            while time.monotonic() < settled:
                stream.read(0.5)
            before, start = sum(tailer.cpu_times()[:2]), time.monotonic()
            while time.monotonic() < start + seconds:
                stream.read(0.5)
            used = sum(tailer.cpu_times()[:2]) - before
            memory = tailer.memory_info().rss / 1e6
            percent = 100 * used / (time.monotonic() - start)
    return {
        "process": "log tailer, idle",
        "files": files,
        "% of a core": round(percent, 2),
        "MB": round(memory, 1),
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows with the same keys as a table."""
    keys = list(rows[0])
    cells = [keys, *([str(row[key]) if row[key] is not None else "-" for key in keys] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(keys))]
    for row in cells:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print()


def main() -> None:
    """Print the tables, or JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--ssh", metavar="HOST")
    target.add_argument("--local", action="store_true", help="without SSH")
    parser.add_argument("--files", type=int, action="append")
    parser.add_argument("--only", choices=["throughput", "latency", "idle"])
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if shutil.which("tail") is None:
        sys.exit("tail is not installed, but the benchmark compares with it. Install GNU coreutils.")
    sizes = chosen.files or [1000, 10_000]
    if chosen.local or chosen.ssh:
        results = measure(chosen.ssh, sizes, chosen.only)
    else:
        with ssh_lab() as lab:
            lab.server("login", env={"HOME": str(lab.home("login"))})
            os.environ.update(lab.environ())
            results = measure("login", sizes, chosen.only)
    if chosen.json:
        print(json.dumps({"schema": 1, "logs": results}, indent=1))
        return
    for rows in results.values():
        print_table(rows)


def measure(ssh: str | None, sizes: Sequence[int], only: str | None) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each table by its name."""
    results: dict[str, list[dict[str, Any]]] = {}
    transport = connect(ssh)
    for files in sizes:
        if only in {None, "throughput"}:
            results.setdefault("throughput", []).extend(measure_throughput(transport, ssh, files))
        if only in {None, "latency"} and files <= 1000:
            results.setdefault("latency", []).extend(measure_latency(transport, ssh, files))
        if only in {None, "idle"}:
            results.setdefault("idle", []).append(measure_idle_tailer(files))
    transport.close()
    return results


if __name__ == "__main__":
    main()
