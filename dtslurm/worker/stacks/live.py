"""Reports the stacks of a running job's ranks on one node; runs on that node in a step of its own.

The answer is printed in short lines, ``dtslurm-live:NODE:NUMBER:COUNT:PIECE``, because srun interleaves the
lines of many nodes and splits long lines. The program ends by itself when its time is up.
"""

import base64
import contextlib
import json
import os
import re
import signal
import socket
import sys
import zlib
from typing import Any, Dict, List, Optional

from . import stacks
from .readers import PROC, environment_of, is_of_run

MARK = "dtslurm-live"
PIECE = 700  # characters of the payload in one line
MOST_WORKERS = 4  # data loading processes of a rank whose stacks are read
DATA = re.compile(r"torch/utils/data/")


def main() -> None:
    """Print the stacks of the ranks on this node; the request is the last argument."""
    request = json.loads(zlib.decompress(base64.b64decode(sys.argv[-1])).decode())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(request["limit"]) + 10)
    with contextlib.suppress(OSError):
        os.nice(10)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    by_node = request["ranks"]
    if not request["by_node"]:  # all ranks are on this node
        ranks = [pair for pairs in by_node.values() for pair in pairs]
    elif node in by_node:
        ranks = by_node[node]
    else:  # node names may differ in their domain
        ranks = {name.split(".")[0]: pairs for name, pairs in by_node.items()}.get(node.split(".")[0], [])
    answer(node, {"node": node, "ranks": look(ranks, request["run_dir"], request["limit"])})


def answer(node: str, report: Dict[str, Any]) -> None:
    """Print the report in short lines."""
    encoded = base64.b64encode(zlib.compress(json.dumps(report).encode(), 6)).decode()
    pieces = [encoded[start : start + PIECE] for start in range(0, len(encoded), PIECE)]
    lines = ["{}:{}:{}:{}:{}\n".format(MARK, node, n, len(pieces), piece) for n, piece in enumerate(pieces)]
    sys.stdout.write("".join(lines))
    sys.stdout.flush()


def look(ranks: List[List[int]], run_dir: str, limit: float) -> Dict[str, Any]:
    """Return each rank's process with its stacks, and the processes that load its data."""
    pids = {rank: process_of(rank, pid, run_dir) for rank, pid in ranks}
    process_by_pid = stacks.look([pid for pid in pids.values() if pid is not None], limit=limit)
    report_by_rank: Dict[str, Any] = {}
    for rank, pid in pids.items():
        if pid is None:
            report_by_rank[str(rank)] = {"pid": None, "by": "none", "why": [], "threads": []}
            continue
        report_by_rank[str(rank)] = process_by_pid[pid]
        main_thread = process_by_pid[pid]["threads"][:1]
        if main_thread and any(DATA.search(frame["file"]) for frame in main_thread[0]["frames"]):
            report_by_rank[str(rank)]["workers"] = workers(process_by_pid[pid]["pid"])
    return report_by_rank


def workers(pid: int) -> List[Dict[str, Any]]:
    """Return the Python child processes of a process, with their stacks."""
    children = stacks.children_of(pid)
    return [
        process
        for process in stacks.look(children[:MOST_WORKERS], interval=0.0, limit=5.0).values()
        if process["threads"]
    ]


def process_of(rank: int, pid: int, run_dir: str) -> Optional[int]:
    """Return the process id of a rank on this node, None if the process has ended.

    In a container with its own process ids, the recorded id differs from the id on this node; and another
    process may have been given that id since. The environment identifies the rank.
    """
    if os.path.exists(os.path.join(PROC, str(pid))):
        env = environment_of(pid)
        if not env or is_rank(dict({"RANK": "0"}, **env), rank, run_dir):  # launcher single exports no RANK
            return pid
    pids = [int(name) for name in os.listdir(PROC) if name.isdigit()]
    matches = [
        candidate
        for candidate in pids
        if is_rank(environment_of(candidate), rank, run_dir) and stacks.is_python(candidate)
    ]
    # The oldest match: the child processes of the rank have the same environment.
    return min(matches, key=stacks.started_at) if matches else None


def is_rank(env: Dict[str, str], rank: int, run_dir: str) -> bool:
    """Return whether an environment belongs to a rank of this run."""
    return env.get("RANK") == str(rank) and is_of_run(env, run_dir)
