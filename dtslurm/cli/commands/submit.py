"""``dtslurm submit`` and ``dtslurm render``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtslurm.cli.options import SECTIONS, job_options, json_option
from dtslurm.cli.printing import output
from dtslurm.cli.printing.progress import transfer
from dtslurm.cli.sbatch_flags import join_optional_value, sbatch_flags, take_sbatch_flags
from dtslurm.errors import JobFailed, RequestInvalid, StoreError
from dtslurm.model.jobs.job import JobRecord, Submission
from dtslurm.services.request.request import JobRequest
from dtslurm.services.runs.runs import selector_arguments, words_for_all
from dtslurm.services.submit.job_file import JobToSubmit, Planned, is_job_file, load_jobs
from dtslurm.services.submit.prepare import Prepared, prepare
from dtslurm.services.wiring.context import Context
from dtslurm.slurm.arrays import is_step_id

if TYPE_CHECKING:
    from dtslurm.services.runs.status import RunView

_set_option = click.option(
    "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="Set a variable of the job file."
)


_stage_option = click.option("--only", "stage", metavar="NAME", help="Use only this stage of the job file.")


class ScriptOrJobFile(click.Command):
    """A command whose options precede a training script, but may stand anywhere around a job file."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Add the options of sbatch that dtslurm does not interpret."""
        super().__init__(*args, **kwargs)
        own_options = {text for param in self.params for text in (*param.opts, *param.secondary_opts)}
        self.params += sbatch_flags(own_options)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before a script, or all options for a job file."""
        ctx.allow_interspersed_args = False
        if not ctx.resilient_parsing:
            normalized = [join_optional_value(argument) for argument in args]
            parsed, _, _ = self.make_parser(ctx).parse_args(list(normalized))
            ctx.allow_interspersed_args = is_job_file(Path(str(parsed.get("script") or "")))
            if ctx.allow_interspersed_args:
                own_count = args.index("--") if "--" in args else len(args)
            else:
                script_args = parsed.get("args")  # not a list if the script has no arguments
                own_count = len(args) - (len(script_args) if isinstance(script_args, (list, tuple)) else 0)
            args = [*normalized[:own_count], *args[own_count:]]
        remaining_args = super().parse_args(ctx, args)
        ctx.params["sbatch"] = (*(ctx.params.get("sbatch") or ()), *take_sbatch_flags(ctx.params))
        return remaining_args

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections."""
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        help_records = {
            option.name: help_record for option in options if (help_record := option.get_help_record(ctx))
        }
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([help_records.pop(name) for name in names if name in help_records])
        with formatter.section("Options"):
            formatter.write_dl(list(help_records.values()))


def _prepare_and_notify(context: Context, request: JobRequest, *, standalone: bool) -> Prepared:
    prepared = prepare(context, request, standalone=standalone)
    for line in prepared.submission.notices:
        output.note(f"note: {line}")
    return prepared


@click.command(cls=ScriptOrJobFile)
@job_options
@_set_option
@_stage_option
@click.option("--write", "target", metavar="FILE", help="Write the script to FILE instead of stdout.")
@json_option
@click.argument("script", metavar="SCRIPT|JOB.yaml")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def render(
    target: str | None,
    as_json: bool,
    assignments: tuple[str, ...],
    stage: str | None,
    script: str,
    args: tuple[str, ...],
    **options: Any,
) -> None:
    """Print the sbatch script for SCRIPT without queuing it.

    Plain sbatch can run the script; each of its jobs creates a run directory.
    """
    context = Context(dry_run=True)
    jobs_to_submit = load_jobs(context, JobRequest(script=script, args=args, **options), assignments, stage)
    if len(jobs_to_submit) > 1:
        names = ", ".join(job.stage for job in jobs_to_submit)
        raise RequestInvalid([f"{script} has several stages; select a stage with --only: {names}"])
    if jobs_to_submit[0].sweep is not None:
        raise RequestInvalid(
            [f"{script} is a sweep: its script needs a file of trials, which only dtslurm submit creates"],
            hint="dtslurm submit --dry-run prints the script",
        )
    submission = _prepare_and_notify(context, jobs_to_submit[0].request, standalone=True).submission
    if target is not None:
        _write_script(context, context.cwd / target, submission)
    elif as_json:
        output.document(**_submission_values(submission))
    else:
        click.echo(submission.script.encode("utf-8", "surrogateescape"), nl=False)


def _write_script(context: Context, path: Path, submission: Submission) -> None:
    if path.is_dir():
        raise StoreError(f"cannot write {path}: it is a folder")
    context.transport.put(submission.script.encode("utf-8", "surrogateescape"), str(path), mode=0o700)


def _submission_values(submission: Submission) -> dict[str, Any]:
    return {
        "cluster": submission.cluster,
        "launcher": submission.spec.launcher,
        "run_dir": submission.run_dir,
        "work_dir": submission.spec.work_dir,
        "layout": submission.layout,
        "notices": submission.notices,
        "origins": submission.origins,
        "script": submission.script,
    }


@click.command(cls=ScriptOrJobFile)
@job_options
@_set_option
@_stage_option
@click.option(
    "--in",
    "allocation",
    metavar="JOBID",
    help="Run at once in this running job of yours, as a step, without queuing.",
)
@click.option("-y", "--yes", is_flag=True, help="Queue a sweep of very many trials without confirmation.")
@click.option("--dry-run", is_flag=True, help="Print exactly what would be queued, without queuing it.")
@click.option("--parsable", is_flag=True, help="Print only the job id.")
@click.option("--wait", "wait_for_end", is_flag=True, help="Wait until the job ends; exit with its code.")
@click.option("-f", "--follow", is_flag=True, help="Show the output until the job ends; exit with its code.")
@json_option
@click.argument("script", metavar="SCRIPT|JOB.yaml")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def submit(
    dry_run: bool,
    parsable: bool,
    wait_for_end: bool,
    follow: bool,
    as_json: bool,
    yes: bool,
    assignments: tuple[str, ...],
    stage: str | None,
    script: str,
    args: tuple[str, ...],
    **options: Any,
) -> None:
    """Check, render and queue SCRIPT with its ARGS, or the jobs of a job file.

    Put options before SCRIPT; everything after SCRIPT is passed to the script. Options after JOB.yaml
    override the job file; arguments after -- are passed to its script.
    """
    from dtslurm.cli.interruption import report_interruption

    context = Context(dry_run=dry_run)
    start_time = context.clock()
    jobs_to_submit = load_jobs(context, JobRequest(script=script, args=args, **options), assignments, stage)
    if options["allocation"] is not None and not all(job.plain for job in jobs_to_submit):
        raise RequestInvalid(["stages and sweeps contradict --in: an allocation runs one job at a time"])
    if follow and not all(job.plain for job in jobs_to_submit):
        raise RequestInvalid(
            ["--follow shows a single job, and this request has several jobs; --wait waits for all of them"]
        )
    planned_jobs = _plan_jobs(context, jobs_to_submit, yes=yes or dry_run)
    if dry_run:
        _show_scripts([job.prepared.submission for job in planned_jobs], as_json=as_json)
        return
    # Import before a job is queued, so that Ctrl-C during the import leaves no job unreported.
    if follow or wait_for_end:
        from dtslurm.cli.follow import follow_to_end, report_continuing_jobs
        from dtslurm.services.logs.logs import LogFilter, wait
    records: list[JobRecord] = []
    with report_interruption(context, records):
        _queue(context, planned_jobs, records)
        if records[0].created_at < start_time:  # by --once
            _report_differences(planned_jobs[0].prepared, records[0])
        if as_json and not (follow or wait_for_end):
            output.document(run=records[0], runs=records)
        elif parsable or not as_json:
            _announce(context, records, start_time, parsable=parsable)
    if follow:
        view = follow_to_end(
            context, records[0], LogFilter(), on_stderr=as_json or parsable, cancels_in_allocation=True
        )
        _finish(context, [view], as_json)
    elif wait_for_end:
        with report_continuing_jobs(context, records, cancels_in_allocation=True):
            run_views = [wait(context, record) for record in records]
        _finish(context, run_views, as_json)


def _plan_jobs(context: Context, jobs_to_submit: Sequence[JobToSubmit], *, yes: bool) -> list[Planned]:
    """Return the jobs to queue, and print their notices."""
    if jobs_to_submit[0].plain:
        planned = [Planned(jobs_to_submit[0], prepare(context, jobs_to_submit[0].request, standalone=False))]
    else:
        from dtslurm.services.submit.stages import plan

        planned = plan(context, jobs_to_submit, confirm=lambda text: yes or _confirm(text))
    for job in planned:
        stage = f"stage {job.step.stage}: " if job.step.stage else ""
        for line in job.prepared.submission.notices:
            output.note(f"note: {stage}{line}")
    return planned


def _confirm(question: str) -> bool:
    return sys.stdin.isatty() and click.confirm(question, err=True)


def _show_scripts(submissions: Sequence[Submission], *, as_json: bool) -> None:
    """Print the scripts that would be queued."""
    if as_json:
        documents = [_submission_values(submission) for submission in submissions]
        output.document(**documents[0], **({"stages": documents} if len(documents) > 1 else {}))
        return
    for submission in submissions:
        click.echo(submission.script.encode("utf-8", "surrogateescape"), nl=False)


def _queue(context: Context, planned: Sequence[Planned], records: list[JobRecord]) -> None:
    """Queue the jobs and append their records to ``records``."""
    with transfer() as show:

        def progress(copied_bytes: int, total_bytes: int) -> None:
            show("sending the code", copied_bytes, total_bytes)

        if planned[0].step.plain:
            from dtslurm.services.submit.submit import submit as submit_job

            records.append(submit_job(context, planned[0].prepared, progress))
            return
        from dtslurm.services.submit.stages import queue

        records += queue(context, planned, progress)


def _report_differences(prepared: Prepared, record: JobRecord) -> None:
    from dtslurm.services.submit.idempotency import differences

    if differing := differences(prepared, record):
        output.note(
            f"note: job {record.job_id} already has this idempotency key (--once), and differs from "
            f"this request in {', '.join(differing)}"
        )


def _announce(context: Context, records: Sequence[JobRecord], start_time: float, *, parsable: bool) -> None:
    if parsable:
        for record in records:
            output.say(record.job_id or "")
        return
    for record in records:
        stage = f", stage {record.stage}" if record.stage else ""
        if record.created_at < start_time:  # by --once
            output.note(
                f"job {record.job_id} ({record.name}{stage}) was submitted before, to {record.cluster}"
            )
        elif is_step_id(record.job_id or ""):
            output.note(f"run {record.job_id} ({record.name}) has started on {output.queue_of(record)}")
        else:
            output.note(f"submitted job {record.job_id} ({record.name}{stage}) to {output.queue_of(record)}")
        output.note(f"  run directory  {record.run_dir}")
        output.note(f"  works in       {output.work_dir_of(record)}")
    if records[-1].sweep:
        output.note(f"  its trials     dtslurm sweep status {selector_arguments(context, records[-1])}")
    elif len(records) > 1:
        output.note(f"  all of them    dtslurm status {words_for_all(context, records)}")
    else:
        output.note(f"  follow it      dtslurm logs -f {selector_arguments(context, records[0])}")


def _finish(context: Context, views: Sequence[RunView], as_json: bool) -> None:
    """Report how the jobs ended.

    Raises:
        JobFailedQuietly: a job failed; it carries the highest exit code.
    """
    from dtslurm.cli.printing.summary import show_end

    if as_json:
        all_runs = {"runs": [{"run": view.record, "statuses": view.statuses} for view in views]}
        output.document(
            run=views[0].record, statuses=views[0].statuses, **(all_runs if len(views) > 1 else {})
        )
    else:
        for view in views:
            show_end(context, view)
    if code := max(view.exit_code for view in views):
        raise JobFailedQuietly(code)


class JobFailedQuietly(JobFailed):
    """A job failed; the failure was already reported, so this error only sets the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__("the job failed", code=code)

    def lines(self) -> list[str]:
        """Return no lines, because the failure was already reported."""
        return []
