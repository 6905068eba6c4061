"""The restart policy: what follows from the cause of an attempt's end.

Pure functions: one table of causes, and limits against endless restarts.
"""

from typing import List, NamedTuple, Optional, Sequence

from .attempts import AttemptEnd

# A retry cannot help: the code, the request or the disk must be changed first.
HOPELESS = {
    "python-exception", "import-error", "nan-loss", "container", "invalid-device", "cpu-build",
    "disk-full", "file-too-large", "gpu-out-of-memory", "host-out-of-memory", "collective-mismatch",
    "role-failure",
}  # fmt: skip
# A restart on another node helps.
ELSEWHERE = {"node-failure", "gpu-fault", "link-down", "driver-mismatch", "bus-error"}
# A node causes it, but which node is certain only when it happens again.
SUSPECTED = {"collective-timeout", "rendezvous", "hang"}
# Nothing failed: training continues where it stopped.
GO_ON = {"checkpointed", "time-limit", "preempted"}
OVER = {"done", "cancelled"}
REQUESTED = {"restart-request"}
# May not happen again: the cause is unknown or was temporary.
MAYBE = {"killed", "segfault", "abort", "exit-code", "unknown", "port-in-use", "role-restart"}

# --max-restarts counts each kind separately: a broken node uses up none of the restarts after crashes.
BUDGETS = {"elsewhere": "node faults", "suspected": "hangs and time-outs", "maybe": "crashes"}

WITHOUT_PROGRESS = 3  # attempts in a row without progress
IN_CIRCLES = 93  # exit code of a job that stops for lack of progress; NVIDIA's ft_launcher uses the same
FIRST_WAIT_S, LONGEST_WAIT_S = 10.0, 300.0
SHORTEST_SPELL_S = 60.0  # a shorter rest of --total-time is not worth a start


class Decision(NamedTuple):
    """The action to take after an attempt.

    Attributes:
        action: restart (in this job), shrink (restart on fewer nodes), requeue (as a new start of this job),
            or stop.
        exclude: nodes to exclude from now on.
        counted: whether the action uses up a restart of a budget.
        budget: that budget, a value of `BUDGETS`; empty if the cause has none.
        used: restarts of that budget so far, this one included; ``of`` is the number allowed.
        exit_code: exit code of the job; None keeps that of the attempt.
        is_fault: whether the excluded nodes are known to have a fault. A node that is only suspected is not
            put on the bad-node list, because the code of the rank on that node may be the cause.
    """

    action: str
    reason: str
    exclude: Sequence[str] = ()
    wait_s: float = 0.0
    counted: bool = False
    budget: str = ""
    used: int = 0
    of: int = 0
    exit_code: Optional[int] = None
    is_fault: bool = True


class RecoveryOptions(NamedTuple):
    """The restarts that are possible.

    Attributes:
        max_restarts: how many restarts are allowed after failures of each kind, see `BUDGETS`.
        healthy: nodes of this job that may be used, the node in question included.
        wanted: number of nodes of an attempt.
        least: the smallest sufficient number of nodes if the launcher can start on fewer; 0 if it cannot.
        requeue: whether the job can start again by requeue or in a successor job.
        total_left: seconds left of ``--total-time``; None without that option.
    """

    max_restarts: int
    healthy: Sequence[str]
    wanted: int
    requeue: bool
    total_left: Optional[float] = None
    least: int = 0


def kind_of(end: AttemptEnd) -> str:
    """Return the row of the table: over, requested, go-on, hopeless, elsewhere, suspected or maybe."""
    for kind, causes in (("over", OVER), ("requested", REQUESTED), ("go-on", GO_ON)):
        if end.cause in causes:
            return kind
    if end.cause in HOPELESS and end.blame not in ("site", "node"):
        return "hopeless"
    if end.cause in ELSEWHERE and end.blame not in ("code", "user"):
        return "elsewhere"
    if end.cause in SUSPECTED:
        return "suspected"
    if end.cause in MAYBE:
        return "maybe"
    if end.blame in ("code", "user"):  # a cause from user-defined signatures, or a GPU fault by the code
        return "hopeless"
    return "elsewhere" if end.blame == "node" else "maybe"


def decide(end: AttemptEnd, history: Sequence[AttemptEnd], means: RecoveryOptions) -> Decision:
    """Return the action after an attempt; ``history`` holds the earlier attempts, oldest first."""
    kind = kind_of(end)
    if kind == "over":
        return Decision("stop", "training is done" if end.cause == "done" else "the run was cancelled")
    if kind == "requested":
        return Decision("restart", "the user requested it")
    if kind == "hopeless":
        return Decision("stop", _with_advice("the same failure would occur again", end))
    loop_reason = _explain_loop(end, history)
    if loop_reason:
        return Decision("stop", loop_reason, exit_code=IN_CIRCLES)
    if kind == "go-on":
        return _continue_run(end, means)
    budget, of = BUDGETS[kind], means.max_restarts
    used = sum(1 for earlier in history if earlier.counted and kind_of(earlier) == kind)
    if used >= of:
        text = "all {} restarts after {} are used up" if used > 1 else "the one restart after {1} is used up"
        text = text.format(used, budget) if of else "no restart is allowed"
        return Decision("stop", text, budget=budget, used=used, of=of)
    decision = _restart(kind, end, history, means)
    return decision._replace(counted=True, budget=budget, used=used + 1, of=of, is_fault=kind != "suspected")


def _restart(kind: str, end: AttemptEnd, history: Sequence[AttemptEnd], means: RecoveryOptions) -> Decision:
    """Return how to restart after a failure: on which nodes, and when."""
    exclude = _bad_node(kind, end, history)
    remaining = [node for node in means.healthy if node not in exclude]
    if exclude and 0 < means.least <= len(remaining) < means.wanted:
        reason = "no node is left to replace {}; training continues on {} of {} nodes".format(
            ", ".join(exclude), len(remaining), means.wanted
        )
        return Decision("shrink", reason, exclude)
    if exclude and len(remaining) < means.wanted:
        if means.requeue:
            reason = "no node is left to replace {}".format(", ".join(exclude))
            return Decision("requeue", reason, exclude)
        exclude = []  # no other node is available: restart on the same nodes
    return Decision("restart", _explain_restart(kind, end, exclude), exclude, _backoff(kind, end, history))


def _continue_run(end: AttemptEnd, means: RecoveryOptions) -> Decision:
    if end.cause == "time-limit" and means.total_left is None:
        return Decision("stop", "the time limit was reached; --total-time DURATION continues after it")
    if means.total_left is not None and means.total_left < SHORTEST_SPELL_S:
        return Decision("stop", "the requested total time is over")
    if not means.requeue:
        return Decision("stop", "the run should continue, but the job is not requeued here; submit it again")
    reasons = {
        "checkpointed": "the ranks saved a checkpoint and requested a requeue",
        "preempted": "the job was preempted",
    }
    return Decision("requeue", reasons.get(end.cause, "the time limit was reached"))


def _bad_node(kind: str, end: AttemptEnd, history: Sequence[AttemptEnd]) -> List[str]:
    if not end.node or _is_own_hang(end):
        return []
    if kind == "elsewhere":
        return [end.node]
    is_repeated = any(
        kind_of(earlier) == "suspected" and earlier.node == end.node and not _is_own_hang(earlier)
        for earlier in history[-3:]
    )
    return [end.node] if kind == "suspected" and is_repeated else []


def _is_own_hang(end: AttemptEnd) -> bool:
    """Return whether the rank that hung waited in the training code itself, see `hangs.own_code`."""
    return end.cause == "hang" and end.blame == "code"


def _explain_loop(end: AttemptEnd, history: Sequence[AttemptEnd]) -> str:
    """Return the reason to stop if several attempts in a row made no progress; empty otherwise."""
    attempts_without_progress = 0
    for attempt in [end, *reversed(history)]:
        if kind_of(attempt) == "requested":
            continue
        same_failure = (attempt.cause, attempt.rank) == (end.cause, end.rank)
        if attempt.progressed is False or (
            attempt.progressed is None and same_failure and kind_of(attempt) != "go-on"
        ):
            attempts_without_progress += 1
        else:
            break
    if attempts_without_progress < WITHOUT_PROGRESS:
        return ""
    return "{} consecutive attempts made no progress".format(attempts_without_progress)


def _backoff(kind: str, end: AttemptEnd, history: Sequence[AttemptEnd]) -> float:
    """Return the seconds to wait: none the first time, then exponentially more without progress."""
    if kind != "maybe":
        return 0.0
    failures_in_row = 0
    for earlier in reversed(history):
        if earlier.cause != end.cause or earlier.progressed:
            break
        failures_in_row += 1
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (failures_in_row - 1)) if failures_in_row else 0.0


def _explain_restart(kind: str, end: AttemptEnd, exclude: Sequence[str]) -> str:
    if exclude and kind == "suspected":
        return "{} may be the cause, for the second time; it is excluded from this run".format(exclude[0])
    if exclude:
        return "{} caused the failure; it is excluded".format(", ".join(exclude))
    if _is_own_hang(end):
        return "rank {} waited in the training code itself, so no node is suspected".format(end.rank)
    if kind == "suspected" and end.node:
        return "{} may be the cause; it is excluded if the failure occurs again".format(end.node)
    return "the failure may not occur again"


def _with_advice(text: str, end: AttemptEnd) -> str:
    return "{}: {}".format(text, end.advice) if end.advice else text
