"""The newest samples of a job's nodes. Part of ``telemetry.py``."""

import contextlib
from typing import Any, Dict, List, Tuple

from ..lib.json_records import finite_number, parse_lines
from .lines import entries

RECORD = 8192  # bytes at the end of a node's samples that are read first
RECORD_MOST = 1 << 20
BACK_S = 60.0  # age difference of the sample that rates are computed against
BEFORE_KEYS = ("time", "node", "node_rank", "nics")


def samples(folder: str) -> Tuple[List[Dict[str, Any]], List[Dict[str, Any]]]:
    """Return the newest sample of each node, and the counters of a sample about a minute older."""
    newest, older = [], []
    for _, path, size, _ in sorted(
        entries(folder, r"^node-([0-9]+)\.jsonl$"), key=lambda entry: int(entry[0])
    ):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            last, before = newest_of(file, size)
            if last:
                newest.append(last)
            if before:
                older.append({key: before[key] for key in BEFORE_KEYS if key in before})
    return newest, older


def newest_of(file: Any, size: int) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Return a file's last record and a record about a minute older, each empty if there is none."""
    length = RECORD
    while True:
        start = max(0, size - length)
        file.seek(start)
        data = file.read(size - start)
        records = whole_records(data, start == 0)
        if len(records) >= 2 or start == 0 or length >= RECORD_MOST:
            break
        length *= 4
    if not records:
        return {}, {}
    last = records[-1]
    target = time_of(last) - BACK_S
    if time_of(records[0]) > target and start > 0 and len(records) >= 2:
        # The mean length and interval of the records give the position of the record from a minute ago.
        record_length = len(data) // len(records)
        interval_s = max((time_of(last) - time_of(records[0])) / (len(records) - 1), 0.1)
        file.seek(max(0, size - int(BACK_S / interval_s + 2) * record_length))
        earlier = whole_records(file.read(3 * record_length), False)
        records = earlier + records
    older = [record for record in records if time_of(record) <= target]
    if older:
        return last, older[-1]
    return last, records[0] if records[0] is not last and time_of(records[0]) < time_of(last) else {}


def whole_records(data: bytes, from_start: bool) -> List[Dict[str, Any]]:
    """Return the objects on the complete lines of a part of a file."""
    lines = data.split(b"\n")[0 if from_start else 1 : -1]
    return list(parse_lines(lines))


def time_of(record: Dict[str, Any]) -> float:
    """Return a record's time, 0 if it has none."""
    return finite_number(record.get("time")) or 0.0
