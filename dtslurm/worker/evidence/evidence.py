"""Reads what the ranks of one attempt left behind, on the machine that holds it; prints only the findings.

Sent over stdin with its parts (`dtslurm.services.wiring.remote_query`); leaves nothing there.
"""

import contextlib
import glob
import json
import os
import re
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from .flight import flight_dumps
from .hits import LogSignature, scan
from .lines import SHOWN
from .log_stacks import frames_of, user_frame


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return what is asked for."""
    return findings(request)


def findings(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return everything found of an attempt: records, hits in logs, dumps."""
    with contextlib.suppress(OSError):
        os.nice(10)
    run, attempt = request["run_dir"], str(request["attempt"])
    logs, ranks = os.path.join(run, "logs", attempt), os.path.join(run, "ranks", attempt)
    signatures = [LogSignature(number, values) for number, values in enumerate(request["signatures"])]
    records, firsts = rank_records(ranks)
    files = sorted(glob.glob(os.path.join(glob.escape(logs), "*.log")))
    files += [path for path in request.get("extra", []) if os.path.exists(path)]
    return {
        "schema": 1,
        "now": time.time(),
        "manifest": json_file(os.path.join(logs, "manifest.json")),
        "events": list(json_lines(os.path.join(run, "events.jsonl"))),
        "records": records,
        "first_failures": firsts,
        "files": scan(files, signatures),
        "dumps": flight_dumps(ranks, logs),
        "free": free_bytes(run),
    }


def free_bytes(folder: str) -> Optional[int]:
    """Return what its user may still write on a folder's file system, None if that cannot be told."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def json_file(path: str) -> Dict[str, Any]:
    """Return a JSON object, empty where there is none."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read().decode("utf-8", "replace"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def json_lines(path: str, tail: Optional[int] = None) -> Iterator[Dict[str, Any]]:
    """Yield the objects of a JSON-lines file (of its last ``tail`` bytes), leaving out what is not one."""
    try:
        with open(path, "rb") as file:
            if tail is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - tail))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def rank_records(folder: str) -> Tuple[List[Dict[str, Any]], List[List[int]]]:
    """Return the ranks' records with the time the file system gave them, and who recorded a failure first."""
    records, firsts = [], []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return [], []
    for name in names:
        path = os.path.join(folder, name)
        if re.match(r"^\d+\.json$", name):
            record = json_file(path)
            if not record:
                continue
            try:
                record["written"] = os.stat(path).st_mtime
            except OSError:  # it was there a moment ago
                continue
            error = json_file(path[:-5] + ".error.json").get("message")
            if error:
                record["error"] = error_record(error)
            records.append(record)
        elif name.startswith("first-failure"):
            try:
                with open(path, "rb") as file:
                    words = file.read(100).split()
            except OSError:
                continue
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
                firsts.append([int(words[0]), int(words[1])])
    return records, firsts


def error_record(message: Any) -> Dict[str, Any]:
    """Return what torchelastic's error file tells: the message, its time, the frame of the user's code."""
    if not isinstance(message, dict):
        return {"message": str(message)[:SHOWN]}
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    stack = str(extra.get("py_callstack", "")).splitlines()
    found = {"message": str(message.get("message", ""))[:SHOWN], "time": extra.get("timestamp")}
    found["frame"] = user_frame(frames_of(stack))
    return found
