"""``dtslurm cancel``, ``requeue``, ``hold``, ``release`` and ``scale``."""

from __future__ import annotations

import click

from dtslurm.cli import completers
from dtslurm.cli.options import cluster_option, json_option
from dtslurm.cli.printing import output
from dtslurm.errors import RequestInvalid
from dtslurm.services.runs.control import DONE, change_jobs
from dtslurm.services.runs.roles import scale_roles
from dtslurm.services.runs.runs import find
from dtslurm.services.wiring.context import Context


def _make_command(verb: str, text: str) -> click.Command:
    @click.command(verb, help=text)
    @cluster_option
    @json_option
    @click.argument(
        "jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=completers.complete_jobs
    )
    def run(cluster: str | None, as_json: bool, jobs: tuple[str, ...]) -> None:
        outcome = change_jobs(Context(), verb, jobs, cluster)
        if as_json:
            optional_values = {"ended": outcome.ended, "waiting": outcome.waiting}
            output.document(
                **{DONE[verb]: outcome.done},
                **{key: jobs_of_kind for key, jobs_of_kind in optional_values.items() if jobs_of_kind},
            )
            return
        for line in outcome.lines(verb):
            output.note(line)

    return run


cancel = _make_command(
    "cancel", "Cancel runs. JOB is a job id, an array task (17_3), a run name or a run directory."
)
requeue = _make_command("requeue", "Requeue running or ended runs under the same job id.")
hold = _make_command("hold", "Hold pending runs.")
release = _make_command("release", "Release held runs.")


@click.command()
@cluster_option
@json_option
@click.argument("job", metavar="JOB", shell_complete=completers.complete_jobs)
@click.argument("roles", nargs=-1, required=True, metavar="ROLE=NUMBER...")
def scale(cluster: str | None, as_json: bool, job: str, roles: tuple[str, ...]) -> None:
    """Change the number of instances of roles in the running JOB, within its allocation."""
    context = Context()
    counts = dict(_parse_count(text) for text in roles)
    record = find(context, job, cluster)
    scale_roles(context, record, counts)
    if as_json:
        output.document(job_id=record.job_id, requested=counts)
        return
    requested = ", ".join(f"{name}={count}" for name, count in counts.items())
    output.note(f"requested: {requested}; dtslurm status {record.job_id} shows the instances")


def _parse_count(text: str) -> tuple[str, int]:
    name, equals, number = text.partition("=")
    if not equals or not name or not number.isdecimal():
        raise RequestInvalid([f"{text!r}: write ROLE=NUMBER, such as rollout=3"])
    return name, int(number)
