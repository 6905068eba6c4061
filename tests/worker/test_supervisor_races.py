"""Races: Slurm, the user or another copy of the run acts while the supervisor decides."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtslurm.worker.supervisor import lease, main, options, requeue, slurm, step
from dtslurm.worker.supervisor.attempts import AttemptEnd
from dtslurm.worker.supervisor.heartbeats import Heartbeats
from dtslurm.worker.supervisor.main import ASK_AGAIN_S, STALE, Supervisor
from tests.worker.conftest import slurm_requests

ASKED = ["--nodes=2", "--world-size=2"]
CHAINED = [*ASKED, "--go-on-by=afterany", "--script=/run/script.sbatch"]
RUNNING = "JobId=17 JobState=RUNNING Restarts=0 PreemptTime=None ExcNodeList=n[8-9] Comment=dtslurm:abc:def\n"
ENDING = RUNNING.replace("RUNNING", "COMPLETING")  # whatever it is ended for
LOST = "Socket timed out on send/recv operation\n"


def stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


class Clock:
    """The supervisor's own time: it passes when the supervisor sleeps, and then something happens."""

    def __init__(self, happens: Callable[[float], object]) -> None:
        self.now = 0.0
        self.happens = happens
        self.time = time.time

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 1e6, "it never stops"
        self.happens(self.now)


def clock(monkeypatch: pytest.MonkeyPatch, happens: Callable[[float], object]) -> Clock:
    made = Clock(happens)
    monkeypatch.setattr(main, "time", made)
    return made


# ---- Cancelled ----


@pytest.mark.parametrize("words", [ASKED, CHAINED])
def test_f34_job_in_cancellation_gets_no_requeue_or_successor(site: Path, words: list[str]) -> None:
    (site / "state").write_text(ENDING + f"EndTime={stamp(0)}\n")
    by, why = requeue.continue_job(options.read(words), str(site), [], time.time() + 3600)
    assert by == ""
    assert "cancelled" in why
    assert slurm_requests(site) == []


def test_f34_cancellation_is_distinguished_from_preemption_and_time_limit(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 600))
    keeper = Supervisor(ASKED)
    keeper.term_at = time.time()

    def cause(state: str) -> str:
        (site / "state").write_text(state)
        return str(keeper.from_outside(143)["cause"])

    assert cause(ENDING + f"EndTime={stamp(0)}\n") == "cancelled"
    assert cause(ENDING.replace("PreemptTime=None", f"PreemptTime={stamp(0)}")) == "preempted"
    assert cause(ENDING.replace("Restarts=0", "Restarts=1")) == "preempted"  # its owner requeued it
    keeper.limit_at = time.time()
    assert cause(ENDING + f"EndTime={stamp(1)}\n") == "time-limit"
    raised = f"StartTime={stamp(-60)} TimeLimit=1-00:05:00\n"
    assert cause(ENDING + f"EndTime={stamp(1)} {raised}") == "cancelled"
    lowered = f"StartTime={stamp(-60)} TimeLimit=00:01:00\n"
    assert cause(ENDING + f"EndTime={stamp(1)} {lowered}") == "time-limit"


def test_f38_no_requeue_job_that_ends_with_a_lost_node_was_not_cancelled(site: Path) -> None:
    ending = ENDING.replace("Restarts=0", "Requeue=0 Restarts=0")
    (site / "state").write_text(ending + "NodeName=n2 State=MIXED ThreadsPerCore=1\n")
    assert requeue.continue_job(options.read(CHAINED), str(site), [], None)[0] == ""
    (site / "state").write_text(ending + "NodeName=n2 State=DOWN+NOT_RESPONDING ThreadsPerCore=1\n")
    assert requeue.continue_job(options.read(CHAINED), str(site), [], None)[0] == "afterany"
    (site / "state").write_text((site / "state").read_text().replace("Requeue=0", "Requeue=1"))
    assert requeue.continue_job(options.read(CHAINED), str(site), [], None)[0] == ""


# ---- Answers that are lost ----


def test_f28_requeue_with_a_lost_answer_is_not_applied_twice(site: Path) -> None:
    (site / "state").write_text(RUNNING)
    (site / "refusals").write_text(LOST + "Job is pending execution for job 17\n")
    by, words = requeue.continue_job(options.read(ASKED), str(site), ["n2"], None)
    assert (by, words) == ("requeue", "Slurm had already requeued the job")
    assert slurm_requests(site) == ["requeue 17"] * 2 + ["update JobId=17 ExcNodeList=n[8-9],n2"]


def test_f28_nothing_is_requested_while_the_job_state_is_unknown(site: Path) -> None:
    (site / "state").write_text(RUNNING.replace("Restarts=0", "Restarts=1"))
    (site / "silence").write_text(LOST * 3)  # it has started anew meanwhile
    assert requeue.continue_job(options.read(ASKED), str(site), [], None)[0] == "requeue"
    assert slurm_requests(site) == []


def test_f28_excluded_nodes_of_the_user_are_retained_after_a_lost_answer(site: Path) -> None:
    (site / "state").write_text(RUNNING)
    (site / "silence").write_text(LOST)
    assert slurm.exclude(["n2"]) == (True, "")
    assert slurm_requests(site) == ["update JobId=17 ExcNodeList=n[8-9],n2"]


def test_f28_requeue_forgotten_by_a_killed_controller_is_requested_again(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "state").write_text(RUNNING)
    keeper = Supervisor(ASKED)
    # Slurm ends this copy at last.
    now = clock(
        monkeypatch, lambda now: keeper._note_term_signal(15, None) if now > 1.5 * ASK_AGAIN_S else None
    )
    assert keeper.onward(0)
    assert slurm_requests(site) == ["requeue 17"] * 2
    assert now.now < 2 * ASK_AGAIN_S


def test_supervisor_terminated_after_its_requeue_ends_at_once(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "state").write_text(RUNNING)
    keeper = Supervisor(ASKED)
    now = clock(monkeypatch, lambda _now: keeper._note_term_signal(15, None))
    assert keeper.onward(0)
    assert now.now < 1.0  # not until it is killed, which KillWait may put off for long


# ---- Successors ----


def test_f1_successor_with_a_lost_answer_takes_over_the_claim(site: Path) -> None:
    (site / "state").write_text(RUNNING)
    (site / "lost").write_text("sbatch: error: Batch job submission failed: " + LOST)
    (site / "queue").write_text("12 dtslurm:abc:def\n17 dtslurm:abc:def\n19 other\n20 (null)\n21\n")
    (site / "claim").symlink_to("job-17")
    by, words = requeue.continue_job(options.read(CHAINED), str(site), [], None)
    assert (by, (site / "claim").readlink()) == ("", Path("job-17"))
    assert "timed out" in words
    with (site / "queue").open("a") as file:
        file.write("18 dtslurm:abc:def\n")
    by, _ = requeue.continue_job(options.read(CHAINED), str(site), [], None)
    assert (by, (site / "claim").readlink()) == ("afterany", Path("job-18"))
    assert len(slurm_requests(site)) == 2  # one request each


def test_f40_job_requeued_by_slurm_gets_no_successor(site: Path) -> None:
    (site / "state").write_text(RUNNING.replace("Restarts=0", "Restarts=1"))
    assert requeue.continue_job(options.read(CHAINED), str(site), [], None)[0] == "requeue"
    assert slurm_requests(site) == []


def test_f38_supervisor_with_a_successor_releases_its_nodes_at_once(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "state").write_text(RUNNING)
    (site / "refusals").write_text("Requested operation is presently disabled for job 17\n")
    keeper = Supervisor([*ASKED, "--script=/run/script.sbatch"])
    clock(monkeypatch, lambda _now: pytest.fail("it waits for Slurm, which knows nothing"))
    assert keeper.onward(0)
    assert keeper.ledger.events("onward")[0]["by"] == "afterany"


# ---- In the pause before a restart ----


def after_a_crash(keeper: Supervisor, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> int:
    """Let a first attempt crash twice; do something in the pause, and return the job's exit code."""

    def attempt(number: int, _nodes: object) -> AttemptEnd:
        assert number < 2, "an attempt was made that must not be"
        keeper.ledger.event("attempt", number)
        keeper.ledger.event("attempt_ended", number, exit_code=1, cause="exit-code", progressed=True)
        return keeper.ledger.history()[-1]._replace(progressed=None)

    monkeypatch.setattr(keeper, "attempt", attempt)
    clock(monkeypatch, lambda _now: meanwhile())
    monkeypatch.setattr(keeper, "judged", pausing(keeper.judged))
    return keeper.run()


def pausing(judged: Callable[..., object]) -> Callable[..., object]:
    """Let each restart wait, the first too."""

    def longer(*words: object) -> object:
        made = judged(*words)
        return made._replace(wait_s=60.0) if made.action == "restart" else made  # type: ignore[attr-defined]

    return longer


def test_f25_preemption_during_a_restart_delay_requeues_the_job(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "state").write_text(RUNNING.replace("PreemptTime=None", f"PreemptTime={stamp(0)}"))
    keeper = Supervisor(ASKED)
    after_a_crash(keeper, monkeypatch, lambda: keeper._note_term_signal(15, None))
    assert slurm_requests(site) == ["requeue 17"]
    assert [item["action"] for item in keeper.ledger.events("decision")] == ["restart", "requeue"]


def test_f29_time_limit_during_a_restart_delay_requeues_a_job_with_a_total_time(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "state").write_text(RUNNING)
    keeper = Supervisor([*ASKED, "--total-time=86400"])

    def meanwhile() -> None:
        keeper.limit_at = time.time() + 20.0
        if slurm_requests(site):
            keeper._note_term_signal(15, None)

    after_a_crash(keeper, monkeypatch, meanwhile)
    assert slurm_requests(site) == ["requeue 17"]
    assert "time limit" in keeper.ledger.events("decision")[-1]["reason"]


def test_f40_supervisor_does_not_take_the_run_from_an_attempt_that_began_in_its_delay(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "state").write_text(RUNNING)
    keeper = Supervisor(ASKED)

    def meanwhile() -> None:
        if (site / "logs/1").exists():
            return
        assert keeper.ledger.begin() == 1
        assert lease.take(str(site), 1)
        keeper.ledger.event("attempt", 1)

    assert after_a_crash(keeper, monkeypatch, meanwhile) == STALE
    assert lease.holder(str(site)) == 1
    assert [item["attempt"] for item in keeper.ledger.events("attempt_ended")] == [0]  # the other's goes on


def test_f40_only_the_lease_holder_records_an_attempt_as_lost(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Supervisor([*ASKED, "--health-check"])
    keeper.ledger.begin()
    lease.take(str(site), 0)
    keeper.ledger.event("attempt", 0)

    def look(_supervisor: object) -> None:  # the other copy still trains, and its attempt ends
        assert keeper.ledger.events("attempt_ended") == []
        keeper.ledger.event("attempt_ended", 0, exit_code=1, cause="node-failure")

    monkeypatch.setattr("dtslurm.worker.supervisor.health.before_training", look)
    monkeypatch.setattr(keeper, "attempt", lambda _number, _nodes: None)
    assert keeper.run() == STALE
    assert [item.cause for item in keeper.ledger.history()] == ["node-failure"]
    assert lease.holder(str(site)) == 1


# ---- Before the time limit ----


def test_f39_ranks_receive_term_through_scancel(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = site / "bin/scancel"
    program.write_text(f'#!/bin/sh\necho "scancel $@" >>{site}/asked\n')
    program.chmod(0o700)
    assert slurm.tell_ranks()
    assert slurm_requests(site) == ["scancel --signal=TERM 17"]
    monkeypatch.setenv("SLURM_LOCAL_STATE", str(site))
    assert not slurm.tell_ranks()  # a job of that number on a real Slurm is another one
    assert len(slurm_requests(site)) == 1


@pytest.mark.parametrize("holder", [0, 1])
def test_f40_srun_of_a_replaced_supervisor_receives_no_term(tmp_path: Path, holder: int) -> None:
    # At TERM srun has Slurm end the step of its number: once the job has started anew, that is the new one's.
    result, there = tmp_path / "told", tmp_path / "there"
    script = f"trap 'touch {result}; exit 1' TERM; touch {there}; while :; do sleep 0.05; done\n"
    (tmp_path / "step.sh").write_text(script)
    (tmp_path / "logs/0").mkdir(parents=True)
    lease.take(str(tmp_path), holder)
    running = step.RunningStep(str(tmp_path), 0, ["n1"])
    while not there.exists():
        time.sleep(0.02)
    running.end(5.0)
    assert result.exists() == (holder == 0)


def test_step_refused_before_slurm_has_freed_resources_is_retried(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "srun: error: Unable to create step for job 17: Memory required by task is not available"
    (site / "step.sh").write_text(
        f"echo >>{site}/starts; [ $(wc -l <{site}/starts) -gt 2 ] || {{ echo '{words}'; exit 1; }}\n"
    )
    paused: list[float] = []
    keeper = Supervisor(ASKED)
    (site / "logs/0").mkdir(parents=True)
    lease.take(str(site), 0)
    monkeypatch.setattr(main, "time", Clock(paused.append))
    ended = keeper.attempt(0, ["n1", "n2"])
    assert ended is not None
    assert (ended.cause, paused) == ("done", [2.0, 6.0])


@pytest.mark.parametrize(
    ("state", "ends_in", "cause"),
    [
        (RUNNING.replace("PreemptTime=None", "PreemptTime=2026-11-20T10:00:00"), -1, "preempted"),
        (RUNNING, -1, "time-limit"),
        (ENDING, -900, "cancelled"),
        (RUNNING, 3600, "exit-code"),
    ],
)
def test_f90_step_refused_while_the_job_ends_is_not_a_crash(
    site: Path, monkeypatch: pytest.MonkeyPatch, state: str, ends_in: float, cause: str
) -> None:
    """Training that fails in the grace time of a preemption is restarted after the preemption."""
    words = "srun: error: Unable to create step for job 17: Job/step already completing or completed"
    (site / "step.sh").write_text(f"echo '{words}'; exit 1\n")
    (site / "state").write_text(f"{state}EndTime={stamp(ends_in)}\n")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 600))
    keeper = Supervisor(ASKED)
    (site / "logs/0").mkdir(parents=True)
    lease.take(str(site), 0)
    ended = keeper.attempt(0, ["n1", "n2"])
    assert ended is not None
    assert ended.cause == cause


@pytest.mark.parametrize("full", ["step.log", ""])
def test_n9_full_disk_under_the_step_log_does_not_end_the_launcher(site: Path, full: str) -> None:
    (site / "step.sh").write_text("for _ in {1..40}; do echo word; sleep 0.01; done; exit 3\n")
    (site / "logs").mkdir()
    if full:
        (site / "logs/0").mkdir()
        (site / "logs/0/step.log").symlink_to("/dev/full")
    started = step.RunningStep(str(site), 0, ["n1", "n2"])
    started.process.wait()
    assert started.finish() == 3


# ---- Nodes ----


def test_f43_node_with_a_rank_exit_record_was_not_lost(site: Path) -> None:
    keeper = Supervisor(ASKED)
    keeper.nodes = ["n1", "n2"]
    ranks = site / "ranks/0"
    (ranks / "beats").mkdir(parents=True)
    for name, kind in (
        ("n1", "bye"),
        ("n2", "beat"),
    ):  # Slurm may end the second one's watcher with its ranks
        (ranks / f"beats/{name}.json").write_text(json.dumps({"kind": kind, "node": name}))
    beats = Heartbeats(str(ranks))
    assert keeper._cause(0, 137, beats, keeper.nodes)["cause"] == "node-failure"
    keeper.lost.clear()
    (ranks / "1.json").write_text(json.dumps({"rank": 1, "host": "n2", "exit_code": 137, "signal": 9}))
    assert keeper._cause(0, 137, beats, keeper.nodes)["cause"] == "killed"
    assert keeper.lost == []


def test_f43_node_with_ranks_ended_by_force_was_not_lost(site: Path) -> None:
    keeper = Supervisor(ASKED)
    keeper.nodes = ["n1", "n2", "n3"]
    (site / "ranks/0/beats").mkdir(parents=True)
    now = [100.0]
    beats = Heartbeats(str(site / "ranks/0"), clock=lambda: now[0])

    def sign(name: str, kind: str) -> None:
        values = {"kind": kind, "node": name, "time": now[0]}
        (site / f"ranks/0/beats/{name}.json").write_text(json.dumps(values))
        beats.look()

    for name in keeper.nodes:
        sign(name, "beat")
    failed_at = now[0] = 103.0
    sign("n1", "bye")  # its rank has failed
    now[0] = 106.0
    sign("n2", "beat")  # its own waits for that one, and n3 is silent
    beats.mark_alive(failed_at)
    result = keeper._cause(0, 137, beats, keeper.nodes)
    assert (result["cause"], result["node"], keeper.lost) == ("node-failure", "n3", ["n3"])
    (site / "ranks/0/beats/n3.json").unlink()
    beats.last.pop("n3")
    assert keeper._cause(0, 137, beats, keeper.nodes)["cause"] == "killed"
