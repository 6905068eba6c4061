"""The present state of the stages of a run's job file."""

from __future__ import annotations

from dtslurm.errors import DtslurmError
from dtslurm.model.runs.record import JobRecord
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.wiring.context import Context


def view_stages(context: Context, record: JobRecord) -> list[tuple[str, RunView | None]]:
    """Return the names and views of the stages of a run's job file, dependencies first.

    The view is None if the run of a stage is gone. The list is empty for a run without stages.
    """
    records_by_stage: dict[str, JobRecord] = {}
    for stage, token in record.stages.items():
        try:
            records_by_stage[stage] = find(context, token, record.cluster)
        except DtslurmError:
            continue
    views_by_token = {view.record.token: view for view in views(context, list(records_by_stage.values()))}
    tokens = record.stages
    return [(stage, views_by_token.get(tokens[stage])) for stage in tokens]
