"""``dtslurm submit`` and ``dtslurm render``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dtslurm.cli import output
from dtslurm.cli.options import job_options, json_option
from dtslurm.cli.progress import transfer
from dtslurm.errors import JobFailed, StoreError
from dtslurm.model.job import JobRecord, Submission
from dtslurm.services.context import Context
from dtslurm.services.prepare import Prepared, prepare
from dtslurm.services.request import JobRequest
from dtslurm.services.status import RunView

_SCRIPT_LAST = {"ignore_unknown_options": False, "allow_interspersed_args": False}


def _request(options: dict[str, Any], script: str, args: tuple[str, ...]) -> JobRequest:
    return JobRequest(script=script, args=args, **options)


def _prepare(context: Context, request: JobRequest, *, standalone: bool) -> Prepared:
    prepared = prepare(context, request, standalone=standalone)
    for line in prepared.submission.notices:
        output.note(f"note: {line}")
    return prepared


@click.command(context_settings=_SCRIPT_LAST)
@job_options
@click.option("-o", "--output", "target", metavar="FILE", help="Write the script there instead of to stdout.")
@json_option
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def render(target: str | None, as_json: bool, script: str, args: tuple[str, ...], **options: Any) -> None:
    """Print the sbatch script for SCRIPT and queue nothing.

    The script runs with plain sbatch; each job of it makes its own run directory.
    """
    context = Context()
    submission = _prepare(context, _request(options, script, args), standalone=True).submission
    if target is not None:
        _write(context, context.cwd / target, submission)
    elif as_json:
        output.document(**_submission_values(submission))
    else:
        click.echo(submission.script.encode("utf-8", "surrogateescape"), nl=False)


def _write(context: Context, path: Path, submission: Submission) -> None:
    if path.is_dir():
        raise StoreError(f"cannot write {path}: it is a folder")
    context.transport.put(submission.script.encode("utf-8", "surrogateescape"), str(path), mode=0o700)


def _submission_values(submission: Submission) -> dict[str, Any]:
    return {
        "cluster": submission.cluster,
        "launcher": submission.spec.launcher,
        "run_dir": submission.run_dir,
        "layout": submission.layout,
        "notices": submission.notices,
        "origins": submission.origins,
        "script": submission.script,
    }


@click.command(context_settings=_SCRIPT_LAST)
@job_options
@click.option("--dry-run", is_flag=True, help="Print exactly what would be queued, and queue nothing.")
@click.option("--parsable", is_flag=True, help="Print the job id alone.")
@click.option("--wait", "wait_for_end", is_flag=True, help="Wait, and exit with the job's own code.")
@click.option(
    "-f", "--follow", is_flag=True, help="Show the output until the end, and exit with the job's code."
)
@json_option
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def submit(
    dry_run: bool,
    parsable: bool,
    wait_for_end: bool,
    follow: bool,
    as_json: bool,
    script: str,
    args: tuple[str, ...],
    **options: Any,
) -> None:
    """Check, render and queue SCRIPT with its ARGS.

    Options come before SCRIPT; everything after it belongs to the script.
    """
    from dtslurm.services.submit import submit as queue

    context = Context()
    prepared = _prepare(context, _request(options, script, args), standalone=False)
    if dry_run:
        if as_json:
            output.document(**_submission_values(prepared.submission))
        else:
            click.echo(prepared.submission.script.encode("utf-8", "surrogateescape"), nl=False)
        return
    with transfer() as show:
        record = queue(context, prepared, lambda done, size: show("sending the code", done, size))
    if as_json and not (follow or wait_for_end):
        output.document(run=record)
    elif parsable:
        output.say(record.job_id or "")
    elif not as_json:
        _announce(record)
    if follow:
        from dtslurm.cli.follow import follow_to_end
        from dtslurm.services.logs import LogFilter

        _finish(follow_to_end(context, record, LogFilter(), on_stderr=as_json or parsable), as_json)
    elif wait_for_end:
        from dtslurm.services.logs import wait

        _finish(wait(context, record), as_json)


def _announce(record: JobRecord) -> None:
    output.note(f"submitted job {record.job_id} ({record.name}) to {record.cluster}")
    output.note(f"  run directory  {record.run_dir}")
    output.note(f"  follow it      dtslurm logs -f {record.job_id}")


def _finish(view: RunView, as_json: bool) -> None:
    """Say how the job ended and end as it did."""
    from dtslurm.cli.summary import show_end

    if as_json:
        output.document(run=view.record, statuses=view.statuses)
    else:
        show_end(view)
    if view.exit_code:
        raise JobFailedQuietly(view.exit_code)


class JobFailedQuietly(JobFailed):
    """The job's failure was told already; only its exit code is left to pass on."""

    def __init__(self, code: int) -> None:
        super().__init__("the job failed", code=code)

    def lines(self) -> list[str]:
        """Return nothing more to say."""
        return []
