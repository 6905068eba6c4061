"""Several jobs that follow each other: all are checked before one is queued, and all are queued or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dtslurm.errors import DtslurmError, RequestInvalid, SubmitInterrupted
from dtslurm.model.jobs import stages
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.runs import control
from dtslurm.services.submit.dependencies import behind
from dtslurm.services.submit.job_file import JobToSubmit, Planned
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.submit.submit import NO_JOB, Progress, submit
from dtslurm.services.submit.sweep import plan_sweep, save_members, submit_sweep
from dtslurm.services.wiring.context import Context


def plan(context: Context, steps: Sequence[JobToSubmit], *, confirm: Callable[[str], bool]) -> list[Planned]:
    """Check and render all jobs; nothing is queued.

    Args:
        confirm: asked before a sweep of very many trials.

    Raises:
        RequestInvalid: one cannot work; the problems of all are in it.
        ProfileNotFound, ProfileInvalid, RenderError: as `prepare` does.
    """
    planned: list[Planned] = []
    problems: list[str] = []
    needs = {step.stage: [name for _, name in step.needs] for step in steps}
    folders: dict[str, str] = {}
    for step in steps:
        known = sorted(stages.before(step.stage, needs)) if not problems else []
        folder_of = tuple(f"{stages.folder_variable(name)}={folders[name]}" for name in known)
        request = replace(step.request, env=(*folder_of, *step.request.env))
        try:
            found = _planned(context, replace(step, request=request), confirm)
        except RequestInvalid as error:
            if type(error) is not RequestInvalid or not step.stage:
                raise
            problems += [f"stage {step.stage}: {problem}" for problem in error.problems]
            continue
        folders[step.stage] = found.prepared.submission.run_dir
        planned.append(found)
    if problems:
        raise RequestInvalid(problems)
    if len(planned) == 1 and not planned[0].step.stage:
        return planned
    tokens = {one.step.stage: one.prepared.submission.token for one in planned}
    return [
        replace(one, prepared=replace(one.prepared, stage=one.step.stage, stages=tokens)) for one in planned
    ]


def _planned(context: Context, step: JobToSubmit, confirm: Callable[[str], bool]) -> Planned:
    if step.sweep is None:
        return Planned(step, prepare(context, step.request, standalone=False))
    sweeping = plan_sweep(context, step.request, step.sweep, confirm=confirm)
    return Planned(step, sweeping.first, sweeping)


def queue(
    context: Context, planned: Sequence[Planned], progress: Progress = lambda *_: None
) -> list[JobRecord]:
    """Queue jobs one after the other, each behind those that it needs; return their records.

    Raises:
        SubmitRejected, …: one was refused; those queued before it are cancelled again.
        SubmitInterrupted: the person pressed Ctrl-C; the jobs that were queued are cancelled again.
    """
    queued: list[JobRecord] = []
    by_stage: dict[str, list[str]] = {}
    try:
        for one in planned:
            after = _after(one.step, by_stage)
            if one.sweeping is not None:  # the first array knows by now of what it is a stage
                sweeping = replace(one.sweeping, first=one.prepared)
                records = submit_sweep(context, sweeping, after, queued, progress)
                save_members(context, records[0], records)
            else:
                records = [submit(context, behind(one.prepared, after), progress)]
                queued += records
            by_stage[one.step.stage] = [record.job_id or "" for record in records]
    except DtslurmError as error:
        told = _take_back(context, queued)
        error.evidence = (*error.evidence, *([told] if told else []))
        raise
    except KeyboardInterrupt as interrupt:
        raise _cancel_interrupted(context, queued, interrupt) from None
    return queued


def _cancel_interrupted(
    context: Context, queued: Sequence[JobRecord], interrupt: KeyboardInterrupt
) -> SubmitInterrupted:
    """Cancel the jobs of an interrupted submission; return the interruption with what became of them."""
    last = interrupt.record if isinstance(interrupt, SubmitInterrupted) else None
    records = [record for record in (*queued, *([last] if last is not None else [])) if record.job_id]
    jobs = [record.job_id or "" for record in records]
    if not jobs:
        return interrupt if isinstance(interrupt, SubmitInterrupted) else SubmitInterrupted(NO_JOB)
    names = ", ".join(jobs)
    try:
        control.act(context, "cancel", [record.token for record in records])
    except (DtslurmError, KeyboardInterrupt) as error:
        reason = error.message if isinstance(error, DtslurmError) else "Ctrl-C was pressed again"
        return SubmitInterrupted(
            f"interrupted: {names} were queued and could not be cancelled: {reason}; "
            f"dtslurm cancel {' '.join(jobs)} cancels them"
        )
    return SubmitInterrupted(f"interrupted: {names} were queued and are cancelled again")


def _after(step: JobToSubmit, jobs: Mapping[str, Sequence[str]]) -> str:
    """Return sbatch's expression for what a step needs, empty for nothing."""
    return ",".join(f"{kind}:{':'.join(jobs[name])}" for kind, name in step.needs)


def _take_back(context: Context, queued: Sequence[JobRecord]) -> str:
    """Cancel what is queued already; return what became of it in words, empty if there was nothing."""
    ids = [record.job_id for record in queued if record.job_id]
    if not ids:
        return ""
    try:
        control.act(context, "cancel", [record.token for record in queued if record.job_id])
    except DtslurmError as error:
        return f"{', '.join(ids)} were queued before, and could not be cancelled: {error.message}"
    return f"{', '.join(ids)} were queued before it and are cancelled again: nothing of this runs"
