"""Whether the ranks of a run train apart from each other, as the samplers of its nodes have recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dtslurm.model.values import dataclass

NOT_DISTRIBUTED = "NOT DISTRIBUTED"
FIX = (
    "start a process group over all ranks in the script: torch.distributed.init_process_group(), Lightning's "
    "Trainer(num_nodes=NODES, devices=RANKS_PER_NODE), or Accelerator(); start ranks that are to work apart "
    "by -l srun"
)
_EVENTS = ("not_distributed", "ranks_apart", "distributed")
_LONGEST = 300


@dataclass(frozen=True)
class RanksApart:
    """Ranks of an attempt that were seen to form no group.

    Attributes:
        is_fault: whether the launcher is for ranks that form a group.
        text: what was seen, with the mark of a fault before it.
    """

    is_fault: bool
    text: str


def find_ranks_apart(events: Iterable[Mapping[str, Any]], attempt: int | None = None) -> RanksApart | None:
    """Return what was recorded last of an attempt (default: the newest), None if its ranks form a group."""
    last: Mapping[str, Any] = {}
    newest = -1
    for event in events:
        number = event.get("attempt")
        if not isinstance(number, int):
            continue
        newest = max(newest, number)
        if event.get("event") in _EVENTS and attempt in {None, number}:
            last = event
    if last.get("event") not in _EVENTS[:2] or (attempt is None and last.get("attempt") != newest):
        return None
    return RanksApart(last["event"] == "not_distributed", describe(last))


def describe(event: Mapping[str, Any]) -> str:
    """Return in words what an event tells of ranks apart."""
    evidence = str(event.get("evidence") or "?")[:_LONGEST]
    if event.get("event") == "not_distributed":
        ranks = str(event.get("world_size"))[:20]
        return f"{NOT_DISTRIBUTED}: the {ranks} ranks do not train together: {evidence}"
    return f"{evidence}; that is right if each rank works on a part of its own"
