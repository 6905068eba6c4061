"""Utilization history of each node's GPUs and CPUs in an attempt, computed where the files are.

Sent over stdin (`dtslurm.services.wiring.remote_query`). The request is ``{"run_dir": DIR, "attempt": NUMBER,
"columns": NUMBER}``; for an array task, ``DIR`` is the task's directory. Of a long file, only records at even
distances are read. The answer has ``from`` and ``to`` (epoch seconds) and a row for each GPU, and for each
node's CPUs: ``{"node", "node_rank", "what": "gpu 0" or "cpu", "values": [percent or null, …]}``, with the
GPU's peak share of used memory (``memory``, 0 to 1), and its mean power in watts (``power_w``).
"""

import glob
import os
import re
from typing import Any, Dict, Iterator, List

from ..lib.json_records import finite_number, parse_lines

PIECE = 16 << 10


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the response to a request."""
    return heat(request["run_dir"], int(request["attempt"]), int(request["columns"]))


def heat(run_dir: str, attempt: int, columns: int) -> Dict[str, Any]:
    """Return the rows of all nodes of an attempt."""
    pattern = os.path.join(glob.escape(run_dir), "metrics", str(attempt), "node-*.jsonl")
    paths = sorted(glob.glob(pattern), key=lambda path: [int(word) for word in re.findall(r"\d+", path)[-1:]])
    nodes = [list(records(path, columns)) for path in paths]
    times = [record["time"] for node in nodes for record in node]
    begin, end = (min(times), max(times)) if times else (0.0, 0.0)
    # Fewer columns for a short run, so that none is empty.
    columns = max(1, min(columns, max(map(len, nodes), default=1)))
    rows = [row for node in nodes for row in rows_of(node, begin, end, columns)]
    return {"schema": 1, "from": begin, "to": end, "rows": rows}


def records(path: str, count: int) -> Iterator[Dict[str, Any]]:
    """Yield the records of a file; of a long file, about ``count`` records at even distances."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            read_whole = size <= count * PIECE
            for index in range(1 if read_whole else count):
                start = 0 if read_whole else index * max(0, size - PIECE) // max(1, count - 1)
                file.seek(start)
                lines = file.read(size if read_whole else PIECE).split(b"\n")
                samples = parse_lines(lines[1 if start else 0 :])
                valid_records = [record for record in samples if 0 < number(record.get("time")) < 1e11]
                for record in valid_records if read_whole else valid_records[:1]:
                    yield record
    except OSError:
        return


def number(value: Any) -> float:
    """Return a finite number as a float, -1 for anything else."""
    decoded = finite_number(value)
    return -1.0 if decoded is None else decoded


def rows_of(node: List[Dict[str, Any]], begin: float, end: float, columns: int) -> Iterator[Dict[str, Any]]:
    """Yield the rows of one node."""
    series: Dict[str, List[List[float]]] = {}
    memory: Dict[str, float] = {}
    power: Dict[str, List[float]] = {}
    for record in node:
        column = int((record["time"] - begin) / max(end - begin, 1e-9) * (columns - 1))
        if number(record.get("cpu_percent")) >= 0:
            series.setdefault("cpu", []).append([column, number(record["cpu_percent"])])
        gpus = record.get("gpus")
        for gpu in gpus if isinstance(gpus, list) else []:
            if not isinstance(gpu, dict):
                continue
            row_name = "gpu {}".format(gpu.get("index"))
            if number(gpu.get("util")) >= 0:
                series.setdefault(row_name, []).append([column, number(gpu["util"])])
            used, total = number(gpu.get("memory_used")), number(gpu.get("memory_total"))
            if used >= 0 and total > 0:
                memory[row_name] = max(memory.get(row_name, 0.0), used / total)
            if number(gpu.get("power_w")) >= 0:
                power.setdefault(row_name, []).append(number(gpu["power_w"]))
    first_record = node[0] if node else {}
    for row_name in sorted(
        series, key=lambda name: (name == "cpu", [int(n) for n in re.findall(r"\d+", name)])
    ):
        row = {
            "node": str(first_record.get("node", "")),
            "node_rank": first_record.get("node_rank", 0),
            "what": row_name,
        }
        watts = power.get(row_name)
        yield dict(
            row,
            values=bin_points(series[row_name], columns),
            memory=memory.get(row_name),
            power_w=sum(watts) / len(watts) if watts else None,
        )


def bin_points(points: List[List[float]], columns: int) -> List[Any]:
    """Return the mean of the points in each column, None for an empty column."""
    values_by_column: List[List[float]] = [[] for _ in range(columns)]
    for column, value in points:
        values_by_column[int(min(max(column, 0), columns - 1))].append(value)
    return [round(sum(values) / len(values), 1) if values else None for values in values_by_column]
