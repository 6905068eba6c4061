"""``dtslurm diagnose``."""

from __future__ import annotations

import shutil
import textwrap
import time

import click

from dtslurm.cli import output
from dtslurm.cli.options import cluster_option, json_option, task_of
from dtslurm.logs.clean import safe
from dtslurm.model.diagnosis import Verdict
from dtslurm.services.context import Context
from dtslurm.services.diagnose import Diagnosis
from dtslurm.services.diagnose import diagnose as find_cause
from dtslurm.services.status import find

_BLAMES = {
    "code": "the code, not the nodes",
    "node": "the node, not the code",
    "site": "the site",
    "user": "what was asked for or set up",
    "unknown": "not known",
}


@click.command()
@click.option(
    "--attempt", type=click.IntRange(min=0), metavar="K", help="Only this attempt. [default: the latest]"
)
@cluster_option
@json_option
@click.argument("job")
def diagnose(attempt: int | None, cluster: str | None, as_json: bool, job: str) -> None:
    """Say which rank of JOB failed first, on which node, why, and what to do."""
    context = Context()
    record = find(context, job, cluster)
    found = find_cause(context, record, attempt=attempt, task=task_of(job, record.job_id))
    if as_json:
        output.document(
            job=found.status.job_id or record.job_id,
            name=record.name,
            cluster=record.cluster,
            attempt=found.attempt,
            verdict=found.verdict,
        )
        return
    for line in lines(found, width=_width()):
        output.say(line)


def _width() -> int:
    return max(40, min(100, shutil.get_terminal_size((80, 24)).columns))


def lines(found: Diagnosis, width: int = 80) -> list[str]:
    """Return the verdict for people."""
    verdict = found.verdict
    job = found.status.job_id or found.record.job_id or "?"
    attempt = f", attempt {found.attempt}" if len(found.attempts) > 1 else ""
    shown = [f"job {job} ({found.record.name}{attempt}): {found.status.word}", ""]
    if verdict.cause == "none":
        return [*shown[:1], *_field("verdict", verdict.summary, width), *_earlier(found, width)]
    shown += _field("failed first", _who(verdict), width)
    guess = "" if verdict.confidence >= 0.7 else "a guess: "
    shown += _field("cause", f"{guess}{verdict.cause} ({verdict.confidence:.0%})", width)
    shown += _field("", verdict.summary, width)
    shown += _evidence(verdict, width)
    for number, item in enumerate(verdict.followed_by):
        ranks = f"{item.count} rank{'s' if item.count > 1 else ''} ({item.ranks}) " if item.count else ""
        shown += _field("then" if number == 0 else "", ranks + item.what, width)
    shown += _field("to blame", _BLAMES.get(verdict.blame, verdict.blame), width)
    if verdict.advice:
        shown += _field("what to do", verdict.advice, width)
    shown += [f"{'logs':<14}{found.logs}"]
    return shown + _earlier(found, width)


def _earlier(found: Diagnosis, width: int) -> list[str]:
    before = [number for number in found.attempts if number < found.attempt]
    if not before:
        return []
    text = f"there were earlier attempts; --attempt {before[-1]} tells of the last one"
    return _field("before", text, width)


def _who(verdict: Verdict) -> str:
    parts = []
    if verdict.rank is not None:
        local = f" (local rank {verdict.local_rank})" if verdict.local_rank is not None else ""
        parts.append(f"rank {verdict.rank}{local}")
    if verdict.node:
        parts.append(f"on {verdict.node}")
    if verdict.time is not None:
        parts.append(f"at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(verdict.time))}")
    if verdict.signal is not None:
        parts.append(f"by signal {verdict.signal}")
    elif verdict.exit_code is not None:
        parts.append(f"with exit code {verdict.exit_code}")
    return " ".join(parts) or "no single rank"


def _evidence(verdict: Verdict, width: int) -> list[str]:
    shown = []
    for line in verdict.evidence[:6]:
        place = f"{line.file}:{line.line}" if line.line is not None else line.file
        if place:
            shown.append(f"  {place}")
        text = safe(line.text).strip()
        shown += [f"  | {part}" for part in textwrap.wrap(text, width - 4, break_long_words=True)[:4]]
    return ["", *shown, ""] if shown else []


def _field(label: str, text: str, width: int) -> list[str]:
    parts = textwrap.wrap(safe(text), width - 14, break_on_hyphens=False) or [""]
    return [f"{label if number == 0 else '':<14}{part}" for number, part in enumerate(parts)]
