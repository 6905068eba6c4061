"""Looks at the ranks of a running job on one of its nodes; runs there in a step of its own.

The answer goes out in short lines, ``dtslurm-live:NODE:NUMBER:COUNT:PIECE``, since srun mixes the lines of
many nodes, and takes long ones apart. Ends by itself when its time is up.
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
from .readers import PROC, environment_of

MARK = "dtslurm-live"
PIECE = 700  # characters of a line
MOST_WORKERS = 4  # data loading processes of a rank that are looked at
DATA = re.compile(r"torch/utils/data/")


def main() -> None:
    """Print what the ranks on this node do; the request is the last argument."""
    request = json.loads(zlib.decompress(base64.b64decode(sys.argv[-1])).decode())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(request["limit"]) + 10)
    with contextlib.suppress(OSError):
        os.nice(10)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    by_node = request["ranks"]
    if not request["by_node"]:  # all of them are here
        ranks = [pair for pairs in by_node.values() for pair in pairs]
    elif node in by_node:
        ranks = by_node[node]
    else:  # names may differ by their domain
        ranks = {name.split(".")[0]: pairs for name, pairs in by_node.items()}.get(node.split(".")[0], [])
    answer(node, {"node": node, "ranks": look(ranks, request["run_dir"], request["limit"])})


def answer(node: str, found: Dict[str, Any]) -> None:
    """Print what was found in short lines."""
    data = base64.b64encode(zlib.compress(json.dumps(found).encode(), 6)).decode()
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    lines = ["{}:{}:{}:{}:{}\n".format(MARK, node, n, len(pieces), piece) for n, piece in enumerate(pieces)]
    sys.stdout.write("".join(lines))
    sys.stdout.flush()


def look(ranks: List[List[int]], run_dir: str, limit: float) -> Dict[str, Any]:
    """Return by rank what its process does, and what the processes do that load its data."""
    pids = {rank: process_of(rank, pid, run_dir) for rank, pid in ranks}
    looks = stacks.look([pid for pid in pids.values() if pid is not None], limit=limit)
    found: Dict[str, Any] = {}
    for rank, pid in pids.items():
        if pid is None:
            found[str(rank)] = {"pid": None, "by": "none", "why": [], "threads": []}
            continue
        found[str(rank)] = looks[pid]
        main = looks[pid]["threads"][:1]
        if main and any(DATA.search(frame["file"]) for frame in main[0]["frames"]):
            found[str(rank)]["workers"] = workers(looks[pid]["pid"])
    return found


def workers(pid: int) -> List[Dict[str, Any]]:
    """Return what the Python processes below one do."""
    below = stacks.children_of(pid)
    return [
        found
        for found in stacks.look(below[:MOST_WORKERS], interval=0.0, limit=5.0).values()
        if found["threads"]
    ]


def process_of(rank: int, pid: int, run_dir: str) -> Optional[int]:
    """Return the process of a rank as this node numbers it, None where it is gone.

    In a container with numbers of its own, the recorded number is another one here; and a number may have
    been given to somebody else since. The environment tells.
    """
    if os.path.exists(os.path.join(PROC, str(pid))):
        env = environment_of(pid)
        if not env or is_rank(dict({"RANK": "0"}, **env), rank, run_dir):  # launcher single exports no RANK
            return pid
    numbers = [int(name) for name in os.listdir(PROC) if name.isdigit()]
    found = [
        number
        for number in numbers
        if is_rank(environment_of(number), rank, run_dir) and stacks.is_python(number)
    ]
    return min(found, key=stacks.started_at) if found else None  # its own children have its environment


def is_rank(env: Dict[str, str], rank: int, run_dir: str) -> bool:
    """Tell whether an environment is that of a rank of this run."""
    return env.get("RANK") == str(rank) and os.path.basename(
        env.get("DTSLURM_RUN_DIR", "")
    ) == os.path.basename(run_dir)
