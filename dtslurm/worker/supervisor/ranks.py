"""Reads the records that the ranks of an attempt wrote at their ends."""

import os
from typing import Any, Dict, List, Set

from ..lib.rank_files import read_records

WANTS_REQUEUE = 85  # the exit code of a rank that saved a checkpoint to be started again


def all_done(run_dir: str, attempt: int, world_size: int) -> bool:
    """Return whether all ranks of an attempt ended with 0 by themselves, without TERM."""
    ends = [
        (record.get("exit_code"), record.get("told_to_end", False))
        for record in _read_records(run_dir, attempt)
    ]
    return len(ends) == world_size > 0 and all(end == (0, False) for end in ends)


def all_saved(run_dir: str, attempt: int, world_size: int) -> bool:
    """Return whether all ranks of an attempt ended with 85: each saved a checkpoint, perhaps after TERM."""
    codes = [record.get("exit_code") for record in _read_records(run_dir, attempt)]
    return len(codes) == world_size > 0 and all(code == WANTS_REQUEUE for code in codes)


def nodes_heard(run_dir: str, attempt: int) -> Set[str]:
    """Return the nodes that recorded the end of a rank: a lost node cannot do so."""
    ended = [record for record in _read_records(run_dir, attempt) if record.get("exit_code") is not None]
    return {str(record.get("host")) for record in ended}


def _read_records(run_dir: str, attempt: int) -> List[Dict[str, Any]]:
    return list(read_records(os.path.join(run_dir, "ranks", str(attempt))).values())
