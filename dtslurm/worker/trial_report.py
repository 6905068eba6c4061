"""Tells how the trials of a sweep fare, out of their files; runs on the machine that holds them."""

import json
import math
import os
import re
from typing import Any, Dict, Iterator, List, Optional

from .telemetry.failure import first_failure, last_exception, tail_lines
from .telemetry.log_metrics import Reading, from_logs, patterns_of

_RANK_LOG = re.compile(r"rank-([0-9]+)\.log$")


def _objects(path: str) -> Iterator[Dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            value = json.loads(line.decode("utf-8", "replace"))
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _object(path: str) -> Dict[str, Any]:
    return next(_objects(path), {})


def _numbered(folder: str) -> List[int]:
    try:
        return sorted(int(name) for name in os.listdir(folder) if re.match(r"[0-9]+$", name))
    except OSError:
        return []


def _number(value: Any) -> Optional[float]:
    """Return a number to compare by, None for what is none: JSON has no infinity, and it is no result."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # more digits than a float has room for
        return None


def _metric_records(folder: str) -> Iterator[Dict[str, Any]]:
    """Yield the records that a trial wrote to its metrics files."""
    for attempt in _numbered(os.path.join(folder, "metrics")):
        yield from _objects(os.path.join(folder, "metrics", str(attempt), "train.jsonl"))


def _log_records(task: str, place: Optional[int], patterns: List[Dict[str, Any]]) -> Iterator[Dict[str, Any]]:
    """Yield the records that a trial printed: one of several in a task has the log of one rank."""
    for attempt in _numbered(os.path.join(task, "logs")):
        logs = os.path.join(task, "logs", str(attempt))
        if place is not None:
            reading = Reading(patterns_of(patterns), {})
            yield from reading.news(os.path.join(logs, "rank-{}.log".format(place)))
        else:
            names = (_RANK_LOG.match(name) for name in os.listdir(logs))
            yield from from_logs(logs, patterns, [int(name.group(1)) for name in names if name], {})[0]


def _summarize_metric(records: Iterator[Dict[str, Any]], request: Dict[str, Any]) -> Dict[str, Any]:
    """Return a trial's metric: its newest and best value, the newest step, and what it wrote in its place."""
    last = best = step = None  # type: Optional[float]
    keys = {}  # type: Dict[str, None]
    points = []  # type: List[List[float]]
    better = max if request["mode"] == "max" else min
    for record in records:
        keys.update(dict.fromkeys(record))
        value, at = _number(record.get(request["metric"])), _number(record.get("step"))
        step = step if at is None else at
        if value is not None:
            last, best = value, value if best is None else better(best, value)
            points.append([len(points) if at is None else at, value])
    every = -(-len(points) // request["points"]) if request.get("points") else 0
    return {
        "last": last,
        "best": best,
        "step": step,
        "keys": [] if request["metric"] in keys else list(keys),
        "points": points[:: every or 1] if every else [],
    }


def _results(trial: str, task: str, place: Optional[int], request: Dict[str, Any]) -> Dict[str, Any]:
    """Return a trial's metric from its metrics files, or from its log where those do not have the metric."""
    written = _summarize_metric(_metric_records(trial), request)
    if written["best"] is not None:
        return written
    printed = _summarize_metric(_log_records(task, place, request["patterns"]), request)
    if printed["best"] is not None:
        return printed
    step = written["step"] if printed["step"] is None else printed["step"]
    return dict(written, step=step, keys=written["keys"] or printed["keys"])


def _end(task: str, place: Optional[int]) -> Dict[str, Any]:
    """Return when a trial started and ended, and its exit code; None for what is not known."""
    found = {"started": None, "ended": None, "exit_code": None}  # type: Dict[str, Any]
    for event in _objects(os.path.join(task, "events.jsonl")):
        if event.get("event") == "started":
            found = {"started": event.get("time"), "ended": None, "exit_code": None}
        elif event.get("event") == "ended":
            found.update(ended=event.get("time"), exit_code=event.get("exit_code"))
    if place is not None:
        for attempt in _numbered(os.path.join(task, "ranks"))[-1:]:
            rank = _object(os.path.join(task, "ranks", str(attempt), "{}.json".format(place)))
            found = {key: rank.get(key, found[key]) for key in found}
    return found


def _failure(task: str, place: Optional[int], exit_code: Any) -> Optional[Dict[str, Any]]:
    """Return which rank of a trial failed first and why, None for a trial that did not fail."""
    attempts = _numbered(os.path.join(task, "logs"))
    if exit_code == 0 or not attempts:
        return None
    logs, ranks = (os.path.join(task, name, str(attempts[-1])) for name in ("logs", "ranks"))
    if place is None:
        return first_failure(logs, ranks)
    found = last_exception(tail_lines(os.path.join(logs, "rank-{}.log".format(place))))
    return dict(found, rank=place, exit_code=exit_code) if exit_code is not None else None


def _trials(run: str, request: Dict[str, Any]) -> Iterator[Dict[str, Any]]:
    shared = request["per_task"] > 1
    for task in _numbered(os.path.join(run, "tasks")):
        folder = os.path.join(run, "tasks", str(task))
        for place in range(request["per_task"]):
            trial = os.path.join(folder, "trials", str(place)) if shared else folder
            if shared and not os.path.isdir(trial):
                continue
            end = _end(folder, place if shared else None)
            yield dict(
                _results(trial, folder, place if shared else None, request),
                failure=_failure(folder, place if shared else None, end["exit_code"]),
                index=task * request["per_task"] + place,
                task=task,
                folder=trial,
                values=_object(os.path.join(trial, "trial.json")).get("values"),
                stopped=_object(os.path.join(trial, "stopped.json")).get("step"),
                **end,
            )


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return what is known of every trial that has started, for each run of the sweep."""
    return {"runs": [list(_trials(run, request)) for run in request["runs"]]}
