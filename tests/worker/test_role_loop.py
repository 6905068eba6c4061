"""How the monitor of roles starts, checks, takes over and ends instances; no process and no thread runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.supervisor.roles import cause, monitor, probes
from dtslurm.worker.supervisor.roles import instance as instances
from dtslurm.worker.supervisor.roles.instance import Instance
from dtslurm.worker.supervisor.roles.monitor import RoleMonitor
from tests.worker.test_role_monitor import Site, with_gpus
from tests.worker.test_role_plan import role
from tests.worker.test_role_supervision import KILLED, RunningSite, no_server, stop_clock

ENDED, FAILED, READY, REMOVED = instances.ENDED, instances.FAILED, instances.READY, instances.REMOVED
STARTING, UNRESPONSIVE, WAITING = instances.STARTING, instances.UNRESPONSIVE, instances.WAITING
FAILURE = {"cause": "role-failure", "summary": "rollout-0: it failed"}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, which passes only when the monitor waits."""
    return stop_clock(monkeypatch)


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The signals that instances get."""
    sent: list[tuple[str, str]] = []
    monkeypatch.setattr(Instance, "terminate", lambda self: sent.append((self.name, "TERM")))
    monkeypatch.setattr(Instance, "kill", lambda self: sent.append((self.name, "KILL")))
    return sent


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The starts of instances: name, nodes, first ports and the distance to the next ones."""
    starts: list[tuple[Any, ...]] = []

    def begin(
        self: Instance, _top: str, nodes: list[str], ports: dict[str, int], step: int, _env: object
    ) -> None:
        starts.append((self.name, nodes, ports, step))
        self.nodes, self.start = nodes, self.start + 1
        self._process = SimpleNamespace(pid=None, poll=lambda: None)
        self.set_state(STARTING)

    monkeypatch.setattr(Instance, "begin", begin)
    return starts


def states(site: Site) -> dict[str, str]:
    return {instance.name: instance.state for instance in site.monitor._all()}


def change_role(site: Site, index: int = 0, **values: Any) -> None:
    """Change keys of a role in the plan."""
    plan = site.monitor.plan
    roles = list(plan.roles)
    changed = roles[index]._replace(**values)
    for instance in site.monitor.instances[changed.name]:
        instance.role = changed
    roles[index] = changed
    site.monitor.plan = plan._replace(roles=roles)


def write_instances(folder: Path, *rows: object, **values: Any) -> None:
    roles = [{"name": "rollout", "instances": rows, **values}]
    (folder / "roles.json").write_text(json.dumps({"roles": roles}))


# ---- Begin and takeover ----


def test_role_beside_another_one_has_an_instance_on_each_of_its_nodes(tmp_path: Path) -> None:
    site = Site(
        tmp_path,
        role("rollout", nodes=3, instances=2, ports=("http", "grpc")),
        role("judge", nodes=0, on="trainer", instances=0, ports=()),
        role("report", nodes=0, on="rollout", instances=0),
        role("cache", nodes=0, on="report", instances=0),
    )
    assert [(instance.name, instance.slot) for instance in site.monitor._all()] == [
        ("rollout-0", 0), ("rollout-1", 2), ("judge-0", 4), ("judge-1", 5),
        ("report-0", 6), ("report-1", 7), ("report-2", 8), ("cache-0", 9), ("cache-1", 10), ("cache-2", 11),
    ]  # fmt: skip
    assert site.monitor.reserved_nodes() == ["n3", "n4", "n5"]
    site.monitor.begin(resume=False)  # it has begun
    assert len(site.monitor.instances["rollout"]) == 2
    assert site.monitor._thread is not None
    assert site.monitor._thread.daemon  # the supervisor can end without it


def test_only_a_new_start_of_the_job_removes_the_mark_of_finished_training(tmp_path: Path) -> None:
    mark = tmp_path / monitor.FINISHING
    mark.touch()
    site = Site(tmp_path, role("rollout"))
    assert not mark.exists()
    mark.touch()
    site.monitor._write_state()
    site.resume()
    assert mark.exists()


def test_takeover_restores_the_instances_that_were_started(tmp_path: Path) -> None:
    site = Site(tmp_path, role("rollout", instances=2))
    write_instances(
        tmp_path,
        {"instance": 0, "start": -1, "state": "ready", "node": "n9"},
        {"instance": 1, "start": 0, "state": "ready", "node": "n4"},
        {"instance": 3, "state": "failed", "node": "n5"},
        nodes=["n4", 5],
    )
    second = site.resume()
    assert [(item.state, item.node, item.start) for item in second.instances["rollout"]] == [
        (WAITING, "", -1), (UNRESPONSIVE, "n4", 0), (WAITING, "", -1), (FAILED, "n5", 0),
    ]  # fmt: skip
    assert [item.slot for item in second.instances["rollout"]] == [0, 1, 2, 3]
    assert second.placement.nodes["rollout"] == ["n4", "5"]


@pytest.mark.parametrize("number", [-1, monitor.MAX_INSTANCES, "1", None])
def test_takeover_skips_an_instance_without_a_valid_number(tmp_path: Path, number: object) -> None:
    site = Site(tmp_path, role("rollout"))
    write_instances(
        tmp_path, {"instance": number, "start": 0}, {"instance": 0, "start": 0, "state": "starting"}
    )
    second = site.resume()
    assert [item.state for item in second.instances["rollout"]] == [STARTING]
    assert second.placement.nodes["rollout"] == ["n3"]


def test_takeover_skips_a_role_that_the_plan_lacks(tmp_path: Path) -> None:
    site = Site(tmp_path, role("rollout"))
    unknown = {"name": "judge", "nodes": ["n4"], "instances": [{"instance": 0, "start": 0}]}
    known = {"name": "rollout", "instances": [{"instance": 0, "start": 2, "state": "starting"}]}
    (tmp_path / "roles.json").write_text(json.dumps({"roles": [unknown, known, {"name": "rollout"}]}))
    second = site.resume()
    assert [item.start for item in second.instances["rollout"]] == [2]
    assert sorted(second.placement.nodes) == ["rollout", "trainer"]


def test_state_of_a_running_monitor_is_taken_over(tmp_path: Path) -> None:
    site = RunningSite(tmp_path, role("rollout", nodes=2, instances=2))
    site.monitor._write_state()
    second = site.resume()
    assert [(item.state, item.node) for item in second.instances["rollout"]] == [(UNRESPONSIVE, "n3")] * 2


# ---- The start of the main role ----


def test_main_role_waits_for_the_roles_before_it(tmp_path: Path, clock: SimpleNamespace) -> None:
    site = RunningSite(tmp_path, role("rollout"), role("judge"))
    site.monitor.plan = site.monitor.plan._replace(main_after=[("rollout", "ready"), ("judge", "ready")])
    rollout, judge = site.monitor._all()
    site.run(rollout, STARTING)
    site.run(judge, STARTING)
    waits = []

    def on_wait() -> None:
        waits.append(clock.now)
        (rollout if len(waits) == 2 else judge).set_state(READY if len(waits) > 1 else STARTING)

    clock.on_wait = on_wait
    assert site.monitor.await_main_start(is_first=True, has_ended=lambda: False) == {}
    assert (len(waits), site.said) == (3, ["waiting for the roles rollout, judge"])


def test_main_role_starts_at_once_after_roles_that_are_ready(tmp_path: Path, clock: SimpleNamespace) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    assert site.monitor.await_main_start(is_first=True, has_ended=lambda: False) == {}
    assert (clock.now, site.said) == (1000.0, [])


def test_main_role_does_not_start_after_the_failure_of_a_role(tmp_path: Path, clock: SimpleNamespace) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    site.monitor.failure = dict(FAILURE)
    assert site.monitor.await_main_start(is_first=True, has_ended=lambda: False) == FAILURE
    assert site.monitor.await_main_start(is_first=True, has_ended=lambda: True) == {}
    assert clock.now == 1000.0


@pytest.mark.parametrize(
    ("is_first", "expected"),
    [
        (True, [READY, FAILED, READY]),
        (False, [WAITING, FAILED, READY]),  # only running instances of a role with the main role
    ],
)
def test_later_attempt_restarts_roles_that_share_a_process_group(
    tmp_path: Path, signals: list[tuple[str, str]], is_first: bool, expected: list[str]
) -> None:
    site = RunningSite(tmp_path, role("rollout", restart="with main", instances=2), role("judge"))
    site.monitor.instances["rollout"][1].set_state(FAILED)
    site.exit_codes["rollout-0"] = 0
    site.monitor.restart_main = {"cause": "role-restart"}
    site.monitor.note_main_start()
    site.monitor.await_main_start(is_first=is_first, has_ended=lambda: True)
    assert list(states(site).values()) == expected
    assert signals == ([] if is_first else [("rollout-0", "TERM")])
    assert (site.monitor.restart_main, site.monitor._main_runs) == ({}, False)


def test_problem_is_the_failure_or_the_restart_of_the_main_role(tmp_path: Path) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    assert site.monitor.problem() == {}
    site.monitor.restart_main = {"cause": "role-restart"}
    assert site.monitor.problem() == {"cause": "role-restart"}
    site.monitor.failure = dict(FAILURE)
    assert site.monitor.problem() == FAILURE


@pytest.mark.parametrize(("noticed_at", "waits"), [(0, 0), (3, 3), (99, 20)])
def test_end_of_an_instance_is_noticed_for_a_moment(
    tmp_path: Path, clock: SimpleNamespace, noticed_at: int, waits: int
) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    count = 0

    def on_wait() -> None:
        nonlocal count
        count += 1
        clock.now = 1000.0 + count / 10
        if count == noticed_at:
            site.monitor.failure = dict(FAILURE)

    if noticed_at == 0:
        site.monitor.failure = dict(FAILURE)
    clock.on_wait = on_wait
    assert site.monitor.await_problem() == ({} if noticed_at == 99 else FAILURE)
    assert count == waits


def test_variables_name_the_addresses_of_running_instances(tmp_path: Path) -> None:
    site = RunningSite(
        tmp_path, role("rollout", instances=4, ports=("http", "grpc")), role("roll-out", ports=())
    )
    first, second, third, ended = site.monitor.instances["rollout"]
    first.ports, second.ports = {"http": 8000, "grpc": 8001}, {"http": 9000}
    second.host, third.host = "n4", ""
    ended.set_state(ENDED)
    assert site.monitor.variables() == {
        "DTSLURM_ROLE_ROLLOUT_HOSTS": "n3,n4",
        "DTSLURM_ROLE_ROLLOUT_URLS": "http://n3:8000,http://n4:9000",
        "DTSLURM_ROLE_ROLLOUT_PORTS_HTTP": "8000,9000",
        "DTSLURM_ROLE_ROLLOUT_PORTS_GRPC": "8001,",
        "DTSLURM_ROLE_ROLLOUT_PORTS": "8000,9000",
        "DTSLURM_ROLE_ROLL_OUT_HOSTS": "n3",
        "DTSLURM_ROLE_ROLL_OUT_URLS": "",
        "DTSLURM_ROLE_ROLL_OUT_PORTS": "",
    }


# ---- The end of the run ----


@pytest.mark.parametrize(
    ("finish_s", "state", "ends_at", "waits"),
    [
        ((0.0, 0.0), READY, 99, None),  # no role may go on
        ((2.0, 0.0), READY, 99, 4),  # until its time is over
        ((2.0, 0.0), UNRESPONSIVE, 3, 3),  # until it ends by itself
        ((2.0, 0.0), ENDED, 99, None),
        ((0.5, 2.0), READY, 99, 4),
    ],
)
def test_roles_may_finish_after_the_training(
    tmp_path: Path,
    clock: SimpleNamespace,
    finish_s: tuple[float, float],
    state: str,
    ends_at: int,
    waits: int | None,
) -> None:
    site = RunningSite(tmp_path, role("rollout", instances=2), role("judge"))
    for index, seconds in enumerate(finish_s):
        change_role(site, index, finish_s=seconds)
    for instance in site.monitor.instances["rollout"]:
        instance.set_state(state)
    count = 0

    def on_wait() -> None:
        nonlocal count
        count += 1
        clock.now = 1000.0 + count / 2
        if count == ends_at:
            for instance in site.monitor.instances["rollout"]:
                instance.set_state(ENDED)

    clock.on_wait = on_wait
    site.monitor.finish(lambda: False)
    assert count == (waits or 0)
    assert (tmp_path / monitor.FINISHING).exists() is (waits is not None)
    names = "rollout, judge" if finish_s[1] else "rollout"
    said = [] if waits is None else [f"the training is done; waiting for the roles {names}"]
    assert site.said == said


@pytest.mark.parametrize(("has_ended", "failure"), [(True, {}), (False, FAILURE)])
def test_finish_ends_with_the_job_and_with_a_failure(
    tmp_path: Path, clock: SimpleNamespace, has_ended: bool, failure: dict[str, str]
) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    change_role(site, finish_s=60.0)
    site.monitor.failure = dict(failure)
    site.monitor.finish(lambda: has_ended)
    assert clock.now == 1000.0


def test_stop_ends_the_running_instances_once(tmp_path: Path, signals: list[tuple[str, str]]) -> None:
    site = RunningSite(tmp_path, role("rollout", instances=5))
    site.run(site.monitor._all()[1], STARTING)
    for index, state in ((2, FAILED), (3, WAITING), (4, READY)):
        site.monitor._all()[index].set_state(state)
    site.monitor._all()[3].start = -1
    site.exit_codes = {"rollout-2": 1, "rollout-4": 0}
    for _ in range(2):
        site.monitor.stop()
    names = ("rollout-0", "rollout-1")
    assert signals == [(name, "TERM") for name in names] + [(name, "KILL") for name in names]
    assert list(states(site).values()) == [ENDED, ENDED, FAILED, WAITING, ENDED]
    document = json.loads((tmp_path / "roles.json").read_text())
    assert [row["state"] for row in document["roles"][0]["instances"]] == list(states(site).values())
    assert site.monitor._ends


def test_stop_before_the_begin_writes_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, role("rollout"))
    (tmp_path / "roles.json").unlink()
    RoleMonitor(site.supervisor, site.monitor.plan).stop()
    assert not (tmp_path / "roles.json").exists()


def test_stop_does_not_wait_for_a_check_of_a_silent_instance(tmp_path: Path) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    site.exit_codes["rollout-0"] = 0
    answers = threading.Event()
    check = site.monitor._pool.submit(answers.wait, 20)
    site.monitor.stop()
    answers.set()
    assert check.result()
    with pytest.raises(RuntimeError):
        site.monitor._pool.submit(print)


@pytest.mark.parametrize(
    ("ends_at", "killed"), [(None, ["rollout-0", "rollout-1"]), (3, ["rollout-1"]), (1, ["rollout-1"])]
)
def test_instances_that_term_does_not_end_are_killed_after_a_moment(
    tmp_path: Path,
    clock: SimpleNamespace,
    signals: list[tuple[str, str]],
    ends_at: int | None,
    killed: list[str],
) -> None:
    site = RunningSite(tmp_path, role("rollout", instances=2))
    count = 0

    def on_wait() -> None:
        nonlocal count
        count += 1
        clock.now = 1000.0 + count / 10
        if count == ends_at:
            site.exit_codes["rollout-0"] = 143

    clock.on_wait = on_wait
    monitor._end(site.monitor._all())
    terms = [("rollout-0", "TERM"), ("rollout-1", "TERM")]
    assert signals == [*terms, *((name, "KILL") for name in killed)]
    assert count == 30


def test_end_of_instances_is_not_awaited_longer_than_they_run(
    tmp_path: Path, clock: SimpleNamespace, signals: list[tuple[str, str]]
) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    clock.on_wait = lambda: site.exit_codes.update({"rollout-0": 0})
    monitor._end(site.monitor._all())
    assert (clock.now, signals) == (1000.1, [("rollout-0", "TERM")])


# ---- The loop ----


def test_loop_looks_twice_per_second_until_the_run_ends(tmp_path: Path, clock: SimpleNamespace) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    looks: list[float] = []
    site.monitor._look = lambda: looks.append(clock.now)  # type: ignore[method-assign]
    clock.on_wait = lambda: site.monitor.ignore_ends() if len(looks) == 3 else None
    RoleMonitor._run(site.monitor)
    assert looks == [1000.0, 1000.5, 1001.0]


def test_monitor_that_fails_ends_the_run(tmp_path: Path, clock: SimpleNamespace) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    site.monitor._look = lambda: 1 // 0  # type: ignore[assignment,method-assign]
    clock.on_wait = site.monitor.ignore_ends
    RoleMonitor._run(site.monitor)
    text = "the roles are no longer monitored: ZeroDivisionError('integer division or modulo by zero')"
    assert site.monitor.failure == {
        "cause": "role-failure", "blame": "unknown", "summary": text, "exit_code": 1,
    }  # fmt: skip
    assert (site.said, clock.now) == ([text], 1000.0)


def test_look_notes_ends_and_starts_what_waits(
    tmp_path: Path, starts: list[tuple[Any, ...]], clock: SimpleNamespace
) -> None:
    site = RunningSite(tmp_path, no_server("report", instances=6))
    for index, state in enumerate((READY, STARTING, WAITING, FAILED, REMOVED, ENDED)):
        site.monitor._all()[index].set_state(state)
    site.exit_codes = {f"report-{index}": 0 for index in (0, 3, 4)}
    site.monitor._is_check_due = lambda instance: False  # type: ignore[method-assign]
    expected = [ENDED, STARTING, STARTING, FAILED, REMOVED, ENDED]
    for at, ignored in ((999.0, False), (None, True), (None, False)):
        site.supervisor.term_at, site.monitor._ends = at, ignored
        before = list(states(site).values())
        site.monitor._look()
        is_active = at is None and not ignored
        assert list(states(site).values()) == (expected if is_active else before)
    assert [start[0] for start in starts] == ["report-2"]
    assert site.names() == ["role_ended", "role_started"]
    assert json.loads((tmp_path / "roles.json").read_text())["time"] == clock.now


class Checks:
    """The checks of instances, whose results a test gives."""

    def __init__(self, site: Site) -> None:
        self.pending: list[tuple[str, Future[Any]]] = []
        site.monitor._pool = SimpleNamespace(submit=self.submit)  # type: ignore[assignment]

    def submit(self, _probe: Callable[..., Any], instance: Instance, _start: int) -> Future[Any]:
        future: Future[Any] = Future()
        self.pending.append((instance.name, future))
        return future

    def take_names(self) -> list[str]:
        names = [name for name, _future in self.pending]
        self.pending = []
        return names


def test_check_without_an_answer_delays_no_other_one(tmp_path: Path) -> None:
    site = RunningSite(tmp_path, role("rollout", instances=2))
    checks = Checks(site)
    for instance in site.monitor._all():
        instance.set_state(STARTING)
    site.monitor._look()
    (_, slow), (_, fast) = checks.pending
    assert checks.take_names() == ["rollout-0", "rollout-1"]
    fast.set_result((True, {"waiting": 3.0}))
    site.monitor._look()
    assert states(site) == {"rollout-0": STARTING, "rollout-1": READY}
    assert site.monitor._all()[1].load == {"waiting": 3.0}
    site.monitor._look()
    assert checks.take_names() == ["rollout-1"]  # again, but not the one without an answer
    slow.set_result((True, {}))
    site.monitor._look()
    assert states(site) == {"rollout-0": READY, "rollout-1": READY}


@pytest.mark.parametrize(("restarted", "ended"), [(True, False), (False, True)])
def test_check_of_an_earlier_start_and_one_at_the_end_change_nothing(
    tmp_path: Path, restarted: bool, ended: bool
) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    checks = Checks(site)
    site.first.set_state(STARTING)
    site.monitor._look()
    [(_, check)] = checks.pending
    check.set_result((True, {"waiting": 3.0}))
    site.first.start += int(restarted)
    site.monitor._ends = ended
    site.monitor._act_on_checks()
    assert (site.first.state, site.first.load) == (STARTING, {})
    assert ("rollout-0" in site.monitor._checks) is ended


@pytest.mark.parametrize(
    ("state", "role_values", "last_s", "is_due"),
    [
        (STARTING, {}, None, True),
        (STARTING, {}, 1.0, True),
        (STARTING, {}, 0.9, False),
        (UNRESPONSIVE, {}, 1.0, True),
        (READY, {}, None, True),
        (READY, {}, 5.0, True),
        (READY, {}, 4.9, False),
        (READY, {"http": None, "line": "up"}, 99.0, False),  # a line of a log shows no health
        (READY, {"http": None, "metrics": "/metrics"}, 5.0, True),
        (STARTING, {"http": None, "line": "up"}, 1.0, True),
        (WAITING, {}, None, False),
        (ENDED, {}, 99.0, False),
        (FAILED, {"metrics": "/metrics"}, 99.0, False),
    ],
)
def test_check_is_due_after_a_pause(
    tmp_path: Path,
    clock: SimpleNamespace,
    state: str,
    role_values: dict[str, Any],
    last_s: float | None,
    is_due: bool,
) -> None:
    clock.now = 6.0
    site = RunningSite(tmp_path, role("rollout"))
    change_role(site, **role_values)
    site.first.set_state(state)
    if last_s is not None:
        site.monitor._checked_at["rollout-0"] = 6.0 - last_s
    assert site.monitor._is_check_due(site.first) is is_due


def test_first_check_is_due_at_once_even_if_the_machine_has_just_booted(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    clock.now = 0.5
    assert site.monitor._is_check_due(site.first)


@pytest.mark.parametrize(
    ("start", "host", "passes", "metrics", "expected", "is_asked"),
    [
        (0, "n3", True, None, (True, {}), True),
        (0, "n3", True, "/metrics", (True, {"waiting": 8000.0}), True),
        (0, "n3", False, "/metrics", (False, {}), True),
        (1, "n3", True, None, (False, {}), False),  # it was started again
        (0, "", True, None, (False, {}), False),  # its task has not begun
    ],
)
def test_probe_checks_a_known_address_and_reads_the_load(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: int,
    host: str,
    passes: bool,
    metrics: str | None,
    expected: tuple[bool, dict[str, float]],
    is_asked: bool,
) -> None:
    asked: list[tuple[Any, ...]] = []

    def is_ready(*words: Any) -> bool:
        asked.append(words[1:])
        return passes

    monkeypatch.setattr(probes, "is_ready", is_ready)
    monkeypatch.setattr(probes, "read_load", lambda _host, port, _path: {"waiting": float(port)})
    site = RunningSite(tmp_path, role("rollout"))
    change_role(site, metrics=metrics)
    site.first.host, site.first.ports = host, {"http": 8000}
    assert site.monitor._probe(site.first, start) == expected
    words = (host, {"http": 8000}, site.first.log, str(tmp_path))
    assert asked == ([words] if is_asked else [])
    assert site.monitor._checked_at == {"rollout-0": 1000.0}


# ---- Starts ----


def test_instances_start_at_ports_of_their_own_and_keep_them(
    tmp_path: Path, starts: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "2")
    site = RunningSite(
        tmp_path,
        role("rollout", instances=2, ports=("http", "grpc"), nodes=2),
        role("judge", nodes=0, on="trainer", instances=2, ports=()),
    )
    first, second, third, _ = site.monitor._all()
    for instance in (first, second, third):
        instance.nodes = []
        instance.set_state(WAITING)
    first.ports = {"grpc": 8001}
    for instance in (first, second, third):
        site.monitor._start(instance)
    assert starts == [
        ("rollout-0", ["n3"], {"http": 30032, "grpc": 8001}, 6),
        ("rollout-1", ["n4"], {"http": 30034, "grpc": 30035}, 6),
        ("judge-0", ["n1"], {}, 6),
    ]
    first.restarts = 2
    site.monitor._start(first)
    assert [event["restarts"] for event in site.events] == [0, 0, 0, 2]
    assert site.events[3] == {
        "event": "role_started", "role": "rollout", "instance": 0, "node": "n3", "start": 2, "restarts": 2,
    }  # fmt: skip


def test_start_gives_gpus_and_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(Instance, "begin", lambda _self, *words: environments.append(words[4]))
    site = RunningSite(tmp_path, with_gpus("rollout", 2))
    site.first.set_state(WAITING)
    site.monitor._start(site.first)
    assert (site.first.gpus, environments) == ([0, 1], [site.monitor.variables()])


def test_instance_without_a_healthy_node_ends_the_run(tmp_path: Path) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    site.healthy.clear()
    site.monitor._start(site.first)
    assert site.first.state == FAILED
    [event] = site.events
    assert (event["cause"], event["summary"]) == ("node-failure", "no node is left that can run it")


def test_start_on_a_full_disk_is_repeated_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    def begin(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Instance, "begin", begin)
    site = RunningSite(tmp_path, role("rollout"))
    site.first.set_state(WAITING)
    site.monitor._start(site.first)
    assert (site.first.state, site.first.not_before, site.events) == (WAITING, 1005.0, [])
    assert site.said == ["rollout-0 cannot be started yet: the disk is full"]
    for clock.now, may_start in ((1004.9, False), (1005.0, True)):
        assert site.monitor._may_start(site.first) is may_start


# ---- Failures ----


def test_failure_states_the_last_lines_of_the_log(tmp_path: Path) -> None:
    site = RunningSite(tmp_path, role("rollout", instances=2))
    site.first.start = 2
    log = Path(site.first.log)
    log.parent.mkdir(parents=True)
    log.write_text("loading\n\nout of memory\n")
    site.monitor._fail(site.first, "killed", "it was killed", reason="no restart is allowed", code=137)
    assert site.events == [
        {
            "event": "role_failed", "role": "rollout", "instance": 0, "node": "n3", "start": 2,
            "cause": "killed", "summary": "it was killed", "reason": "no restart is allowed",
            "lines": ["loading", "out of memory"], "log": "roles/rollout-0/logs/2/rank-0.log",
        }
    ]  # fmt: skip
    assert site.said == [
        "role rollout-0 on n3: it was killed; no restart is allowed", "  loading", "  out of memory",
    ]  # fmt: skip
    site.monitor._fail(site.monitor._all()[1], "killed", "it ended later", code=1)
    assert site.monitor.failure == {
        "cause": "role-failure", "blame": "unknown", "node": "n3", "exit_code": 137,
        "summary": "rollout-0 on n3: it was killed", "advice": "no restart is allowed",
    }  # fmt: skip


def test_failure_before_the_first_start_has_no_node_and_no_lines(tmp_path: Path) -> None:
    site = Site(tmp_path, role("rollout"))
    instance = site.monitor._all()[0]
    log = Path(instance.log)
    log.parent.mkdir(parents=True)
    log.write_text("of no start\n")
    site.monitor._fail(instance, "node-failure", "no node is left")
    assert site.events[0]["lines"] == []
    failure = site.monitor.failure
    assert (failure["summary"], failure["node"], failure["exit_code"]) == (
        "rollout-0: no node is left",
        None,
        1,
    )


@pytest.mark.parametrize("code", [0, 3])
def test_end_of_an_instance_is_recorded_in_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(cause, "find_cause", lambda *_: dict(KILLED))
    site = RunningSite(tmp_path, no_server("report"))
    ranks = tmp_path / "roles/report-0/ranks/0"
    ranks.mkdir(parents=True)
    (ranks / "address.json").write_text('{"host": "n3.cluster", "ports": {}}')
    site.first.host = ""
    site.exit_codes["report-0"] = code
    site.monitor._note_end(site.first)
    document = json.loads((ranks / "0.json").read_text())
    assert (document["host"], document["started"], document["exit_code"]) == ("n3", 990, code)
    assert site.first.host == "n3.cluster"
    assert site.events[0]["exit_code"] == code
    assert site.first.state == (WAITING if code else ENDED)


# ---- Number of instances, and the state file ----


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('{"instances": 0}', 0),
        ('{"instances": 3}', 3),
        ('{"instances": 1000}', 1000),
        ('{"instances": 1001}', 1),
        ('{"instances": -1}', 1),
        ("{}", 1),
    ],
)
def test_scale_accepts_up_to_a_thousand_instances(tmp_path: Path, text: str, count: int) -> None:
    site = Site(tmp_path, with_gpus("judge", 0, instances=1), with_gpus("rollout", 0, instances=1))
    (tmp_path / "scale-rollout.json").write_text(text)  # the other role has no request
    site.monitor._scale()
    active = [item for item in site.monitor.instances["rollout"] if item.state != REMOVED]
    assert len(active) == count


def test_new_request_is_handled_beside_one_that_was_handled_before(tmp_path: Path) -> None:
    site = Site(tmp_path, with_gpus("judge", 0, instances=1), with_gpus("rollout", 0, instances=1))
    for name, count in (("judge", 2), ("rollout", 3)):
        (tmp_path / f"scale-{name}.json").write_text(json.dumps({"instances": count}))
        site.monitor._scale()
    assert [(event["role"], event["instances"]) for event in site.events] == [("judge", 2), ("rollout", 3)]


def test_scale_ends_the_last_instances_and_starts_them_anew(
    tmp_path: Path, signals: list[tuple[str, str]]
) -> None:
    site = RunningSite(tmp_path, with_gpus("rollout", 1, instances=4))
    site.monitor._all()[2].set_state(WAITING)
    site.monitor._all()[3].restarts = 2
    site.exit_codes["rollout-3"] = 0
    site.monitor._scale_role(site.monitor.plan.roles[0], 2)
    assert list(states(site).values()) == [READY, READY, REMOVED, REMOVED]
    assert signals == [("rollout-3", "TERM")]
    site.monitor._scale_role(site.monitor.plan.roles[0], 9)
    assert [(item.state, item.restarts, item.node) for item in site.monitor._all()] == (
        [(READY, 0, "n3")] * 2 + [(WAITING, 0, "")] * 6
    )
    assert [{**event, "event": ""} for event in site.events] == [
        {"event": "", "role": "rollout", "instances": 2, "requested": 2, "reason": ""},
        {
            "event": "", "role": "rollout", "instances": 8, "requested": 9,
            "reason": "no other GPU of the role's nodes is free",
        },
    ]  # fmt: skip


def test_state_is_written_when_it_changes_and_twice_a_minute(tmp_path: Path, clock: SimpleNamespace) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    path = tmp_path / "roles.json"
    written = []
    for clock.now, state in (
        (1000.04, READY), (1030.0, READY), (1030.04, READY), (1031.0, UNRESPONSIVE), (1032.0, UNRESPONSIVE),
    ):  # fmt: skip
        if site.first.state != state:
            site.first.set_state(state)
        site.monitor._write_state()
        written.append(json.loads(path.read_text())["time"])
    assert written == [1000.0, 1000.0, 1030.0, 1031.0, 1031.0]
    assert json.loads(path.read_text()) == {
        "schema": 1, "main": "trainer", "time": 1031.0,
        "roles": [
            {
                "name": "rollout", "component": 0, "nodes": ["n3"], "restarts": 3,
                "instances": [site.first.describe()],
            }
        ],
    }  # fmt: skip


def test_state_that_cannot_be_written_is_written_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    path = tmp_path / "roles.json"
    path.unlink()

    def fail(*_: object, **_options: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(monitor, "write_atomically", fail)
        site.monitor._write_state()
    assert not path.exists()
    site.monitor._write_state()
    assert path.exists()
