"""``dtslurm logs``."""

from __future__ import annotations

import re
import sys

import click

from dtslurm.cli import output
from dtslurm.cli.follow import follow_to_end, prefix
from dtslurm.cli.options import cluster_option, json_option, task_of
from dtslurm.errors import RequestInvalid
from dtslurm.services.context import Context
from dtslurm.services.logs import LogFilter, LogReader, follow
from dtslurm.services.status import find, views


@click.command()
@click.option("-f", "--follow", "following", is_flag=True, help="Go on until the run is over.")
@click.option("--rank", "ranks", metavar="SET", help="Only these ranks, such as 0,3-7.")
@click.option("--node", metavar="HOST", help="Only ranks that ran on this node.")
@click.option("--grep", metavar="REGEX", help="Only lines that match.")
@click.option(
    "--attempt", type=click.IntRange(min=0), metavar="K", help="Only this attempt. [default: the latest]"
)
@click.option(
    "-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each rank."
)
@cluster_option
@json_option
@click.argument("job")
def logs(
    following: bool,
    ranks: str | None,
    node: str | None,
    grep: str | None,
    attempt: int | None,
    tail: int | None,
    cluster: str | None,
    as_json: bool,
    job: str,
) -> None:
    """Show the output of JOB: the batch script, the launcher on each node, every rank."""
    context = Context()
    record = find(context, job, cluster)
    wanted = LogFilter(
        ranks=_ranks(ranks),
        node=node,
        grep=_pattern(grep),
        attempt=attempt,
        tail=tail,
        task=task_of(job, record.job_id),
    )
    reader = LogReader(record, wanted)
    if following and not as_json:
        follow_to_end(context, reader)
        return
    lines = reader.skip_to_tail() if tail is not None else reader.read(to_the_end=True)
    if as_json:
        output.document(job_id=record.job_id, lines=list(follow(context, reader) if following else lines))
        return
    shown = False
    for line in lines:
        shown = True
        sys.stdout.write(f"{prefix(line)}{output.safe(line.text, colours=output.is_terminal())}\n")
    if not shown and grep is None:
        view = views(context, [record])[0]
        output.note(f"nothing written yet; the job is {view.statuses[0].word}")


def _ranks(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not found or (found[2] and int(found[2]) < int(found[1])):
            raise RequestInvalid([f"--rank {text!r}: write ranks and ranges like 0,3-7"])
        chosen.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return frozenset(chosen)


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise RequestInvalid([f"--grep {text!r} is not a regular expression: {error}"]) from error
