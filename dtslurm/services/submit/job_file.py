"""A job file as requests: one, or one for each of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtslurm.config.job_file_detection import is_job_file
from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.values import dataclass
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import Context
from dtslurm.suggestions import suggest_name

if TYPE_CHECKING:
    from dtslurm.config.jobs import LoadedJob, LoadedStage
    from dtslurm.model.jobs.sweep import Sweep
    from dtslurm.services.submit.prepare import Prepared
    from dtslurm.services.submit.sweep import Sweeping

__all__ = ["JobToSubmit", "Planned", "is_job_file", "steps_of"]

_NOT_OPTIONS = {"variables", "script", "stages", "sweep", "needs"}


@dataclass(frozen=True, kw_only=True)
class JobToSubmit:
    """One job to submit: a script, a job file's, or one of its stages.

    Attributes:
        stage: the stage's name, empty for a job on its own.
        needs: (kind of dependency, stage) for each stage that it waits for.
        sweep: what it goes over, if it is a sweep.
    """

    request: JobRequest
    stage: str = ""
    needs: tuple[tuple[str, str], ...] = ()
    sweep: Sweep | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a single job on its own."""
        return not self.stage and self.sweep is None


@dataclass(frozen=True)
class Planned:
    """A step, checked and rendered.

    Attributes:
        prepared: its job; of a sweep the job of its first trials.
        sweeping: what more there is of a sweep.
    """

    step: JobToSubmit
    prepared: Prepared
    sweeping: Sweeping | None = None


def steps_of(
    context: Context, said: JobRequest, assignments: Sequence[str] = (), stage: str | None = None
) -> list[JobToSubmit]:
    """Return what a command line asks for: its script, or its job file's jobs, each after those it needs.

    Args:
        said: the options and arguments of the command line; they hold over the file's.
        assignments: ``NAME=VALUE`` of the file's variables, from ``--set``.
        stage: only this one of its stages.

    Raises:
        ProfileInvalid: the file is wrong; every problem found is in it.
        RequestInvalid: an assignment is, or there is no such stage.
    """
    path = context.cwd / said.script
    if not is_job_file(path):
        told = [("--set", bool(assignments)), ("--only", stage is not None)]
        if wrong := [
            f"{flag} goes with a job file, which {said.script} is not" for flag, given in told if given
        ]:
            raise RequestInvalid(wrong)
        return [JobToSubmit(request=said)]
    from dtslurm.config import jobs
    from dtslurm.services.request.trust import require_trust

    home = context.env.get("HOME")
    given = jobs.assignments(tuple(assignments))
    found = jobs.load(path, given, cwd=context.cwd, home=Path(home) if home else None)
    require_trust(context, found)
    steps = [_step(found, one, said) for one in found.stages]
    if stage is not None:
        names = [step.stage for step in steps if step.stage]
        steps = [replace(step, stage="", needs=()) for step in steps if step.stage and step.stage == stage]
        if not steps:
            meant = suggest_name(stage, names)
            raise RequestInvalid(
                [f"--only {stage}: {path.name} has {', '.join(names) or 'no stages'}{meant}"]
            )
    several = len(steps) > 1 or any(step.sweep for step in steps)
    if several and any(step.request.once is not None for step in steps):
        raise RequestInvalid(["--once makes one job of many requests; here are several jobs"])
    if len(steps) > 1 and said.args:
        raise RequestInvalid(["arguments after -- belong to one script; --only NAME says to which"])
    return steps


def _step(found: LoadedJob, one: LoadedStage, said: JobRequest) -> JobToSubmit:
    places = {key.partition(".")[0]: place for key, place in sorted(one.origins.items(), reverse=True)}
    values = {key: value for key, value in found.job.written().items() if key not in _NOT_OPTIONS}
    if one.name:
        tops = {key: value for key, value in values.items() if key in {"cluster", "transport", "once"}}
        values = {"job_name": one.name, **tops, **one.work.written()}
        values = {key: value for key, value in values.items() if key not in _NOT_OPTIONS}
        places = {**{key: found.origins.get(key, "") for key in tops}, **places}
    sweep = one.work.sweep
    if sweep is not None:  # what the command line adds is nobody's to fill in
        said = replace(said, args=tuple(word.replace("${", "$${") for word in said.args))
    request = replace(said, script=one.work.script or "", origins={"script": places["script"]}).over(
        values, places
    )
    if sweep is not None:
        variables = set(sweep.variables())
        filled = [name for name, text in one.work.env.items() if _mentions(text or "", variables)]
        request = replace(request, trials=Trials(env=tuple(filled), plain=sweep.optuna is None))
    return JobToSubmit(request=request, stage=one.name, needs=one.needs, sweep=sweep)


def _mentions(text: str, names: set[str]) -> bool:
    from dtslurm.worker.trial_text import MENTION

    return any(found[2] in names or found[1] for found in MENTION.finditer(text))
