"""The report of a submission's jobs after Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from dtslurm.cli.printing import output
from dtslurm.errors import SubmitInterrupted
from dtslurm.interrupts import EXIT_CODE
from dtslurm.model.runs.record import JobRecord
from dtslurm.services.runs.control import cancel_in_allocation
from dtslurm.services.runs.runs import describe_queued
from dtslurm.services.submit.submit import NO_JOB
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.arrays import is_step_id


@contextmanager
def report_interruption(context: Context, queued: Sequence[JobRecord]) -> Iterator[None]:
    """Print which jobs are in the queue if Ctrl-C ends a submission.

    Args:
        queued: the runs queued so far; the caller appends to it.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if sys.stderr.isatty():
            output.note("")  # the terminal shows ^C without a line end
        records = list(queued)
        if isinstance(interrupt, SubmitInterrupted):
            if interrupt.record is None and (not records or str(interrupt) != NO_JOB):
                output.note(str(interrupt))
            if interrupt.record is not None and interrupt.record not in records:
                records.append(interrupt.record)
        if len(records) == 1 and is_step_id(records[0].job_id or ""):
            output.note(f"interrupted: {cancel_in_allocation(context, records[0])}")
        elif records:
            output.note(f"interrupted: {describe_queued(context, records)}")
        raise click.exceptions.Exit(EXIT_CODE) from None
