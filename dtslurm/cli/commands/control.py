"""``dtslurm cancel``, ``requeue``, ``hold`` and ``release``."""

from __future__ import annotations

import click

from dtslurm.cli import completers
from dtslurm.cli.options import cluster_option, json_option
from dtslurm.cli.printing import output
from dtslurm.services.runs.control import DONE, change_jobs
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
