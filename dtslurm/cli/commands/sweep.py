"""``dtslurm sweep status | results | resume | stop``."""

from __future__ import annotations

import click

from dtslurm.cli.options import cluster_option, json_option
from dtslurm.cli.printing import output
from dtslurm.cli.printing.progress import transfer
from dtslurm.errors import RequestInvalid, SlurmUnavailable
from dtslurm.model.runs.record import JobRecord
from dtslurm.presentation.quantities import format_precise_number
from dtslurm.services.submit.trials import SweepView, TrialView, load_sweep
from dtslurm.services.submit.trials import resume as resume_trials
from dtslurm.services.submit.trials import stop as stop_trials
from dtslurm.services.wiring.context import Context

_MAX_SHOWN = 20  # maximum number of trials in the output
_COLOURS = {"running": "green", "done": "dim", "stopped": "dim", "failed": "bold red", "never ran": "red"}


@click.group()
def sweep() -> None:
    """Manage the sweeps that `dtslurm submit JOB.yaml` queues. JOB is any job of a sweep."""


@sweep.command()
@cluster_option
@json_option
@click.argument("job")
def status(cluster: str | None, as_json: bool, job: str) -> None:
    """Count the trials in each state. Running and failed trials are listed."""
    context = Context()
    view = load_sweep(context, job, cluster)
    if as_json:
        output.document(**_json_values(view), counts=view.counts())
        return
    jobs = ", ".join(record.job_id or "?" for record in view.runs)
    counts = ", ".join(f"{count} {state}" for state, count in view.counts().items())
    output.say(f"sweep {view.head.name} (job {jobs}) on {view.head.cluster}: {counts}")
    notable_trials = [trial for trial in view.trials if trial.state in {"running", "failed", "never ran"}]
    if notable_trials:
        _print_table(view, notable_trials[:_MAX_SHOWN])
    if len(notable_trials) > _MAX_SHOWN:
        output.note(
            f"and {len(notable_trials) - _MAX_SHOWN} more; dtslurm sweep results {job} has all of them"
        )
    scored_trials = [trial for trial in view.ranked() if trial.best is not None]
    if scored_trials:
        output.say(f"best so far: {scored_trials[0].name}, {view.metric} {scored_trials[0].best:g}")
    states = view.counts().keys()
    # Resume requires the sweep to be over.
    if states & {"failed", "never ran"} and not states & {"running", "waiting"}:
        output.note(f"dtslurm sweep resume {job} runs the failed and the missing trials again")
    _report_trouble(view)


@sweep.command()
@click.option("-n", "--limit", metavar="N", type=click.IntRange(min=1), help="Show only the best N trials.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV on stdout.")
@cluster_option
@json_option
@click.argument("job")
def results(limit: int | None, as_csv: bool, cluster: str | None, as_json: bool, job: str) -> None:
    """Show all trials, the best first, with values and metric."""
    if as_csv and as_json:
        raise RequestInvalid(["give only one of --csv and --json"])
    context = Context()
    view = load_sweep(context, job, cluster)
    trials = view.ranked()[:limit]
    if as_json:
        output.document(**_json_values(view, trials))
    elif as_csv:
        output.comma_separated(_make_csv_rows(view, trials))
    else:
        _print_table(view, trials)
    _report_trouble(view)


@sweep.command()
@cluster_option
@json_option
@click.argument("job")
def resume(cluster: str | None, as_json: bool, job: str) -> None:
    """Rerun the trials that failed or never ran. Each resumes from its own checkpoints."""
    from dtslurm.cli.interruption import report_interruption

    context = Context()
    records: list[JobRecord] = []
    with report_interruption(context, records):
        with transfer() as show:
            resume_trials(
                context,
                job,
                cluster,
                lambda copied_bytes, total_bytes: show("sending the code", copied_bytes, total_bytes),
                records,
            )
        if as_json:
            output.document(runs=records)
        elif not records:
            output.note("every trial is done: no trial to run again")
        for record in records if not as_json else ():
            output.note(f"submitted job {record.job_id} ({record.name}) to {output.queue_of(record)}")
            output.note(f"  run directory  {record.run_dir}")
            output.note(f"  works in       {output.work_dir_of(record)}")


@sweep.command()
@cluster_option
@json_option
@click.argument("job")
def stop(cluster: str | None, as_json: bool, job: str) -> None:
    """Cancel all pending and running trials. Finished trials stay; resume runs the rest."""
    cancelled_jobs = stop_trials(Context(), job, cluster)
    if as_json:
        output.document(cancelled=cancelled_jobs)
    else:
        output.note(
            f"cancelled: {', '.join(cancelled_jobs)}"
            if cancelled_jobs
            else "the sweep has no pending or running jobs"
        )


def _json_values(view: SweepView, trials: list[TrialView] | None = None) -> dict[str, object]:
    return {
        "sweep": view.head.sweep,
        "jobs": [record.job_id for record in view.runs],
        "metric": view.metric,
        "mode": view.mode,
        "trials": view.trials if trials is None else trials,
        "trouble": view.trouble,
    }


def _list_parameters(view: SweepView) -> list[str]:
    return list(dict.fromkeys(name for trial in view.trials for name in trial.values))


def _print_table(view: SweepView, trials: list[TrialView]) -> None:
    names = _list_parameters(view)
    rows = [
        [
            str(trial.number),
            *(trial.values.get(name, "-") for name in names),
            trial.state,
            *(format_precise_number(value, "-") for value in (trial.best, trial.last, trial.step)),
            trial.job,
        ]
        for trial in trials
    ]
    output.table(("TRIAL", *names, "STATE", f"BEST {view.metric}", "LAST", "STEP", "JOB"), rows, _COLOURS)


def _make_csv_rows(view: SweepView, trials: list[TrialView]) -> list[list[object]]:
    names = _list_parameters(view)
    fixed_columns = ("state", "best", "last", "step", "exit_code", "job", "folder")
    rows: list[list[object]] = [["trial", "name", *names, *fixed_columns]]
    for trial in trials:
        values = [trial.values.get(name, "") for name in names]
        rows.append([trial.number, trial.name, *values, *(getattr(trial, key) for key in fixed_columns)])
    return rows


def _report_trouble(view: SweepView) -> None:
    if view.written:
        written_keys = ", ".join(view.written[:_MAX_SHOWN])
        output.note(
            f"no trial has written {view.metric!r}, the metric of the comparison; metrics found: "
            f"{written_keys}"
        )
    if view.trouble:
        raise SlurmUnavailable(f"a scheduler could not be queried: {view.trouble}")
