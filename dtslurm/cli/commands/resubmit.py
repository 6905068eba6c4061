"""``dtslurm resubmit``."""

from __future__ import annotations

import click

from dtslurm.cli import completers
from dtslurm.cli.options import json_option
from dtslurm.cli.printing import output
from dtslurm.cli.printing.progress import transfer
from dtslurm.model.runs.record import JobRecord


@click.command(context_settings={"ignore_unknown_options": False})
@click.option("--from-checkpoint", is_flag=True, help="Resume from the checkpoints of JOB, and add to them.")
@click.option("--parsable", is_flag=True, help="Print only the job id.")
@click.option(
    "--cluster",
    metavar="NAME",
    shell_complete=completers.complete_clusters,
    help="Submit to this cluster. [default: the run's own]",
)
@json_option
@click.argument("job", metavar="JOB", shell_complete=completers.complete_jobs)
def resubmit(from_checkpoint: bool, parsable: bool, cluster: str | None, as_json: bool, job: str) -> None:
    """Submit JOB again with its original request and the current code.

    JOB is a job id, an array task (17_3), a run name or a run directory. The new run records the old run.
    """
    from dtslurm.cli.interruption import report_interruption
    from dtslurm.services.submit.resubmit import prepare_resubmission
    from dtslurm.services.submit.submit import submit

    context, prepared = prepare_resubmission(job, from_checkpoint=from_checkpoint, cluster=cluster)
    for line in prepared.submission.notices:
        output.note(f"note: {line}")
    records: list[JobRecord] = []
    with report_interruption(context, records):
        with transfer() as show:
            records.append(
                submit(
                    context,
                    prepared,
                    lambda copied_bytes, total_bytes: show("sending the code", copied_bytes, total_bytes),
                )
            )
        [record] = records
        if as_json:
            output.document(run=record)
        elif parsable:
            output.say(record.job_id or "")
        else:
            output.note(f"submitted job {record.job_id} ({record.name}) to {output.queue_of(record)}")
            output.note(f"  {'continues' if from_checkpoint else 'repeats'}  {record.parent}")
