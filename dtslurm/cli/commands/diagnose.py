"""``dtslurm diagnose``."""

from __future__ import annotations

import time

import click

from dtslurm.cli.options import cluster_option, job_argument, json_option
from dtslurm.cli.printing import output
from dtslurm.cli.printing.output import styled
from dtslurm.cli.printing.styles import EXCEPTION, FAILED, MAIN, SECONDARY, find_exception, style_of_state
from dtslurm.cli.printing.verdict import format_field, width, wrap_words
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.diagnosis import Verdict
from dtslurm.model.runs.state import JobState
from dtslurm.presentation.states import describe_state
from dtslurm.services.observe.diagnose import Diagnosis
from dtslurm.services.observe.diagnose import diagnose as find_cause
from dtslurm.services.runs.changed_script import describe_changed_script
from dtslurm.services.runs.runs import find
from dtslurm.services.runs.tasks import task_of
from dtslurm.services.wiring.context import Context

_NO_RANK_TEXT = "no single rank"
_BLAMES = {
    "code": "the code, not the nodes",
    "node": "the node, not the code",
    "site": "the cluster",
    "user": "the request or the set-up",
    "unknown": "unknown",
}


@click.command()
@click.option(
    "--attempt",
    type=click.IntRange(min=0),
    metavar="K",
    help="Diagnose only this attempt. [default: the latest]",
)
@click.option(
    "--live",
    is_flag=True,
    help="Check a running job: its progress, the rank that blocks the others, and where each rank is.",
)
@cluster_option
@json_option
@job_argument
def diagnose(attempt: int | None, live: bool, cluster: str | None, as_json: bool, job: str | None) -> None:
    """Find the rank of JOB (or of the newest run) that failed first, its node, the cause, and a fix.

    With --live, one short step on the job's nodes examines each rank: its stack (with py-spy if installed),
    what it waits for according to the kernel, its last output. Nothing in the job is changed.
    """
    if live and attempt is not None:
        raise click.UsageError(
            "--live examines the running attempt, and --attempt selects an earlier one; give only one of them"
        )
    context = Context()
    record = find(context, job, cluster)
    task = task_of(job, record)
    if live:
        _diagnose_live(context, record, task, as_json)
        return
    diagnosis = find_cause(context, record, attempt=attempt, task=task)
    if as_json:
        output.document(
            job=diagnosis.status.job_id or record.job_id,
            name=record.name,
            cluster=record.cluster,
            attempt=diagnosis.attempt,
            script_changed=diagnosis.script_changed,
            verdict=diagnosis.verdict,
        )
        return
    for line in format_diagnosis(diagnosis, width=width()):
        output.say(line)


def _diagnose_live(context: Context, record: JobRecord, task: str | None, as_json: bool) -> None:
    from dtslurm.cli.printing import live
    from dtslurm.services.observe.live import diagnose_live

    live_diagnosis = diagnose_live(context, record, task=task)
    if as_json:
        live.print_json(live_diagnosis)
        return
    for line in live.format_live_diagnosis(live_diagnosis, width=width()):
        output.say(line)


def format_diagnosis(diagnosis: Diagnosis, width: int = 80) -> list[str]:
    """Return the lines of the verdict for the user."""
    verdict = diagnosis.verdict
    job = diagnosis.status.job_id or diagnosis.record.job_id or "?"
    attempt = f", attempt {diagnosis.attempt}" if len(diagnosis.attempts) > 1 else ""
    state_text = describe_state(diagnosis.status, diagnosis.activity)
    style = style_of_state(state_text)
    output_lines: list[str] = [
        styled((f"job {job} ({diagnosis.record.name}{attempt}): ", ""), (state_text, style)),
        "",
    ]
    if verdict.cause == "stalled":
        advice = format_field("what to do", verdict.advice, width)
        return [
            *output_lines[:1],
            *format_field("verdict", verdict.summary, width, MAIN),
            *advice,
            *_format_notes(diagnosis, width),
        ]
    if verdict.cause == "none":
        hint_lines = []
        if diagnosis.status.state is JobState.RUNNING:
            hint_lines = format_field(
                "more", f"dtslurm diagnose --live {job} shows whether the job makes progress", width
            )
        return [
            *output_lines[:1],
            *format_field("verdict", verdict.summary, width, MAIN),
            *hint_lines,
            *_format_notes(diagnosis, width),
        ]
    has_location = verdict.rank is not None or bool(verdict.node)
    if verdict.cause != "not-distributed":  # no rank failed in such a job
        output_lines += format_field(
            "failed first" if has_location or _describe_first_failure(verdict) == _NO_RANK_TEXT else "ended",
            _describe_first_failure(verdict),
            width,
        )
    guess_prefix = "" if verdict.confidence >= 0.7 else "probably: "
    cause_style = style if diagnosis.status.terminal and not diagnosis.status.ok else FAILED
    output_lines += format_field(
        "cause", f"{guess_prefix}{verdict.cause} ({verdict.confidence:.0%})", width, cause_style
    )
    output_lines += format_field("", verdict.summary, width, MAIN)
    output_lines += _format_evidence(verdict, width)
    for number, item in enumerate(verdict.followed_by):
        ranks = f"{item.count} rank{'s' if item.count > 1 else ''} ({item.ranks}) " if item.count else ""
        output_lines += format_field("then" if number == 0 else "", ranks + item.what, width, SECONDARY)
    output_lines += format_field("responsible", _BLAMES.get(verdict.blame, verdict.blame), width)
    if verdict.advice:
        output_lines += format_field("what to do", verdict.advice, width)
    output_lines += [styled((f"{'logs':<14}{diagnosis.logs}", SECONDARY))]
    return output_lines + _format_notes(diagnosis, width)


def _format_notes(diagnosis: Diagnosis, width: int) -> list[str]:
    """Return further notes: that the script was edited, and that there were earlier attempts."""
    script_note = describe_changed_script(
        diagnosis.record, [diagnosis.attempt] if diagnosis.script_changed else []
    )
    return [
        *(format_field("note", script_note, width) if script_note else ()),
        *_note_earlier_attempts(diagnosis, width),
    ]


def _note_earlier_attempts(diagnosis: Diagnosis, width: int) -> list[str]:
    earlier_attempts = [number for number in diagnosis.attempts if number < diagnosis.attempt]
    if not earlier_attempts:
        return []
    text = f"the run had earlier attempts; --attempt {earlier_attempts[-1]} shows the last of them"
    return format_field("before", text, width, SECONDARY)


def _describe_first_failure(verdict: Verdict) -> str:
    parts = []
    if verdict.rank is not None:
        local_rank_text = f" (local rank {verdict.local_rank})" if verdict.local_rank is not None else ""
        parts.append(f"rank {verdict.rank}{local_rank_text}")
    if verdict.node:
        parts.append(f"on {verdict.node}")
    if verdict.time is not None:
        local_time = time.localtime(verdict.time)
        today = local_time[:3] == time.localtime()[:3]
        parts.append(time.strftime("at %H:%M:%S" if today else "at %Y-%m-%d %H:%M:%S", local_time))
    if verdict.signal is not None:
        parts.append(f"by signal {verdict.signal}")
    elif verdict.exit_code is not None:
        parts.append(f"with exit code {verdict.exit_code}")
    return " ".join(parts) or _NO_RANK_TEXT


def _format_evidence(verdict: Verdict, width: int) -> list[str]:
    output_lines: list[str] = []
    last_location = ""
    lines = [(line, line.text.strip()) for line in verdict.evidence[:6]]
    exceptions = [line for line, text in lines if find_exception(text) is not None]
    for line, text in lines:
        location = f"{line.file}:{line.line}" if line.line is not None else line.file
        if location and location != last_location:
            output_lines.append(styled((f"  {location}", SECONDARY)))
        last_location = location
        style = EXCEPTION if exceptions and line is exceptions[-1] else ""  # Python prints the exception last
        wrapped_lines = wrap_words(text, width - 4)[:4]
        output_lines += [
            styled(("  | ", SECONDARY), (wrapped_line[: 4 * width], style)) for wrapped_line in wrapped_lines
        ]
    return ["", *output_lines, ""] if output_lines else []
