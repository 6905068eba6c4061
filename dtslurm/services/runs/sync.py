"""Brings this machine's copies of far run directories up to date."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from dtslurm.model.runs.record import JobRecord
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.login_node import far_python
from dtslurm.store.pull import PullSpec, copy
from dtslurm.store.rundir import RunDir

# What tells how a run fares; its record is this machine's own, and the nodes' samples are asked for there.
RECORDS = (
    "events.jsonl", "*/events.jsonl", "*/train.jsonl", "*/[0-9]*.json", "*/manifest.json", "*first-failure*",
    "*/activity-[0-9]*.json",
)  # fmt: skip
LOGS = ("logs/*.log", "tasks/*.log")
# The record, the script and the mark of a submission here are this machine's own: no cluster writes them.
_SKIPPED = ("code", "checkpoints", *RunDir.OWN)


def refresh(context: Context, records: Sequence[JobRecord], *, logs: bool = False) -> None:
    """Copy what is new of the runs on other machines: one command for each cluster.

    Raises:
        TransportError: a cluster cannot be reached.
        StoreError: the disk here refused.
    """
    by_cluster: dict[tuple[str, str], list[JobRecord]] = defaultdict(list)
    for record in records:
        if record.mirror:
            by_cluster[record.profile or record.cluster, record.transport].append(record)
    for of_one in by_cluster.values():
        cluster = context.cluster_of(of_one[0])
        wanted = [
            PullSpec(
                record.run_dir,
                Path(record.mirror),
                (*RECORDS, *(LOGS if logs else ())),
                skip=_SKIPPED,
                hidden=False,
            )
            for record in of_one
        ]
        copy(cluster.transport, wanted, python=far_python(context, cluster))
