"""Report the state of a sweep's trials from their files; runs on the host that stores them."""

import os
import re
from typing import Any, Dict, Iterator, List, Optional

from .lib.json_records import finite_number, read_lines, read_object
from .lib.rank_files import list_rank_logs, read_record
from .telemetry.failure import first_failure, last_exception, tail_lines
from .telemetry.log_metrics import LogParser, from_logs, patterns_of


def _list_numbers(folder: str) -> List[int]:
    try:
        return sorted(int(name) for name in os.listdir(folder) if re.match(r"[0-9]+$", name))
    except OSError:
        return []


def _metric_records(folder: str) -> Iterator[Dict[str, Any]]:
    """Yield the records that a trial wrote to its metrics files."""
    for attempt in _list_numbers(os.path.join(folder, "metrics")):
        yield from read_lines(os.path.join(folder, "metrics", str(attempt), "train.jsonl"))


def _log_records(task: str, slot: Optional[int], patterns: List[Dict[str, Any]]) -> Iterator[Dict[str, Any]]:
    """Yield the records that a trial printed. Of trials that share a task, each has the log of one rank."""
    for attempt in _list_numbers(os.path.join(task, "logs")):
        logs = os.path.join(task, "logs", str(attempt))
        if slot is not None:
            reading = LogParser(patterns_of(patterns), {})
            yield from reading.news(logs, slot)
        else:
            yield from from_logs(logs, patterns, list(list_rank_logs(logs)), {})[0]


def _summarize_metric(records: Iterator[Dict[str, Any]], request: Dict[str, Any]) -> Dict[str, Any]:
    """Summarize a trial's metric: last and best value, newest step, and the other keys if it is missing."""
    last_value = best_value = newest_step = None  # type: Optional[float]
    keys = {}  # type: Dict[str, None]
    points = []  # type: List[List[float]]
    better = max if request["mode"] == "max" else min
    for record in records:
        keys.update(dict.fromkeys(record))
        value, step = finite_number(record.get(request["metric"])), record.get("step")
        record_step = step if finite_number(step) is not None else None  # a whole number stays whole
        newest_step = newest_step if record_step is None else record_step
        if value is not None:
            last_value, best_value = value, value if best_value is None else better(best_value, value)
            points.append([len(points) if record_step is None else record_step, value])
    stride = -(-len(points) // request["points"]) if request.get("points") else 0
    return {
        "last": last_value,
        "best": best_value,
        "step": newest_step,
        "keys": [] if request["metric"] in keys else list(keys),
        "points": points[:: stride or 1] if stride else [],
    }


def _read_results(trial: str, task: str, slot: Optional[int], request: Dict[str, Any]) -> Dict[str, Any]:
    """Return a trial's metric from its metrics files, or from its log if the files lack the metric."""
    from_files = _summarize_metric(_metric_records(trial), request)
    if from_files["best"] is not None:
        return from_files
    from_log = _summarize_metric(_log_records(task, slot, request["patterns"]), request)
    if from_log["best"] is not None:
        return from_log
    step = from_files["step"] if from_log["step"] is None else from_log["step"]
    return dict(from_files, step=step, keys=from_files["keys"] or from_log["keys"])


def _read_times(task: str, slot: Optional[int]) -> Dict[str, Any]:
    """Return when a trial started and ended, and its exit code; None for unknown values."""
    times = {"started": None, "ended": None, "exit_code": None}  # type: Dict[str, Any]
    for event in read_lines(os.path.join(task, "events.jsonl")):
        if event.get("event") == "started":
            times = {"started": event.get("time"), "ended": None, "exit_code": None}
        elif event.get("event") == "ended":
            times.update(ended=event.get("time"), exit_code=event.get("exit_code"))
    if slot is not None:
        for attempt in _list_numbers(os.path.join(task, "ranks"))[-1:]:
            rank = read_record(os.path.join(task, "ranks", str(attempt)), slot)
            times = {key: rank.get(key, times[key]) for key in times}
    return times


def _find_failure(task: str, slot: Optional[int], exit_code: Any) -> Optional[Dict[str, Any]]:
    """Return the first failed rank and its cause, None for a trial that did not fail."""
    attempts = _list_numbers(os.path.join(task, "logs"))
    if exit_code == 0 or not attempts:
        return None
    logs, ranks = (os.path.join(task, name, str(attempts[-1])) for name in ("logs", "ranks"))
    if slot is None:
        return first_failure(logs, ranks)
    exception = last_exception(tail_lines(logs, slot))
    return dict(exception, rank=slot, exit_code=exit_code) if exit_code is not None else None


def _read_trials(run: str, request: Dict[str, Any]) -> Iterator[Dict[str, Any]]:
    is_shared = request["per_task"] > 1
    for task in _list_numbers(os.path.join(run, "tasks")):
        folder = os.path.join(run, "tasks", str(task))
        for index_in_task in range(request["per_task"]):
            trial = os.path.join(folder, "trials", str(index_in_task)) if is_shared else folder
            if is_shared and not os.path.isdir(trial):
                continue
            times = _read_times(folder, index_in_task if is_shared else None)
            yield dict(
                _read_results(trial, folder, index_in_task if is_shared else None, request),
                failure=_find_failure(folder, index_in_task if is_shared else None, times["exit_code"]),
                index=task * request["per_task"] + index_in_task,
                task=task,
                folder=trial,
                values=read_object(os.path.join(trial, "trial.json")).get("values"),
                stopped=read_object(os.path.join(trial, "stopped.json")).get("step"),
                **times,
            )


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the state of every trial that has started, for each run of the sweep."""
    return {"runs": [list(_read_trials(run, request)) for run in request["runs"]]}
