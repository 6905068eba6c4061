"""Decides the verdict on an attempt: which failure came first, from ranks, launchers and Slurm.

The evidence is considered in this order: a rank's own error (an exception, a signal, the hardware); the rank
whose end was recorded first; times, only if they differ by more than clocks may; Slurm's state and messages;
and what ranks report about others, which points to a rank without a message. A timeout or a lost connection
is never the cause if anything else can be.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from dtslurm.diagnose.external_causes import (
    FROM_OUTSIDE,
    by_scheduler,
    find_external_cause,
    node_failure,
    not_launched,
    state_line,
    with_host_memory,
)
from dtslurm.diagnose.failure_context import (
    CERTAIN,
    FailureContext,
    failed_before_stop,
    find_first_failure,
    judge_rank,
    strength,
    verdict_of,
    with_rank,
)
from dtslurm.diagnose.findings import Findings, LogEvidence, node_of
from dtslurm.diagnose.follow_on_errors import format_ranges, list_consequences
from dtslurm.diagnose.gpu_request import with_gpu_request
from dtslurm.diagnose.peer_failures import find_first_weak_end, judge_peer_failures
from dtslurm.diagnose.ranks_apart import FIX, find_ranks_apart
from dtslurm.diagnose.reasons import EXCEPTION, Classifier, RankEnd, Reason, signal_of
from dtslurm.diagnose.recorded import (
    find_observed_verdict,
    find_recorded_verdict,
    has_requested_requeue,
    judge_checkpointed_ranks,
    judge_requeue_request,
    judge_role_failure,
)
from dtslurm.diagnose.setup import add_setup_failures
from dtslurm.diagnose.space import add_full_disk
from dtslurm.diagnose.supervisor_faults import (
    batch_script_killed,
    with_stopped_run,
    with_stopped_supervisor,
)
from dtslurm.model.runs.diagnosis import EvidenceLine, JobFacts, Signature, Verdict

_SACCT_ADVICE = re.compile(r" \(sacct [^)]*\)|, and the output of sacct .*")


def judge(facts: JobFacts, findings: Findings, signatures: Sequence[Signature]) -> Verdict:
    """Return the verdict on one attempt of a job."""
    classifier = Classifier(signatures)
    ends = tuple(classifier.end_of(rank, findings.first) for rank in findings.ranks)
    context = FailureContext(facts, findings, ends, tuple(classifier.find_job_reasons(findings)))
    context = replace(context, ends=with_host_memory(context))
    verdict = with_gpu_request(add_setup_failures(add_full_disk(_decide(context), context), context), context)
    verdict = with_stopped_supervisor(_with_ranks_apart(verdict, context), context)
    verdict = with_stopped_run(verdict, context)
    verdict = replace(verdict, advice=_adapt_advice(facts, verdict.advice))
    if verdict.cause in ("none", "stalled", "unknown", "not-distributed"):
        return verdict
    return replace(verdict, followed_by=list_consequences(verdict, context.ends, facts))


def _with_ranks_apart(verdict: Verdict, context: FailureContext) -> Verdict:
    """Return the verdict, or that the ranks do not train together if the run did not fail."""
    observation = find_ranks_apart(context.findings.events, context.facts.attempt)
    if verdict.cause != "none" or observation is None or not observation.is_fault:
        return verdict
    return Verdict(
        cause="not-distributed", summary=observation.text, confidence=0.9, blame="code", advice=FIX
    )


def _adapt_advice(facts: JobFacts, advice: str) -> str:
    """Return the advice with the job id inserted, and without sacct commands if there is no accounting."""
    usable_advice = advice if facts.accounting else _SACCT_ADVICE.sub("", advice)
    return re.sub(r"\bJOB\b", facts.job_id or "JOB", usable_advice)


def _decide(context: FailureContext) -> Verdict:
    if context.facts.state == "COMPLETED" and not context.of_kind("cause", "weak"):
        return Verdict(cause="none", summary="the job did not fail", blame="unknown")
    role_verdict = judge_role_failure(context.findings.events, context.facts)
    if role_verdict is not None:
        return role_verdict
    killed_verdict = batch_script_killed(context)
    if killed_verdict is not None:
        return killed_verdict
    external_cause = find_external_cause(context)
    own_failures = _list_own_failures(context, external_cause)
    launcher_cause = find_launcher_cause(context)
    if own_failures and (
        launcher_cause is None or launcher_cause[1].strength < CERTAIN or strength(own_failures) >= EXCEPTION
    ):
        end = find_first_failure(own_failures, context)
        if end.reason and end.reason.cause == "node-failure":  # a line of Slurm in the log of a healthy rank
            return node_failure(context, 0.9, end.reason.lines)
        return judge_rank(end, context)
    if external_cause:
        return by_scheduler(external_cause, context)
    if launcher_cause is not None:
        return judge_launcher_cause(*launcher_cause, context)
    return (
        find_observed_verdict(context)
        or judge_requeue_request(context)
        or judge_peer_failures(context)
        or _judge_weak(context)
        or find_recorded_verdict(context)
        or judge_checkpointed_ranks(context)
        or not_launched(context)
        or _judge_without_cause(context)
    )


def _list_own_failures(context: FailureContext, external_cause: str | None) -> list[RankEnd]:
    """Return the ranks that ended for a reason of their own, not as a consequence of another end."""
    if has_requested_requeue(context):
        return []
    own_failures = context.of_kind("cause")
    if external_cause == "node-failure":
        return [end for end in own_failures if end.reason and end.reason.strength > 83]
    if external_cause in FROM_OUTSIDE:
        return [end for end in own_failures if failed_before_stop(end, context)]
    return own_failures


def find_launcher_cause(context: FailureContext) -> tuple[LogEvidence, Reason] | None:
    """Return the strongest cause in the log of a launcher or of the batch script, with its log."""
    for log, reason in context.job_reasons:
        if reason.role == "cause" and reason.strength >= 45:
            return log, reason
    return None


def judge_launcher_cause(log: LogEvidence, reason: Reason, context: FailureContext) -> Verdict:
    """Return the verdict for a cause in a launcher's log, on the rank that the line is about if known."""
    if reason.cause == "node-failure":
        return node_failure(context, 0.9, reason.lines)
    node = reason.groups.get("node") or node_of(log, context.findings.ranks) or None
    on_node = [end for end in context.ends if node and end.rank.host == node]
    signals = {"segfault": 11, "bus-error": 7, "host-out-of-memory": 9}
    with_signal = [end for end in on_node if signal_of(end.rank) == signals.get(reason.cause, 0)]
    rank = with_signal[0].rank if with_signal else on_node[0].rank if len(on_node) == 1 else None
    verdict = verdict_of(rank, reason, 0.9 if reason.strength >= CERTAIN else 0.7, context)
    return replace(verdict, node=node or verdict.node)


# ---- Weak and missing evidence ----


def _judge_weak(context: FailureContext) -> Verdict | None:
    weak_ends = context.of_kind("weak")
    return judge_rank(find_first_weak_end(weak_ends, context), context) if weak_ends else None


def _judge_without_cause(context: FailureContext) -> Verdict:
    facts = context.facts
    if facts.stall:
        advice = (
            "dtslurm diagnose --live JOB examines every rank, and names the rank that the others wait for"
        )
        return Verdict(cause="stalled", summary=facts.stall, advice=advice)
    if not facts.over:
        return Verdict(cause="none", summary=f"nothing has failed so far; the job is {facts.state}")
    ended_ends = context.of_kind("ended")
    if ended_ends and facts.state in ("FAILED", "UNKNOWN"):
        verdict = Verdict(cause="killed", summary=(
            "its processes received a request to end, and the sender is not recorded"
        ),
                          advice="ask the cluster's support for the record of the job")  # fmt: skip
        return with_rank(verdict, find_first_failure(ended_ends, context).rank, 0.4, state_line(context))
    weak_cause = next((reason for _, reason in context.job_reasons if reason.role == "cause"), None)
    if weak_cause is not None:
        return verdict_of(None, weak_cause, 0.4, context)
    never_started = [end.rank.rank for end in context.ends if not end.rank.recorded]
    start_note = f"; ranks {format_ranges(never_started)} never started" if never_started else ""
    code = f" with exit code {facts.exit_code}" if facts.exit_code else ""
    batch_tail = [
        line for log in context.findings.job_logs if log.file.startswith("batch") for line in log.tail
    ]
    lines = tuple(EvidenceLine(rank=None, file="batch.log", line=None, text=text) for text in batch_tail[-3:])
    summary = f"the job ended {facts.state}{code}, and its logs and records show no cause{start_note}"
    advice = (
        "read the complete output with dtslurm logs, and the output of sacct -j JOB -o State,Reason,ExitCode"
    )
    return Verdict(
        cause="unknown",
        summary=summary,
        confidence=0.2,
        advice=advice,
        evidence=lines,
        time=facts.end,
        exit_code=facts.exit_code,
    )
