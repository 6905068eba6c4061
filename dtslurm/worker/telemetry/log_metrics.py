"""Training metrics from the ranks' log lines. Part of ``telemetry.py`` and ``trial_report.py``."""

import math
import re
import time
from typing import Any, Dict, List, Optional, Tuple

from ..lib.rank_files import open_rank_log
from .lines import read_new_lines_of

LOG_MOST = 8 << 20  # new bytes of a log that are read; of more, the last ones
LINE_MOST = 4000  # bytes of one line that are read
NUMBER = (
    r"([-+]?(?:(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|nan|NaN|inf|Infinity)"
    r"(?:[KMGTB](?![A-Za-z]))?)"
)
TELLING = {"step", "epoch_step", "epoch_number", "loss"}  # a line without any of these is no training record
SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PREFIX = re.compile(r"^(?:\[(?:rank|default)?\d+\]:? ?|\d+: )+")
STAMP = re.compile(r"(20\d\d)-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)")


def from_logs(
    folder: str, patterns: List[Dict[str, Any]], ranks: List[int], previous_state: Dict[str, Any]
) -> Tuple[List[Dict[str, Any]], Dict[str, Any]]:
    """Return the new training records in the logs, and the state for the next call.

    Reads the log of rank 0, or of the last rank, where Megatron reports its losses: the first of these logs
    that has reported a loss is the only source from then on.
    """
    line_patterns = patterns_of(patterns)
    state: Dict[str, Any] = {
        "source": previous_state.get("source", ""),
        "files": dict(previous_state.get("files") or {}),
    }
    source = re.match(r"rank-(\d+)\.log$", state["source"])
    candidates = [int(source.group(1))] if source else sorted({0, max(ranks or [0])})
    first_records: List[Dict[str, Any]] = []
    for rank in candidates:
        name = "rank-%d.log" % rank
        reading = LogParser(line_patterns, state["files"].get(name) or {})
        records = reading.news(folder, rank)
        state["files"][name] = reading.state
        if reading.state.get("loss"):
            state["source"] = name
            return records, state
        first_records = first_records or records
    return first_records, state


def patterns_of(values: List[Dict[str, Any]]) -> "List[Pattern]":
    """Return the compiled patterns of a request."""
    return [Pattern(pattern_values) for pattern_values in values]


class Pattern:
    """A kind of log line.

    Attributes:
        words: a line must contain at least one of these.
        values: the expressions of the values that a line may contain, by key.
    """

    def __init__(self, values: Dict[str, Any]) -> None:
        self.words: List[str] = values["words"]
        self.values = {
            key: re.compile(text.replace("<number>", NUMBER)) for key, text in values["values"].items()
        }

    def read(self, line: str) -> Dict[str, float]:
        """Return the values in a line."""
        if not any(word in line for word in self.words):
            return {}
        values = {}
        for key, pattern in self.values.items():
            match = pattern.search(line)
            if match:
                values[key] = number(match.group(1))
        return values


def number(text: str) -> float:
    """Return the value of a text such as ``1,234``, ``1.5K``, ``2e-4`` or ``nan``."""
    factor = SUFFIXES.get(text[-1], 1.0)
    return float((text if factor == 1.0 else text[:-1]).replace(",", "")) * factor


class LogParser:
    """Parser of one log's lines in their order: a step may be on one line and its loss on the next."""

    def __init__(self, patterns: List[Pattern], state: Dict[str, Any]) -> None:
        self.patterns = patterns
        self.words = [word.encode() for pattern in patterns for word in pattern.words]
        self.state = dict(state)

    def news(self, logs: str, rank: int) -> List[Dict[str, Any]]:
        """Return the records in the new part of a rank's log."""
        is_first_read = "offset" not in self.state
        lines, self.state["offset"], written = read_new_lines_of(
            lambda: open_rank_log(logs, rank), self.state.get("offset"), LOG_MOST
        )
        written_at = None if is_first_read or written is None else round(written, 1)
        records: List[Dict[str, Any]] = []
        for raw_line in lines:
            for line in raw_line.split(b"\r"):
                if any(word in line[:LINE_MOST] for word in self.words):
                    text = ESCAPE.sub("", line[:LINE_MOST].decode("utf-8", "replace"))
                    self.add(records, PREFIX.sub("", text), written_at)
        return records

    def add(self, records: List[Dict[str, Any]], line: str, last_write: Optional[float]) -> None:
        """Add a line's values to the records: as a new record, or to the last record of the same step."""
        values_by_pattern = (pattern.read(line) for pattern in self.patterns)
        line_values = next((values for values in values_by_pattern if TELLING & set(values)), None)
        if line_values is None:
            return  # a progress bar of another kind of work
        record = self.record(line_values)
        if not record:
            return
        logged_at = stamp(line)
        record["time"] = last_write if logged_at is None else logged_at
        if record["time"] is None:
            del record["time"]
        if records and records[-1].get("step") == record.get("step"):
            records[-1].update(record)
        else:
            records.append(record)

    def record(self, values: Dict[str, float]) -> Dict[str, Any]:
        """Return a record with the dashboard's keys and units; {} for a line that only gives the position."""
        if "epoch_number" in values:
            self.state.update(epoch=values["epoch_number"] - 1, epochs=values.get("epochs"))
            return {}
        record = convert_to_seconds(values)
        steps = record.pop("epoch_steps", None)
        if "epoch_step" in record:
            epoch = record.get("epoch", self.state.get("epoch") or 0)
            record["step"] = record.pop("epoch_step") + epoch * (steps or 0)
            if self.state.get("epochs") and steps:
                record["total_steps"] = self.state["epochs"] * steps
        if self.is_another_bar(record):
            return {}
        if "step" not in record and "step" in self.state:
            record["step"] = self.state["step"]
        for key in ("step", "total_steps"):
            if key in record and math.isfinite(record[key]):
                record[key] = self.state[key] = int(record[key])
        self.state["loss"] = self.state.get("loss") or "loss" in record
        return record

    def is_another_bar(self, record: Dict[str, Any]) -> bool:
        """Return whether a progress bar is that of an evaluation: its total is smaller than training's."""
        total = record.get("total_steps")
        return "loss" not in record and total is not None and total < self.state.get("total_steps", 0)


def convert_to_seconds(values: Dict[str, float]) -> Dict[str, Any]:
    """Return the values with the step's time converted to seconds."""
    record = dict(values)
    if "step_time_ms" in record:
        record["step_time_s"] = record.pop("step_time_ms") / 1000.0
    if record.get("steps_per_s"):
        record["step_time_s"] = 1.0 / record["steps_per_s"]
    record.pop("steps_per_s", None)
    return record


def stamp(text: str) -> Optional[float]:
    """Return the time in a line, in this machine's time zone; None without a time stamp."""
    match = STAMP.search(text)
    if match is None:
        return None
    try:
        return time.mktime((*map(int, match.groups()), 0, 0, -1))  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        return None
