"""Reads the evidence that an attempt's ranks left, on the machine that holds it; prints only the findings.

Sent over stdin with its modules (`dtslurm.services.wiring.remote_query`); installs nothing on that machine.
"""

import contextlib
import glob
import os
import time
from typing import Any, Dict, List, Optional, Tuple

from ..lib.json_records import read_lines, read_object
from ..lib.rank_files import read_records
from .flight import flight_dumps
from .hits import LogSignature, scan, size_of
from .lines import SHOWN
from .log_stacks import frames_of, user_frame

LARGEST_STACKS = 32 << 20  # bytes of the file with the stacks of a node's ranks
MOST_NODES = 32  # nodes whose stacks are read if no rank differs from the others


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the response to a request."""
    return findings(request)


def findings(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return all evidence of an attempt: records, hits in logs, dumps."""
    with contextlib.suppress(OSError):
        os.nice(10)
    run, attempt = request["run_dir"], str(request["attempt"])
    logs, ranks = os.path.join(run, "logs", attempt), os.path.join(run, "ranks", attempt)
    signatures = [LogSignature(number, values) for number, values in enumerate(request["signatures"])]
    records, firsts = rank_records(ranks)
    files = sorted(glob.glob(os.path.join(glob.escape(logs), "*.log")))
    files += [path for path in request.get("extra", []) if os.path.exists(path)]
    events = list(read_lines(os.path.join(run, "events.jsonl")))
    return {
        "schema": 1,
        "now": time.time(),
        "manifest": read_object(os.path.join(logs, "manifest.json")),
        "events": events,
        "records": records,
        "first_failures": firsts,
        "files": scan(files, signatures),
        "dumps": flight_dumps(ranks, logs),
        "stacks": saved_stacks(ranks, [event for event in events if str(event.get("attempt")) == attempt]),
        "free": free_bytes(run),
    }


def saved_stacks(ranks: str, events: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return the process of the rank that hung, with the stack of its main thread; else those of all ranks.

    The agent of each node writes them into a file when the supervisor finds a hang. In a large job without a
    rank that differs from the others, not all files are read.
    """
    hang = next((event for event in events if event.get("event") == "hang"), None)
    if hang is None:
        return []
    folder, rank, node = os.path.join(ranks, "stacks"), hang.get("rank"), hang.get("node")
    if rank is None:
        paths = sorted(glob.glob(os.path.join(glob.escape(folder), "*.json")))[:MOST_NODES]
        return [process for path in paths for process in main_threads(path)]
    if not isinstance(node, str) or "/" in node:
        return []
    processes = main_threads(os.path.join(folder, node + ".json"))
    return [process for process in processes if process["rank"] == rank]


def main_threads(path: str) -> List[Dict[str, Any]]:
    """Return the process of each rank in the file of a node, with the stack of its main thread."""
    if not 0 < size_of(path) <= LARGEST_STACKS:
        return []
    ranks = read_object(path).get("ranks")
    processes = []
    for rank, process in ranks.items() if isinstance(ranks, dict) else ():
        threads = process.get("threads") if isinstance(process, dict) else None
        thread = threads[0] if isinstance(threads, list) and threads else None
        if rank.isdecimal() and isinstance(thread, dict):
            values = {name: process.get(name) for name in ("pid", "state", "cpu", "moved", "by")}
            values.update({name: thread.get(name) for name in ("waits", "frames")})
            processes.append(dict(values, rank=int(rank), node=os.path.basename(path)[: -len(".json")]))
    return processes


def free_bytes(folder: str) -> Optional[int]:
    """Return the bytes that the user can still write on a folder's file system, None if unknown."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def rank_records(folder: str) -> Tuple[List[Dict[str, Any]], List[List[int]]]:
    """Return the ranks' records with their modification times, and the recorded first failures."""
    first_failures = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return [], []
    record_by_rank = read_records(folder)
    for name in names:
        path = os.path.join(folder, name)
        rank, _, ending = name.partition(".")
        if ending == "error.json" and rank.isdigit() and int(rank) in record_by_rank:
            error = read_object(path).get("message")
            if error:
                record_by_rank[int(rank)]["error"] = error_record(error)
        elif name.startswith("first-failure"):
            try:
                with open(path, "rb") as file:
                    fields = file.read(100).split()
            except OSError:
                continue
            if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit():
                first_failures.append([int(fields[0]), int(fields[1])])
    return list(record_by_rank.values()), first_failures


def error_record(message: Any) -> Dict[str, Any]:
    """Return the message, time and innermost user frame from torchelastic's error file."""
    if not isinstance(message, dict):
        return {"message": str(message)[:SHOWN]}
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    stack = str(extra.get("py_callstack", "")).splitlines()
    record = {"message": str(message.get("message", ""))[:SHOWN], "time": extra.get("timestamp")}
    record["frame"] = user_frame(frames_of(stack))
    return record
