"""What follows from the cause of an end. Pure: one table, and limits against going on for ever."""

from typing import List, NamedTuple, Optional, Sequence

from .attempts import Ended

# Trying again cannot help: the code, the request or the disk must be changed first.
HOPELESS = {
    "python-exception", "import-error", "nan-loss", "container", "invalid-device", "cpu-build",
    "disk-full", "file-too-large", "gpu-out-of-memory", "host-out-of-memory", "collective-mismatch",
}  # fmt: skip
# Another node is what helps.
ELSEWHERE = {"node-failure", "gpu-fault", "link-down", "driver-mismatch", "bus-error"}
# Some node is behind it, which one is known for sure only when it happens again.
SUSPECTED = {"collective-timeout", "rendezvous", "hang"}
# Nothing failed: training is to go on where it was.
GO_ON = {"checkpointed", "time-limit", "preempted"}
OVER = {"done", "cancelled"}
# May not happen again: what killed it is not known, or was there for a moment only.
MAYBE = {"killed", "segfault", "abort", "exit-code", "unknown", "port-in-use"}

# What --max-restarts counts, each by itself: a broken node uses up none of the restarts after crashes.
BUDGETS = {"elsewhere": "node faults", "suspected": "hangs and time-outs", "maybe": "crashes"}

WITHOUT_PROGRESS = 3  # attempts in a row that came no further than those before
IN_CIRCLES = 93  # exit code of a job that ends for that; NVIDIA's ft_launcher means the same by it
FIRST_WAIT_S, LONGEST_WAIT_S = 10.0, 300.0
SHORTEST_SPELL_S = 60.0  # of --total-time, less is not worth a start


class Decision(NamedTuple):
    """What to do now.

    Attributes:
        action: restart (in this job), shrink (that, on fewer nodes), requeue (as a new start of this job), or
            stop.
        exclude: nodes not to use any more.
        counted: whether it uses up one of the restarts of a budget.
        budget: which that is, one of `BUDGETS`; empty where the cause has none.
        used: restarts of that budget so far, this one included; ``of`` so many that are allowed.
        exit_code: of the job; None leaves it that of the attempt.
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


class RecoveryOptions(NamedTuple):
    """What can be done.

    Attributes:
        max_restarts: how many restarts are allowed after failures of each kind, see `BUDGETS`.
        healthy: nodes of this job that may be used, the one in question included.
        wanted: nodes that an attempt has.
        least: nodes that will do, where the launcher can start on fewer; 0 where it cannot.
        requeue: whether the job can get a new start of its own by requeue or by a successor.
        total_left: seconds left of ``--total-time``; None without one.
    """

    max_restarts: int
    healthy: Sequence[str]
    wanted: int
    requeue: bool
    total_left: Optional[float] = None
    least: int = 0


def kind_of(ended: Ended) -> str:
    """Return the row of the table: over, go-on, hopeless, elsewhere, suspected or maybe."""
    if ended.cause in OVER:
        return "over"
    if ended.cause in GO_ON:
        return "go-on"
    if ended.cause in HOPELESS and ended.blame not in ("site", "node"):
        return "hopeless"
    if ended.cause in ELSEWHERE and ended.blame not in ("code", "user"):
        return "elsewhere"
    if ended.cause in SUSPECTED:
        return "suspected"
    if ended.cause in MAYBE:
        return "maybe"
    if ended.blame in ("code", "user"):  # a cause of somebody's own signatures, or a GPU fault by the code
        return "hopeless"
    return "elsewhere" if ended.blame == "node" else "maybe"


def decide(ended: Ended, history: Sequence[Ended], means: RecoveryOptions) -> Decision:
    """Return what to do after an attempt; ``history`` has those before it, oldest first."""
    kind = kind_of(ended)
    if kind == "over":
        return Decision("stop", "training is done" if ended.cause == "done" else "it was cancelled")
    if kind == "hopeless":
        return Decision("stop", _with_advice("it would only happen again", ended))
    looping = _looping(ended, history)
    if looping:
        return Decision("stop", looping, exit_code=IN_CIRCLES)
    if kind == "go-on":
        return _go_on(ended, means)
    budget, of = BUDGETS[kind], means.max_restarts
    used = sum(1 for one in history if one.counted and kind_of(one) == kind)
    if used >= of:
        text = "all {} restarts after {} are used up" if used > 1 else "the one restart after {1} is used up"
        text = text.format(used, budget) if of else "no restart is allowed"
        return Decision("stop", text, budget=budget, used=used, of=of)
    made = _again(kind, ended, history, means)
    return made._replace(counted=True, budget=budget, used=used + 1, of=of)


def _again(kind: str, ended: Ended, history: Sequence[Ended], means: RecoveryOptions) -> Decision:
    """Return how to start again after a failure: on which nodes, and when."""
    exclude = _bad_node(kind, ended, history)
    left = [node for node in means.healthy if node not in exclude]
    if exclude and 0 < means.least <= len(left) < means.wanted:
        reason = "no node is left to take the place of {}; it goes on with {} of {} nodes".format(
            ", ".join(exclude), len(left), means.wanted
        )
        return Decision("shrink", reason, exclude)
    if exclude and len(left) < means.wanted:
        if means.requeue:
            reason = "no node is left to take the place of {}".format(", ".join(exclude))
            return Decision("requeue", reason, exclude)
        exclude = []  # nothing else to be had: once more where it was
    return Decision("restart", _why(kind, ended, exclude), exclude, _wait(kind, ended, history))


def _go_on(ended: Ended, means: RecoveryOptions) -> Decision:
    if ended.cause == "time-limit" and means.total_left is None:
        return Decision("stop", "the time limit was reached; --total-time DURATION goes on after it")
    if means.total_left is not None and means.total_left < SHORTEST_SPELL_S:
        return Decision("stop", "the total time asked for is over")
    if not means.requeue:
        return Decision("stop", "it should go on, but this site lets no job be requeued; submit it again")
    words = {"checkpointed": "it saved and wants to go on", "preempted": "it was preempted"}
    return Decision("requeue", words.get(ended.cause, "the time limit was reached"))


def _bad_node(kind: str, ended: Ended, history: Sequence[Ended]) -> List[str]:
    if not ended.node:
        return []
    if kind == "elsewhere":
        return [ended.node]
    again = any(kind_of(one) == "suspected" and one.node == ended.node for one in history[-3:])
    return [ended.node] if kind == "suspected" and again else []


def _looping(ended: Ended, history: Sequence[Ended]) -> str:
    """Return why it goes on in circles, if it does: several ends in a row that brought nothing new."""
    row = 0
    for one in [ended, *reversed(history)]:
        same = (one.cause, one.rank) == (ended.cause, ended.rank)
        if one.progressed is False or (one.progressed is None and same and kind_of(one) != "go-on"):
            row += 1
        else:
            break
    if row < WITHOUT_PROGRESS:
        return ""
    return "{} attempts in a row came no further than those before".format(row)


def _wait(kind: str, ended: Ended, history: Sequence[Ended]) -> float:
    """Return how long to wait: not at all the first time, then longer and longer while nothing is won."""
    if kind != "maybe":
        return 0.0
    row = 0
    for one in reversed(history):
        if one.cause != ended.cause or one.progressed:
            break
        row += 1
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (row - 1)) if row else 0.0


def _why(kind: str, ended: Ended, exclude: Sequence[str]) -> str:
    if exclude:
        again = " again" if kind == "suspected" else ""
        return "{} was at fault{}; it is left out".format(", ".join(exclude), again)
    if kind == "suspected" and ended.node:
        return "it may have been {}; if it happens again, that node is left out".format(ended.node)
    return "it may not happen again"


def _with_advice(text: str, ended: Ended) -> str:
    return "{}: {}".format(text, ended.advice) if ended.advice else text
