"""Submit the stages of a job file: check all jobs before queuing any, and queue all jobs or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dtslurm.errors import DtslurmError, RequestInvalid, SubmitInterrupted
from dtslurm.model.jobs import stages
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.runs import control
from dtslurm.services.submit.job_file import JobToSubmit, Planned
from dtslurm.services.submit.prepare import add_dependency, prepare
from dtslurm.services.submit.submit import NO_JOB, Progress, submit
from dtslurm.services.submit.sweep import plan_sweep, save_members, submit_sweep
from dtslurm.services.wiring.context import Context


def plan(context: Context, steps: Sequence[JobToSubmit], *, confirm: Callable[[str], bool]) -> list[Planned]:
    """Check and render all jobs without queuing them.

    Args:
        confirm: called with a question before a sweep of very many trials.

    Raises:
        RequestInvalid: a request is invalid; the error lists the problems of all jobs.
        ProfileNotFound, ProfileInvalid, RenderError: as `prepare` does.
    """
    planned: list[Planned] = []
    problems: list[str] = []
    needs = {step.stage: [name for _, name in step.needs] for step in steps}
    folders: dict[str, str] = {}
    for step in steps:
        earlier_stages = sorted(stages.find_ancestors(step.stage, needs)) if not problems else []
        folder_variables = tuple(f"{stages.folder_variable(name)}={folders[name]}" for name in earlier_stages)
        request = replace(step.request, env=(*folder_variables, *step.request.env))
        try:
            planned_job = _plan_job(context, replace(step, request=request), confirm)
        except RequestInvalid as error:
            if type(error) is not RequestInvalid or not step.stage:
                raise
            problems += [f"stage {step.stage}: {problem}" for problem in error.problems]
            continue
        folders[step.stage] = planned_job.prepared.submission.run_dir
        planned.append(planned_job)
    if problems:
        raise RequestInvalid(problems)
    if len(planned) == 1 and not planned[0].step.stage:
        return planned
    tokens = {planned_job.step.stage: planned_job.prepared.submission.token for planned_job in planned}
    return [
        replace(
            planned_job, prepared=replace(planned_job.prepared, stage=planned_job.step.stage, stages=tokens)
        )
        for planned_job in planned
    ]


def _plan_job(context: Context, step: JobToSubmit, confirm: Callable[[str], bool]) -> Planned:
    if step.sweep is None:
        return Planned(step, prepare(context, step.request, standalone=False))
    sweeping = plan_sweep(context, step.request, step.sweep, confirm=confirm)
    return Planned(step, sweeping.first, sweeping)


def queue(
    context: Context, planned: Sequence[Planned], progress: Progress = lambda *_: None
) -> list[JobRecord]:
    """Queue jobs one after the other, each with its dependencies; return their records.

    Raises:
        SubmitRejected, …: a job was rejected; the jobs queued before it are cancelled.
        SubmitInterrupted: the user pressed Ctrl-C; the queued jobs are cancelled.
    """
    queued: list[JobRecord] = []
    jobs_by_stage: dict[str, list[str]] = {}
    try:
        for planned_job in planned:
            after = _dependency_expression(planned_job.step, jobs_by_stage)
            if planned_job.sweeping is not None:  # `plan` has set the stage in `prepared` only
                sweeping = replace(planned_job.sweeping, first=planned_job.prepared)
                records = submit_sweep(context, sweeping, after, queued, progress)
                save_members(context, records[0], records)
            else:
                records = [submit(context, add_dependency(planned_job.prepared, after), progress)]
                queued += records
            jobs_by_stage[planned_job.step.stage] = [record.job_id or "" for record in records]
    except DtslurmError as error:
        outcome = _cancel_queued(context, queued)
        error.evidence = (*error.evidence, *([outcome] if outcome else []))
        raise
    except KeyboardInterrupt as interrupt:
        raise _cancel_interrupted(context, queued, interrupt) from None
    return queued


def _cancel_interrupted(
    context: Context, queued: Sequence[JobRecord], interrupt: KeyboardInterrupt
) -> SubmitInterrupted:
    """Cancel the jobs of an interrupted submission; return an interruption that describes their state."""
    last_record = interrupt.record if isinstance(interrupt, SubmitInterrupted) else None
    records = [
        record for record in (*queued, *([last_record] if last_record is not None else [])) if record.job_id
    ]
    job_ids = [record.job_id or "" for record in records]
    if not job_ids:
        return interrupt if isinstance(interrupt, SubmitInterrupted) else SubmitInterrupted(NO_JOB)
    names = ", ".join(job_ids)
    try:
        control.change_jobs(context, "cancel", [record.token for record in records])
    except (DtslurmError, KeyboardInterrupt) as error:
        reason = error.message if isinstance(error, DtslurmError) else "Ctrl-C was pressed again"
        return SubmitInterrupted(
            f"interrupted: {names} were queued and could not be cancelled: {reason}; "
            f"dtslurm cancel {' '.join(job_ids)} cancels them"
        )
    return SubmitInterrupted(f"interrupted: {names} were queued and are cancelled again")


def _dependency_expression(step: JobToSubmit, jobs: Mapping[str, Sequence[str]]) -> str:
    """Return sbatch's dependency expression for a job, empty if it depends on no stage."""
    return ",".join(f"{kind}:{':'.join(jobs[name])}" for kind, name in step.needs)


def _cancel_queued(context: Context, queued: Sequence[JobRecord]) -> str:
    """Cancel the queued jobs; return a description of their state, empty if no job was queued."""
    job_ids = [record.job_id for record in queued if record.job_id]
    if not job_ids:
        return ""
    try:
        control.change_jobs(context, "cancel", [record.token for record in queued if record.job_id])
    except DtslurmError as error:
        return f"{', '.join(job_ids)} were queued before, and could not be cancelled: {error.message}"
    return f"{', '.join(job_ids)} were queued before and are cancelled again, so no stage runs"
