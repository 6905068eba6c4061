"""The checker sees each kind of violation, and none in a history that is as it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtslurm.services.runs.run_evidence import NOT_STARTED_AGAIN
from tests.nemesis.checker import check
from tests.nemesis.history import Event, History, dump, load, of_bodies
from tests.nemesis.schedule import DAEMONS, FAULTS, HORIZON_S, make


def client_event(at: float, what: str, **values: Any) -> Event:
    """Return something that took a tenth of a second, by a client."""
    return Event(at, at + 0.1, "api", what, "r", {"result": "ok", "job": "7", **values})


def state_event(at: float, state: str, *, terminal: bool = True, **values: Any) -> Event:
    what = {"state": state, "terminal": terminal, "source": "squeue", "reason": "", "job": "7", **values}
    return Event(at, at + 0.1, "watcher", "seen", "r", what)


def final_event(state: str, *, terminal: bool = True, **values: Any) -> Event:
    return Event(99, 99.1, "final", "final", "r", state_event(99, state, terminal=terminal, **values).values)


def body_event(at: float, what: str, attempt: int = 0, job: str = "7", **values: Any) -> Event:
    return Event(at, at, "body", what, "r", {"attempt": attempt, "job": job, **values})


DONE = [body_event(2, "begin"), body_event(3, "commit"), body_event(4, "end", code=0)]
FAILED = [body_event(2, "begin"), body_event(4, "end", code=3)]
AGAIN = [
    client_event(1, "submit"),
    *DONE,
    body_event(6, "begin", 1),
    body_event(7, "end", 1, code=0),
    final_event("COMPLETED"),
]


def plan_events(*, supervised: bool) -> Event:
    return Event(0, 0, "owner", "plan", "r", {"supervised": supervised})


IN_CIRCLES = [
    client_event(1, "submit"),
    *(
        event
        for n in range(3)
        for event in (body_event(2 + n, "begin", n), body_event(2.5 + n, "end", n, code=3))
    ),
    final_event("FAILED", code=93),
]
LATE = [client_event(1, "submit"), *DONE]
LOST = "the scheduler does not know this job (any more)"
FINE: dict[str, list[Event]] = {
    "failed when Slurm had lost its job": [
        client_event(1, "submit"),
        *FAILED,
        state_event(5, "UNKNOWN", terminal=False, reason=LOST),
        final_event("FAILED", code=1),
    ],
    "queued once more for a lost node, and not started again": [
        client_event(1, "submit"),
        body_event(2, "begin"),
        state_event(3, "PENDING", terminal=False),
        body_event(4, "end", code=0),
        final_event("FAILED", code=1, reason=NOT_STARTED_AGAIN),
    ],
    "taken by Slurm while its script ended": [*LATE, state_event(4.5, "TIMEOUT"), final_event("TIMEOUT")],
    "failed three times, and given up by its supervisor": [plan_events(supervised=True), *IN_CIRCLES],
    "failed three times, once without a word of its end": [
        plan_events(supervised=True),
        *(event for event in IN_CIRCLES if event.until != 2.5),
    ],
    "done again because Slurm lost its node, and nothing supervises it": [
        plan_events(supervised=False),
        *AGAIN,
    ],
    "done": [
        client_event(1, "submit"),
        *DONE,
        state_event(3, "RUNNING", terminal=False),
        state_event(5, "COMPLETED"),
        final_event("COMPLETED"),
    ],
    "failed": [client_event(1, "submit"), *FAILED, final_event("FAILED", code=3)],
    "refused": [client_event(1, "submit", result="refused")],
    "cancelled": [
        client_event(1, "submit"),
        body_event(2, "begin"),
        client_event(3, "cancel"),
        final_event("CANCELLED"),
    ],
    "cancelled while its ranks were on their way to a node that was cut off": [
        client_event(1, "submit"),
        client_event(2, "cancel"),
        body_event(2.9, "begin"),
        final_event("CANCELLED"),
    ],
    "over, and not when the controller came back without what it had not saved": [
        client_event(1, "submit"),
        body_event(2, "begin"),
        client_event(3, "cancel"),
        state_event(3.5, "CANCELLED"),
        Event(4, 6, "nemesis", "fault", "", {"kind": "N2", "target": "controller"}),
        state_event(7, "RUNNING", terminal=False),
        client_event(9, "cancel"),
        final_event("CANCELLED"),
    ],
    "over, and not yet for a window whose clock is ahead": [
        *LATE,
        state_event(5, "COMPLETED"),
        Event(3, 8, "nemesis", "fault", "", {"kind": "N12", "target": "100"}),
        state_event(6, "RUNNING", terminal=False),
        final_event("COMPLETED"),
    ],
    "over, and told a little late where a clock was off just before": [
        *LATE,
        state_event(5, "COMPLETED"),
        Event(3, 5.5, "nemesis", "fault", "", {"kind": "N12", "target": "-400"}),
        state_event(6, "RUNNING", terminal=False),
        final_event("COMPLETED"),
    ],
    "failed, and requeued while it was looked at": [
        client_event(1, "submit"),
        *FAILED,
        state_event(5, "FAILED", code=3),
        Event(5.9, 6.3, "watcher 0", "seen", "r", state_event(6, "PENDING", terminal=False).values),
        client_event(6, "requeue"),
        body_event(7, "begin", 1),
        body_event(8, "end", 1, code=0),
        final_event("COMPLETED"),
    ],
    "forgotten by the controller, and told so": [
        client_event(1, "submit"),
        final_event("UNKNOWN", terminal=False, reason="lost"),
    ],
    "saved and gone on": [
        client_event(1, "submit"),
        body_event(2, "begin"),
        body_event(3, "end", code=85),
        body_event(9, "begin", 1),
        body_event(12, "end", 1, code=0),
        final_event("COMPLETED"),
    ],
    "requeued after its end": [
        client_event(1, "submit"),
        *DONE,
        state_event(5, "COMPLETED"),
        client_event(6, "requeue"),
        state_event(7, "PENDING", terminal=False),
        body_event(8, "begin", 1),
        body_event(9, "end", 1, code=0),
        final_event("COMPLETED"),
    ],
    "cancelled, requeued, and at work again": [
        client_event(1, "submit"),
        client_event(3, "cancel"),
        client_event(4, "requeue"),
        *[Event(e.at + 9, e.until + 9, e.who, e.what, e.run, e.values) for e in DONE],
        final_event("COMPLETED"),
    ],
    "cleaned when it was over": [
        client_event(1, "submit"),
        *DONE,
        client_event(6, "requeue", result="refused"),
        client_event(7, "clean"),
    ],
    "withdrawn, and submitted anew under its key": [
        Event(1, 30, "api", "submit", "r", {"result": "ok", "job": "8"}),
        state_event(20, "CANCELLED", job=None),
        *[Event(e.at + 30, e.until + 30, e.who, e.what, e.run, e.values) for e in DONE],
        final_event("COMPLETED"),
    ],
}
WRONG: dict[str, tuple[str, list[Event]]] = {
    "accepted and not known": ("lost", [client_event(1, "submit")]),
    "at work and not known": ("lost", [client_event(1, "submit", result="killed"), *DONE]),
    "at work and told to have no job": (
        "lost",
        [*DONE, final_event("UNKNOWN", terminal=False, job=None, reason="x")],
    ),
    "waiting for ever": ("lost", [client_event(1, "submit"), final_event("PENDING", terminal=False)]),
    "unknown, nobody says why": ("lost", [client_event(1, "submit"), final_event("UNKNOWN", terminal=False)]),
    "its job finds the run taken": ("lost", [client_event(1, "submit"), final_event("FAILED", code=87)]),
    "two jobs": ("doubled", [client_event(1, "submit"), *DONE, body_event(3, "begin", 1, job="8"), final_event("COMPLETED")]),
    "an attempt twice": ("doubled", [client_event(1, "submit"), *DONE, body_event(3, "begin"), final_event("COMPLETED")]),
    "not started again, though it never waited for that": (
        "false verdict",
        [client_event(1, "submit"), *DONE, final_event("FAILED", code=1, reason=NOT_STARTED_AGAIN)],
    ),
    "done, and done again": ("doubled", AGAIN),
    "done, and done again under a supervisor": ("doubled", [plan_events(supervised=True), *AGAIN]),
    "done twice by one attempt": (
        "doubled",
        [plan_events(supervised=False), *DONE, body_event(5, "begin"), body_event(6, "end", code=0), final_event("COMPLETED")],
    ),
    "given up though nobody supervises it": ("false verdict", [plan_events(supervised=False), *IN_CIRCLES]),
    "taken by Slurm long after it was done": ("false verdict", [*LATE, state_event(7, "TIMEOUT"), final_event("TIMEOUT")]),
    "an old attempt commits": (
        "stale commit",
        [client_event(1, "submit"), body_event(2, "begin"), body_event(5, "begin", 1), body_event(6, "commit"),
         body_event(7, "end", 1, code=0), final_event("COMPLETED")],
    ),
    "a cancelled run begins": (
        "revived",
        [client_event(1, "submit"), client_event(2, "cancel"), body_event(5, "begin", 1), final_event("CANCELLED")],
    ),
    "at work after it was cleaned": ("lost", [client_event(1, "submit"), *DONE, client_event(5, "clean"), body_event(6, "begin", 1)]),
    "started again after it was cleaned": (
        "lost",
        [client_event(1, "submit"), *DONE, client_event(5, "clean"), client_event(6, "requeue")],
    ),
    "completed before its end": (
        "false verdict",
        [client_event(1, "submit"), state_event(2.5, "COMPLETED"), *DONE, final_event("COMPLETED")],
    ),
    "over, and back long after a clock was off": (
        "false verdict",
        [*LATE, state_event(5, "COMPLETED"), Event(1, 2, "nemesis", "fault", "", {"kind": "N12", "target": "-400"}),
         state_event(6, "RUNNING", terminal=False), final_event("COMPLETED")],
    ),
    "completed and never done": ("false verdict", [client_event(1, "submit"), body_event(2, "begin"), final_event("COMPLETED")]),
    "failed and at work": (
        "false verdict",
        [client_event(1, "submit"), body_event(2, "begin"), state_event(2.2, "NODE_FAIL"), body_event(4, "commit"),
         body_event(5, "end", code=0), final_event("COMPLETED")],
    ),
    "failed though done": ("false verdict", [client_event(1, "submit"), *DONE, final_event("FAILED", code=1)]),
    "another exit code": ("false verdict", [client_event(1, "submit"), *FAILED, final_event("FAILED", code=1)]),
    "cancelled by nobody": ("false verdict", [client_event(1, "submit"), final_event("CANCELLED")]),
    "over, and not over": (
        "false verdict",
        [client_event(1, "submit"), *FAILED, state_event(5, "FAILED", code=3), state_event(6, "PENDING", terminal=False),
         final_event("FAILED", code=3)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FINE)
def test_checker_accepts_valid_histories(name: str) -> None:
    assert check(sorted(FINE[name], key=lambda event: event.at)) == []


@pytest.mark.parametrize("name", WRONG)
def test_checker_reports_each_kind_of_violation(name: str) -> None:
    kind, events = WRONG[name]
    found = check(sorted(events, key=lambda event: event.at))
    assert {one.kind for one in found} == {kind}, found


def test_history_is_written_and_read(tmp_path: Path) -> None:
    history = History()
    history.add("api", "submit", "r", since=1.0, result="ok")
    (tmp_path / "bodies").write_text('{"at": 0.5, "what": "begin", "run": "r", "attempt": 0}\n')
    events = history.events(*of_bodies(tmp_path / "bodies"))
    assert [event.what for event in events] == ["begin", "submit"]
    dump(events, tmp_path / "kept")
    assert load(tmp_path / "kept") == events


def test_seed_always_gives_the_same_schedule() -> None:
    assert all(make(seed) == make(seed) for seed in range(50))
    assert len({make(seed) for seed in range(200)}) == 200


def test_schedules_contain_every_fault_within_limits() -> None:
    plans = [make(seed) for seed in range(1, 701)]
    hit = {(fault.kind, fault.target) for plan in plans for fault in plan.faults}
    assert hit == {(kind, target) for kind, (targets, _) in FAULTS.items() for target in targets}
    for plan in plans:
        kinds = [fault.kind for fault in plan.faults]
        assert plan.networked or "N4" not in kinds
        assert sum(kind in DAEMONS for kind in kinds) <= 1
        assert all(0 <= fault.at < HORIZON_S for fault in plan.faults)
