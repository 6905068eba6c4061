"""Returns the new events, metrics and rank states of a running job, on the machine that holds its files.

Sent over stdin with its modules (`dtslurm.services.wiring.remote_query`); writes no files. The request::

    {"run_dir": DIR, "task": "3" or null, "attempt": 0 or null for the newest, "train_limit": 2000,
     "after": the "cursor" of the previous answer, or null, "patterns": [{"words": […], "match": […]}]}

Missing, truncated or invalid content of the files is left out.
"""

import contextlib
import os
import re
import time
from typing import Any, Dict, List, Optional, Tuple

from ..lib.json_records import read_object, whole_number
from ..lib.rank_files import list_rank_logs, read_records
from .failure import first_failure
from .lines import entries, read_new_objects, thinned
from .log_metrics import from_logs
from .nodes import samples

EVENTS = 5000  # events in one answer; of more, the last ones
SLACK_S = 120.0  # nodes' clocks may differ: records that are this much older are read again
RANK_KEYS = (
    "node_rank", "local_rank", "host", "pid", "started", "ended", "exit_code", "signal", "told_to_end"
)  # fmt: skip


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the state of one attempt of a run, or of an array task."""
    with contextlib.suppress(OSError):
        os.nice(10)
    run_or_array_dir = request["run_dir"]
    tasks = numbers(os.path.join(run_or_array_dir, "tasks"))
    task = request.get("task")
    if task is None and tasks:
        task = str(tasks[0])
    run_dir = run_or_array_dir if task is None else os.path.join(run_or_array_dir, "tasks", task)
    attempts = numbers(os.path.join(run_dir, "logs"))
    attempt = request.get("attempt")
    if attempt is None and attempts:
        attempt = attempts[-1]
    previous = request.get("after") or {}
    same_task = previous.get("task") == task
    same_attempt = same_task and attempt is not None and previous.get("attempt") == attempt
    events, events_at = read_new_objects(
        os.path.join(run_dir, "events.jsonl"), previous.get("events") if same_task else None, EVENTS
    )
    state: Dict[str, Any] = {
        "schema": 1,
        "now": time.time(),
        "task": task,
        "tasks": [str(number) for number in tasks],
        "attempt": attempt,
        "attempts": attempts,
        "world_size": None,
        "ranks": {},
        "first_failure": None,
        "nodes": [],
        "nodes_before": [],
        "roles": read_object(os.path.join(run_dir, "roles.json")).get("roles") or [],
        "activity": [],
        "train": {"records": [], "offset": 0},
        "events": {"records": events, "offset": events_at},
        "cursor": {"task": task, "attempt": attempt, "events": events_at},
    }
    if attempt is not None:
        add_attempt(state, run_dir, previous if same_attempt else {}, request)
    return state


def add_attempt(telemetry: Dict[str, Any], run: str, cursor: Dict[str, Any], request: Dict[str, Any]) -> None:
    """Add the contents of one attempt's folders."""
    number = str(telemetry["attempt"])
    logs, ranks, metrics = (os.path.join(run, name, number) for name in ("logs", "ranks", "metrics"))
    telemetry["world_size"] = world_size(logs, ranks)
    telemetry["ranks"], written = rank_states(logs, ranks, cursor.get("written"))
    telemetry["first_failure"] = first_failure(logs, ranks)
    telemetry["nodes"], telemetry["nodes_before"] = samples(metrics)
    for _, path, _, mtime in entries(metrics, r"^activity-([0-9]+)\.json$"):
        record = read_object(path)
        if record:
            telemetry["activity"].append(dict(record, written=mtime))
    limit = int(request.get("train_limit") or 2000)
    records, offset = read_new_objects(os.path.join(metrics, "train.jsonl"), cursor.get("train"), None)
    train_records, log_state = records, cursor.get("logs") or {}
    if offset:
        log_state, telemetry["train_from"] = {}, "file"
    elif request.get("patterns"):
        rank_numbers = [int(rank) for rank in telemetry["ranks"]]
        train_records, log_state = from_logs(logs, request["patterns"], rank_numbers, log_state)
        telemetry["train_from"] = "logs" if log_state.get("source") else ""
    telemetry["train"] = {"records": thinned(train_records, limit), "offset": offset}
    telemetry["cursor"].update(train=offset, written=written, logs=log_state)


def numbers(folder: str) -> List[int]:
    """Return the numeric names in a folder, smallest first."""
    try:
        return sorted(int(name) for name in os.listdir(folder) if re.match(r"^[0-9]+$", name))
    except OSError:
        return []


def world_size(logs: str, ranks: str) -> Optional[int]:
    """Return the number of ranks: of an elastic job's last start, else as the job began."""
    try:
        with open(os.path.join(ranks, "world_size")) as file:
            return int(file.read(32))
    except (OSError, ValueError):
        return whole_number(read_object(os.path.join(logs, "manifest.json")).get("world_size"))


def rank_states(
    logs: str, ranks: str, newest_time: Optional[float]
) -> Tuple[Dict[str, Dict[str, Any]], Optional[float]]:
    """Return each rank's log size, the time of its last output, and its record if that is new.

    Records older than ``newest_time`` (of the records in the previous answer) are not read again.
    """
    states: Dict[str, Dict[str, Any]] = {}
    for rank, (size, written) in list_rank_logs(logs).items():
        states[str(rank)] = {"bytes": size, "spoke": round(written, 1) if size else None}
    newest = newest_time
    for rank, record in read_records(ranks, None if newest_time is None else newest_time - SLACK_S).items():
        newest = record["written"] if newest is None else max(newest, record["written"])
        state = states.setdefault(str(rank), {"bytes": 0, "spoke": None})
        state.update((key, record[key]) for key in RANK_KEYS if key in record)
    return states, newest
