"""Shell completion of values: names of clusters and ids of jobs."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def complete_clusters(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the profiles whose name begins with the word ``incomplete``."""
    del context, parameter
    from dtslurm.services.wiring.clusters import known
    from dtslurm.services.wiring.context import Context

    return [
        CompletionItem(entry.name, help=entry.title or None)
        for entry in known(Context())
        if entry.name.startswith(incomplete)
    ]


def complete_jobs(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the newest runs whose job id begins with ``incomplete``, without a query of the scheduler."""
    del context, parameter
    from dtslurm.services.runs.runs import recent
    from dtslurm.services.wiring.context import Context

    return [
        CompletionItem(record.job_id, help=record.name)
        for record in recent(Context(), 50)
        if record.job_id and record.job_id.startswith(incomplete)
    ]
