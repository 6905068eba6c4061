"""The jobs that a run is a stage with, as they are now."""

from __future__ import annotations

from dtslurm.errors import DtslurmError
from dtslurm.model.runs.record import JobRecord
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.wiring.context import Context


def chain(context: Context, record: JobRecord) -> list[tuple[str, RunView | None]]:
    """Return the stages of a run's job file, each after those that it needs, with what each is doing.

    None stands for one that is gone. A run of its own has no stages.
    """
    found: dict[str, JobRecord] = {}
    for stage, token in record.stages.items():
        try:
            found[stage] = find(context, token, record.cluster)
        except DtslurmError:
            continue
    seen = {view.record.token: view for view in views(context, list(found.values()))}
    tokens = record.stages
    return [(stage, seen.get(tokens[stage])) for stage in tokens]
