"""Shell completion of values: names of clusters and ids of jobs."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def clusters(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the profiles whose name begins with the incomplete word ``begun``."""
    del context, parameter
    from dtslurm.services.wiring.clusters import known
    from dtslurm.services.wiring.context import Context

    return [
        CompletionItem(entry.name, help=entry.title or None)
        for entry in known(Context())
        if entry.name.startswith(begun)
    ]


def jobs(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the newest runs whose job id begins with ``begun``, without a query of the scheduler."""
    del context, parameter
    from dtslurm.services.runs.runs import recent
    from dtslurm.services.wiring.context import Context

    return [
        CompletionItem(record.job_id, help=record.name)
        for record in recent(Context(), 50)
        if record.job_id and record.job_id.startswith(begun)
    ]
