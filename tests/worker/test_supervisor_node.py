"""The agent beside a node's ranks: its heartbeats of real processes, and when it kills them."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.stacks import stacks
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


# ---- What the agent decides, without processes


class FakeRelay:
    """The node's end of the tree of heartbeats, with a link that a test cuts."""

    def __init__(self) -> None:
        self.linked = self.confirms = True
        self.orders: Any = None
        self.kinds: list[str] = []

    def put(self, beat: Any) -> bool:
        self.kinds.append(beat.kind)
        return self.linked

    def leave(self) -> bool:
        return self.linked

    def confirms_lease(self) -> bool:
        return self.confirms


@pytest.fixture
def linked(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> tuple[node.NodeAgent, FakeRelay, Clock]:
    """Return an agent of a large job whose node has no ranks, its link, and its clock."""
    clock = Clock(lambda _now: None)
    monkeypatch.setattr(node, "time", clock)
    monkeypatch.setattr(node, "own_processes", list)
    watch, link = node.NodeAgent(), FakeRelay()
    assert watch.relay is None
    monkeypatch.setattr(watch, "relay", link)
    return watch, link, clock


Linked = tuple[node.NodeAgent, FakeRelay, Clock]


def test_heartbeats_go_into_a_file_only_without_a_link(linked: Linked, ranks: Ranks) -> None:
    watch, link, clock = linked
    path = ranks.folder / "ranks/0/beats/n1.json"
    written = []
    for now in (0, 100, 103, 106, 109, 165, 166, 169):
        clock.now = 1000.0 + now
        link.linked = now in {0, 100}
        path.unlink(missing_ok=True)
        watch.beat()
        if path.exists():
            written.append(now)
    assert written == [106, 166]  # after six seconds, then once a minute
    assert set(link.kinds) == {"beat"}


@pytest.mark.parametrize("is_linked", [True, False])
def test_farewell_goes_into_a_file_unless_the_supervisor_receives_it(
    linked: Linked, ranks: Ranks, is_linked: bool
) -> None:
    watch, link, _ = linked
    link.linked = is_linked
    watch._write("bye", {})
    assert (ranks.folder / "ranks/0/beats/n1.json").exists() is not is_linked


def test_lease_is_read_rarely_while_the_supervisor_confirms_it(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, link, clock = linked
    clock.now = 1000.0
    read: list[float] = []

    def holds(_run_dir: str, _attempt: int) -> bool:
        read.append(clock.now - 1000)
        return False

    monkeypatch.setattr(lease, "holds", holds)
    assert not watch._holds_lease()
    for now in (3, 59):
        clock.now = 1000.0 + now
        assert watch._holds_lease()
    clock.now = 1060.0
    assert not watch._holds_lease()
    clock.now, link.confirms = 1063.0, False
    assert not watch._holds_lease()
    assert read == [0, 60, 63]


def test_restarted_agent_ends_when_the_supervisor_says_that_the_first_is_back(linked: Linked) -> None:
    watch, link, _ = linked
    answers = []
    for back in ([], ["n2"], ["n2", "n1"]):
        link.orders = SimpleNamespace(back=back, stacks=0)
        answers.append(watch._is_replaced())
    assert answers == [False, False, True]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"kind": "beat"}, True),
        ({"kind": "bye"}, False),
        ({"kind": "beat", "restarted": True}, False),
        ({"kind": "beat", "time": None}, False),
        ({}, False),
    ],
)
def test_restarted_agent_ends_only_for_heartbeats_of_the_first(
    ranks: Ranks, record: dict[str, Any], expected: bool
) -> None:
    path = ranks.folder / "ranks/0/beats/n1.json"
    path.write_text(json.dumps({"time": time.time() + 1000, **record} if record else {}))
    assert node.NodeAgent(restarted=True)._is_replaced() is expected


def test_stacks_are_written_once_for_each_request(
    linked: Linked, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, link, _ = linked
    looks: list[list[int]] = []
    (ranks.folder / "ranks/0/stacks").mkdir()

    def look(pids: list[int], limit: float) -> dict[int, dict[str, Any]]:
        looks.append(pids)
        assert limit == 8.0
        return {pid: {"by": "py-spy", "why": [], "threads": []} for pid in pids}

    monkeypatch.setattr(stacks, "look", look)
    monkeypatch.setattr(stacks, "text", lambda processes: f"process {min(processes)}")
    watch.latest = {"3": {"pid": 70}, "2": {"pid": 80}, "4": {}}
    for request in (0, 1, 1, 2):
        link.orders = SimpleNamespace(stacks=request, back=[])
        watch.tell()
    assert looks == [[70, 80]] * 2
    folder = ranks.folder / "ranks/0/stacks"
    assert (folder / "n1.txt").read_text() == "rank 3\nprocess 70\nrank 2\nprocess 80"
    record = json.loads((folder / "n1.json").read_text())
    assert (record["node"], record["number"], sorted(record["ranks"])) == ("n1", 2, ["2", "3"])


def test_state_of_a_process_has_its_cpu_time_and_wait_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = " ".join(map(str, range(1, 50)))
    files = {
        "/proc/7/stat": f"7 (a ) b) S {counts}",
        "/proc/7/wchan": "futex_wait\n",
        "/proc/7/io": "rchar: 100\nwchar: 20\nsyscr: 5\nread_bytes: 9\n",
        "/proc/7/environ": "A=1=2\0B\0C=\0",
        "/proc/8/stat": "8 (b) S 1 2",
    }
    monkeypatch.setattr(node, "text_of", files.get)
    monkeypatch.setattr(node, "TICK", 10.0)
    assert node.status_of(7) == {"state": "S", "cpu": 2.3, "waits": "futex_wait"}
    assert node.status_of(8) == node.status_of(9) == {}
    assert (node.bytes_of(7), node.bytes_of(8)) == (120, 0)
    assert (node.environment_of(7), node.environment_of(8)) == ({"A": "1=2", "C": ""}, {})


def test_agent_on_a_node_without_a_slurm_name_uses_the_host_name(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURMD_NODENAME")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="h7.cluster.org"))
    watch = node.NodeAgent()
    assert (watch.node, watch.place) == ("h7", "SLURM_NODEID")
    assert watch.path == str(ranks.folder / "ranks/0/beats/h7.json")


def test_usage_of_a_rank_is_the_sum_over_its_processes(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"DTSLURM_RUN_DIR": str(ranks.folder), "DTSLURM_ATTEMPT": "0", "SLURMD_NODENAME": "n1"}
    first = 5_000_000  # larger than any process id
    usage = {first: (1.111, 100), first + 1: (2.222, 200), first + 2: (4, 400), first + 3: (8, 800)}
    names = ({"RANK": "3"}, {"RANK": "3"}, {"RANK": "x"}, {"DTSLURM_ATTEMPT": "1", "RANK": "4"})
    environments = {first + number: {**env, **more} for number, more in enumerate(names)}
    monkeypatch.setattr(node, "own_processes", lambda: [*environments, os.getpid()])
    monkeypatch.setattr(node, "environment_of", lambda pid: environments.get(pid, {**env, "RANK": "9"}))
    monkeypatch.setattr(node, "bytes_of", lambda pid: usage[pid][1])
    monkeypatch.setattr(
        node, "status_of", lambda pid: {"cpu": usage[pid][0], "state": "R", "waits": f"w{pid - first}"}
    )
    (ranks.folder / "ranks/0/3.json").write_text(json.dumps({"pid": first + 1}))
    node.NodeAgent().beat()
    assert ranks.told()["ranks"] == {
        "3": {"cpu": 3.33, "moved": 300, "pid": first + 1, "state": "R", "waits": "w1"}
    }


def test_output_of_a_rank_is_its_position_else_the_size_of_its_log(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = {7: 0, 8: 50}
    monkeypatch.setattr(node, "output_position", positions.get)
    (ranks.folder / "logs/0").mkdir(parents=True)
    (ranks.folder / "logs/0/rank-3.log").write_bytes(b"hello")
    (ranks.folder / "3.log").write_bytes(b"hi")
    watch = node.NodeAgent()
    assert [watch._output_of("3", pid) for pid in (7, 8, 9)] == [0, 50, 5]
    assert watch._output_of("4", 9) == 0
    monkeypatch.setattr(watch, "collector", SimpleNamespace(folder=str(ranks.folder)))
    assert watch._output_of("3", 9) == 2


def test_a_rank_that_ends_waits_while_another_one_copies_the_files_of_the_node(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "files"
    for folder in (files, tmp_path / "logs/0"):
        folder.mkdir(parents=True)
    (files / "1.log").write_text("end\n")
    (files / "1.json").write_text('{"rank": 1, "exit_code": 0}\n')
    monkeypatch.setenv(node.NODE_FILES, str(files))
    descriptor = os.open(files, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    copying = threading.Timer(1.0, os.close, [descriptor])
    copying.start()
    node.collect_files()
    copying.join()
    assert (files / "1.collected").exists()
    assert "1: end" in (tmp_path / "logs/0/ranks-1.log").read_text()
