"""Detects whether ranks that write no output still work."""

from typing import Dict, NamedTuple

IDLE = 0.1  # CPU share per rank: a single rank may compute while the others wait for it
BYTES_PER_S = 1e5  # read and written by a rank that loads or saves
WINDOW_S = 10.0  # over which both are measured
STOPPED = ("T", "t", "Z")  # states that mean a hang even if other ranks compute


class ActivitySummary(NamedTuple):
    """What the ranks of a large job do, as their nodes report it.

    Attributes:
        outputs: bytes that each node's ranks have written.
        is_computing: whether any rank computed in the last seconds.
        is_transferring: whether any rank read or wrote much in the last seconds.
    """

    outputs: Dict[str, int]
    is_computing: bool
    is_transferring: bool
    has_stopped_rank: bool
    rank_count: int
