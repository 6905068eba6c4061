"""A whole attempt: the step, events during the step, and the record of its end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dtslurm.model import nodes
from dtslurm.worker.lib.node_blocklist import HOLDS_S, read_supervisor_notes, supervisor_file
from dtslurm.worker.supervisor import attempt_monitor, bad_nodes, lease, main, node, slurm, verdict
from dtslurm.worker.supervisor.attempts import AttemptEnd
from dtslurm.worker.supervisor.heartbeats import Heartbeats
from dtslurm.worker.supervisor.main import Supervisor
from tests.worker.conftest import slurm_requests
from tests.worker.test_supervisor_races import ASKED, ENDING, RUNNING, Clock, stamp


def begin(site: Path, step: str, *words: str) -> Supervisor:
    """Return the supervisor of a run whose attempt 0 may begin."""
    (site / "step.sh").write_text(step + "\n")
    (site / "logs/0").mkdir(parents=True)
    (site / "state").write_text(RUNNING)
    lease.take(str(site), 0)
    keeper = Supervisor([*ASKED, *words])
    keeper.nodes = ["n1", "n2"]
    return keeper


def attempt(
    keeper: Supervisor, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[float], object]
) -> AttemptEnd | None:
    """Run the attempt; its time passes as the watch over it sleeps, and meanwhile something happens."""
    now = Clock(meanwhile)
    monkeypatch.setattr(attempt_monitor, "time", now)
    monkeypatch.setattr(slurm, "measure_clock", lambda: None)
    return keeper.attempt(0, keeper.nodes)


def write_heartbeat(site: Path, name: str, kind: str) -> None:
    folder = site / "ranks/0/beats"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"kind": kind, "node": name, "time": time.time()}))


def test_f40_replaced_attempt_ends_without_a_record(
    site: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keeper = begin(site, "exec sleep 600")
    assert attempt(keeper, monkeypatch, lambda _now: lease.take(str(site), 1)) is None
    assert "attempt 0 ends: a later attempt has taken over" in capfd.readouterr().out
    assert keeper.ledger.events("attempt_ended") == []


def test_f40_attempt_replaced_at_its_end_writes_no_record(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = begin(site, f"echo 1 >{site}/attempt; exit 1")
    assert attempt(keeper, monkeypatch, lambda _now: None) is None
    assert keeper.ledger.events("attempt_ended") == []


def test_f34_stop_file_ends_an_attempt(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "CANCEL_S", 0.2)
    keeper = begin(site, "exec sleep 600")
    ended = attempt(keeper, monkeypatch, lambda _now: (site / "stop").touch())
    assert ended is not None
    assert (ended.cause, ended.blame, ended.summary) == ("cancelled", "user", "the file 'stop' exists")
    [result] = keeper.ledger.events("attempt_ended")
    assert (result["cause"], result["exit_code"]) == ("cancelled", 143)


def test_f34_cancelled_job_has_time_to_save_before_slurm_ends_it(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = begin(
        site, f"until [ -e {site}/told ]; do sleep 0.1; done; sleep 1; touch {site}/saved; exit 143"
    )
    asked: list[list[str]] = []

    def call(words: list[str]) -> tuple[int, str]:
        asked.append(words)
        keeper._note_term_signal(15, None)
        (site / "told").touch()
        return 0, ""

    monkeypatch.setattr(slurm, "call", call)
    ended = attempt(keeper, monkeypatch, lambda _now: (site / "stop").touch())
    assert ended is not None
    assert (ended.cause, ended.exit_code) == ("cancelled", 143)
    assert (site / "saved").exists()
    assert keeper._end(143) == 143  # and asks for no second cancel
    assert asked == [["scancel", "17"]]


def test_f29_attempt_with_a_total_time_ends_before_the_time_limit_of_the_job(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = begin(site, "exec sleep 600", "--total-time=7200")
    keeper.limit_at = time.time() + 10
    ended = attempt(keeper, monkeypatch, lambda _now: None)
    assert ended is not None
    assert (ended.cause, ended.summary) == ("time-limit", "the job's time limit is near")


SAVES = "until [ -e {0}/told ]; do sleep 0.1; done; sleep 1; touch {0}/saved; exit {1}"


@pytest.mark.parametrize("code", [0, 143])
def test_ranks_may_save_before_a_requested_restart_and_are_not_done_if_they_end_with_0(
    site: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    keeper = begin(site, SAVES.format(site, code))
    asked: list[list[str]] = []

    def call(words: list[str]) -> tuple[int, str]:
        asked.append(words)
        (site / "told").touch()
        return 0, ""

    monkeypatch.setattr(slurm, "call", call)
    ended = attempt(keeper, monkeypatch, lambda _now: (site / "restart").write_text("0\n"))
    assert ended is not None
    assert (ended.cause, ended.blame, ended.exit_code) == ("restart-request", "user", code)
    assert (site / "saved").exists()
    assert asked == [["scancel", "--signal=TERM", "17"]]
    assert not (site / "done").exists()
    [result] = keeper.ledger.events("attempt_ended")
    assert (result["cause"], result["summary"]) == ("restart-request", "the user requested a restart")


def test_requested_restart_spares_the_servers_of_other_roles(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = begin(site, "exec sleep 600")
    keeper.roles = Mock(problem=dict, await_problem=dict, variables=dict, plan=Mock(main="trainer"))
    keeper.roles.await_main_start.return_value = {}
    monkeypatch.setattr(slurm, "call", lambda words: pytest.fail(f"the whole job is told: {words}"))
    ended = attempt(keeper, monkeypatch, lambda _now: (site / "restart").write_text("0\n"))
    assert ended is not None
    assert (ended.cause, ended.exit_code) == ("restart-request", 143)
    keeper.roles.ignore_ends.assert_not_called()


def test_attempt_without_a_total_time_runs_past_the_early_end(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = begin(site, f"until [ -e {site}/go ]; do sleep 0.01; done")
    keeper.limit_at = time.time() + 10
    ended = attempt(keeper, monkeypatch, lambda now: (site / "go").touch() if now > 20 else None)
    assert ended is not None
    assert ended.cause == "done"


def test_remaining_ranks_are_ended_after_a_rank_has_failed(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = begin(site, "exec sleep 600")
    (site / "ranks/0").mkdir(parents=True)
    seen: list[float] = []

    def meanwhile(now: float) -> None:
        seen.append(now)
        if now == 10:
            (site / "ranks/0/first-failure").write_text("1 3\n")

    ended = attempt(keeper, monkeypatch, meanwhile)
    assert ended is not None
    assert (ended.cause, ended.rank, ended.exit_code) == ("exit-code", 1, 143)
    assert ended.summary == "rank 1 ended with 3"
    assert 10 + attempt_monitor.OTHERS_END_S < seen[-1] < 10 + attempt_monitor.OTHERS_END_S + 5


@pytest.mark.parametrize("words", ["1 85\n", "half", ""])
def test_checkpointed_rank_that_requests_a_restart_is_not_a_failure(
    site: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    keeper = begin(site, f"until [ -e {site}/go ]; do sleep 0.01; done; exit 85")
    (site / "ranks/0").mkdir(parents=True)
    (site / "ranks/0/first-failure").write_text(words)
    ended = attempt(keeper, monkeypatch, lambda now: (site / "go").touch() if now > 60 else None)
    assert ended is not None
    assert (ended.cause, ended.exit_code) == ("checkpointed", 85)


def test_f30_ranks_may_save_after_slurm_sends_term(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = begin(site, f"until [ -e {site}/go ]; do sleep 0.01; done; exit 143")

    def meanwhile(now: float) -> None:
        if now == 5:
            keeper._note_term_signal(15, None)
            (site / "ranks/0/first-failure").write_text("1 143\n")
        if now > 60:
            (site / "go").touch()

    ended = attempt(keeper, monkeypatch, meanwhile)
    assert ended is not None
    assert (ended.cause, ended.summary) == ("preempted", "the job received TERM")
    assert len(keeper.ledger.events("signalled")) == 1


# ---- Whose fault it was ----


def final_cause(
    keeper: Supervisor, monkeypatch: pytest.MonkeyPatch, cause: str, code: int = 1
) -> dict[str, Any]:
    monkeypatch.setattr(verdict, "verdict_on", lambda *_: {"cause": cause})
    (Path(keeper.run_dir) / "ranks/0").mkdir(parents=True, exist_ok=True)
    return keeper._cause(0, code, Heartbeats(f"{keeper.run_dir}/ranks/0"), keeper.nodes)


def test_f43_down_node_explains_a_secondary_failure(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = begin(site, "")
    (site / "state").write_text(RUNNING + "NodeName=n2 State=DOWN+NOT_RESPONDING ThreadsPerCore=1\n")
    result = final_cause(keeper, monkeypatch, "collective-timeout")
    assert (result["cause"], result["node"], keeper.lost) == ("node-failure", "n2", ["n2"])
    assert result["summary"].startswith("node n2 is DOWN")


def test_f32_code_error_is_the_cause_when_a_node_is_also_down(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = begin(site, "")
    (site / "state").write_text(RUNNING + "NodeName=n2 State=DOWN+NOT_RESPONDING ThreadsPerCore=1\n")
    assert final_cause(keeper, monkeypatch, "gpu-out-of-memory") == {"cause": "gpu-out-of-memory"}
    assert keeper.lost == []


def test_step_with_the_slurm_state_timeout_reached_its_time_limit(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = begin(site, "")
    (site / "state").write_text(RUNNING.replace("RUNNING", "TIMEOUT"))
    assert final_cause(keeper, monkeypatch, "killed", 143)["cause"] == "time-limit"


# ---- After an end by force ----


def farewell_wait(
    keeper: Supervisor, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[float], object]
) -> float:
    """Return how long the nodes are waited for."""
    now = Clock(meanwhile)
    monkeypatch.setattr(main, "time", now)
    beats = Heartbeats(f"{keeper.run_dir}/ranks/0", clock=now.monotonic)
    keeper._farewells(beats, 0)
    return now.now


def test_f48_supervisor_waits_for_farewells_of_all_nodes(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = begin(site, "")
    write_heartbeat(site, "n1", "bye")
    write_heartbeat(site, "n2", "beat")
    waited = farewell_wait(
        keeper, monkeypatch, lambda now: write_heartbeat(site, "n2", "bye" if now > 2 else "beat")
    )
    assert 2 < waited < 2.5


def test_f48_supervisor_stops_waiting_for_a_node_without_heartbeats(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = begin(site, "")
    write_heartbeat(site, "n2", "beat")
    waited = farewell_wait(keeper, monkeypatch, lambda _now: None)
    assert node.BEAT_S < waited < main.FAREWELL_S
    keeper.lost = ["n2"]
    assert farewell_wait(keeper, monkeypatch, lambda _now: None) == 0.0


def test_f48_supervisor_waits_a_limited_time_for_a_node_that_keeps_running(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = begin(site, "")
    write_heartbeat(site, "n2", "beat")
    waited = farewell_wait(keeper, monkeypatch, lambda _now: write_heartbeat(site, "n2", "beat"))
    assert waited == pytest.approx(main.FAREWELL_S, abs=0.3)


# ---- What follows ----


@pytest.mark.parametrize("cause", ["health", "array", "no cluster", "foreign"])
def test_excluded_node_is_recorded_in_the_run_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    run = tmp_path / "root/run"
    place = run / "tasks/3" if cause == "array" else run
    place.mkdir(parents=True)
    (run / "job.json").write_text("{}" if cause == "no cluster" else '{"schema": 1, "cluster": "ours"}')
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    if cause == "array":
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    path = Path(supervisor_file(str(tmp_path / "root")))
    if cause == "foreign":
        path.touch()
        path.chmod(0o666)
    bad_nodes.note(str(place), "n2", "health: gpus: \x1b[1m7 of 8", 1000.5)
    if cause in {"no cluster", "foreign"}:
        assert not path.exists() or path.read_text() == ""
        return
    assert path.stat().st_mode & 0o777 == 0o600
    [note] = nodes.parse_notes(read_supervisor_notes([str(tmp_path / "root")]), 2000.0)
    assert (note.node, note.job, note.when) == ("n2", "17" if cause == "array" else "18", 1000.5)
    assert path.read_text() == nodes.format_note(replace(note, reason="health: gpus: \x1b[1m7 of 8")) + "\n"


def test_f43_bad_node_is_recorded_and_the_run_continues_without_the_node(
    site: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keeper = begin(site, "")
    (site / "job.json").write_text('{"schema": 1, "cluster": "ours"}')
    end = AttemptEnd(
        0, 1, "node-failure", blame="node", node="n2", summary="node n2 is DOWN", progressed=True
    )
    assert keeper.judged(end, []).action == "requeue"
    [result] = keeper.ledger.events("node_excluded")
    assert (result["node"], result["reason"]) == ("n2", "node n2 is DOWN")
    [note] = nodes.parse_notes(read_supervisor_notes([str(site.parent)]), time.time())
    assert (note.node, note.cluster, note.reason) == ("n2", "ours", "node n2 is DOWN")
    assert (note.job, note.when, note.expires) == ("17", result["time"], result["time"] + HOLDS_S)
    assert keeper.healthy() == ["n1"]
    said = capfd.readouterr().out
    assert "dtslurm: attempt 0 ended: node n2 is DOWN (node-failure)\n" in said


@pytest.mark.parametrize(
    ("total_time", "cause"), [(86400, "time-limit"), (0, "time-limit"), (86400, "killed")]
)
def test_run_with_a_total_time_stops_if_its_jobs_repeat_the_same_steps(
    site: Path, capfd: pytest.CaptureFixture[str], total_time: int, cause: str
) -> None:
    keeper = begin(site, "", f"--total-time={total_time}")
    history: list[AttemptEnd] = []
    decisions = []
    for attempt in range(4):
        metrics = site / "metrics" / str(attempt)
        metrics.mkdir(parents=True)
        lines = [json.dumps({"step": step}) for step in range(1, 100 + attempt)]
        (metrics / "train.jsonl").write_text("\n".join(lines))
        end = AttemptEnd(attempt, 143, cause, progressed=keeper.ledger.progressed(attempt), rank=attempt)
        decisions.append(keeper.judged(end, history))
        history.append(end)
    said = capfd.readouterr().out
    assert said.count("began again at step 1") == (3 if (total_time, cause) == (86400, "time-limit") else 0)
    assert decisions[-1].reason == "3 consecutive attempts made no progress"
    assert (decisions[-1].action, decisions[-1].exit_code) == ("stop", 93)


def test_f45_node_of_a_repeated_hang_is_excluded_from_its_run_alone(site: Path) -> None:
    keeper = begin(site, "")
    (site / "job.json").write_text('{"schema": 1, "cluster": "ours"}')
    hang = AttemptEnd(0, 1, "hang", rank=1, node="n2", summary="no rank wrote output", progressed=True)
    assert keeper.judged(hang, []).action == "restart"
    assert keeper.ledger.events("node_excluded") == []
    keeper.judged(hang._replace(attempt=1), [hang])
    [result] = keeper.ledger.events("node_excluded")
    assert (result["node"], result["suspected"]) == ("n2", True)
    assert keeper.healthy() == ["n1"]
    assert not any("no rank wrote output" in line for line in read_supervisor_notes([str(site.parent)]))


def test_f34_failed_requeue_is_reported_with_its_reason(
    site: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keeper = begin(site, "")
    (site / "state").write_text(ENDING + f"EndTime={stamp(0)}\n")
    assert not keeper.onward(0)
    [result] = keeper.ledger.events("onward")
    assert (result["done"], result["by"]) == (False, "requeue")
    assert "cancelled" in result["words"]
    assert f"dtslurm: the job could not be requeued: {result['words']}\n" in capfd.readouterr().out


# ---- The program ----


def test_supervisor_program_runs_the_step_and_exits(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "step.sh").write_text(f"echo >>{site}/starts\n")
    monkeypatch.setattr(sys, "argv", [str(site), *ASKED])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert (ended.value.code, (site / "starts").read_text()) == (0, "\n")
    assert slurm_requests(site) == []
