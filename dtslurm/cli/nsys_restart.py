"""``dtslurm profile --with nsys``: confirm and wait for the restart of the attempt, then record."""

from __future__ import annotations

import sys

import click

from dtslurm.cli.printing import output
from dtslurm.errors import RequestInvalid
from dtslurm.services.observe.inside.nsys import (
    NsysReport,
    NsysTarget,
    ranks_are_below_nsys,
    record_ranks,
    restart_below_nsys,
)

_QUESTION = (
    "nsys observes only what starts below it. Restart the attempt of job {}? Training loses the time since "
    "its last checkpoint, and the start."
)


def record_with_nsys(target: NsysTarget, seconds: int, *, yes: bool) -> list[NsysReport]:
    """Return what nsys recorded of the ranks, after a restart if they do not run below nsys yet.

    Raises:
        RequestInvalid: the restart was not confirmed, or is not possible.
    """
    if not ranks_are_below_nsys(target):
        question = _QUESTION.format(target.job)
        if not yes and not (sys.stdin.isatty() and click.confirm(question, default=False, err=True)):
            raise RequestInvalid(
                ["the restart of the attempt was not confirmed, and nothing was changed"],
                hint="--yes restarts it without a question",
            )
        output.note("the attempt ends; waiting for the next one to train")
        if not restart_below_nsys(target):
            output.note(
                "no steps of this run are known, so recording begins now, a minute after its start; "
                "repeat the command for another recording, without a restart"
            )
    return record_ranks(target, seconds)
