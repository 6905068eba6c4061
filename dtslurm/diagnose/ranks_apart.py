"""Detects ranks of a run that do not train together, from events of the telemetry samplers on its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dtslurm.model.values import dataclass

NOT_DISTRIBUTED = "NOT DISTRIBUTED"
FIX = (
    "start a process group over all ranks in the script: torch.distributed.init_process_group(), "
    "Lightning's Trainer(num_nodes=NODES, devices=RANKS_PER_NODE), or Accelerator(); start "
    "independent ranks with -l srun"
)
_EVENTS = ("not_distributed", "ranks_apart", "distributed")
_MAX_EVIDENCE_CHARS = 300


@dataclass(frozen=True)
class RanksApart:
    """Ranks of an attempt that form no process group.

    Attributes:
        is_fault: whether the launcher is meant for ranks that form a process group.
        text: the observation; for a fault it starts with ``NOT DISTRIBUTED``.
    """

    is_fault: bool
    text: str


def find_ranks_apart(events: Iterable[Mapping[str, Any]], attempt: int | None = None) -> RanksApart | None:
    """Return the last observation that an attempt's ranks form no process group.

    The result is None if they form a group. The default attempt is the newest.
    """
    last_event: Mapping[str, Any] = {}
    newest_attempt = -1
    for event in events:
        number = event.get("attempt")
        if not isinstance(number, int):
            continue
        newest_attempt = max(newest_attempt, number)
        if event.get("event") in _EVENTS and attempt in {None, number}:
            last_event = event
    if last_event.get("event") not in _EVENTS[:2] or (
        attempt is None and last_event.get("attempt") != newest_attempt
    ):
        return None
    return RanksApart(last_event["event"] == "not_distributed", describe(last_event))


def describe(event: Mapping[str, Any]) -> str:
    """Describe an event about ranks without a process group."""
    evidence = str(event.get("evidence") or "?")[:_MAX_EVIDENCE_CHARS]
    if event.get("event") == "not_distributed":
        ranks = str(event.get("world_size"))[:20]
        return f"{NOT_DISTRIBUTED}: the {ranks} ranks do not train together: {evidence}"
    return f"{evidence}; this is intended if each rank works on its own part"
