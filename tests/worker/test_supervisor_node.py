"""The agent beside a node's ranks: its heartbeats of real processes, and when it kills them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.supervisor import lease, node
from tests.waiting import wait_until
from tests.worker.test_supervisor_races import Clock


class Ranks:
    """Processes of an attempt's ranks on this machine, which plays the node n1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int | None, attempt: int = 0, node_id: str = "0") -> int:
        env = {"DTSLURM_RUN_DIR": str(self.folder), "DTSLURM_ATTEMPT": str(attempt), "SLURM_NODEID": node_id}
        env |= {} if rank is None else {"RANK": str(rank), "SLURM_PROCID": str(rank)}
        env["SLURMD_NODENAME"] = f"n{int(node_id) + 1}"
        process = subprocess.Popen(["sleep", "600"], env={**env, "PATH": os.environ["PATH"]})
        self.started.append(process)
        wait_until(lambda: "DTSLURM_RUN_DIR" in node.environment_of(process.pid))
        wait_until(lambda: node.status_of(process.pid).get("state") == "S" and node.bytes_of(process.pid))
        return process.pid

    def alive(self) -> list[int]:
        return [process.pid for process in self.started if process.poll() is None]

    def ended(self) -> list[int]:
        """How each has ended, once all have."""
        return [process.wait(60) for process in self.started]

    def told(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "ranks/0/beats/n1.json").read_text())
        return result


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    for name, value in {
        "DTSLURM_RUN_DIR": str(tmp_path),
        "DTSLURM_ATTEMPT": "0",
        "SLURM_NODEID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    (tmp_path / "ranks/0/beats").mkdir(parents=True)
    lease.take(str(tmp_path), 0)
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    made = Ranks(tmp_path)
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)
    for process in made.started:
        process.kill()
        process.wait()


def test_heartbeat_contains_the_processes_of_each_rank(ranks: Ranks) -> None:
    first, second = ranks.start(0), ranks.start(3)
    ranks.start(3)  # a data loader
    ranks.start(1, attempt=7)
    ranks.start(2, node_id="1")  # another node on the same machine
    ranks.start(None)  # a launcher's own
    (ranks.folder / "ranks/0/3.json").write_text(json.dumps({"pid": second}))
    (ranks.folder / "ranks/0/0.json").write_text(json.dumps({"pid": "?"}))
    watch = node.NodeAgent()
    watch.beat()
    result = ranks.told()
    assert (result["kind"], result["node"], sorted(result["ranks"])) == ("beat", "n1", ["0", "3"])
    assert (result["ranks"]["3"]["pid"], result["ranks"]["3"]["state"]) == (second, "S")
    assert "pid" not in result["ranks"]["0"]
    assert 0 < result["ranks"]["0"]["moved"] <= node.bytes_of(first)  # what it read to start
    assert result["ranks"]["3"]["moved"] > node.bytes_of(second)


def test_single_process_without_a_rank_number_is_reported_as_rank_0(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ranks.start(None)
    (ranks.folder / "ranks/0/0.json").write_text(json.dumps({"pid": alone}))
    node.NodeAgent().beat()
    assert ranks.told()["ranks"] == {}  # a task of several: an agent of torchrun
    monkeypatch.setenv("SLURM_NTASKS", "1")
    watch = node.NodeAgent()
    watch.beat()
    assert [(rank, item["pid"]) for rank, item in ranks.told()["ranks"].items()] == [("0", alone)]
    ranks.start(3)  # which that agent has started
    watch.beat()
    assert sorted(ranks.told()["ranks"]) == ["3"]


def test_ended_process_is_not_reported(ranks: Ranks) -> None:
    ranks.start(0)
    watch = node.NodeAgent()
    watch.beat()
    assert sorted(ranks.told()["ranks"]) == ["0"]
    ranks.started[0].kill()
    ranks.started[0].wait()
    watch.beat()
    assert ranks.told()["ranks"] == {}
    assert node.status_of(ranks.started[0].pid) == {}
    assert node.environment_of(ranks.started[0].pid) == {}


def test_failed_heartbeat_write_does_not_stop_the_agent(ranks: Ranks) -> None:
    watch = node.NodeAgent()
    watch.path = str(ranks.folder / "none/n1.json")
    watch.beat()
    assert not (ranks.folder / "none").exists()


def run_agent(watch: node.NodeAgent, monkeypatch: pytest.MonkeyPatch, meanwhile: Any) -> Clock:
    """Let the watch run; its time passes as it sleeps, and meanwhile something happens."""
    now = Clock(meanwhile)
    monkeypatch.setattr(node, "time", now)
    watch.run()
    return now


def test_f40_ranks_of_a_replaced_attempt_are_killed_at_once(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        ranks.start(rank)
    other = ranks.start(0, attempt=1)
    run_agent(
        node.NodeAgent(), monkeypatch, lambda now: lease.take(str(ranks.folder), 1) if now > 4 else None
    )
    assert [ranks.started[rank].wait(60) for rank in (0, 1)] == [-signal.SIGKILL] * 2
    assert ranks.alive() == [other]
    assert ranks.told()["kind"] == "beat"  # no farewell: it did not end in order


def test_agent_writes_heartbeats_and_a_farewell(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.start(0)
    watch = node.NodeAgent()
    result: list[str] = []

    def meanwhile(now: float) -> None:
        result.append(ranks.told()["kind"])
        if now > 7:
            os.kill(os.getpid(), signal.SIGTERM)
        if ranks.told()["kind"] == "bye":
            for process in ranks.started:
                process.kill()
                process.wait()

    run_agent(watch, monkeypatch, meanwhile)
    assert result[0] == "beat"
    assert result[-1] == "bye"
    assert (ranks.told()["kind"], ranks.told()["ranks"]) == ("bye", {})


def test_f40_terminating_ranks_are_killed_when_the_attempt_is_replaced(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.start(0)
    watch = node.NodeAgent()
    watch.told_to_end = True

    def meanwhile(now: float) -> None:
        if now > 5:
            lease.take(str(ranks.folder), 1)

    now = run_agent(watch, monkeypatch, meanwhile)
    assert ranks.ended() == [-signal.SIGKILL]
    assert 5 < now.now < 10


def test_ranks_that_end_slowly_are_left_to_slurm(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.start(0)
    watch = node.NodeAgent()
    watch.told_to_end = True
    assert run_agent(watch, monkeypatch, lambda _now: None).now >= 60
    assert len(ranks.alive()) == 1


def test_agent_ends_with_its_parent_process(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = node.NodeAgent()
    watch.parent = -1
    assert run_agent(watch, monkeypatch, lambda _now: None).now == 0.0
    assert ranks.told()["kind"] == "bye"


def test_f87_restarted_agent_in_a_separate_step_ends_with_the_ranks(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NODEID", "7")  # of that step, which has another count of nodes
    rank = ranks.start(1, node_id="0")
    ranks.start(0, node_id="1")
    result: list[dict[str, Any]] = []

    def meanwhile(now: float) -> None:
        result.append(ranks.told())
        if now > 4:
            ranks.started[0].kill()
            ranks.started[0].wait()

    assert run_agent(node.NodeAgent(restarted=True), monkeypatch, meanwhile).now < 10
    assert (sorted(result[0]["ranks"]), result[0]["restarted"]) == (["1"], True)
    assert ranks.told()["kind"] == "bye"
    assert rank not in ranks.alive()


@pytest.mark.parametrize(("age", "ends"), [(4.0, True), (5.0, False)])
def test_f87_restarted_agent_does_not_replace_an_agent_that_was_late(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, age: float, ends: bool
) -> None:
    ranks.start(0)
    watch = node.NodeAgent(restarted=True)
    now = Clock(lambda at: watch.__setattr__("told_to_end", at > 4))
    today = time.time()
    now.time = lambda: today  # so that the first agent is exactly that late
    first = {"kind": "beat", "node": "n1", "time": today - age, "ranks": {}}
    (ranks.folder / "ranks/0/beats/n1.json").write_text(json.dumps(first))
    monkeypatch.setattr(node, "time", now)
    watch.run()
    assert (ranks.told() == first) is ends


def test_agent_without_a_run_exits_silently(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DTSLURM_ATTEMPT", "x")
    with pytest.raises(SystemExit) as ended:
        node.main(restarted=False)
    assert (ended.value.code, capfd.readouterr()) == (1, ("", ""))


def test_rank_processes_are_listed_from_outside_the_step(ranks: Ranks) -> None:
    mine = ranks.start(0)
    ranks.start(None)
    ranks.start(1, attempt=3)
    assert node.find_rank_processes(str(ranks.folder), 0) == [mine]


def test_vanished_process_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = str(os.getpid())
    monkeypatch.setattr(os, "listdir", lambda _path: ["self", "999999999", own])
    assert node.own_processes() == [os.getpid()]
    assert node.bytes_of(999999999) == 0
