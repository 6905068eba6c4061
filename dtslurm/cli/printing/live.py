"""The output of ``dtslurm diagnose --live``."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.cli.printing import output
from dtslurm.cli.printing.output import styled
from dtslurm.cli.printing.styles import FAILED, MAIN, SECONDARY, style_of_state
from dtslurm.cli.printing.verdict import format_field
from dtslurm.diagnose.places import format_frame
from dtslurm.logs.clean import safe
from dtslurm.model.runs.live import RankLook, StackGroup
from dtslurm.presentation.quantities import duration
from dtslurm.services.observe.live import Live

_VERDICT_FIELDS = ("cause", "confidence", "summary", "rank", "local_rank", "node", "suspects", "advice")
_MAX_GROUPS = 6
_MAX_FRAMES = 8
_CAUSE_TEXTS = {
    "hang": "the job hangs",
    "slow": "one rank blocks the others",
    "none": "the job makes progress",
    "unknown": "unknown",
}
_STYLES = {"hang": FAILED, "slow": FAILED, "none": "green", "unknown": ""}
_METHODS = {"py-spy": "py-spy", "signal": "dumps of the ranks", "proc": "/proc only"}


def print_json(live_diagnosis: Live) -> None:
    """Print the verdict as JSON."""
    output.document(
        job=live_diagnosis.status.job_id or live_diagnosis.record.job_id,
        name=live_diagnosis.record.name,
        cluster=live_diagnosis.record.cluster,
        attempt=live_diagnosis.attempt,
        live=True,
        verdict={name: getattr(live_diagnosis.verdict, name) for name in _VERDICT_FIELDS},
        places=live_diagnosis.verdict.places,
        gpus=live_diagnosis.gpus,
        missing=live_diagnosis.missing,
        ranks=live_diagnosis.looks,
    )


def format_live_diagnosis(live_diagnosis: Live, width: int = 80) -> list[str]:
    """Return the lines of the verdict for the user."""
    verdict = live_diagnosis.verdict
    job = live_diagnosis.status.job_id or live_diagnosis.record.job_id or "?"
    state = live_diagnosis.status.word
    output_lines: list[str] = [
        styled(
            (f"job {job} ({live_diagnosis.record.name}): ", ""),
            (state, style_of_state(state)),
            (", live", ""),
        ),
        "",
    ]
    guess_prefix = "probably: " if verdict.confidence < 0.7 else ""
    output_lines += format_field(
        "verdict",
        f"{guess_prefix}{_CAUSE_TEXTS[verdict.cause]} ({verdict.confidence:.0%})",
        width,
        _STYLES[verdict.cause],
    )
    output_lines += format_field("", verdict.summary, width, MAIN)
    by_rank = {look.rank: look for look in live_diagnosis.looks}
    if verdict.rank is not None and verdict.rank in by_rank:
        output_lines += ["", *_describe_suspect(by_rank[verdict.rank], width), ""]
    output_lines += _describe_stack_groups(verdict.places, width)
    output_lines += format_field(
        "last output", _describe_last_output(live_diagnosis.looks, verdict.rank), width
    )
    if live_diagnosis.gpus is not None:
        gpus = live_diagnosis.gpus
        text = f"{gpus.idle} of {gpus.count} idle, mean use {gpus.util:.0f} % ({gpus.age_s:.0f} s ago)"
        if verdict.cause == "hang" and not gpus.idle:
            text += "; a GPU that waits in a collective counts as busy"
        output_lines += format_field("GPUs", text, width)
    methods = ", ".join(f"{count} by {_METHODS[method]}" for method, count in live_diagnosis.by.items())
    output_lines += format_field(
        "seen", f"{methods or 'no rank'}, of {len(live_diagnosis.looks)} ranks", width, SECONDARY
    )
    for number, reason in enumerate(live_diagnosis.missing):
        output_lines += format_field("not examined" if number == 0 else "", reason, width, SECONDARY)
    if verdict.advice and verdict.cause in ("hang", "slow"):
        output_lines += format_field("what to do", verdict.advice, width)
    return output_lines


def _describe_suspect(look: RankLook, width: int) -> list[str]:
    local = f" (local rank {look.local_rank})" if look.local_rank is not None else ""
    suspect_lines = [f"  rank {look.rank}{local} on {look.host or '?'}, process {look.pid}"]
    if look.cpu >= 0.05 or look.frames:
        suspect_lines[0] += f", {look.cpu:.1f} cores busy"
    suspect_lines += [f"  | {format_frame(frame)}" for frame in look.frames[:_MAX_FRAMES]]
    if not look.frames and look.waits:
        suspect_lines.append(f"  | {look.waits}")
    suspect_lines += [f"  | {worker}" for worker in look.workers]
    return [safe(line)[:width] for line in suspect_lines]


def _describe_stack_groups(stack_groups: Sequence[StackGroup], width: int) -> list[str]:
    group_lines = []
    for number, group in enumerate(stack_groups[:_MAX_GROUPS]):
        ranks_text = (
            f"rank {group.ranks}" if group.count == 1 else f"{group.count:,} ranks ({_truncate(group.ranks)})"
        )
        activity = f"waiting {group.what}" if group.kind == "waits" else group.what
        group_lines += format_field("ranks" if number == 0 else "", f"{ranks_text} {activity}", width)
    if len(stack_groups) > _MAX_GROUPS:
        remaining_ranks = sum(group.count for group in stack_groups[_MAX_GROUPS:])
        group_lines += format_field(
            "",
            f"and {remaining_ranks:,} ranks at {len(stack_groups) - _MAX_GROUPS} more places "
            "(--json shows all)",
            width,
        )
    return group_lines


def _truncate(ranks: str, max_length: int = 40) -> str:
    return ranks if len(ranks) <= max_length else ranks[:max_length].rpartition(",")[0] + ",…"


def _describe_last_output(looks: Sequence[RankLook], suspect: int | None) -> str:
    with_output = [look for look in looks if look.silent_s is not None]
    if not with_output:
        return "no rank has written output"
    silent_times = sorted(look.silent_s or 0.0 for look in with_output)
    text = f"{duration(silent_times[0])} ago"
    if len(silent_times) > 1:
        text += f" (the quietest: {duration(silent_times[-1])})"
    suspect_silent_s = next((look.silent_s for look in with_output if look.rank == suspect), None)
    if suspect is not None and len(looks) > 1:
        text += f"; rank {suspect}: " + (
            f"{duration(suspect_silent_s)} ago" if suspect_silent_s is not None else "none"
        )
    if len(with_output) < len(looks):
        text += f"; {len(looks) - len(with_output)} never wrote output"
    return text
