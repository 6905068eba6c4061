"""The output of ``dtslurm diagnose --live``."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.cli.printing import output
from dtslurm.cli.printing.output import styled
from dtslurm.cli.printing.styles import FAILED, MAIN, SECONDARY, style_of_state
from dtslurm.cli.printing.verdict import field
from dtslurm.diagnose.places import format_frame
from dtslurm.logs.clean import safe
from dtslurm.model.runs.live import RankLook, StackGroup
from dtslurm.presentation.quantities import duration
from dtslurm.services.observe.live import Live

_VERDICT = ("cause", "confidence", "summary", "rank", "local_rank", "node", "suspects", "advice")
_MAX_PLACES = 6
_MAX_FRAMES = 8
_WORDS = {
    "hang": "the job hangs",
    "slow": "one rank blocks the others",
    "none": "the job makes progress",
    "unknown": "unknown",
}
_STYLES = {"hang": FAILED, "slow": FAILED, "none": "green", "unknown": ""}
_METHODS = {"py-spy": "py-spy", "signal": "dumps of the ranks", "proc": "/proc only"}


def document(found: Live) -> None:
    """Print the verdict as JSON."""
    output.document(
        job=found.status.job_id or found.record.job_id,
        name=found.record.name,
        cluster=found.record.cluster,
        attempt=found.attempt,
        live=True,
        verdict={name: getattr(found.verdict, name) for name in _VERDICT},
        places=found.verdict.places,
        gpus=found.gpus,
        missing=found.missing,
        ranks=found.looks,
    )


def lines(found: Live, width: int = 80) -> list[str]:
    """Return the lines of the verdict for the user."""
    verdict = found.verdict
    job = found.status.job_id or found.record.job_id or "?"
    state = found.status.word
    output_lines: list[str] = [
        styled((f"job {job} ({found.record.name}): ", ""), (state, style_of_state(state)), (", live", "")),
        "",
    ]
    guess_prefix = "probably: " if verdict.confidence < 0.7 else ""
    output_lines += field(
        "verdict",
        f"{guess_prefix}{_WORDS[verdict.cause]} ({verdict.confidence:.0%})",
        width,
        _STYLES[verdict.cause],
    )
    output_lines += field("", verdict.summary, width, MAIN)
    by_rank = {look.rank: look for look in found.looks}
    if verdict.rank is not None and verdict.rank in by_rank:
        output_lines += ["", *_describe_suspect(by_rank[verdict.rank], width), ""]
    output_lines += _describe_places(verdict.places, width)
    output_lines += field("last output", _describe_last_output(found.looks, verdict.rank), width)
    if found.gpus is not None:
        gpus = found.gpus
        text = f"{gpus.idle} of {gpus.count} idle, mean use {gpus.util:.0f} % ({gpus.age_s:.0f} s ago)"
        if verdict.cause == "hang" and not gpus.idle:
            text += "; a GPU that waits in a collective counts as busy"
        output_lines += field("GPUs", text, width)
    methods = ", ".join(f"{count} by {_METHODS[method]}" for method, count in found.by.items())
    output_lines += field("seen", f"{methods or 'no rank'}, of {len(found.looks)} ranks", width, SECONDARY)
    for number, reason in enumerate(found.missing):
        output_lines += field("not examined" if number == 0 else "", reason, width, SECONDARY)
    if verdict.advice and verdict.cause in ("hang", "slow"):
        output_lines += field("what to do", verdict.advice, width)
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


def _describe_places(places: Sequence[StackGroup], width: int) -> list[str]:
    place_lines = []
    for number, place in enumerate(places[:_MAX_PLACES]):
        ranks_text = (
            f"rank {place.ranks}" if place.count == 1 else f"{place.count:,} ranks ({_truncate(place.ranks)})"
        )
        activity = f"waiting {place.what}" if place.kind == "waits" else place.what
        place_lines += field("ranks" if number == 0 else "", f"{ranks_text} {activity}", width)
    if len(places) > _MAX_PLACES:
        remaining_ranks = sum(place.count for place in places[_MAX_PLACES:])
        place_lines += field(
            "",
            f"and {remaining_ranks:,} ranks at {len(places) - _MAX_PLACES} more places (--json shows all)",
            width,
        )
    return place_lines


def _truncate(ranks: str, most: int = 40) -> str:
    return ranks if len(ranks) <= most else ranks[:most].rpartition(",")[0] + ",…"


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
