"""Describes the consequences of the first failure, and decides who is to blame for a failure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from dtslurm.diagnose.findings import Rank
from dtslurm.diagnose.reasons import RankEnd, Reason, signal_of
from dtslurm.model.exit_codes import WANTS_REQUEUE
from dtslurm.model.runs.diagnosis import Aftermath, JobFacts, Verdict

# The node is to blame for these causes if they occur on all of its ranks and on no other rank.
_NODE_CAUSES = {
    "cpu-build",
    "import-error",
    "python-exception",
    "driver-mismatch",
    "disk-full",
    "invalid-device",
    "rendezvous",
}
_WORDS_BY_KIND = {
    "timeout": "waited in a collective until its timeout",
    "lost-peer": "lost the connection to another rank",
    "ended": "received a request to end",
    "fine": "ended with exit code 0",
}
_SLURM_PREFIXES = ("slurmstepd:", "srun:")
_FILE_ERRORS = ("FileNotFoundError", "PermissionError", "NotADirectoryError", "OSError", "IsADirectoryError")


def assign_blame(reason: Reason, rank: Rank, ends: Sequence[RankEnd]) -> tuple[str, str]:
    """Return who is to blame, and a remark for the summary, from where else the same failure occurred."""
    if reason.cause not in _NODE_CAUSES:
        return reason.blame, ""
    if reason.cause == "python-exception" and reason.groups.get("type") not in _FILE_ERRORS:
        return reason.blame, ""
    same_reason_ranks = {
        end.rank.rank for end in ends if end.reason and end.reason.same == reason.same and end.kind == "cause"
    }
    hosts = {end.rank.host for end in ends if end.rank.host}
    node_ranks = {end.rank.rank for end in ends if end.rank.host == rank.host}
    if len(hosts) < 2 or not rank.host:
        return reason.blame, ""
    unaffected_hosts = {end.rank.host for end in ends if end.rank.host and _shows_progress(end)} - {rank.host}
    is_only_here = same_reason_ranks == node_ranks and (
        len(node_ranks) > 1 or reason.cause in ("import-error", "driver-mismatch")
    )
    if is_only_here and unaffected_hosts:
        host_count = len(unaffected_hosts)
        remark = (
            f"; only on {rank.host}, the other {f'{host_count} nodes' if host_count > 1 else 'node'} passed "
            "this point"
        )
        return "node", remark
    if len(same_reason_ranks) == len(ends):
        return reason.blame, f"; all {len(ends)} ranks failed this way"
    return reason.blame, ""


def _shows_progress(end: RankEnd) -> bool:
    """Return whether a rank shows progress; a rank that was ended at its start shows none."""
    has_output = any(line.strip() and not line.startswith(_SLURM_PREFIXES) for line in end.rank.log.tail)
    return has_output or end.kind in {"timeout", "lost-peer", "fine"}


def list_consequences(verdict: Verdict, ends: Sequence[RankEnd], facts: JobFacts) -> tuple[Aftermath, ...]:
    """Return the consequences of the first failure, the largest group of ranks first."""
    ranks_by_consequence: dict[str, list[int]] = defaultdict(list)
    for end in ends:
        if end.rank.rank != verdict.rank:
            consequence = _describe_consequence(end, verdict)
            if consequence:
                ranks_by_consequence[consequence].append(end.rank.rank)
    consequences = [
        Aftermath(what=consequence, ranks=format_ranges(ranks), count=len(ranks))
        for consequence, ranks in sorted(ranks_by_consequence.items(), key=lambda item: -len(item[1]))
    ]
    if facts.over and facts.state not in ("UNKNOWN", "COMPLETED"):
        code = f", exit code {facts.exit_code}" if facts.exit_code else ""
        consequences.append(Aftermath(what=f"the job ended: {facts.state}{code}"))
    return tuple(consequences)


def _describe_consequence(end: RankEnd, verdict: Verdict) -> str:
    if end.kind == "fine" and end.rank.exit_code == WANTS_REQUEUE:
        return "saved a checkpoint and ended with 85"
    if end.kind in _WORDS_BY_KIND:
        return _WORDS_BY_KIND[end.kind]
    if end.kind == "silent":
        return "did not record their end" if end.rank.recorded else "never started"
    if end.reason and end.reason.cause == verdict.cause and verdict.cause not in ("killed", "exit-code"):
        return f"failed the same way ({verdict.cause})"
    signal = signal_of(end.rank)
    if signal is not None:
        return f"ended by signal {signal}"
    if end.kind == "weak" or end.reason is None:
        return f"ended with exit code {end.rank.exit_code}"
    return f"failed as well ({end.reason.cause})"


def format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: ``0-6,8``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
