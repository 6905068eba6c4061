"""``dtslurm notebook`` and ``dtslurm code``."""

from __future__ import annotations

from typing import Any

import click

from dtslurm.cli.commands.forward import forward_to_end
from dtslurm.cli.options import job_options
from dtslurm.cli.printing import output
from dtslurm.services.observe.inside.forward import ForwardRequest
from dtslurm.services.observe.inside.target_process import ProcessSelector
from dtslurm.services.runs.runs import selector_arguments
from dtslurm.services.submit.session import SessionKind, prepare_session
from dtslurm.services.submit.submit import submit
from dtslurm.services.wiring.context import Context

_idle_option = click.option(
    "--idle",
    "idle_time",
    default="30m",
    show_default=True,
    metavar="TIME",
    help="End the job when no user has used it for this long.",
)
_no_forward_option = click.option(
    "--parsable", is_flag=True, help="Print only the job id, and do not connect."
)


@click.command()
@job_options
@_idle_option
@_no_forward_option
@click.option("--open", "opens", is_flag=True, help="Open the browser as soon as Jupyter answers.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS...]")
def notebook(idle_time: str, parsable: bool, opens: bool, args: tuple[str, ...], **options: Any) -> None:
    """Run Jupyter in a job, and lead a port of this machine to it; ARGS are options of Jupyter.

    The Python of the job (--python) must have JupyterLab or Notebook. Ctrl-C ends the connection only: the
    job ends with its time limit, by dtslurm cancel, or after the time of --idle without a working kernel.
    """
    _start("notebook", idle_time, args, options, connects=not parsable, opens=opens)


@click.command()
@job_options
@_idle_option
@_no_forward_option
def code(idle_time: str, parsable: bool, **options: Any) -> None:
    """Start an SSH server of your own in a job, for VS Code, Cursor, Zed, or ssh.

    Only this machine's key can log in, through the connection that this command holds. Ctrl-C ends the
    connection only: the job ends with its time limit, by dtslurm cancel, or after the time of --idle
    without a connection.
    """
    _start("editor", idle_time, (), options, connects=not parsable, opens=False)


def _start(
    kind: SessionKind,
    idle_time: str,
    args: tuple[str, ...],
    options: dict[str, Any],
    *,
    connects: bool,
    opens: bool,
) -> None:
    context = Context()
    prepared = prepare_session(context, kind, idle_time, args, options)
    for line in prepared.submission.notices:
        output.note(f"note: {line}")
    record = submit(context, prepared)
    if not connects:
        output.say(record.job_id or "")
        return
    output.note(f"submitted {kind} {record.job_id} to {output.queue_of(record)}")
    output.note(f"  works in       {output.work_dir_of(record)}")
    output.note(f"  end it         dtslurm cancel {selector_arguments(context, record)}")
    forward_to_end(context, record, ForwardRequest(ProcessSelector()), opens=opens)
