"""What the monitor of roles does with instances that get ready, fall silent or end; no process runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.supervisor import agents, slurm
from dtslurm.worker.supervisor.roles import cause, monitor
from dtslurm.worker.supervisor.roles import instance as instances
from dtslurm.worker.supervisor.roles.instance import Instance
from tests.worker.test_role_monitor import Site, with_several_nodes
from tests.worker.test_role_plan import role

OUT_OF_MEMORY = {"cause": "out-of-memory", "summary": "it ran out of memory", "hopeless": True}
KILLED = {"cause": "killed", "summary": "it was killed", "hopeless": False}
EXCEPTION = {"cause": "python-exception", "summary": "ValueError", "hopeless": False}


def stop_clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the time, which passes only when the monitor waits; ``on_wait`` is called then."""
    clock = SimpleNamespace(now=1000.0, on_wait=lambda: None)

    def wait(seconds: float) -> None:
        clock.now += seconds
        assert clock.now < 9999, "the monitor waits without end"
        clock.on_wait()

    fake = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now, sleep=wait)
    monkeypatch.setattr(monitor, "time", fake)
    monkeypatch.setattr(instances, "time", fake)
    monkeypatch.setattr(slurm, "bad_nodes", lambda _nodes: {})
    monkeypatch.setattr(slurm, "show_job", lambda: {"JobState": "RUNNING", "Restarts": "0"})
    return clock


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, which passes only when the monitor waits."""
    return stop_clock(monkeypatch)


class RunningSite(Site):
    """A site whose instances run on the node n3, and that notes what is said and excluded."""

    def __init__(self, folder: Path, *others: Any, **more: Any) -> None:
        super().__init__(folder, *others, **more)
        self.said: list[str] = []
        self.excluded: list[tuple[str, str]] = []
        self.supervisor.say = self.said.append
        self.supervisor.exclude = lambda node, why: self.excluded.append((node, why))
        self.exit_codes: dict[str, int] = {}
        for instance in self.monitor._all():
            self.run(instance)

    def run(self, instance: Instance, state: str = instances.READY) -> Instance:
        instance.nodes, instance.host, instance.start, instance.started_at = ["n3"], "n3", 0, 990.0
        instance._process = SimpleNamespace(pid=None, poll=lambda: self.exit_codes.get(instance.name))
        instance.set_state(state)
        return instance

    @property
    def first(self) -> Instance:
        return self.monitor._all()[0]

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]


def no_server(name: str, **values: Any) -> Any:
    spec = role(name, ports=(), **values)
    return replace(spec, options=replace(spec.options, ready=None))


def test_instance_that_passes_its_first_check_is_ready(tmp_path: Path) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    instance = site.run(site.first, instances.STARTING)
    site.monitor._note_check(instance, passed=True)
    assert (instance.state, instance.answered_at) == (instances.READY, 1000.0)
    [event] = site.events
    assert (event["event"], event["role"], event["seconds"]) == ("role_ready", "rollout", 10.0)


def test_silent_instance_is_restarted_when_its_time_is_over(tmp_path: Path, clock: SimpleNamespace) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    clock.now = 10.0
    site.monitor._note_check(site.first, passed=True)
    clock.now = 11.0
    site.monitor._note_check(site.first, passed=False)  # a single check may fail on a busy node
    for clock.now in (20.0, 40.0):
        site.monitor._note_check(site.first, passed=False)
    assert (site.first.state, site.events) == (instances.UNRESPONSIVE, [])
    clock.now = 41.0
    site.monitor._note_check(site.first, passed=False)
    [event] = site.events
    assert (event["cause"], event["summary"]) == ("unresponsive", "it did not respond for 31 s")
    assert (site.first.state, site.first.restarts) == (instances.WAITING, 1)


def test_instance_that_answers_again_is_ready_without_another_event(tmp_path: Path) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    for passed in (False, True):
        site.monitor._note_check(site.first, passed=passed)
    assert (site.first.state, site.events) == (instances.READY, [])


def test_instance_that_stays_ready_keeps_the_time_of_its_last_change(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    clock.now = 1005.0
    site.monitor._note_check(site.first, passed=True)
    assert (site.first.changed_at, site.first.answered_at) == (1000.0, 1005.0)


def test_check_of_an_instance_that_has_ended_changes_nothing(tmp_path: Path) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    site.exit_codes["rollout-0"] = 1
    site.monitor._note_check(site.first, passed=False)
    assert site.first.state == instances.READY


def test_instance_that_is_not_ready_in_time_ends_the_run(tmp_path: Path, clock: SimpleNamespace) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    instance = site.run(site.first, instances.STARTING)
    clock.now = 990.0 + 600.0
    site.monitor._note_check(instance, passed=False)
    assert (instance.state, site.monitor.failure) == (instances.STARTING, {})
    clock.now += 1
    site.monitor._note_check(instance, passed=False)
    assert (instance.state, site.names()) == (instances.FAILED, ["role_failed"])
    assert site.monitor.failure == {
        "cause": "role-failure", "blame": "unknown", "node": "n3", "advice": "", "exit_code": 1,
        "summary": "rollout-0 on n3: it was not ready within 600 s",
    }  # fmt: skip
    assert site.said == ["role rollout-0 on n3: it was not ready within 600 s"]


@pytest.mark.parametrize("answering", [["n3"], []])
def test_step_that_slurm_does_not_start_is_started_again_elsewhere_if_its_node_is_lost(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, answering: list[str]
) -> None:
    monkeypatch.setattr(agents, "answering", lambda _top, _nodes: answering)
    site = RunningSite(tmp_path, role("rollout"))
    instance = site.run(site.first, instances.STARTING)
    instance.host = ""
    clock.now = 990.0 + monitor.TASK_BEGINS_S
    site.monitor._note_check(instance, passed=False)
    assert site.events == []
    clock.now += 1
    site.monitor._note_check(instance, passed=False)
    assert [event["cause"] for event in site.events] == ["unknown" if answering else "node-failure"]
    assert site.excluded == ([] if answering else [("n3", "Slurm did not start its step")])


@pytest.mark.parametrize(
    ("findings", "restarts", "was_ready", "reason"),
    [
        (KILLED, 0, False, None),
        (KILLED, 2, True, None),
        (KILLED, 3, True, "its restarts are used up (3)"),
        (KILLED, 4, True, "its restarts are used up (3)"),
        (OUT_OF_MEMORY, 0, True, "a restart would end the same way"),
        (EXCEPTION, 0, True, None),
        (EXCEPTION, 0, False, "a restart would end the same way"),
    ],
)
def test_cause_and_restarts_decide_whether_an_instance_comes_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    findings: dict[str, Any],
    restarts: int,
    was_ready: bool,
    reason: str | None,
) -> None:
    monkeypatch.setattr(cause, "find_cause", lambda *_: dict(findings))
    site = RunningSite(tmp_path, role("rollout"))
    site.first.restarts, site.first.was_ready = restarts, was_ready
    site.exit_codes["rollout-0"] = 137
    site.monitor._note_end(site.first)
    ended = site.events[0]
    assert (ended["event"], ended["cause"], ended["exit_code"]) == ("role_ended", findings["cause"], 137)
    if reason is None:
        pause_s = monitor.PAUSES_S[min(restarts, len(monitor.PAUSES_S) - 1)]
        assert (site.first.state, site.first.restarts) == (instances.WAITING, restarts + 1)
        assert (site.first.not_before, site.monitor.failure) == (1000.0 + pause_s, {})
        assert site.said == [f"rollout-0 on n3 is restarted: {findings['summary']}"]
        return
    assert site.names() == ["role_ended", "role_failed"]
    assert (site.first.state, site.events[1]["reason"]) == (instances.FAILED, reason)
    failure = site.monitor.failure
    assert (failure["exit_code"], failure["advice"], failure["node"]) == (137, reason, "n3")


def test_instance_without_restarts_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cause, "find_cause", lambda *_: dict(KILLED))
    site = RunningSite(tmp_path, role("rollout", restart="never"))
    site.exit_codes["rollout-0"] = 137
    site.monitor._note_end(site.first)
    assert site.monitor.failure["advice"] == "no restart is allowed"


def test_server_that_ends_with_0_is_restarted_and_a_program_is_done(tmp_path: Path) -> None:
    site = RunningSite(tmp_path, role("rollout"), no_server("report"))
    server, program = site.monitor._all()
    site.exit_codes = {"rollout-0": 0, "report-0": 0}
    site.monitor._note_end(server)
    site.monitor._note_end(program)
    assert (server.state, program.state) == (instances.WAITING, instances.ENDED)
    assert [event.get("summary") for event in site.events] == ["it ended with 0", None]


def test_end_of_the_job_restarts_nothing(tmp_path: Path) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    site.exit_codes["rollout-0"] = 143
    site.supervisor.term_at = 999.0
    site.monitor._note_end(site.first)
    assert (site.first.state, site.events) == (instances.READY, [])


@pytest.mark.parametrize("code", [143, 0])  # some servers end with 0 after TERM
@pytest.mark.parametrize(
    "job",
    [
        {"JobState": "COMPLETING", "Restarts": "1"},
        {"JobState": "CANCELLED", "Restarts": "0"},
        {"JobState": "RUNNING", "Restarts": "0", "PreemptTime": "2026-11-28T10:38:29"},
    ],
)
def test_instance_that_slurm_ends_before_the_supervisor_is_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: dict[str, str], code: int
) -> None:
    monkeypatch.setattr(slurm, "show_job", lambda: job)
    site = RunningSite(tmp_path, role("rollout", restart="never"))
    site.exit_codes["rollout-0"] = code
    for _ in range(2):
        site.monitor._act_on_ends()
    assert (site.first.state, site.events, site.monitor.failure) == (instances.READY, [], {})


def test_node_that_slurm_calls_lost_is_the_cause_and_is_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "bad_nodes", lambda _nodes: {"n3": "DOWN", "n4": "DRAINED"})
    monkeypatch.setattr(slurm, "is_lost", lambda state: state == "DOWN")
    site = RunningSite(tmp_path, role("rollout"))
    site.monitor._consider_restart(site.first, dict(OUT_OF_MEMORY), 1)
    assert (site.events[0]["cause"], site.events[0]["summary"]) == ("node-failure", "node n3 is lost")
    assert site.excluded == [("n3", "node n3 is lost")]
    assert site.first.state == instances.WAITING


@pytest.mark.parametrize("is_stated", [True, False])
def test_lost_node_of_several_is_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stated: bool
) -> None:
    monkeypatch.setattr(slurm, "bad_nodes", lambda _nodes: {} if is_stated else {"n4": "DOWN"})
    site = RunningSite(tmp_path, with_several_nodes("rollout", 2, nodes=2))
    site.first.nodes = ["n3", "n4"]
    findings = {"cause": "node-failure", "summary": "its step did not start", "hopeless": False}
    site.monitor._consider_restart(site.first, {**findings, "nodes": ["n4"] if is_stated else []})
    assert [node for node, _why in site.excluded] == ["n4"]


@pytest.mark.parametrize(
    ("restarts", "pause_s"), [(0, 0), (1, 2), (2, 5), (3, 10), (4, 30), (5, 60), (6, 60), (9, 60)]
)
def test_pause_before_a_restart_grows_up_to_a_minute(tmp_path: Path, restarts: int, pause_s: int) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    site.first.role = site.first.role._replace(restarts=10)
    site.first.restarts = restarts
    site.monitor._consider_restart(site.first, dict(KILLED), 137)
    assert (site.first.not_before, site.first.restarts) == (1000.0 + pause_s, restarts + 1)


@pytest.mark.parametrize(("nodes", "excluded"), [(["n3"], ["n3"]), (["n3", "n4"], [])])
def test_only_the_single_node_of_an_instance_is_excluded_for_what_its_log_says(
    tmp_path: Path, nodes: list[str], excluded: list[str]
) -> None:
    site = RunningSite(tmp_path, with_several_nodes("rollout", len(nodes), nodes=2))
    site.first.nodes = nodes
    findings = {"cause": "node-failure", "summary": "a GPU is broken", "hopeless": False}
    site.monitor._consider_restart(site.first, findings, 1)
    assert [node for node, _why in site.excluded] == excluded


@pytest.mark.parametrize("main_runs", [True, False])
def test_role_with_the_main_role_waits_until_that_has_ended(tmp_path: Path, main_runs: bool) -> None:
    site = RunningSite(tmp_path, role("rollout", restart="with main"), role("judge"))
    rollout, judge = site.monitor._all()
    site.monitor._main_runs = main_runs
    site.monitor._consider_restart(rollout, dict(KILLED), 137)
    rollout.not_before = judge.not_before = 0.0
    assert bool(site.monitor.restart_main) is main_runs
    assert (site.monitor._may_start(rollout), site.monitor._may_start(judge)) == (not main_runs, True)
    if main_runs:
        expected = "rollout-0 ended (it was killed), and the main role restarts with it"
        assert site.monitor.restart_main["summary"] == expected


@pytest.mark.parametrize(
    ("state", "awaited", "may_start"),
    [
        (instances.STARTING, "ready", False),
        (instances.READY, "ready", True),
        (instances.ENDED, "ready", True),
        (instances.UNRESPONSIVE, "ready", False),
        (instances.STARTING, "started", True),
        (instances.ENDED, "started", True),
        (instances.WAITING, "started", True),  # it is restarted
        (instances.REMOVED, "ready", True),
        (instances.FAILED, "ready", False),
    ],
)
def test_instance_starts_after_the_roles_that_it_follows(
    tmp_path: Path, state: str, awaited: str, may_start: bool
) -> None:
    site = RunningSite(tmp_path, role("rollout"), role("judge", after=(("rollout", awaited),)))
    rollout, judge = site.monitor._all()
    site.run(rollout, state)
    assert site.monitor._may_start(judge) is may_start
    judge.not_before = 1000.5
    assert not site.monitor._may_start(judge)


@pytest.mark.parametrize(
    ("state", "may_start"),
    [
        (instances.WAITING, False),
        (instances.STARTING, False),
        (instances.FAILED, False),
        (instances.ENDED, True),
    ],
)
def test_instance_without_an_address_has_not_started_unless_it_has_ended(
    tmp_path: Path, state: str, may_start: bool
) -> None:
    site = RunningSite(tmp_path, role("rollout"), role("judge", after=(("rollout", "started"),)))
    rollout, judge = site.monitor._all()
    site.run(rollout, state).host = ""
    assert site.monitor._may_start(judge) is may_start


def test_role_after_the_main_role_waits_for_its_start(tmp_path: Path) -> None:
    site = RunningSite(tmp_path, role("judge", after=(("trainer", "started"),)))
    assert not site.monitor._may_start(site.first)
    site.monitor.note_main_start()
    assert site.monitor._may_start(site.first)


def test_requests_per_second_follow_from_two_counts(tmp_path: Path, clock: SimpleNamespace) -> None:
    site = RunningSite(tmp_path, role("rollout"))
    rates = []
    for clock.now, count in ((1000.0, 100.0), (1000.0, 105.0), (1010.0, 160.0), (1020.0, 10.0)):
        monitor._note_load(site.first, {"waiting": 2.0, "requests": count})
        rates.append(site.first.load.get("requests_per_s"))
        assert site.first.load["waiting"] == 2.0
    assert rates == [None, None, 5.5, 0.0]  # a server that was started again counts from 0
