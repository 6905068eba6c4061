"""Parse the options that the batch script passes to the supervisor."""

import argparse
from typing import Any, List


def read(words: List[str]) -> Any:
    """Return the parsed options; durations are in seconds, 0 means no limit or not set."""
    parser = argparse.ArgumentParser(prog="supervisor")
    parser.add_argument(
        "--nodes",
        type=int,
        required=True,
        help="number of nodes of an attempt; other nodes of the job are spare nodes",
    )
    parser.add_argument(
        "--least-nodes", type=int, help="minimum number of nodes after losses; default: --nodes"
    )
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument(
        "--health-check",
        action="store_true",
        help="check the nodes before training, and exclude bad nodes",
    )
    parser.add_argument("--max-restarts", type=int, default=3)
    parser.add_argument(
        "--hang-timeout", type=float, default=0, help="0: learned from the run; negative: no hang detection"
    )
    parser.add_argument("--total-time", type=float, default=0)
    parser.add_argument("--time-limit", type=float, default=0)
    parser.add_argument("--go-on-by", choices=["requeue", "afterany", "singleton"], default="requeue")
    parser.add_argument("--start-now", action="store_true", help="shorten Slurm's delay after a requeue")
    parser.add_argument("--python", default="", help="Python 3.10 or later, for the diagnosis")
    parser.add_argument("--script", default="", help="the batch script, used to submit a successor job")
    parser.add_argument("--resume", action="store_true", help="continue the attempt of a killed supervisor")
    parsed = parser.parse_args(words)
    parsed.least_nodes = parsed.least_nodes or parsed.nodes
    return parsed
