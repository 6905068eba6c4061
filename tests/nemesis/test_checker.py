"""The checker reports each kind of violation, and no violation in a valid history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtslurm.services.runs.run_evidence import NOT_STARTED_AGAIN
from tests.nemesis.checker import check
from tests.nemesis.history import Event, History, dump, load, name_task, of_bodies
from tests.nemesis.schedule import (
    ARRAYS,
    DAEMONS,
    FAULTS,
    HORIZON_S,
    MIXED,
    MIXED_ONLY,
    ROLES,
    ROLES_ONLY,
    UNSTEADY,
    make,
)


def did(at: float, what: str, **values: Any) -> Event:
    """Return something that took a tenth of a second, by a client."""
    return Event(at, at + 0.1, "api", what, "r", {"result": "ok", "job": "7", **values})


def told(at: float, state: str, *, terminal: bool = True, **values: Any) -> Event:
    what = {"state": state, "terminal": terminal, "source": "squeue", "reason": "", "job": "7", **values}
    return Event(at, at + 0.1, "watcher", "seen", "r", what)


def final(state: str, *, terminal: bool = True, **values: Any) -> Event:
    return Event(99, 99.1, "final", "final", "r", told(99, state, terminal=terminal, **values).values)


def body(at: float, what: str, attempt: int = 0, job: str = "7", **values: Any) -> Event:
    return Event(at, at, "body", what, "r", {"attempt": attempt, "job": job, **values})


def server(at: float, what: str, instance: int, start: int = 0) -> Event:
    return Event(at, at, "server", what, "r", {"instance": instance, "start": start, "job": "7"})


def of_task(task: int, *events: Event) -> list[Event]:
    return [replace(event, run=name_task("r", task)) for event in events]


WITH_SERVERS = [did(0.5, "plan", supervised=True, servers=2), did(1, "submit")]
SERVED = [*WITH_SERVERS, server(1.5, "serve", 0), server(1.6, "serve", 1)]
DONE = [body(2, "begin"), body(3, "commit"), body(4, "end", code=0)]
FAILED = [body(2, "begin"), body(4, "end", code=3)]
AGAIN = [
    did(1, "submit"),
    *DONE,
    body(6, "begin", 1),
    body(7, "end", 1, code=0),
    final("COMPLETED"),
]


def planned(*, supervised: bool) -> Event:
    return Event(0, 0, "owner", "plan", "r", {"supervised": supervised})


TWO_TASKS = [did(0.5, "plan", supervised=True, tasks=2), did(1, "submit")]
IN_CIRCLES = [
    did(1, "submit"),
    *(event for n in range(3) for event in (body(2 + n, "begin", n), body(2.5 + n, "end", n, code=3))),
    final("FAILED", code=93),
]
LATE = [did(1, "submit"), *DONE]
LOST = "the scheduler has no record of this job"
FINE: dict[str, list[Event]] = {
    "failed when Slurm had lost its job": [
        did(1, "submit"),
        *FAILED,
        told(5, "UNKNOWN", terminal=False, reason=LOST),
        final("FAILED", code=1),
    ],
    "queued once more for a lost node, and not started again": [
        did(1, "submit"),
        body(2, "begin"),
        told(3, "PENDING", terminal=False),
        body(4, "end", code=0),
        final("FAILED", code=1, reason=NOT_STARTED_AGAIN),
    ],
    "taken by Slurm while its script ended": [*LATE, told(4.5, "TIMEOUT"), final("TIMEOUT")],
    "failed three times, and given up by its supervisor": [planned(supervised=True), *IN_CIRCLES],
    "failed three times, once without a word of its end": [
        planned(supervised=True),
        *(event for event in IN_CIRCLES if event.until != 2.5),
    ],
    "done again because Slurm lost its node, and nothing supervises it": [
        planned(supervised=False),
        *AGAIN,
    ],
    "done": [
        did(1, "submit"),
        *DONE,
        told(3, "RUNNING", terminal=False),
        told(5, "COMPLETED"),
        final("COMPLETED"),
    ],
    "failed": [did(1, "submit"), *FAILED, final("FAILED", code=3)],
    "refused": [did(1, "submit", result="refused")],
    "cancelled": [
        did(1, "submit"),
        body(2, "begin"),
        did(3, "cancel"),
        final("CANCELLED"),
    ],
    "cancelled while its ranks were on their way to a node that was cut off": [
        did(1, "submit"),
        did(2, "cancel"),
        body(2.9, "begin"),
        final("CANCELLED"),
    ],
    "over, and not when the controller came back without what it had not saved": [
        did(1, "submit"),
        body(2, "begin"),
        did(3, "cancel"),
        told(3.5, "CANCELLED"),
        Event(4, 6, "nemesis", "fault", "", {"kind": "N2", "target": "controller"}),
        told(7, "RUNNING", terminal=False),
        did(9, "cancel"),
        final("CANCELLED"),
    ],
    "over, and not yet for a window whose clock is ahead": [
        *LATE,
        told(5, "COMPLETED"),
        Event(3, 8, "nemesis", "fault", "", {"kind": "N12", "target": "100"}),
        told(6, "RUNNING", terminal=False),
        final("COMPLETED"),
    ],
    "over, and told a little late where a clock was off just before": [
        *LATE,
        told(5, "COMPLETED"),
        Event(3, 5.5, "nemesis", "fault", "", {"kind": "N12", "target": "-400"}),
        told(6, "RUNNING", terminal=False),
        final("COMPLETED"),
    ],
    "failed, and requeued while it was looked at": [
        did(1, "submit"),
        *FAILED,
        told(5, "FAILED", code=3),
        Event(5.9, 6.3, "watcher 0", "seen", "r", told(6, "PENDING", terminal=False).values),
        did(6, "requeue"),
        body(7, "begin", 1),
        body(8, "end", 1, code=0),
        final("COMPLETED"),
    ],
    "forgotten by the controller, and told so": [
        did(1, "submit"),
        final("UNKNOWN", terminal=False, reason="lost"),
    ],
    "saved and gone on": [
        did(1, "submit"),
        body(2, "begin"),
        body(3, "end", code=85),
        body(9, "begin", 1),
        body(12, "end", 1, code=0),
        final("COMPLETED"),
    ],
    "requeued after its end": [
        did(1, "submit"),
        *DONE,
        told(5, "COMPLETED"),
        did(6, "requeue"),
        told(7, "PENDING", terminal=False),
        body(8, "begin", 1),
        body(9, "end", 1, code=0),
        final("COMPLETED"),
    ],
    "cancelled, requeued, and at work again": [
        did(1, "submit"),
        did(3, "cancel"),
        did(4, "requeue"),
        *[Event(e.at + 9, e.until + 9, e.who, e.what, e.run, e.values) for e in DONE],
        final("COMPLETED"),
    ],
    "cleaned when it was over": [
        did(1, "submit"),
        *DONE,
        did(6, "requeue", result="refused"),
        did(7, "clean"),
    ],
    "withdrawn, and submitted anew under its key": [
        Event(1, 30, "api", "submit", "r", {"result": "ok", "job": "8"}),
        told(20, "CANCELLED", job=None),
        *[Event(e.at + 30, e.until + 30, e.who, e.what, e.run, e.values) for e in DONE],
        final("COMPLETED"),
    ],
}
SAVED = [planned(supervised=True), did(1, "submit"), body(2, "begin"), body(2.1, "restored", step=0)]
SAVED += [body(3, "saved", path="/r/checkpoints/step-00000006-a0"), body(4, "begin", 1)]
RESUMED = [body(6, "end", 1, code=0), final("COMPLETED")]
TRAINED = [did(1, "submit"), *DONE, Event(100, 100, "owner", "undisturbed", "r", {"digest": "ab"})]
HIDDEN = {"in_queue": True, "listed": False, "trouble": ""}
NOTED = {"noted": ["n2"], "excluded": []}
FINE |= {
    "trained on from the latest checkpoint": [*SAVED, body(5, "restored", 1, step=6), *RESUMED],
    "trained on from a checkpoint that the next attempt found first": [
        *SAVED,
        body(4.5, "saved", path="/r/checkpoints/step-00000009-a0"),  # by ranks that have not ended yet
        body(5, "restored", 1, step=6),
        *RESUMED,
    ],
    "trained to the same state": [*TRAINED, body(3.9, "trained", digest="ab"), final("COMPLETED")],
    "not in the list when the queue is not known": [
        *TRAINED, did(3, "listed", **{**HIDDEN, "trouble": "down"}), final("COMPLETED"),
    ],
    "not found by its id when it had left the queue": [
        *TRAINED, did(5, "cancel", known=False, in_queue=False), final("COMPLETED")
    ],
    "a server that was restarted": [
        *SERVED, *DONE, server(2.5, "alive", 0), server(3, "serve", 0, 1), server(3.3, "alive", 0, 1),
        server(3.4, "alive", 1), final("COMPLETED"), server(101, "alive", 1),
    ],
    "a server that was scaled away before training": [
        *SERVED[:-1], did(1.7, "scale"), *DONE, final("COMPLETED"),
    ],
    "a server whose step the controller had not saved when it was killed": [
        *SERVED, *DONE, Event(2, 3, "nemesis", "fault", "", {"kind": "N2"}), server(9, "serve", 0, 1),
        server(9.2, "alive", 0), final("COMPLETED"), server(120, "alive", 0),
    ],
    "a server on a node that was cut off": [
        *SERVED, *DONE, Event(2, 9, "nemesis", "fault", "", {"kind": "N4"}), final("COMPLETED"),
        server(120, "alive", 0),
    ],
    "submitted to a node that is noted while the notes cannot be read": [
        did(1, "submit", **NOTED), *DONE, final("COMPLETED"),
        Event(0.5, 2, "nemesis", "fault", "", {"kind": "N9", "target": "full"}),
    ],
    "each task of an array done once, the second by its second attempt": [
        *TWO_TASKS, *of_task(0, *DONE, final("COMPLETED")),
        *of_task(1, body(2, "begin", job="8"), body(6, "begin", 1, job="8"),
                 body(7, "end", 1, job="8", code=0), final("COMPLETED")),
    ],
    "submitted after a time in which notes could not be written": [
        Event(0.1, 0.4, "nemesis", "fault", "", {"kind": "N9", "target": "full"}),
        did(9, "submit", **NOTED), *DONE, final("COMPLETED"),
    ],
    "failed, and started again by a controller that had lost the end": [
        planned(supervised=False), did(1, "submit"), *FAILED, told(5, "FAILED", code=3),
        Event(6, 7, "nemesis", "fault", "", {"kind": "N2", "target": "controller"}),
        body(50, "begin", 1), body(51, "end", 1, code=3), final("FAILED", code=3),
    ],
    "submitted while all nodes are noted": [
        did(1, "submit", noted=["n1", "n2", "n3"], excluded=[]), *DONE, final("COMPLETED"),
    ],
}  # fmt: skip
WRONG: dict[str, tuple[str, list[Event]]] = {
    "accepted and not known": ("lost", [did(1, "submit")]),
    "at work and not known": ("lost", [did(1, "submit", result="killed"), *DONE]),
    "at work and told to have no job": (
        "lost",
        [*DONE, final("UNKNOWN", terminal=False, job=None, reason="x")],
    ),
    "waiting for ever": ("lost", [did(1, "submit"), final("PENDING", terminal=False)]),
    "unknown, nobody says why": ("lost", [did(1, "submit"), final("UNKNOWN", terminal=False)]),
    "its job finds the run taken": ("lost", [did(1, "submit"), final("FAILED", code=87)]),
    "two jobs": ("doubled", [did(1, "submit"), *DONE, body(3, "begin", 1, job="8"), final("COMPLETED")]),
    "an attempt twice": ("doubled", [did(1, "submit"), *DONE, body(3, "begin"), final("COMPLETED")]),
    "not started again, though it never waited for that": (
        "false verdict",
        [did(1, "submit"), *DONE, final("FAILED", code=1, reason=NOT_STARTED_AGAIN)],
    ),
    "done, and done again": ("doubled", AGAIN),
    "done, and done again under a supervisor": ("doubled", [planned(supervised=True), *AGAIN]),
    "done twice by one attempt": (
        "doubled",
        [planned(supervised=False), *DONE, body(5, "begin"), body(6, "end", code=0), final("COMPLETED")],
    ),
    "given up though nobody supervises it": ("false verdict", [planned(supervised=False), *IN_CIRCLES]),
    "taken by Slurm long after it was done": ("false verdict", [*LATE, told(7, "TIMEOUT"), final("TIMEOUT")]),
    "an old attempt commits": (
        "stale commit",
        [did(1, "submit"), body(2, "begin"), body(5, "begin", 1), body(6, "commit"),
         body(7, "end", 1, code=0), final("COMPLETED")],
    ),
    "a cancelled run begins": (
        "revived",
        [did(1, "submit"), did(2, "cancel"), body(5, "begin", 1), final("CANCELLED")],
    ),
    "at work after it was cleaned": ("lost", [did(1, "submit"), *DONE, did(5, "clean"), body(6, "begin", 1)]),
    "started again after it was cleaned": (
        "lost",
        [did(1, "submit"), *DONE, did(5, "clean"), did(6, "requeue")],
    ),
    "completed before its end": (
        "false verdict",
        [did(1, "submit"), told(2.5, "COMPLETED"), *DONE, final("COMPLETED")],
    ),
    "over, and back long after a clock was off": (
        "false verdict",
        [*LATE, told(5, "COMPLETED"), Event(1, 2, "nemesis", "fault", "", {"kind": "N12", "target": "-400"}),
         told(6, "RUNNING", terminal=False), final("COMPLETED")],
    ),
    "completed and never done": ("false verdict", [did(1, "submit"), body(2, "begin"), final("COMPLETED")]),
    "failed, and started again by nobody": (
        "false verdict",
        [planned(supervised=False), did(1, "submit"), *FAILED, told(5, "FAILED", code=3),
         body(50, "begin", 1), body(51, "end", 1, code=3), final("FAILED", code=3)],
    ),
    "failed and at work": (
        "false verdict",
        [did(1, "submit"), body(2, "begin"), told(2.2, "NODE_FAIL"), body(4, "commit"),
         body(5, "end", code=0), final("COMPLETED")],
    ),
    "failed though done": ("false verdict", [did(1, "submit"), *DONE, final("FAILED", code=1)]),
    "another exit code": ("false verdict", [did(1, "submit"), *FAILED, final("FAILED", code=1)]),
    "cancelled by nobody": ("false verdict", [did(1, "submit"), final("CANCELLED")]),
    "over, and not over": (
        "false verdict",
        [did(1, "submit"), *FAILED, told(5, "FAILED", code=3), told(6, "PENDING", terminal=False),
         final("FAILED", code=3)],
    ),
    "trained again from an older checkpoint": (
        "lost progress", [*SAVED, body(5, "restored", 1, step=3), *RESUMED],
    ),
    "trained again from the beginning": (
        "lost progress", [*SAVED, body(5, "restored", 1, step=0), *RESUMED],
    ),
    "trained to another state": (
        "other result", [*TRAINED, body(3.9, "trained", digest="cd"), final("COMPLETED")],
    ),
    "in the queue and not in the list": (
        "omitted", [*TRAINED, did(3, "listed", **HIDDEN), final("COMPLETED")],
    ),
    "in the queue and not found by its id": (
        "omitted", [*TRAINED, did(3, "cancel", known=False, in_queue=True), final("COMPLETED")],
    ),
    "failed without work though links could be created again": (
        "lost",
        [did(1, "submit"), Event(2, 9, "nemesis", "fault", "", {"kind": "N25"}), final("FAILED", code=1)],
    ),
    "began before a server": ("unserved", [*SERVED[:-1], *DONE, final("COMPLETED")]),
    "a server of an earlier start": (
        "doubled", [*SERVED, *DONE, server(3, "serve", 0, 1), server(3.2, "alive", 0), final("COMPLETED")],
    ),
    "a server of an earlier start, long before the controller was killed": (
        "doubled",
        [*SERVED, *DONE, Event(20, 23, "nemesis", "fault", "", {"kind": "N2"}), server(30, "serve", 0, 1),
         server(30.2, "alive", 0), final("COMPLETED")],
    ),
    "a server that was given up": (
        "gave up", [*SERVED, *DONE, final("COMPLETED"), did(5, "gave up", words="killed")],
    ),
    "a server after the end": (
        "outlived", [*SERVED, *DONE, final("COMPLETED"), server(120, "alive", 0)],
    ),
    "an array of which one task is not known": (
        "lost", [*TWO_TASKS, *of_task(0, *DONE, final("COMPLETED"))],
    ),
    "a task of an array done twice": (
        "doubled", [*TWO_TASKS, *of_task(0, *AGAIN[1:]), *of_task(1, *DONE, final("COMPLETED"))],
    ),
    "a task of a cancelled array begins": (
        "revived",
        [*TWO_TASKS, did(2, "cancel"), *of_task(0, final("CANCELLED")),
         *of_task(1, body(5, "begin"), final("CANCELLED"))],
    ),
    "submitted to a node that is noted": (
        "bad node used", [did(1, "submit", **NOTED), *DONE, final("COMPLETED")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FINE)
def test_checker_accepts_valid_histories(name: str) -> None:
    assert check(sorted(FINE[name], key=lambda event: event.at)) == []


@pytest.mark.parametrize("name", WRONG)
def test_checker_reports_each_kind_of_violation(name: str) -> None:
    kind, events = WRONG[name]
    result = check(sorted(events, key=lambda event: event.at))
    assert {item.kind for item in result} == {kind}, result


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
    seeds = (
        *range(1, 701),
        *range(MIXED, MIXED + 300),
        *range(ROLES, ROLES + 100),
        *range(ARRAYS, ARRAYS + 100),
    )
    plans = [make(seed) for seed in seeds]
    hit = {(fault.kind, fault.target) for plan in plans for fault in plan.faults}
    assert hit == {(kind, target) for kind, (targets, _) in FAULTS.items() for target in targets}
    for plan in plans:
        kinds = [fault.kind for fault in plan.faults]
        assert plan.networked or "N4" not in kinds
        assert sum(kind in DAEMONS for kind in kinds) <= 1
        assert plan.seed < MIXED or sum(kind in UNSTEADY for kind in kinds) <= 1
        assert bool(MIXED_ONLY.intersection(kinds)) == (MIXED <= plan.seed < ROLES)
        assert not ROLES_ONLY.intersection(kinds) or plan.seed >= ROLES
        assert any(run.servers for run in plan.runs) == (ROLES <= plan.seed < ARRAYS)
        assert any(run.tasks for run in plan.runs) == (plan.seed >= ARRAYS)
        assert all(0 <= fault.at < HORIZON_S for fault in plan.faults)
