"""Parse the options that the batch script passes to the supervisor."""

import argparse
from typing import Any, List


def read(words: List[str]) -> Any:
    """Return the parsed options; durations are in seconds, 0 means no limit or not set."""
    parser = argparse.ArgumentParser(prog="supervisor")
    parser.add_argument(
        "--nodes", type=int, required=True, help="that an attempt needs; the others are spare"
    )
    parser.add_argument("--least-nodes", type=int, help="that will do when others are lost; default: --nodes")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument(
        "--health-check",
        action="store_true",
        help="look at the nodes before training, and leave out bad ones",
    )
    parser.add_argument("--max-restarts", type=int, default=3)
    parser.add_argument(
        "--hang-timeout", type=float, default=0, help="0: learned; negative: hangs are not looked for"
    )
    parser.add_argument("--total-time", type=float, default=0)
    parser.add_argument("--time-limit", type=float, default=0)
    parser.add_argument("--go-on-by", choices=["requeue", "afterany", "singleton"], default="requeue")
    parser.add_argument(
        "--start-now", action="store_true", help="do not wait for Slurm's pause after a requeue"
    )
    parser.add_argument(
        "--python", default="", help="an interpreter of version 3.10 or later, for the verdict"
    )
    parser.add_argument("--script", default="", help="the batch script, to queue a successor")
    parser.add_argument("--resume", action="store_true", help="go on where a killed supervisor left off")
    parsed = parser.parse_args(words)
    parsed.least_nodes = parsed.least_nodes or parsed.nodes
    return parsed
