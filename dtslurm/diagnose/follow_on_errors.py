"""What the first failure had as its consequence, and whom a failure speaks against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from dtslurm.diagnose.findings import Rank
from dtslurm.diagnose.reasons import RankEnd, Reason, signal_of
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.diagnosis import Aftermath, JobFacts, Verdict

# Of these a node is to blame where they come on all of its ranks and on no other.
_BY_PLACE = {
    "cpu-build",
    "import-error",
    "python-exception",
    "driver-mismatch",
    "disk-full",
    "invalid-device",
    "rendezvous",
}
_WORDS = {
    "timeout": "waited in a collective until its timeout",
    "lost-peer": "lost the connection to another rank",
    "ended": "told to end",
    "fine": "ended with exit code 0",
}
_OF_SLURM = ("slurmstepd:", "srun:")
_FILES = ("FileNotFoundError", "PermissionError", "NotADirectoryError", "OSError", "IsADirectoryError")


def blamed(reason: Reason, rank: Rank, ends: Sequence[RankEnd]) -> tuple[str, str]:
    """Return who is to blame and a remark for the summary, by where else the same thing happened."""
    if reason.cause not in _BY_PLACE:
        return reason.blame, ""
    if reason.cause == "python-exception" and reason.groups.get("type") not in _FILES:
        return reason.blame, ""
    same = {
        end.rank.rank for end in ends if end.reason and end.reason.same == reason.same and end.kind == "cause"
    }
    hosts = {end.rank.host for end in ends if end.rank.host}
    here = {end.rank.rank for end in ends if end.rank.host == rank.host}
    if len(hosts) < 2 or not rank.host:
        return reason.blame, ""
    further = {end.rank.host for end in ends if end.rank.host and _got_further(end)} - {rank.host}
    alone = same == here and (len(here) > 1 or reason.cause in ("import-error", "driver-mismatch"))
    if alone and further:
        others = len(further)
        remark = f"; only on {rank.host}, the other {f'{others} nodes' if others > 1 else 'node'} got past it"
        return "node", remark
    if len(same) == len(ends):
        return reason.blame, f"; all {len(ends)} ranks failed this way"
    return reason.blame, ""


def _got_further(end: RankEnd) -> bool:
    """Tell whether a rank shows that it did something; one that was ended at its very start shows nothing."""
    said = any(line.strip() and not line.startswith(_OF_SLURM) for line in end.rank.log.tail)
    return said or end.kind in {"timeout", "lost-peer", "fine"}


def aftermath(verdict: Verdict, ends: Sequence[RankEnd], facts: JobFacts) -> tuple[Aftermath, ...]:
    """Return what followed the first failure, largest group first."""
    groups: dict[str, list[int]] = defaultdict(list)
    for end in ends:
        if end.rank.rank != verdict.rank:
            what = _words(end, verdict)
            if what:
                groups[what].append(end.rank.rank)
    found = [
        Aftermath(what=what, ranks=folded(ranks), count=len(ranks))
        for what, ranks in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    if facts.over and facts.state not in ("UNKNOWN", "COMPLETED"):
        code = f", exit code {facts.exit_code}" if facts.exit_code else ""
        found.append(Aftermath(what=f"the job ended: {facts.state}{code}"))
    return tuple(found)


def _words(end: RankEnd, verdict: Verdict) -> str:
    if end.kind == "fine" and end.rank.exit_code == WANTS_REQUEUE:
        return "saved and ended with 85"
    if end.kind in _WORDS:
        return _WORDS[end.kind]
    if end.kind == "silent":
        return "left no record of their end" if end.rank.recorded else "never started"
    if end.reason and end.reason.cause == verdict.cause and verdict.cause not in ("killed", "exit-code"):
        return f"failed the same way ({verdict.cause})"
    signal = signal_of(end.rank)
    if signal is not None:
        return f"ended by signal {signal}"
    if end.kind == "weak" or end.reason is None:
        return f"ended with exit code {end.rank.exit_code}"
    return f"failed as well ({end.reason.cause})"


def folded(numbers: Iterable[int]) -> str:
    """Return numbers as ``0-6,8``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
