"""The judgement: of all that the ranks, the launchers and Slurm say, what came first.

The order of evidence: what a rank says of itself (an exception, a signal, the hardware); whose end was
recorded first; times, trusted only beyond what clocks may differ; then Slurm's word; then what ranks say of
others, which points to one that says nothing. A timeout or a lost connection is never a cause while anything
else can be.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from dtslurm.diagnose.external_causes import (
    FROM_OUTSIDE,
    by_scheduler,
    node_failure,
    not_launched,
    outside,
    state_line,
    with_host_memory,
)
from dtslurm.diagnose.failure_context import (
    CERTAIN,
    FailureContext,
    before,
    first,
    of_rank,
    placed,
    strength,
    verdict_of,
)
from dtslurm.diagnose.findings import Findings, LogEvidence, node_of
from dtslurm.diagnose.follow_on_errors import aftermath, folded
from dtslurm.diagnose.gpu_request import with_gpu_request
from dtslurm.diagnose.peer_failures import first_weak, from_others
from dtslurm.diagnose.ranks_apart import FIX, find_ranks_apart
from dtslurm.diagnose.reasons import EXCEPTION, Classifier, Reason, signal_of
from dtslurm.diagnose.recorded import checkpointed, seen_by_supervisor, told_by_supervisor
from dtslurm.diagnose.setup import with_setup
from dtslurm.diagnose.space import with_full_disk
from dtslurm.diagnose.supervisor_faults import batch_script_killed, with_stopped_supervisor
from dtslurm.model.runs.diagnosis import EvidenceLine, JobFacts, Signature, Verdict

_BY_SACCT = re.compile(r" \(sacct [^)]*\)|, and at sacct .*")


def judge(facts: JobFacts, findings: Findings, signatures: Sequence[Signature]) -> Verdict:
    """Return the verdict on one attempt of a job."""
    classifier = Classifier(signatures)
    ends = tuple(classifier.end_of(rank, findings.first) for rank in findings.ranks)
    case = FailureContext(facts, findings, ends, tuple(classifier.others(findings)))
    case = replace(case, ends=with_host_memory(case))
    verdict = with_gpu_request(with_setup(with_full_disk(_judge(case), case), case), case)
    verdict = with_stopped_supervisor(_with_ranks_apart(verdict, case), case)
    verdict = replace(verdict, advice=_advice_for(facts, verdict.advice))
    if verdict.cause in ("none", "stalled", "unknown", "not-distributed"):
        return verdict
    return replace(verdict, followed_by=aftermath(verdict, case.ends, facts))


def _with_ranks_apart(verdict: Verdict, case: FailureContext) -> Verdict:
    """Return the verdict on a run that did not fail, or that its ranks do not train together."""
    apart = find_ranks_apart(case.findings.events, case.facts.attempt)
    if verdict.cause != "none" or apart is None or not apart.is_fault:
        return verdict
    return Verdict(cause="not-distributed", summary=apart.text, confidence=0.9, blame="code", advice=FIX)


def _advice_for(facts: JobFacts, advice: str) -> str:
    """Return advice that can be followed: with the job's number, and sacct only where it can be asked."""
    possible = advice if facts.accounting else _BY_SACCT.sub("", advice)
    return re.sub(r"\bJOB\b", facts.job_id or "JOB", possible)


def _judge(case: FailureContext) -> Verdict:
    if case.facts.state == "COMPLETED" and not case.of_kind("cause", "weak"):
        return Verdict(cause="none", summary="it did not fail", blame="unknown")
    killed = batch_script_killed(case)
    if killed is not None:
        return killed
    own = case.of_kind("cause")
    from_outside = outside(case)
    if from_outside == "node-failure":
        own = [end for end in own if end.reason and end.reason.strength > 83]
    elif from_outside in FROM_OUTSIDE:
        own = [end for end in own if before(end, case)]
    launcher = launchers_word(case)
    if own and (launcher is None or launcher[1].strength < CERTAIN or strength(own) >= EXCEPTION):
        end = first(own, case)
        if end.reason and end.reason.cause == "node-failure":  # Slurm's line, in a rank's log that was well
            return node_failure(case, 0.9, end.reason.lines)
        return of_rank(end, case)
    if from_outside:
        return by_scheduler(from_outside, case)
    if launcher is not None:
        return of_launcher(*launcher, case)
    return (
        seen_by_supervisor(case)
        or from_others(case)
        or _from_weak(case)
        or told_by_supervisor(case)
        or checkpointed(case)
        or not_launched(case)
        or _nothing(case)
    )


def launchers_word(case: FailureContext) -> tuple[LogEvidence, Reason] | None:
    """Return the strongest cause that stands in a launcher's or the batch script's log."""
    for log, reason in case.others:
        if reason.role == "cause" and reason.strength >= 45:
            return log, reason
    return None


def of_launcher(log: LogEvidence, reason: Reason, case: FailureContext) -> Verdict:
    """Return the verdict that a launcher's line makes, on the rank it means if that is known."""
    if reason.cause == "node-failure":
        return node_failure(case, 0.9, reason.lines)
    node = reason.groups.get("node") or node_of(log, case.findings.ranks) or None
    on_node = [end for end in case.ends if node and end.rank.host == node]
    signals = {"segfault": 11, "bus-error": 7, "host-out-of-memory": 9}
    wanted = [end for end in on_node if signal_of(end.rank) == signals.get(reason.cause, 0)]
    rank = wanted[0].rank if wanted else on_node[0].rank if len(on_node) == 1 else None
    verdict = verdict_of(rank, reason, 0.9 if reason.strength >= CERTAIN else 0.7, case)
    return replace(verdict, node=node or verdict.node)


# ---- What is left ----


def _from_weak(case: FailureContext) -> Verdict | None:
    weak = case.of_kind("weak")
    return of_rank(first_weak(weak, case), case) if weak else None


def _nothing(case: FailureContext) -> Verdict:
    facts = case.facts
    if facts.stall:
        advice = "dtslurm diagnose --live JOB looks at every rank, and names the one that the others wait for"
        return Verdict(cause="stalled", summary=facts.stall, advice=advice)
    if not facts.over:
        return Verdict(cause="none", summary=f"nothing has failed so far; the job is {facts.state}")
    ended = case.of_kind("ended")
    if ended and facts.state in ("FAILED", "UNKNOWN"):
        verdict = Verdict(cause="killed", summary="its processes were told to end, and nothing says by whom",
                          advice="ask the site's support for the job's record")  # fmt: skip
        return placed(verdict, first(ended, case).rank, 0.4, state_line(case))
    told = next((reason for _, reason in case.others if reason.role == "cause"), None)
    if told is not None:
        return verdict_of(None, told, 0.4, case)
    never = [end.rank.rank for end in case.ends if not end.rank.recorded]
    started = f"; ranks {folded(never)} never started" if never else ""
    code = f" with exit code {facts.exit_code}" if facts.exit_code else ""
    tail = [line for log in case.findings.others if log.file.startswith("batch") for line in log.tail]
    lines = tuple(EvidenceLine(rank=None, file="batch.log", line=None, text=text) for text in tail[-3:])
    summary = f"it ended {facts.state}{code}, and nothing that was left behind says why{started}"
    advice = "look at the whole output by dtslurm logs, and at sacct -j JOB -o State,Reason,ExitCode"
    return Verdict(
        cause="unknown",
        summary=summary,
        confidence=0.2,
        advice=advice,
        evidence=lines,
        time=facts.end,
        exit_code=facts.exit_code,
    )
