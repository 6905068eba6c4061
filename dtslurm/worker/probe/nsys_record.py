"""Let nsys record a rank that was started below it: ``python3 -c PROGRAM SECONDS``.

It prints the operations of the GPU and the NVTX ranges as a trace in the JSON format of Chrome, and the
report of nsys itself, in lines with the kind of the content and a piece of it. The tables of a report: the
chapter "Exporter SQLite Schema" of the manual of Nsight Systems.
"""

import base64
import contextlib
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, Iterator, List

NOT_BELOW_NSYS = 4
LONGEST_REPORT = 1 << 26  # bytes that are printed; a longer report stays in the run directory
MOST_OPERATIONS = 300000
LOOK_S = 0.2
PIECE = 700  # bytes in one line; srun mixes lines of several nodes that are longer than 1024 bytes
RANGE_KINDS = (59, 60)  # NvtxPushPopRange and NvtxStartEndRange in the table of NVTX events
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
OPERATIONS = {
    "kernel": """SELECT a.start, a.end, a.deviceId, a.streamId, s.value FROM CUPTI_ACTIVITY_KIND_KERNEL a
        LEFT JOIN StringIds s ON s.id = a.shortName""",
    "gpu_memcpy": """SELECT a.start, a.end, a.deviceId, a.streamId, a.copyKind
        FROM CUPTI_ACTIVITY_KIND_MEMCPY a""",
    "gpu_memset": "SELECT a.start, a.end, a.deviceId, a.streamId, 0 FROM CUPTI_ACTIVITY_KIND_MEMSET a",
}


class NoReport(Exception):
    """There is no report; the message states why."""


def own_environment() -> Dict[str, str]:
    """Return the environment without what nsys adds for the programs below it, which this one is not."""
    prefixes = ("NSYS_", "QUADD_", "CUDA_INJECTION", "NVTX_INJECTION")
    return {
        name: value
        for name, value in os.environ.items()
        if name != "LD_PRELOAD" and not name.startswith(prefixes)
    }


def call_nsys(*words: str) -> None:
    """Run nsys; its messages go to stderr.

    Raises:
        NoReport: it returned an error.
    """
    done = subprocess.run(
        ["nsys", *words],
        env=own_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        text = done.stdout.decode("utf-8", "replace").strip()
        raise NoReport("nsys {} ended with {}: {}".format(words[0], done.returncode, text[-500:]))


def record(session: str, seconds: float, pid: int, folder: str) -> str:
    """Return the path of a report of the next seconds.

    Raises:
        NoReport: nsys returned an error, or the rank has ended.
    """
    option = "--session=" + session
    call_nsys(
        "start", option, "--output=" + os.path.join(folder, "report"), "--sample=none", "--cpuctxsw=none"
    )
    try:
        wait_beside(pid, seconds)
    except BaseException:
        with contextlib.suppress(NoReport):
            call_nsys("cancel", option)
        raise
    call_nsys("stop", option)
    for suffix in (".nsys-rep", ".qdstrm"):  # without its importer, nsys writes the latter only
        path = os.path.join(folder, "report" + suffix)
        if os.path.exists(path):
            return path
    raise NoReport("nsys wrote no report")


def wait_beside(pid: int, seconds: float) -> None:
    """Wait.

    Raises:
        NoReport: the process has ended meanwhile.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not os.path.exists("/proc/{}".format(pid)):
            raise NoReport("the rank has ended")
        time.sleep(LOOK_S)


def read_trace(report: str, folder: str) -> bytes:
    """Return the operations of the GPU and the NVTX ranges of a report as a packed trace.

    Raises:
        NoReport: nsys cannot export the report, or this Python has no sqlite3.
    """
    database = os.path.join(folder, "report.sqlite")
    call_nsys("export", "--type=sqlite", "--output=" + database, "--force-overwrite=true", report)
    try:
        return gzip.compress(json.dumps({"traceEvents": read_events(database)}).encode())
    except ImportError as error:
        raise NoReport("the report cannot be read: {}".format(error)) from error


def read_events(database: str) -> List[Dict[str, Any]]:
    """Return the events of an exported report; nsys leaves out the tables of kinds that did not occur.

    Raises:
        ImportError: this Python has no sqlite3.
    """
    import sqlite3  # some builds of Python lack it

    with contextlib.closing(sqlite3.connect(database)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        operations = list(_read_operations(connection, tables))
        operations.sort(key=lambda event: event["ts"])
        ranges = list(_read_ranges(connection)) if "NVTX_EVENTS" in tables else []
    return [*operations[:MOST_OPERATIONS], *ranges]


def _read_operations(connection: Any, tables: Any) -> Iterator[Dict[str, Any]]:
    for category, query in OPERATIONS.items():
        if query.partition("FROM ")[2].split()[0] not in tables:
            continue
        for start, end, device, stream, name in connection.execute(query):
            if category == "gpu_memcpy":
                name = "Memcpy {}".format(COPY_KINDS.get(name, "other"))  # noqa: PLW2901
            elif category == "gpu_memset":
                name = "Memset"  # noqa: PLW2901
            event = _make_event(str(name), category, start, end)
            yield dict(event, pid=device, tid="stream {}".format(stream))


def _read_ranges(connection: Any) -> Iterator[Dict[str, Any]]:
    query = """SELECT a.start, a.end, a.globalTid, coalesce(a.text, s.value) FROM NVTX_EVENTS a
        LEFT JOIN StringIds s ON s.id = a.textId
        WHERE a.end IS NOT NULL AND a.eventType IN (?, ?) LIMIT ?"""
    for start, end, thread, name in connection.execute(query, (*RANGE_KINDS, MOST_OPERATIONS)):
        if name is None:
            continue
        # The manual: the process is in bits 24 to 47 of this number, the thread in those below.
        ids = (
            {"pid": (thread >> 24) & 0xFFFFFF, "tid": "thread {}".format(thread & 0xFFFFFF)} if thread else {}
        )
        yield dict(_make_event(name, "user_annotation", start, end), **ids)


def _make_event(name: str, category: str, start_ns: int, end_ns: int) -> Dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
    }


def print_content(kind: str, content: bytes) -> None:
    """Print bytes in base64, in lines that begin with their kind."""
    text = base64.b64encode(content).decode()
    for start in range(0, max(1, len(text)), PIECE):
        print(kind, text[start : start + PIECE])


def print_report(report: str) -> None:
    """Print a report, or, if it is too long, move it to the run directory and print its name."""
    suffix = os.path.splitext(report)[1][1:]
    if os.path.getsize(report) <= LONGEST_REPORT:
        with open(report, "rb") as file:
            print_content(suffix, file.read())
        return
    name = "nsys-{}-{:.0f}.{}".format(os.environ.get("RANK", "0"), time.time(), suffix)
    kept = os.path.join(os.environ["DTSLURM_RUN_DIR"], name)
    shutil.copyfile(report, kept)
    os.chmod(kept, 0o600)
    print_content("kept", kept.encode())


def main(words: List[str]) -> int:
    """Record the rank, and print the trace and the report."""
    session = os.environ.get("DTSLURM_NSYS_SESSION")
    if not session:
        sys.stderr.write("rank {} does not run below nsys\n".format(os.environ.get("RANK", "0")))
        return NOT_BELOW_NSYS
    os.umask(0o077)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="dtslurm-") as folder:
        try:
            report = record(session, float(words[0]), int(os.environ["DTSLURM_PID"]), folder)
        except NoReport as error:
            print(error, file=sys.stderr)
            return 1
        trace = b""
        try:
            trace = read_trace(report, folder) if report.endswith(".nsys-rep") else b""
        except NoReport as error:
            print(error, file=sys.stderr)
        print_content("trace", trace)
        print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
