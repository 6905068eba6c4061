"""``dtslurm cancel``, ``requeue``, ``hold`` and ``release``."""

from __future__ import annotations

import click

from dtslurm.cli import completers
from dtslurm.cli.options import cluster_option, json_option
from dtslurm.cli.printing import output
from dtslurm.services.runs.control import DONE, act
from dtslurm.services.wiring.context import Context


def _command(verb: str, text: str) -> click.Command:
    @click.command(verb, help=text)
    @cluster_option
    @json_option
    @click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=completers.jobs)
    def run(cluster: str | None, as_json: bool, jobs: tuple[str, ...]) -> None:
        acted = act(Context(), verb, jobs, cluster)
        if as_json:
            rest = {"ended": acted.ended, "waiting": acted.waiting}
            output.document(**{DONE[verb]: acted.done}, **{key: one for key, one in rest.items() if one})
            return
        for line in acted.lines(verb):
            output.note(line)

    return run


cancel = _command("cancel", "End runs. JOB is a job id, an array task (17_3), a run name or a run directory.")
requeue = _command("requeue", "Put running or ended runs back into the queue under the same id.")
hold = _command("hold", "Keep pending runs from starting.")
release = _command("release", "Let held runs start.")
