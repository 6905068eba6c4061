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
    """Return the process of the rank that hung, with its main thread's stack, from the file of its node.

    The node's agent writes this file when the supervisor finds a hang.
    """
    for event in events:
        rank, node = event.get("rank"), event.get("node")
        if event.get("event") != "hang" or not isinstance(rank, int) or not isinstance(node, str):
            continue
        path = os.path.join(ranks, "stacks", node + ".json")
        if "/" in node or not 0 < size_of(path) <= LARGEST_STACKS:
            continue
        processes = read_object(path).get("ranks")
        process = processes.get(str(rank)) if isinstance(processes, dict) else None
        threads = process.get("threads") if isinstance(process, dict) else None
        if (
            isinstance(process, dict)
            and isinstance(threads, list)
            and isinstance((threads or [None])[0], dict)
        ):
            fields = {name: process.get(name) for name in ("pid", "state", "cpu", "moved", "by")}
            fields.update(
                rank=rank, node=node, waits=threads[0].get("waits"), frames=threads[0].get("frames")
            )
            return [fields]
    return []


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
