"""``dtslurm alloc``."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from dtslurm.cli.options import resource_options
from dtslurm.cli.printing import output
from dtslurm.errors import DtslurmError
from dtslurm.interrupts import EXIT_CODE
from dtslurm.services.runs.control import change_jobs
from dtslurm.services.runs.runs import selector_arguments
from dtslurm.services.submit.hold import NO_IDLE_LIMIT, prepare_allocation, wait_for_start
from dtslurm.services.submit.submit import submit
from dtslurm.services.wiring.context import Context

if TYPE_CHECKING:
    from dtslurm.model.runs.record import JobRecord
    from dtslurm.services.runs.status import RunView


@click.command()
@resource_options
@click.option(
    "--idle",
    "idle_time",
    default="30m",
    show_default=True,
    metavar="TIME",
    help="End the allocation when no step has run in it for this long; off for no such limit.",
)
@click.option("--parsable", is_flag=True, help="Print only the job id.")
def alloc(idle_time: str, parsable: bool, **options: Any) -> None:
    """Hold an allocation: wait until it starts, and leave it running.

    dtslurm submit --in starts scripts in it without queuing. The allocation does not depend on this
    terminal: it ends with its time limit, by dtslurm cancel, or after the time of --idle without a step.
    """
    context = Context()
    prepared = prepare_allocation(context, idle_time, options)
    for line in prepared.submission.notices:
        output.note(f"note: {line}")
    record = submit(context, prepared)
    output.note(f"allocation {record.job_id} is queued on {output.queue_of(record)}; Ctrl-C cancels it")
    view = _wait(context, record)
    if parsable:
        output.say(record.job_id or "")
    else:
        _describe(context, view, idle_time)


def _wait(context: Context, record: JobRecord) -> RunView:
    from dtslurm.slurm.pending import explain

    shown_reasons = {""}

    def show_reason(view: RunView) -> None:
        reason = view.statuses[0].reason
        if not view.terminal and reason not in shown_reasons:
            shown_reasons.add(reason)
            output.note(output.fold(f"  pending, {reason}: {explain(reason).text}", 4))

    try:
        return wait_for_start(context, record, show_reason)
    except KeyboardInterrupt:
        job = selector_arguments(context, record)
        try:
            change_jobs(context, "cancel", [record.token])
        except DtslurmError as error:
            output.note(f"interrupted: {error.message}; dtslurm cancel {job} cancels the allocation")
        else:
            output.note(f"interrupted: allocation {record.job_id} is cancelled")
        raise click.exceptions.Exit(EXIT_CODE) from None


def _describe(context: Context, view: RunView, idle_time: str) -> None:
    status, job = view.statuses[0], selector_arguments(context, view.record)
    until = ""
    if status.time_left is not None:
        until = f" until {datetime.fromtimestamp(context.clock() + status.time_left):%Y-%m-%d %H:%M}"
    output.say(f"allocation {view.record.job_id} is running{until}")
    if idle_time != NO_IDLE_LIMIT:
        output.say(f"  idle limit     it ends when no step has run in it for {idle_time} (--idle)")
    output.say(f"  run a script   dtslurm submit --in {job} SCRIPT")
    output.say(f"  open a shell   dtslurm exec {job}")
    output.say(f"  end it         dtslurm cancel {job}")
