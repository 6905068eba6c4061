"""What ``dtslurm diagnose --live`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from dtslurm.cli.printing import output
from dtslurm.cli.printing.output import styled
from dtslurm.cli.printing.styles import FAILED, MAIN, SECONDARY, style_of_state
from dtslurm.cli.printing.verdict import field
from dtslurm.diagnose.places import at
from dtslurm.logs.clean import safe
from dtslurm.model.runs.live import RankLook, StackGroup
from dtslurm.services.observe.live import Live

_VERDICT = ("cause", "confidence", "summary", "rank", "local_rank", "node", "suspects", "advice")
_PLACES = 6
_FRAMES = 8
_WORDS = {
    "hang": "it hangs",
    "slow": "one keeps the others",
    "none": "it makes progress",
    "unknown": "not known",
}
_STYLES = {"hang": FAILED, "slow": FAILED, "none": "green", "unknown": ""}
_WAYS = {"py-spy": "py-spy", "signal": "the programs' own dumps", "proc": "/proc alone"}


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
    """Return the verdict for people."""
    verdict = found.verdict
    job = found.status.job_id or found.record.job_id or "?"
    word = found.status.word
    shown: list[str] = [
        styled((f"job {job} ({found.record.name}): ", ""), (word, style_of_state(word)), (", live", "")),
        "",
    ]
    guess = "a guess: " if verdict.confidence < 0.7 else ""
    shown += field(
        "verdict", f"{guess}{_WORDS[verdict.cause]} ({verdict.confidence:.0%})", width, _STYLES[verdict.cause]
    )
    shown += field("", verdict.summary, width, MAIN)
    by_rank = {look.rank: look for look in found.looks}
    if verdict.rank is not None and verdict.rank in by_rank:
        shown += ["", *_suspect(by_rank[verdict.rank], width), ""]
    shown += _places(verdict.places, width)
    shown += field("last words", _spoke(found.looks, verdict.rank), width)
    if found.gpus is not None:
        gpus = found.gpus
        text = f"{gpus.idle} of {gpus.count} idle, mean use {gpus.util:.0f} % ({gpus.age_s:.0f} s ago)"
        if verdict.cause == "hang" and not gpus.idle:
            text += "; a GPU that waits in a collective counts as busy"
        shown += field("GPUs", text, width)
    ways = ", ".join(f"{count} by {_WAYS[way]}" for way, count in found.by.items())
    shown += field("seen", f"{ways or 'no rank'}, of {len(found.looks)} ranks", width, SECONDARY)
    for number, why in enumerate(found.missing):
        shown += field("not seen" if number == 0 else "", why, width, SECONDARY)
    if verdict.advice and verdict.cause in ("hang", "slow"):
        shown += field("what to do", verdict.advice, width)
    return shown


def _suspect(look: RankLook, width: int) -> list[str]:
    local = f" (local rank {look.local_rank})" if look.local_rank is not None else ""
    shown = [f"  rank {look.rank}{local} on {look.host or '?'}, process {look.pid}"]
    if look.cpu >= 0.05 or look.frames:
        shown[0] += f", {look.cpu:.1f} cores busy"
    shown += [f"  | {at(frame)}" for frame in look.frames[:_FRAMES]]
    if not look.frames and look.waits:
        shown.append(f"  | {look.waits}")
    shown += [f"  | {worker}" for worker in look.workers]
    return [safe(line)[:width] for line in shown]


def _places(places: Sequence[StackGroup], width: int) -> list[str]:
    shown = []
    for number, place in enumerate(places[:_PLACES]):
        who = f"rank {place.ranks}" if place.count == 1 else f"{place.count:,} ranks ({_cut(place.ranks)})"
        what = f"waiting {place.what}" if place.kind == "waits" else place.what
        shown += field("ranks" if number == 0 else "", f"{who} {what}", width)
    if len(places) > _PLACES:
        rest = sum(place.count for place in places[_PLACES:])
        shown += field(
            "", f"and {rest:,} ranks at {len(places) - _PLACES} more places (--json tells all)", width
        )
    return shown


def _cut(ranks: str, most: int = 40) -> str:
    return ranks if len(ranks) <= most else ranks[:most].rpartition(",")[0] + ",…"


def _spoke(looks: Sequence[RankLook], suspect: int | None) -> str:
    known = [look for look in looks if look.silent_s is not None]
    if not known:
        return "no rank has said anything"
    times = sorted(look.silent_s or 0.0 for look in known)
    text = f"{output.duration(times[0])} ago"
    if len(times) > 1:
        text += f" (the quietest: {output.duration(times[-1])})"
    own = next((look.silent_s for look in known if look.rank == suspect), None)
    if suspect is not None and len(looks) > 1:
        text += f"; rank {suspect}: " + (f"{output.duration(own)} ago" if own is not None else "none")
    if len(known) < len(looks):
        text += f"; {len(looks) - len(known)} never spoke"
    return text
