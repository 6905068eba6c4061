"""Reads what the ranks of an attempt recorded of their ends."""

import os
import re
from typing import Any, Dict, List, Set

from .files import json_of, names_in


def all_done(run_dir: str, attempt: int, world_size: int) -> bool:
    """Tell whether all ranks of an attempt recorded an end with 0 that nobody told them to make."""
    ends = [(one.get("exit_code"), one.get("told_to_end", False)) for one in _records(run_dir, attempt)]
    return len(ends) == world_size > 0 and all(end == (0, False) for end in ends)


def nodes_heard(run_dir: str, attempt: int) -> Set[str]:
    """Return the nodes that told how a rank of theirs ended: a node that is lost cannot."""
    told = [one for one in _records(run_dir, attempt) if one.get("exit_code") is not None]
    return {str(one.get("host")) for one in told}


def _records(run_dir: str, attempt: int) -> List[Dict[str, Any]]:
    folder = os.path.join(run_dir, "ranks", str(attempt))
    names = [name for name in names_in(folder) if re.match(r"\d+\.json$", name)]
    return [json_of(os.path.join(folder, name)) for name in names]
