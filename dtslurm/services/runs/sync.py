"""Update the local copies of remote run directories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from dtslurm.model.runs.record import JobRecord
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.login_node import find_remote_python
from dtslurm.store.pull import PullSpec, copy
from dtslurm.store.rundir import RunDir

# Files that show a run's progress. The record is written locally, and node samples are read on the cluster.
RECORDS = (
    "events.jsonl", "*/events.jsonl", "*/train.jsonl", "*/[0-9]*.json", "*/manifest.json", "*first-failure*",
    "*/ranks-[0-9]*.jsonl", "*/activity-[0-9]*.json",
    "roles.json", "*/roles.json",
)  # fmt: skip
LOGS = ("logs/*.log", "tasks/*.log")
# RunDir.OWN are files that only this machine writes: the record, the script and the submission mark.
_SKIPPED = ("code", "checkpoints", *RunDir.OWN)


def refresh(context: Context, records: Sequence[JobRecord], *, logs: bool = False) -> None:
    """Copy new and changed files of remote runs, with one command per cluster.

    Raises:
        TransportError: a cluster cannot be reached.
        StoreError: the local disk cannot be written.
    """
    by_cluster: dict[tuple[str, str], list[JobRecord]] = defaultdict(list)
    for record in records:
        if record.mirror:
            by_cluster[record.profile or record.cluster, record.transport].append(record)
    for cluster_records in by_cluster.values():
        cluster = context.cluster_of(cluster_records[0])
        specs = [
            PullSpec(
                record.run_dir,
                Path(record.mirror),
                (*RECORDS, *(LOGS if logs else ())),
                skip=_SKIPPED,
                hidden=False,
            )
            for record in cluster_records
        ]
        copy(cluster.transport, specs, python=find_remote_python(context, cluster))
