"""The restart policy: the reasons it gives, its limits, and histories that were read from a file."""

from __future__ import annotations

from typing import Any

import pytest

from dtslurm.worker.supervisor.attempts import AttemptEnd
from dtslurm.worker.supervisor.restart_policy import Decision, RecoveryOptions, decide, kind_of


def ended(cause: str, **values: Any) -> AttemptEnd:
    """Return the end of an attempt that made progress; its texts are new objects, as if read from a file."""
    texts = {name: "".join(list(value)) for name, value in values.items() if isinstance(value, str)}
    return AttemptEnd(0, 1, "".join(list(cause)), **{"progressed": True, **values, **texts})


def decide_on(end: AttemptEnd, *history: AttemptEnd, **options: Any) -> Decision:
    values = {"max_restarts": 3, "healthy": ("n1", "n2", "n3"), "wanted": 2, "requeue": True, **options}
    return decide(end, history, RecoveryOptions(**values))


@pytest.mark.parametrize(
    ("cause", "blame", "kind"),
    [
        ("done", "node", "over"),
        ("cancelled", "user", "over"),
        ("time-limit", "user", "go-on"),
        ("preempted", "site", "go-on"),
        ("restart-request", "user", "requested"),
        ("nan-loss", "code", "hopeless"),
        ("nan-loss", "unknown", "hopeless"),
        ("disk-full", "site", "maybe"),
        ("disk-full", "node", "elsewhere"),
        ("bus-error", "node", "elsewhere"),
        ("bus-error", "unknown", "elsewhere"),
        ("bus-error", "code", "hopeless"),
        ("bus-error", "user", "hopeless"),
        ("hang", "code", "suspected"),
        ("rendezvous", "node", "suspected"),
        ("segfault", "code", "maybe"),
        ("killed", "node", "maybe"),
        ("my-own-signature", "code", "hopeless"),
        ("my-own-signature", "user", "hopeless"),
        ("my-own-signature", "node", "elsewhere"),
        ("my-own-signature", "site", "maybe"),
        ("my-own-signature", "unknown", "maybe"),
    ],
)
def test_kind_of_an_end_depends_on_its_cause_and_its_blame(cause: str, blame: str, kind: str) -> None:
    assert kind_of(ended(cause, blame=blame)) == kind


@pytest.mark.parametrize(
    ("end", "options", "action", "reason"),
    [
        (ended("done"), {}, "stop", "training is done"),
        (ended("cancelled"), {}, "stop", "the run was cancelled"),
        (ended("import-error"), {}, "stop", "the same failure would occur again"),
        (
            ended("cpu-build", advice="install CUDA"),
            {},
            "stop",
            "the same failure would occur again: install CUDA",
        ),
        (
            ended("time-limit"),
            {},
            "stop",
            "the time limit was reached; --total-time DURATION continues after it",
        ),
        (ended("restart-request"), {"max_restarts": 0}, "restart", "the user requested it"),
        (ended("time-limit"), {"total_left": 60.0}, "requeue", "the time limit was reached"),
        (ended("time-limit"), {"total_left": 59.0}, "stop", "the requested total time is over"),
        (ended("preempted"), {}, "requeue", "the job was preempted"),
        (ended("checkpointed"), {}, "requeue", "the ranks saved a checkpoint and requested a requeue"),
        (
            ended("preempted"),
            {"requeue": False},
            "stop",
            "the run should continue, but the job is not requeued here; submit it again",
        ),
        (ended("killed", node="n2"), {}, "restart", "the failure may not occur again"),
        (ended("hang"), {}, "restart", "the failure may not occur again"),
        (
            ended("hang", node="n2"),
            {},
            "restart",
            "n2 may be the cause; it is excluded if the failure occurs again",
        ),
        (
            ended("hang", node="n2", rank=3, blame="code"),
            {},
            "restart",
            "rank 3 waited in the training code itself, so no node is suspected",
        ),
        (ended("link-down", node="n2"), {}, "restart", "n2 caused the failure; it is excluded"),
        (ended("link-down"), {}, "restart", "the failure may not occur again"),
        (
            ended("link-down", node="n2"),
            {"wanted": 3},
            "requeue",
            "no node is left to replace n2",
        ),
        (
            ended("link-down", node="n2"),
            {"wanted": 3, "requeue": False},
            "restart",
            "the failure may not occur again",
        ),
        (
            ended("link-down", node="n2"),
            {"wanted": 3, "least": 1},
            "shrink",
            "no node is left to replace n2; training continues on 2 of 3 nodes",
        ),
        (
            ended("link-down", node="n2"),
            {"wanted": 3, "least": 3},
            "requeue",
            "no node is left to replace n2",
        ),
        (
            ended("link-down", node="n2"),
            {"wanted": 1, "least": 1},
            "restart",
            "n2 caused the failure; it is excluded",
        ),
        (ended("link-down", node="n2"), {"wanted": 1}, "restart", "n2 caused the failure; it is excluded"),
    ],
)
def test_decision_states_its_reason(
    end: AttemptEnd, options: dict[str, Any], action: str, reason: str
) -> None:
    decision = decide_on(end, **options)
    assert (decision.action, decision.reason) == (action, reason)


def test_node_that_cannot_be_replaced_is_not_excluded_without_a_requeue() -> None:
    decision = decide_on(ended("link-down", node="n2"), wanted=3, requeue=False)
    assert (list(decision.exclude), decision.wait_s) == ([], 0.0)


@pytest.mark.parametrize(
    ("end", "history", "excluded"),
    [
        (ended("hang", node="n2"), [ended("rendezvous", node="n2")], ["n2"]),
        (ended("hang", node="n2"), [ended("hang", node="n1")], []),
        (ended("hang", node="n2"), [ended("hang", node="n3")], []),
        (ended("hang", node="n2"), [ended("killed", node="n2")], []),
        (ended("hang", node="n2"), [ended("link-down", node="n2")], []),
        (ended("hang"), [ended("hang")], []),
        (ended("killed", node="n2"), [ended("hang", node="n2")], []),
        (
            ended("hang", node="n2"),
            [ended("hang", node="n2"), ended("preempted"), ended("preempted")],
            ["n2"],
        ),
        (ended("hang", node="n2"), [ended("hang", node="n2"), *[ended("preempted")] * 3], []),
        (ended("hang", node="n2", blame="code"), [ended("hang", node="n2", blame="code")], []),
        (ended("hang", node="n2", blame="code"), [ended("hang", node="n2")], []),
        (ended("hang", node="n2"), [ended("hang", node="n2", blame="code")], []),
    ],
)
def test_suspect_node_is_excluded_if_it_was_suspected_in_the_last_three_attempts(
    end: AttemptEnd, history: list[AttemptEnd], excluded: list[str]
) -> None:
    decision = decide_on(end, *history)
    assert list(decision.exclude) == excluded
    if excluded:
        assert decision.reason == "n2 may be the cause, for the second time; it is excluded from this run"
        assert not decision.is_fault


def test_only_nodes_with_a_fault_are_put_on_the_bad_node_list() -> None:
    assert decide_on(ended("link-down", node="n2")).is_fault
    assert decide_on(ended("link-down", node="n2"), wanted=3).is_fault
    assert not decide_on(ended("hang", node="n2"), ended("hang", node="n2"), wanted=3).is_fault


@pytest.mark.parametrize(
    ("failures", "max_restarts", "reason"),
    [
        (1, 1, "the one restart after crashes is used up"),
        (2, 2, "all 2 restarts after crashes are used up"),
        (3, 2, "all 3 restarts after crashes are used up"),  # the limit was lowered meanwhile
        (0, 0, "no restart is allowed"),
    ],
)
def test_run_stops_when_its_restarts_are_used_up(failures: int, max_restarts: int, reason: str) -> None:
    history = [ended("killed", counted=True)] * failures
    decision = decide_on(ended("killed"), *history, max_restarts=max_restarts)
    assert (decision.action, decision.reason, decision.used) == ("stop", reason, failures)
    assert (decision.budget, decision.of) == ("crashes", max_restarts)


def test_uncounted_restart_leaves_the_budget() -> None:
    history = [ended("killed", counted=False)] * 5 + [ended("killed", counted=True)]
    assert decide_on(ended("killed"), *history).used == 2


@pytest.mark.parametrize(
    ("end", "history", "attempts"),
    [
        (ended("killed", progressed=False), [ended("hang", progressed=False)] * 2, 3),
        (ended("killed", progressed=False), [ended("hang", progressed=False)] * 3, 4),
        (ended("killed", progressed=False), [ended("hang", progressed=False)], 0),
        (ended("killed", progressed=True), [ended("killed", progressed=False)] * 5, 0),
        (
            ended("killed", progressed=False),
            [*[ended("killed", progressed=False)] * 5, ended("killed"), ended("killed", progressed=False)],
            0,
        ),
        (ended("link-down", progressed=None), [ended("link-down", progressed=None)] * 2, 3),
        (ended("killed", progressed=None), [ended("killed", progressed=None)] * 2, 3),
        (ended("killed", progressed=None), [ended("segfault", progressed=None)] * 2, 0),
        (ended("killed", progressed=None, rank=1), [ended("killed", progressed=None, rank=2)] * 2, 0),
        (ended("preempted", progressed=None), [ended("preempted", progressed=None)] * 5, 0),
        (ended("restart-request", progressed=False), [ended("killed", progressed=False)] * 2, 0),
        (ended("killed", progressed=False), [ended("restart-request", progressed=False)] * 5, 0),
        (
            ended("killed", progressed=False),
            [ended("killed", progressed=False), ended("restart-request"), ended("hang", progressed=False)],
            3,
        ),
    ],
)
def test_run_stops_after_three_attempts_without_progress(
    end: AttemptEnd, history: list[AttemptEnd], attempts: int
) -> None:
    decision = decide_on(end, *history)
    if attempts:
        assert decision.reason == f"{attempts} consecutive attempts made no progress"
        assert (decision.action, decision.exit_code, decision.counted) == ("stop", 93, False)
    else:
        assert decision.action in {"restart", "requeue"}


@pytest.mark.parametrize(
    ("cause", "history", "wait_s"),
    [
        ("killed", [], 0.0),
        ("killed", [("killed", None, 1)], 10.0),
        ("killed", [("killed", True, 1)], 0.0),
        ("killed", [("segfault", None, 1)], 0.0),
        ("killed", [("abort", None, 1)], 0.0),
        ("killed", [("killed", None, 1), ("segfault", None, 2), ("killed", None, 3)], 10.0),
        ("killed", [("killed", None, 1), ("killed", True, 2), ("killed", None, 3)], 10.0),
        ("killed", [("killed", None, rank) for rank in range(1, 6)], 160.0),
        ("killed", [("killed", None, rank) for rank in range(1, 7)], 300.0),
        ("hang", [("hang", None, 1)] * 2, 0.0),
        ("link-down", [("link-down", None, 1)] * 2, 0.0),
    ],
)
def test_restart_waits_longer_after_each_equal_crash_without_progress(
    cause: str, history: list[tuple[str, bool | None, int]], wait_s: float
) -> None:
    earlier = [ended(name, progressed=progressed, rank=rank) for name, progressed, rank in history]
    assert decide_on(ended(cause, rank=0, progressed=None), *earlier, max_restarts=9).wait_s == wait_s
