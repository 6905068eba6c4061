"""``dtslurm plan --probe``: confirm, queue, wait, and plan again with the measurements."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from dtslurm.cli.interruption import report_interruption
from dtslurm.cli.printing import output
from dtslurm.cli.printing.progress import transfer
from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs.job import JobRecord
from dtslurm.planner.explain import TRIAL_STEPS
from dtslurm.presentation.quantities import pluralize
from dtslurm.services.planning.plan import Plan, PlanRequest, make
from dtslurm.services.runs.runs import selector_arguments
from dtslurm.services.submit.probe import (
    PlannedProbe,
    ProbedLayout,
    find_probe,
    finish_probe,
    plan_probe,
    probed_request,
    submit_probe,
)
from dtslurm.services.wiring.context import Context


def run_probe(
    plan: Plan, script: str, args: Sequence[str], *, yes: bool
) -> tuple[Plan, Sequence[ProbedLayout]]:
    """Run the layouts that a plan shows; return the plan with their measurements, and the results."""
    context = Context()
    probe = plan_probe(context, plan, script, args)
    for line in probe.sweeping.first.submission.notices:
        output.note(f"note: {line}")
    _show_costs(plan, probe)
    if not yes and not (sys.stdin.isatty() and click.confirm("Queue these jobs?", err=True)):
        raise RequestInvalid(
            ["the probe was not confirmed, and no job was queued"],
            hint="--yes queues the jobs without a question",
        )
    records: list[JobRecord] = []
    with report_interruption(context, records), transfer() as show:
        record = submit_probe(
            context,
            probe,
            records,
            lambda copied_bytes, total_bytes: show("sending the code", copied_bytes, total_bytes),
        )
    output.note(f"submitted job {record.job_id} ({record.name}) to {output.queue_of(record)}")
    output.note(f"  run directory  {record.run_dir}")
    output.note(f"  follow it      dtslurm logs -f {selector_arguments(context, record)}")
    return _finish_probe(context, plan, record)


def wait_for_probe(request: PlanRequest, job: str) -> tuple[Plan, Sequence[ProbedLayout]] | None:
    """Wait for a probe, and return what `run_probe` does; None if the run is no probe."""
    context = Context()
    probe_run = find_probe(context, job, request.cluster)
    if probe_run is None:
        return None
    record, probed = probe_run
    return _finish_probe(context, make(probed_request(request, probed, job), context.cwd), record)


def _show_costs(plan: Plan, probe: PlannedProbe) -> None:
    gpus = plan.task.machine.gpus
    output.note(
        f"{TRIAL_STEPS} steps of {pluralize(len(probe.layouts), 'layout')} on {pluralize(gpus, 'GPU')}: "
        f"{_format_gpu_hours(probe.gpu_hours)} as predicted, besides the start of each job; at most "
        f"{_format_gpu_hours(probe.most_gpu_hours)} ({probe.minutes} min each)"
    )
    for item in probe.layouts:
        output.note(f"  {item.layout}")


def _format_gpu_hours(gpu_hours: float) -> str:
    return f"{gpu_hours:,.1f} GPU-hours" if gpu_hours >= 0.1 else "less than 0.1 GPU-hours"


def _finish_probe(context: Context, plan: Plan, record: JobRecord) -> tuple[Plan, Sequence[ProbedLayout]]:
    with _report_continuing_jobs(context, record):
        results, path = finish_probe(context, plan, record)
    for item in results:
        if item.problem:
            output.note(f"{item.layout} (job {item.job}): not measured: {item.problem}")
    output.note(f"saved in {path}; the next plan on this cluster uses it")
    return make(plan.request, context.cwd), results


@contextmanager
def _report_continuing_jobs(context: Context, record: JobRecord) -> Iterator[None]:
    """Print on Ctrl-C that the jobs continue, and how to read their measurements."""
    try:
        yield
    except KeyboardInterrupt:
        job = selector_arguments(context, record)
        output.note(f"the jobs continue; dtslurm plan --calibrate {job} waits for them and plans again")
        raise
