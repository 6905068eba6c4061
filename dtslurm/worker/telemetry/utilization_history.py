"""Tells how each node's GPUs and CPUs did over the time of an attempt, in a few columns, where the files are.

Sent over stdin (`dtslurm.services.wiring.remote_query`). The request is ``{"run_dir": DIR,
"attempt": NUMBER, "columns": NUMBER}``, ``DIR`` that of an array's task for such a run. Of a long file only
records at even distances are read. The answer has ``from`` and ``to`` (epoch seconds) and a row for each GPU,
and for each node's CPUs: ``{"node", "node_rank", "what": "gpu 0" or "cpu", "values": [percent or null, …]}``,
with what the GPU had of memory at the most (``memory``, 0 to 1), and its mean watts (``power_w``).
"""

import glob
import json
import os
import re
from typing import Any, Dict, Iterator, List

PIECE = 16 << 10


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return what is asked for."""
    return heat(request["run_dir"], int(request["attempt"]), int(request["columns"]))


def heat(run_dir: str, attempt: int, columns: int) -> Dict[str, Any]:
    """Return the rows of all nodes of an attempt."""
    pattern = os.path.join(glob.escape(run_dir), "metrics", str(attempt), "node-*.jsonl")
    paths = sorted(glob.glob(pattern), key=lambda path: [int(word) for word in re.findall(r"\d+", path)[-1:]])
    nodes = [list(records(path, columns)) for path in paths]
    times = [record["time"] for node in nodes for record in node]
    begin, end = (min(times), max(times)) if times else (0.0, 0.0)
    columns = max(1, min(columns, max(map(len, nodes), default=1)))  # no gaps in a short run
    rows = [row for node in nodes for row in rows_of(node, begin, end, columns)]
    return {"schema": 1, "from": begin, "to": end, "rows": rows}


def records(path: str, count: int) -> Iterator[Dict[str, Any]]:
    """Yield the records of a file, of a long one about so many at even distances."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            whole = size <= count * PIECE
            for number in range(1 if whole else count):
                start = 0 if whole else number * max(0, size - PIECE) // max(1, count - 1)
                file.seek(start)
                lines = file.read(size if whole else PIECE).split(b"\n")
                kept = [one for one in map(record_of, lines[1 if start else 0 :]) if one]
                for one in kept if whole else kept[:1]:
                    yield one
    except OSError:
        return


def record_of(line: bytes) -> Dict[str, Any]:
    """Return the record on a line, empty for what is none."""
    try:
        value = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and 0 < number(value.get("time")) < 1e11 else {}


def number(value: Any) -> float:
    """Return a value that is a number, -1 for what is none."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e15 else -1.0


def rows_of(node: List[Dict[str, Any]], begin: float, end: float, columns: int) -> Iterator[Dict[str, Any]]:
    """Yield the rows of one node."""
    series: Dict[str, List[List[float]]] = {}
    memory: Dict[str, float] = {}
    power: Dict[str, List[float]] = {}
    for record in node:
        place = int((record["time"] - begin) / max(end - begin, 1e-9) * (columns - 1))
        if number(record.get("cpu_percent")) >= 0:
            series.setdefault("cpu", []).append([place, number(record["cpu_percent"])])
        gpus = record.get("gpus")
        for gpu in gpus if isinstance(gpus, list) else []:
            if not isinstance(gpu, dict):
                continue
            what = "gpu {}".format(gpu.get("index"))
            if number(gpu.get("util")) >= 0:
                series.setdefault(what, []).append([place, number(gpu["util"])])
            used, total = number(gpu.get("memory_used")), number(gpu.get("memory_total"))
            if used >= 0 and total > 0:
                memory[what] = max(memory.get(what, 0.0), used / total)
            if number(gpu.get("power_w")) >= 0:
                power.setdefault(what, []).append(number(gpu["power_w"]))
    first = node[0] if node else {}
    for what in sorted(series, key=lambda name: (name == "cpu", [int(n) for n in re.findall(r"\d+", name)])):
        row = {"node": str(first.get("node", "")), "node_rank": first.get("node_rank", 0), "what": what}
        watts = power.get(what)
        yield dict(
            row,
            values=binned(series[what], columns),
            memory=memory.get(what),
            power_w=sum(watts) / len(watts) if watts else None,
        )


def binned(points: List[List[float]], columns: int) -> List[Any]:
    """Return the mean of the points that fall into each column, None for one without."""
    sums: List[List[float]] = [[] for _ in range(columns)]
    for place, value in points:
        sums[int(min(max(place, 0), columns - 1))].append(value)
    return [round(sum(one) / len(one), 1) if one else None for one in sums]
