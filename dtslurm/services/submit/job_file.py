"""Convert a job file into job requests: one for the job, or one per stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtslurm.config.job_files.detection import is_job_file
from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.values import dataclass
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import Context
from dtslurm.suggestions import suggest_name

if TYPE_CHECKING:
    from dtslurm.config.job_files.jobs import LoadedJob, LoadedStage
    from dtslurm.model.jobs.sweep import Sweep
    from dtslurm.services.submit.prepare import Prepared
    from dtslurm.services.submit.sweep import PlannedSweep

__all__ = ["JobToSubmit", "Planned", "is_job_file", "load_jobs"]

_NON_OPTION_KEYS = {"variables", "script", "stages", "sweep", "needs", "roles"}


@dataclass(frozen=True, kw_only=True)
class JobToSubmit:
    """One job to submit: a script, the job of a job file, or one stage of a job file.

    Attributes:
        stage: the stage's name, empty for a job that is not a stage.
        needs: (dependency type, stage) for each stage that this job waits for.
        sweep: the parameter space, if the job is a sweep.
    """

    request: JobRequest
    stage: str = ""
    needs: tuple[tuple[str, str], ...] = ()
    sweep: Sweep | None = None

    @property
    def plain(self) -> bool:
        """Whether the job is neither a stage nor a sweep."""
        return not self.stage and self.sweep is None


@dataclass(frozen=True)
class Planned:
    """A job that was checked and rendered.

    Attributes:
        prepared: the prepared job; for a sweep, the job of its first trials.
        sweeping: the planned sweep, if the job is a sweep.
    """

    step: JobToSubmit
    prepared: Prepared
    sweeping: PlannedSweep | None = None


def load_jobs(
    context: Context,
    request: JobRequest,
    assignments: Sequence[str] = (),
    stage: str | None = None,
    per_trial: Collection[str] = (),
) -> list[JobToSubmit]:
    """Return the jobs that a command line submits: its script, or the jobs of its job file.

    Each stage comes after the stages that it depends on.

    Args:
        request: the options and arguments of the command line; they override those of the file.
        assignments: ``NAME=VALUE`` for the file's variables, from ``--set``.
        stage: return only this stage of the file.
        per_trial: variables that each trial of an array substitutes, as those of a sweep.

    Raises:
        ProfileInvalid: the file is invalid; the error lists every problem.
        RequestInvalid: an assignment is invalid, or the stage does not exist.
    """
    path = context.cwd / request.script
    if not is_job_file(path):
        job_file_options = [("--set", bool(assignments)), ("--only", stage is not None)]
        if problems := [
            f"{flag} needs a job file, and {request.script} is not a job file"
            for flag, is_set in job_file_options
            if is_set
        ]:
            raise RequestInvalid(problems)
        return [JobToSubmit(request=request)]
    from dtslurm.config.job_files import jobs
    from dtslurm.services.request.trust import require_trust

    home = context.env.get("HOME")
    variables = jobs.assignments(tuple(assignments))
    loaded = jobs.load(
        path, variables, cwd=context.cwd, home=Path(home) if home else None, per_trial=per_trial
    )
    require_trust(context, loaded)
    steps = [_build_job(loaded, loaded_stage, request) for loaded_stage in loaded.stages]
    if stage is not None:
        names = [step.stage for step in steps if step.stage]
        steps = [replace(step, stage="", needs=()) for step in steps if step.stage and step.stage == stage]
        if not steps:
            suggestion = suggest_name(stage, names)
            raise RequestInvalid(
                [f"--only {stage}: {path.name} has {', '.join(names) or 'no stages'}{suggestion}"]
            )
    several = len(steps) > 1 or any(step.sweep for step in steps)
    if several and any(step.request.once is not None for step in steps):
        raise RequestInvalid(["--once is for a single job, and this job file has several jobs"])
    if len(steps) > 1 and request.args:
        raise RequestInvalid(
            [
                (
                    "arguments after -- need a single stage, and the job file has several; select one with "
                    "--only NAME"
                )
            ]
        )
    return steps


def _build_job(job_file: LoadedJob, stage: LoadedStage, command_line: JobRequest) -> JobToSubmit:
    origins = {key.partition(".")[0]: origin for key, origin in sorted(stage.origins.items(), reverse=True)}
    values = {key: value for key, value in job_file.job.written().items() if key not in _NON_OPTION_KEYS}
    if stage.name:
        common = {key: value for key, value in values.items() if key in {"cluster", "transport", "once"}}
        values = {"job_name": stage.name, **common, **stage.work.written()}
        values = {key: value for key, value in values.items() if key not in _NON_OPTION_KEYS}
        origins = {**{key: job_file.origins.get(key, "") for key in common}, **origins}
    sweep = stage.work.sweep
    if sweep is not None:  # arguments of the command line are not filled in by trials
        args = tuple(word.replace("${", "$${") for word in command_line.args)
        command_line = replace(command_line, args=args)
    request = replace(
        command_line,
        script=stage.work.script or "",
        roles=stage.roles,
        origins={"script": origins["script"]},
    ).over(values, origins)
    if sweep is not None:
        variables = set(sweep.variables())
        trial_variables = [
            name for name, text in stage.work.env.items() if _mentions_variable(text or "", variables)
        ]
        request = replace(request, trials=Trials(env=tuple(trial_variables), plain=sweep.optuna is None))
    return JobToSubmit(request=request, stage=stage.name, needs=stage.needs, sweep=sweep)


def _mentions_variable(text: str, names: set[str]) -> bool:
    from dtslurm.worker.trial_text import MENTION

    return any(match[2] in names or match[1] for match in MENTION.finditer(text))
