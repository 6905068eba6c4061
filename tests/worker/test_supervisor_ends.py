"""The end of training, when Slurm, a lost node or another start of the job makes the end uncertain."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest

from dtslurm.worker.supervisor import files, lease, slurm
from dtslurm.worker.supervisor.heartbeats import Heartbeats
from dtslurm.worker.supervisor.main import Supervisor

ASKED = ["--nodes=2", "--world-size=2"]


def write_rank_ends(site: Path, *ends: Mapping[str, object]) -> None:
    """Leave the records of attempt 0's ranks: each ended with 0, but for what is told otherwise."""
    (site / "ranks/0").mkdir(parents=True)
    for rank, end in enumerate(ends):
        values = {"rank": rank, "host": f"n{rank + 1}", "exit_code": 0, **end}
        (site / f"ranks/0/{rank}.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("codes", "exit_code", "cause"),
    [((0, 0), None, "done"), ((0, 0), 15, "preempted"), ((0, 3), None, "killed"), ((0,), None, "killed")],
)
def test_attempt_is_done_when_every_rank_finished_although_the_step_failed(
    site: Path, codes: tuple[int, ...], exit_code: int | None, cause: str
) -> None:
    (site / "step.sh").write_text("exit 137\n")  # srun, when its stepd was killed and the ranks went on
    (site / "logs/0").mkdir(parents=True)
    write_rank_ends(site, *({"exit_code": code} for code in codes))
    keeper = Supervisor(ASKED)
    keeper.nodes = ["n1", "n2"]
    lease.take(str(site), 0)
    if exit_code is not None:
        keeper.term_at = exit_code
    ended = keeper.attempt(0, keeper.nodes)
    assert ended is not None
    assert (ended.cause, ended.exit_code) == (cause, 0 if cause == "done" else 137)
    assert lease.finished(str(site)) == (cause == "done")


@pytest.mark.parametrize(
    ("codes", "cause", "code"),
    [
        ((85, 85), "checkpointed", 85),
        ((85, 0), "killed", 137),
        ((85,), "killed", 137),
        ((85, 3), "killed", 137),
    ],
)
def test_attempt_is_checkpointed_when_every_rank_saved_although_slurm_killed_the_step(
    site: Path, codes: tuple[int, ...], cause: str, code: int
) -> None:
    """Slurm kills a rank's shell that takes longer than KillWait to end after its training code has ended."""
    (site / "step.sh").write_text("exit 137\n")
    (site / "logs/0").mkdir(parents=True)
    write_rank_ends(site, *({"exit_code": rank_code, "told_to_end": True} for rank_code in codes))
    lease.take(str(site), 0)
    ended = Supervisor(ASKED).attempt(0, ["n1", "n2"])
    assert ended is not None
    assert (ended.cause, ended.exit_code) == (cause, code)
    assert not lease.finished(str(site))


def test_ranks_that_saved_because_the_supervisor_ended_them_do_not_change_the_exit_code(
    site: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (site / "logs/0").mkdir(parents=True)
    write_rank_ends(site, {"exit_code": 85, "told_to_end": True}, {"exit_code": 85, "told_to_end": True})
    lease.take(str(site), 0)
    keeper = Supervisor(ASKED)
    ended = keeper._record_end(0, 143, {"cause": "hang"}, Heartbeats(str(site / "ranks/0")), ["n1", "n2"])
    assert ended is not None
    assert (ended.cause, ended.exit_code) == ("hang", 143)
    assert "Slurm killed the step" not in capfd.readouterr().out


def test_rank_that_exited_with_0_after_a_termination_request_is_not_done(site: Path) -> None:
    (site / "step.sh").write_text("exit 137\n")  # srun tells the other ranks to end when a node is lost
    (site / "logs/0").mkdir(parents=True)
    write_rank_ends(site, {}, {"told_to_end": True})
    lease.take(str(site), 0)
    ended = Supervisor(ASKED).attempt(0, ["n1", "n2"])
    assert ended is not None
    assert (ended.cause, lease.finished(str(site))) == ("killed", False)


@pytest.mark.parametrize(
    ("ends", "later", "done"),
    [
        (({}, {}), [], True),
        (({}, {"exit_code": 3}), [], False),
        (({},), [], False),
        (({}, {"told_to_end": True}), [], False),
        (({}, {}), [{"event": "requeue"}], False),
        (({}, {}), [{"event": "attempt_ended", "attempt": 0, "cause": "preempted"}], False),
    ],
)
def test_n3_completed_training_is_not_repeated_after_slurm_ended_the_job(
    site: Path, ends: tuple[dict[str, object], ...], later: list[dict[str, object]], done: bool
) -> None:
    (site / "step.sh").write_text(f"echo >>{site}/starts\n")
    (site / "logs/0").mkdir(parents=True)
    write_rank_ends(site, *ends)
    begun = {"time": time.time(), "event": "attempt", "attempt": 0, "world_size": 2}
    (site / "events.jsonl").write_text("".join(json.dumps(item) + "\n" for item in [begun, *later]))
    assert Supervisor(ASKED).run() == 0
    assert (site / "starts").exists() is not done
    assert lease.finished(str(site))
    if done:
        last = [item for item in Supervisor(ASKED).ledger.events("attempt_ended") if item["attempt"] == 0]
        assert [(item["cause"], item["exit_code"]) for item in last] == [("done", 0)]


@pytest.mark.parametrize(("exit_code", "state"), [(15, "RUNNING"), (None, "PENDING"), (None, "COMPLETING")])
def test_training_that_exits_with_0_during_a_requeue_is_not_finished(
    site: Path, exit_code: int | None, state: str
) -> None:
    (site / "step.sh").write_text("exit 0\n")
    (site / "logs/0").mkdir(parents=True)
    (site / "state").write_text(f"JobId=17 JobState={state} Comment=dtslurm:abc:def\n")
    keeper = Supervisor(ASKED)
    keeper.term_at = exit_code
    lease.take(str(site), 0)
    ended = keeper.attempt(0, ["n1", "n2"])
    assert ended is not None
    assert ended.cause == "done"
    assert not lease.finished(str(site))


def test_n2_end_of_training_waits_for_a_controller_that_is_down(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "step.sh").write_text("exit 0\n")
    (site / "logs/0").mkdir(parents=True)
    lease.take(str(site), 0)
    answers = [
        ({}, "Socket timed out on send/recv operation"),
        ({}, "Unable to contact slurm controller"),
        ({"JobState": "RUNNING"}, ""),
    ]
    monkeypatch.setattr(slurm, "_request_job", lambda _patience=0: answers.pop(0))
    assert Supervisor(ASKED).attempt(0, ["n1", "n2"]) is not None
    assert (lease.finished(str(site)), answers) == (True, [])


def test_n4_killed_supervisor_leaves_the_end_of_training_to_the_rank_records(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1,n2")
    (site / "step.sh").write_text(f"echo >>{site}/starts\n")
    write_rank_ends(site, {}, {})
    keeper = Supervisor(ASKED)

    def killed(*_: object) -> None:
        raise SystemExit(137)

    with monkeypatch.context() as patched:
        patched.setattr(slurm, "new_start", killed)
        with pytest.raises(SystemExit):
            keeper.run()
    assert Supervisor(ASKED).run() == 0
    assert (site / "starts").read_text() == "\n"


@pytest.mark.parametrize(
    ("state", "node", "done"),
    [
        ("JobState=PENDING Reason=None Restarts=0", "", True),  # the controller forgot this start
        ("JobState=PENDING Reason=BeginTime Restarts=1", "", False),
        ("JobState=COMPLETING Reason=None Restarts=0", "", False),  # somebody wants another one
        ("JobState=PENDING Reason=launch_failed_requeued_held Restarts=1", "", True),
        ("JobState=PENDING Reason=BeginTime Restarts=1", "NodeName=n1 State=DOWN*", True),
        ("JobState=PENDING Reason=BeginTime Restarts=1", "NodeName=n1 State=IDLE", False),
    ],
)
def test_n2_n3_only_a_requested_requeue_leaves_training_unfinished(
    site: Path, state: str, node: str, done: bool
) -> None:
    (site / "step.sh").write_text("exit 0\n")
    (site / "logs/0").mkdir(parents=True)
    (site / "state").write_text(f"JobId=17 {state} Comment=dtslurm:abc:def\n{node}\n")
    lease.take(str(site), 0)
    assert Supervisor(ASKED).attempt(0, ["n1", "n2"]) is not None
    assert lease.finished(str(site)) is done


def test_job_requeued_after_completed_training_starts_no_attempt(
    site: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (site / "step.sh").write_text(f"echo >>{site}/starts\n")
    assert Supervisor(ASKED).run() == 0
    assert Supervisor(ASKED).run() == 0
    assert (site / "starts").read_text() == "\n"
    assert "training is already complete" in capfd.readouterr().out
    (site / "done").unlink()  # as dtslurm requeue does
    assert Supervisor(ASKED).run() == 0
    assert (site / "starts").read_text() == "\n\n"


def test_n9_end_of_training_is_recorded_after_a_full_disk_recovers(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "step.sh").write_text("exit 0\n")
    (site / "logs/0").mkdir(parents=True)
    events = site / "events.jsonl"
    events.write_text('{"event": "half')
    full: list[Path] = []

    def put(path: str, text: str) -> None:
        if Path(path) not in full:
            full.append(Path(path))
            raise OSError(errno.ENOSPC, "No space left on device")
        Path(path).write_text(text)

    lease.take(str(site), 0)
    monkeypatch.setattr(lease, "write_atomically", put)
    events.rename(site / "kept")
    events.symlink_to("/dev/full")
    Timer(1.0, (site / "kept").replace, [events]).start()
    assert Supervisor(ASKED).attempt(0, ["n1", "n2"]) is not None
    assert lease.finished(str(site))
    ended = [item for item in Supervisor(ASKED).ledger.events("attempt_ended") if item["attempt"] == 0]
    assert [item["cause"] for item in ended] == ["done"]


def test_event_is_dropped_when_the_disk_stays_full(site: Path) -> None:
    (site / "events.jsonl").symlink_to("/dev/full")
    Supervisor(ASKED).ledger.event("ended", 0, exit_code=0, patience_s=0.3)
    (site / "events.jsonl").unlink()
    (site / "events.jsonl").mkdir()
    Supervisor(ASKED).ledger.event("ended", 0, exit_code=0, patience_s=100)  # no room would help


def test_n9_terminated_supervisor_does_not_wait_for_disk_space(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "step.sh").write_text("exit 143\n")
    (site / "logs/0").mkdir(parents=True)
    (site / "events.jsonl").symlink_to("/dev/full")
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waits"))
    monkeypatch.setattr(files, "time", clock)
    lease.take(str(site), 0)
    keeper = Supervisor(ASKED)
    keeper._note_term_signal(15, None)
    ended = keeper._record_end(0, 143, {"cause": "preempted"}, Heartbeats(str(site)), ["n1", "n2"])
    assert ended is not None
    assert ended.cause == "preempted"
