"""The supervisor's pure parts: restart policy, lease, heartbeats and attempt history."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.supervisor import lease, node
from dtslurm.worker.supervisor.agents import Agents
from dtslurm.worker.supervisor.attempts import AttemptEnd, Ledger
from dtslurm.worker.supervisor.heartbeats import Heartbeats
from dtslurm.worker.supervisor.restart_policy import Decision, RecoveryOptions, decide
from tests.waiting import wait_until

NODES = ("n1", "n2", "n3")


def ended(cause: str, number: int = 0, **more: Any) -> AttemptEnd:
    return AttemptEnd(attempt=number, exit_code=1, cause=cause, **more)


def recovery_options(**more: Any) -> RecoveryOptions:
    values: dict[str, Any] = {"max_restarts": 3, "healthy": NODES, "wanted": 2, "requeue": True, **more}
    return RecoveryOptions(**values)


def decide_on(end: AttemptEnd, history: tuple[AttemptEnd, ...] = (), **more: Any) -> Decision:
    return decide(end, history, recovery_options(**more))


@pytest.mark.parametrize(
    ("cause", "blame", "action", "excluded"),
    [
        ("done", "unknown", "stop", ()),
        ("cancelled", "user", "stop", ()),
        ("python-exception", "code", "stop", ()),
        ("import-error", "user", "stop", ()),
        ("gpu-out-of-memory", "code", "stop", ()),
        ("host-out-of-memory", "user", "stop", ()),
        ("disk-full", "user", "stop", ()),
        ("gpu-fault", "code", "stop", ()),  # an assertion in a kernel
        ("my-own-signature", "user", "stop", ()),
        ("node-failure", "node", "restart", ("n2",)),
        ("gpu-fault", "node", "restart", ("n2",)),
        ("link-down", "site", "restart", ("n2",)),
        ("collective-timeout", "unknown", "restart", ()),
        ("hang", "unknown", "restart", ()),
        ("killed", "unknown", "restart", ()),
        ("segfault", "code", "restart", ()),
        ("exit-code", "code", "restart", ()),
        ("python-exception", "site", "restart", ()),  # a stale file handle
        ("checkpointed", "unknown", "requeue", ()),
        ("preempted", "site", "requeue", ()),
        ("time-limit", "user", "stop", ()),  # without --total-time
    ],
)
def test_restart_action_depends_on_the_cause(
    cause: str, blame: str, action: str, excluded: tuple[str, ...]
) -> None:
    decision = decide_on(ended(cause, blame=blame, node="n2"))
    assert (decision.action, tuple(decision.exclude)) == (action, excluded)
    assert decision.reason


def test_out_of_memory_stop_contains_the_advice() -> None:
    assert (
        "ask for more by --mem"
        in decide_on(ended("host-out-of-memory", advice="ask for more by --mem")).reason
    )


def test_total_time_allows_requeues_until_it_is_used() -> None:
    assert decide_on(ended("time-limit"), total_left=3600.0).action == "requeue"
    assert decide_on(ended("time-limit"), total_left=10.0).action == "stop"
    assert decide_on(ended("checkpointed"), total_left=10.0).action == "stop"


def test_job_is_requeued_without_the_bad_node_when_no_spare_node_exists() -> None:
    decision = decide_on(ended("node-failure", blame="node", node="n2"), healthy=("n1", "n2"))
    assert (decision.action, list(decision.exclude)) == ("requeue", ["n2"])


def test_elastic_job_shrinks_when_no_spare_node_exists() -> None:
    end = ended("node-failure", blame="node", node="n2")
    decision = decide_on(end, healthy=NODES, wanted=3, least=2)
    assert (decision.action, list(decision.exclude), decision.counted) == ("shrink", ["n2"], True)
    assert "continues on 2 of 3 nodes" in decision.reason
    assert decide_on(end, healthy=("n1", "n2"), wanted=3, least=2).action == "requeue"
    assert (
        decide_on(end, healthy=(*NODES, "n4"), wanted=3, least=2).action == "restart"
    )  # a spare one is there


def test_suspect_node_is_excluded_after_a_repeated_failure() -> None:
    first = ended("hang", node="n2", progressed=True, counted=True)
    assert list(decide_on(ended("hang", 1, node="n2", progressed=True), (first,)).exclude) == ["n2"]
    assert list(decide_on(ended("hang", 1, node="n1", progressed=True), (first,)).exclude) == []


def counted(*causes: str, blame: str = "unknown") -> tuple[AttemptEnd, ...]:
    return tuple(
        ended(cause, number, blame=blame, counted=True, progressed=True)
        for number, cause in enumerate(causes)
    )


@pytest.mark.parametrize(
    ("before", "cause", "action", "budget", "used"),
    [
        (("killed", "exit-code"), "segfault", "restart", "crashes", 3),
        (("killed", "exit-code", "killed"), "segfault", "stop", "crashes", 3),
        (("killed", "exit-code", "killed"), "unknown", "stop", "crashes", 3),
        (("killed", "exit-code", "killed"), "hang", "restart", "hangs and time-outs", 1),
        (("killed", "exit-code", "killed"), "node-failure", "restart", "node faults", 1),
        (("node-failure", "gpu-fault", "link-down"), "killed", "restart", "crashes", 1),
        (("node-failure", "gpu-fault", "link-down"), "bus-error", "stop", "node faults", 3),
        (("hang", "collective-timeout", "rendezvous"), "hang", "stop", "hangs and time-outs", 3),
        (("hang", "node-failure", "killed"), "hang", "restart", "hangs and time-outs", 2),
    ],
)
def test_f33_each_failure_kind_has_a_separate_restart_budget(
    before: tuple[str, ...], cause: str, action: str, budget: str, used: int
) -> None:
    decision = decide_on(ended(cause, 3, progressed=True), counted(*before))
    assert (decision.action, decision.budget, decision.used, decision.of) == (action, budget, used, 3)
    assert decision.counted is (action == "restart")
    assert (f"all 3 restarts after {budget} are used up" == decision.reason) is (action == "stop")


@pytest.mark.parametrize("cause", ["checkpointed", "preempted", "time-limit"])
def test_f33_requeues_for_time_limit_or_preemption_use_no_restart(cause: str) -> None:
    crashed = counted("killed", "killed", "killed")
    decision = decide_on(ended(cause, 3, progressed=True), crashed, total_left=9e3)
    assert (decision.action, decision.counted, decision.budget) == ("requeue", False, "")
    history = tuple(ended(cause, number, progressed=True) for number in range(9))
    assert decide_on(ended("killed", 9, progressed=True), history).used == 1


def test_requested_restart_uses_no_restart_and_excludes_no_node() -> None:
    crashed = counted("killed", "killed", "killed")
    decision = decide_on(ended("restart-request", 3, node="n2", progressed=False), crashed)
    assert (decision.action, decision.counted, decision.budget) == ("restart", False, "")
    assert (list(decision.exclude), decision.wait_s) == ([], 0.0)


def test_f33_user_error_stops_the_run_without_a_restart() -> None:
    decision = decide_on(ended("python-exception", blame="code"), max_restarts=9)
    assert (decision.action, decision.counted, decision.budget) == ("stop", False, "")


@pytest.mark.parametrize("cause", ["killed", "hang", "node-failure"])
def test_f33_zero_max_restarts_stops_after_every_failure_kind(cause: str) -> None:
    decision = decide_on(ended(cause, node="n2"), max_restarts=0)
    assert (decision.action, decision.reason) == ("stop", "no restart is allowed")


@pytest.mark.parametrize("more", [{}, {"healthy": ("n1", "n2")}, {"wanted": 3, "least": 2}])
def test_f33_node_failure_uses_a_restart_for_every_kind_of_recovery(more: dict[str, Any]) -> None:
    decision = decide_on(
        ended("node-failure", 1, node="n2", progressed=True), counted("node-failure"), **more
    )
    assert (decision.counted, decision.budget, decision.used) == (True, "node faults", 2)


def test_f33_attempts_without_progress_stop_the_run() -> None:
    history = tuple(ended("preempted", number, progressed=False) for number in range(2))
    stopped = decide_on(ended("preempted", 2, progressed=False), history)
    assert (stopped.action, stopped.exit_code) == ("stop", 93)
    further = decide_on(ended("preempted", 2, progressed=True), history)
    assert (further.action, further.exit_code) == ("requeue", None)
    unknown = tuple(ended("killed", number, rank=3, counted=True) for number in range(2))
    assert "made no progress" in decide_on(ended("killed", 2, rank=3), unknown).reason
    assert decide_on(ended("killed", 2, rank=1), unknown).action == "restart"


def test_restart_delay_doubles_with_repeated_failures() -> None:
    rows = [ended("killed", number, rank=number, counted=True) for number in range(4)]
    waits = [decide_on(rows[number], tuple(rows[:number]), max_restarts=9).wait_s for number in range(4)]
    assert waits == [0.0, 10.0, 20.0, 40.0]


# ---- the ledger ----


def test_f36_attempt_numbers_increase_and_are_never_reused(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    assert [ledger.begin(), ledger.begin()] == [0, 1]
    (tmp_path / "logs" / "7").mkdir()
    assert Ledger(str(tmp_path)).begin() == 8


def test_attempt_history_is_read_after_a_restart_of_the_supervisor(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    ledger.event("attempt_ended", 0, exit_code=137, cause="killed", rank=1, node="n2", progressed=True)
    ledger.event("decision", 0, action="restart", counted=True)
    ledger.event("node_excluded", 0, node="n2", reason="it went away")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "event": "attem')  # a line cut off by a crash
    again = Ledger(str(tmp_path))
    assert [(item.cause, item.rank, item.counted) for item in again.history()] == [("killed", 1, True)]
    assert again.excluded() == ["n2"]


def test_progress_is_a_step_that_no_earlier_attempt_reached(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    for attempt, steps in enumerate(([1, 2, 3], [2, 3], [3, 4])):
        folder = tmp_path / "metrics" / str(attempt)
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    assert [ledger.progressed(attempt) for attempt in range(3)] == [True, False, True]
    assert ledger.progressed(3) is None


def test_f66_changed_checkpoint_counts_as_progress_with_any_clock(tmp_path: Path) -> None:
    ledger, folder = Ledger(str(tmp_path)), tmp_path / "checkpoints"
    ledger.note_checkpoints(0)
    assert ledger.progressed(0) is None  # no checkpoint at all tells nothing
    folder.mkdir()
    for attempt, seconds in enumerate((5000, 1000)):  # the second node's clock is behind
        ledger.note_checkpoints(attempt)
        (folder / f"step-{attempt}").touch()
        os.utime(folder / f"step-{attempt}", (seconds, seconds))
        assert ledger.progressed(attempt) is True
    ledger.note_checkpoints(2)
    assert ledger.progressed(2) is False
    os.utime(folder / "step-1", (900, 900))  # written anew under its name
    assert ledger.progressed(2) is True


# ---- the lease ----


def test_f40_later_attempt_takes_the_lease_permanently(tmp_path: Path) -> None:
    run = str(tmp_path)
    assert lease.take(run, 0)
    assert lease.take(run, 1)
    assert not lease.holds(run, 0)
    assert not lease.take(run, 0)
    assert lease.holder(run) == 1


def test_f34_stop_file_of_an_array_applies_to_its_tasks(tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "3"
    task.mkdir(parents=True)
    assert not lease.stopped(str(task))
    (tmp_path / "stop").touch()
    assert lease.stopped(str(task))
    assert lease.stopped(str(tmp_path))


# ---- signs of life ----


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def beat(ranks: Path, node: str, kind: str, count: int) -> None:
    (ranks / "beats").mkdir(exist_ok=True)
    text = json.dumps({"kind": kind, "node": node, "time": count, "ranks": {"0": {"cpu": 1.0}}})
    (ranks / "beats" / f"{node}.json").write_text(text)


def test_f41_node_is_lost_when_its_heartbeats_stop_without_a_farewell(tmp_path: Path) -> None:
    clock = Clock()
    beats = Heartbeats(str(tmp_path), 15.0, clock)
    for count in range(8):
        beat(tmp_path, "n1", "beat", count)
        beat(tmp_path, "n2", "beat", min(count, 2))
        beat(tmp_path, "n3", "beat" if count < 2 else "bye", min(count, 2))
        beats.look()
        assert beats.silent(15.0) == (["n2"] if clock.now > 1000 + 6 + 15 else [])
        clock.now += 3.0
    assert beats.silent(15.0) == ["n2"]
    assert beats.without_farewell() == ["n1", "n2"]


def lost_node_after_silence(tmp_path: Path, silent: set[str], seconds: int, stall_at: int = -1) -> str | None:
    """Return the node that is lost when some give no more signs for so long, read every second."""
    clock = Clock()
    beats = Heartbeats(str(tmp_path), 10.0, clock)
    agents = Agents(beats, lambda _name: None)
    for second in range(seconds):
        for name in ("n1", "n2", "n3"):
            beat(tmp_path, name, "beat", 0 if name in silent else second)
        if second == stall_at:
            clock.now += 30.0
        beats.look()
        agents.look()
        if agents.lost():
            return agents.lost()
        clock.now += 1.0
    return None


def test_f87_node_with_a_restarting_agent_is_not_lost(tmp_path: Path) -> None:
    clock = Clock()
    beats = Heartbeats(str(tmp_path), 10.0, clock)
    started: list[tuple[str, float]] = []
    agents = Agents(beats, lambda name: started.append((name, clock.now - 1000)))
    back: list[str] = []
    for second in range(120):
        beat(tmp_path, "n1", "beat", second)
        if second == 0:
            beat(tmp_path, "n2", "beat", 0)
        if second == 9:
            (tmp_path / "beats/n2.log").write_text("srun: error: of no importance\nstarted\n")
        if second == 100:
            record = {"kind": "beat", "node": "n2", "time": 100, "restarted": True, "ranks": {}}
            (tmp_path / "beats/n2.json").write_text(json.dumps(record))
        beats.look()
        back += agents.look()
        assert agents.lost() is None
        clock.now += 1.0
    assert [name for name, _ in started][:2] == ["n2", "n2"]  # the first one is not waited for for ever
    assert started[0][1] <= 6
    assert started[1][1] - started[0][1] >= 60
    assert back == ["n2"]


def test_f87_silent_rack_starts_few_agents_at_once(tmp_path: Path) -> None:
    clock = Clock()
    beats = Heartbeats(str(tmp_path), 10.0, clock)
    started: list[str] = []
    agents = Agents(beats, started.append)
    for second in range(30):
        beat(tmp_path, "n0", "beat", second)
        for number in range(1, 40 if second == 0 else 1):
            beat(tmp_path, f"n{number}", "beat", 0)
        beats.look()
        agents.look()
        clock.now += 1.0
    assert len(started) == 4
    assert agents.lost() in started
    assert agents.words("n1") == ""


def test_f41_silence_of_all_nodes_at_once_is_blamed_on_the_file_system(tmp_path: Path) -> None:
    assert lost_node_after_silence(tmp_path, {"n2"}, 15) == "n2"
    assert lost_node_after_silence(tmp_path, {"n1", "n2", "n3"}, 30) is None
    assert (
        lost_node_after_silence(tmp_path, {"n1", "n2", "n3"}, 60) == "n1"
    )  # it lasts: better to start again


def test_f41_stalled_supervisor_blames_no_node(tmp_path: Path) -> None:
    assert lost_node_after_silence(tmp_path, set(), 20, stall_at=5) is None
    assert lost_node_after_silence(tmp_path, {"n2"}, 9, stall_at=5) is None


def test_remaining_rank_processes_of_the_node_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    env = {"DTSLURM_RUN_DIR": "/run/of/this/test", "DTSLURM_ATTEMPT": "3", "SLURM_PROCID": "0"}
    running = [
        subprocess.Popen(["sleep", "100"], env={**env, "SLURMD_NODENAME": name, **more})
        for name, more in (("n1", {}), ("n2", {}), ("n1", {"DTSLURM_ATTEMPT": "2"}))
    ]
    try:
        # Until a program has begun, its environment cannot be read.
        wait_until(lambda: all("DTSLURM_RUN_DIR" in node.environment_of(item.pid) for item in running))
        assert node.find_rank_processes("/run/of/this/test", 3) == [running[0].pid]
        running[0].kill()
        running[0].wait()
        assert node.find_rank_processes("/run/of/this/test", 3) == []
    finally:
        for item in running:
            item.kill()
            item.wait()


def test_f41_node_of_the_supervisor_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    assert lost_node_after_silence(tmp_path, {"n2"}, 60) is None


def test_supervisor_parses_as_python_3_6() -> None:
    folder = Path(lease.__file__).parent
    for path in folder.glob("*.py"):
        ast.parse(path.read_text(), str(path), feature_version=(3, 6))
        assert "from __future__ import annotations" not in path.read_text(), path
