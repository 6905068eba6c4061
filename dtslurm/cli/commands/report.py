"""``dtslurm report``."""

from __future__ import annotations

import click

from dtslurm.cli.options import cluster_option, job_argument
from dtslurm.cli.printing import output
from dtslurm.errors import StoreError
from dtslurm.model.paths import expand_home
from dtslurm.services.observe.report import report as make
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.tasks import task_of
from dtslurm.services.submit.sweep_report import report_sweep
from dtslurm.services.wiring.context import Context


@click.command()
@click.option("-o", "--output", "target", metavar="FILE", help="Write to FILE. [default: ./NAME-JOB.html]")
@click.option("--attempt", type=int, metavar="K", help="Report on this attempt. [default: the latest]")
@cluster_option
@job_argument
def report(target: str | None, attempt: int | None, cluster: str | None, job: str | None) -> None:
    """Write an HTML report about JOB (or the newest run) that needs no network to view.

    It has a summary, curves, GPU utilization over time, ranks, attempts, the cause of failure, and the exact
    script. For a sweep, it has a table of trials, their curves, and the causes of failed trials.
    """
    context = Context()
    record = find(context, job, cluster)
    task = task_of(job, record)
    if record.sweep and task is None and attempt is None:
        text = report_sweep(context, record)
    else:
        text = make(context, record, attempt=attempt, task=task)
    number = record.job_id if task is None else f"{record.job_id}_{task}"
    path = context.cwd / expand_home(target or f"{record.name}-{number}.html")
    if path.is_dir():
        raise StoreError(f"cannot write {path}: it is a folder")
    context.transport.put(text.encode("utf-8", "surrogateescape"), str(path))
    output.say(str(path))
