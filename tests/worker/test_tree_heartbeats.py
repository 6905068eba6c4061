"""The heartbeats of a large job as the supervisor sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.supervisor import heartbeats
from dtslurm.worker.supervisor.hangs import ActivitySummary
from dtslurm.worker.supervisor.heartbeat_tree import beats, tree
from dtslurm.worker.supervisor.heartbeat_tree.tree import TreeHeartbeats
from dtslurm.worker.supervisor.heartbeats import Heartbeats
from tests.worker.heartbeat_fakes import SetClock


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


class FakeRoot:
    """The supervisor's end of the tree, with the heartbeats that a test puts into it."""

    def __init__(self, folder: str, _head: str, clock: Callable[[], float]) -> None:
        self.folder, self.clock = folder, clock
        self.lines: dict[bytes, tuple[float, bytes]] = {}
        self.orders: list[dict[str, Any]] = []
        self.parents: dict[str, str] = {}
        self.is_closed = False

    def take(self) -> dict[bytes, tuple[float, bytes]]:
        lines, self.lines = self.lines, {}
        return lines

    def give_orders(self, **values: Any) -> None:
        self.orders.append(values)

    def parent_of(self, node: str) -> str:
        return self.parents.get(node, "")

    def close(self) -> None:
        self.is_closed = True


class Job:
    """A supervisor's heartbeats of a large job; wall clock and monotonic clock are the same."""

    def __init__(self, folder: Path, clock: SetClock) -> None:
        self.folder, self.clock = folder / "beats", clock
        self.beats = TreeHeartbeats(str(folder), "head", 10.0, clock)
        self.root: Any = self.beats.root

    def send(self, node: str, kind: str = "beat", **values: Any) -> None:
        """Let a node's heartbeat arrive now over TCP."""
        record = {"kind": kind, "time": self.clock.now, "ranks": {}, "activity": "-", **values}
        self.root.lines[node.encode()] = (self.clock.now, beats.pack_beat(node, beats.beat_of(record)))

    def write(self, name: str, **values: Any) -> dict[str, Any]:
        """Let a node write its heartbeat into a file now."""
        record = {
            "kind": "beat",
            "node": name,
            "time": self.clock.now,
            "ranks": {},
            "activity": "-",
            **values,
        }
        (self.folder / f"{name}.json").write_text(json.dumps(record))
        return record

    def look(self) -> None:
        self.beats.look()


@pytest.fixture
def job(tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(tree, "HeartbeatRoot", FakeRoot)
    monkeypatch.setattr(heartbeats, "time", clock)
    return Job(tmp_path, clock)


def test_heartbeats_over_tcp_are_dated_by_their_arrival(job: Job) -> None:
    job.send("n1")
    job.send("n2", "bye")
    job.clock.now += 2.0
    job.look()
    assert job.beats.last_seen == {"n1": 1000.0, "n2": 1000.0}
    assert job.beats.last == {
        "n1": {"kind": "beat", "node": "n1"},
        "n2": {"kind": "bye", "node": "n2"},
    }
    assert job.root.orders == [{"looks": 1}]
    job.look()
    assert job.root.orders == [{"looks": 1}, {"looks": 2}]


def test_restarted_agent_is_recorded_and_told_when_the_first_agent_returns(job: Job) -> None:
    job.send("n1")
    job.look()
    job.send("n1", restarted=True)
    job.look()
    assert job.beats.last["n1"] == {"kind": "beat", "node": "n1", "restarted": True}
    job.send("n1", restarted=True)
    job.look()
    assert {"back": ["n1"]} not in job.root.orders
    job.send("n1")
    job.look()
    assert job.beats.last["n1"] == {"kind": "beat", "node": "n1"}
    assert job.root.orders[-1] == {"back": ["n1"]}


def test_nodes_of_a_killed_supervisor_have_time_to_join_its_successor(tmp_path: Path, job: Job) -> None:
    (job.folder / "members").write_text("n1\nn2\n")
    again = TreeHeartbeats(str(tmp_path), "head", 10.0, job.clock)
    assert again.last_seen == {"n1": 1030.0, "n2": 1030.0}
    assert again.last == {name: {"kind": "beat", "node": name} for name in ("n1", "n2")}
    assert again.still_there() == ["n1", "n2"]


def test_clocks_of_the_nodes_are_compared_at_the_first_heartbeat_and_now_and_then(job: Job) -> None:
    clocks = []
    for look in range(33):
        job.send("n1", time=990.0 + (look >= 3) + 2.0 * (look >= 20))
        job.look()
        clocks.append(job.beats.clocks["n1"])
    assert clocks == [10.0] * 15 + [9.0] * 16 + [7.0] * 2


@pytest.mark.parametrize(
    ("age_s", "way", "is_silent"),
    [
        (11.5, "direct", False),
        (11.75, "direct", True),  # 10 s, and a delay by two nodes on the way
        (11.75, "silent parent", False),
        (18.0, "silent parent", False),
        (18.25, "silent parent", True),
        (11.75, "parent", True),
        (100.0, "file", False),
        (100.25, "file", True),
    ],
)
def test_silent_node_has_the_time_that_its_way_to_the_supervisor_takes(
    job: Job, age_s: float, way: str, is_silent: bool
) -> None:
    now = job.clock.now
    job.beats.last = {name: {"kind": "beat"} for name in ("n1", "n2", "n3")}
    job.beats.last_seen = {
        "n1": now - age_s,
        "n2": now - (99.0 if way == "silent parent" else 1.0),
        "n3": now,
    }
    job.root.parents = {"n1": "n2"} if "parent" in way else {}
    job.beats.by_file = {"n1"} if way == "file" else set()
    assert ("n1" in job.beats.silent(10.0)) is is_silent


@pytest.mark.parametrize(("age_s", "names"), [(10.0, []), (10.5, ["n1"])])
def test_no_node_is_silent_within_the_limit(job: Job, age_s: float, names: list[str]) -> None:
    job.beats.last = {"n1": {"kind": "beat"}, "n2": {"kind": "beat"}}
    job.beats.last_seen = {"n1": job.clock.now - age_s, "n2": job.clock.now}
    assert job.beats._find_silent(10.0) == names


def test_all_nodes_are_silent_after_a_long_time(job: Job) -> None:
    job.beats.last = {"n1": {"kind": "beat"}, "n2": {"kind": "beat"}}
    job.beats.last_seen = {"n1": job.clock.now - 45.0, "n2": job.clock.now - 42.0}
    assert job.beats.silent(10.0) == ["n1", "n2"]


def test_heartbeat_files_of_all_nodes_are_read_every_30_s(job: Job) -> None:
    job.write("n1", ranks={"4": {"cpu": 1.0}}, activity="t")
    for age_s in (0.0, 20.0, 29.5):
        job.clock.now, job.beats.looked = 1000.0 + age_s, 1000.0 + age_s
        job.look()
        assert job.beats.last == {}
    job.clock.now = job.beats.looked = 1030.0
    job.look()
    assert job.beats.last_seen == {"n1": 1030.0}
    assert (job.beats.by_file, job.beats.ranks()) == ({"n1"}, {4: {"cpu": 1.0, "node": "n1"}})
    job.write("n2")
    job.clock.now = job.beats.looked = 1059.5
    job.look()
    assert "n2" not in job.beats.last
    job.clock.now = job.beats.looked = 1060.0
    job.look()
    assert job.beats.last_seen["n2"] == 1060.0


def test_heartbeat_file_of_a_silent_node_is_read_at_once(job: Job) -> None:
    for name in ("n1", "n2"):
        job.send(name)
    job.look()
    job.clock.now = job.beats.looked = 1004.0
    job.send("n2")
    job.write("n1")
    job.look()
    assert job.beats.by_file == set()  # not silent for long enough
    job.clock.now = job.beats.looked = 1006.0
    job.send("n2")
    job.look()
    assert job.beats.by_file == {"n1"}
    assert job.beats.last_seen == {"n1": 1006.0, "n2": 1006.0}


@pytest.mark.parametrize(("later_s", "is_read"), [(-1.0, False), (0.0, False), (0.5, True)])
def test_heartbeat_file_counts_if_it_is_newer_than_the_heartbeat_over_tcp(
    job: Job, later_s: float, is_read: bool
) -> None:
    job.send("n1")
    job.look()
    job.write("n1", time=1000.0 + later_s)
    job.beats._read_files(["n1"], 1003.0)
    assert job.beats.last_seen["n1"] == (1003.0 if is_read else 1000.0)
    job.beats._read_files(["n1"], 1004.0)  # the same file again
    assert job.beats.last_seen["n1"] == (1003.0 if is_read else 1000.0)
    job.write("n2", node="n3")
    job.beats._read_files(["n2"], 1003.0)
    assert "n2" not in job.beats.last_seen


def test_heartbeat_over_tcp_ends_the_reception_by_file(job: Job) -> None:
    job.send("n1")
    job.look()
    record = job.write("n1", time=1001.0)
    job.beats._read_files(["n1"], 1003.0)
    assert (job.beats.by_file, job.beats.last["n1"]) == ({"n1"}, record)
    job.send("n1", time=1002.0)
    job.look()
    assert (job.beats.by_file, job.beats.last["n1"]) == (set(), {"kind": "beat", "node": "n1"})


def test_states_of_all_ranks_are_returned_with_their_nodes(job: Job) -> None:
    job.send("n1", ranks={"0": {"cpu": 1.0}, "1": {"cpu": 2.0}})
    job.send("n2", ranks={"2": {"cpu": 3.0}})
    job.root.lines[b"n3"] = (1000.0, b"n3 b 1.0 - 0 0 no JSON")
    job.root.lines[b"n4"] = (1000.0, b'n4 b 1.0 - 0 0 {"x": {}}')
    job.look()
    assert job.beats.ranks() == {
        0: {"cpu": 1.0, "node": "n1"},
        1: {"cpu": 2.0, "node": "n1"},
        2: {"cpu": 3.0, "node": "n2"},
    }


@pytest.mark.parametrize(
    ("activities", "flags"),
    [
        (("-", "-"), (False, False, False)),
        (("c", "-"), (True, False, False)),
        (("-", "t"), (False, True, False)),
        (("s", "-"), (False, False, True)),
        (("ct", "s"), (True, True, True)),
    ],
)
def test_activity_of_a_large_job_is_that_of_any_node(
    job: Job, activities: tuple[str, str], flags: tuple[bool, bool, bool]
) -> None:
    for number, letters in enumerate(activities):
        job.send(f"n{number}", activity=letters, ranks={"0": {"output": 3}, "1": {"output": 4 + number}})
    job.look()
    assert job.beats.activity() == ActivitySummary({"n0": 7, "n1": 8}, *flags, 4)


def test_stack_request_is_written_and_sent_to_the_nodes(job: Job) -> None:
    job.beats.ask_stacks()
    job.beats.ask_stacks()
    assert job.root.orders == [{"stacks": 1}, {"stacks": 2}]
    assert (job.folder.parent / "stacks/wanted").read_text() == "2\n"
    job.beats.close()
    assert job.root.is_closed


@pytest.mark.parametrize(("count", "arrive_by_tcp"), [(1, False), (2, False), (3, True)])
def test_large_job_sends_its_heartbeats_over_tcp(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, arrive_by_tcp: bool
) -> None:
    monkeypatch.setattr(tree, "plain_nodes", lambda _env: 2)
    result, problem = tree.choose_heartbeats(str(tmp_path), [f"n{number}" for number in range(count)], "head")
    assert (result.arrive_by_tcp, problem) == (arrive_by_tcp, "")


def test_large_job_without_a_port_uses_heartbeat_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no free port")

    monkeypatch.setattr(tree, "plain_nodes", lambda _env: 0)
    monkeypatch.setattr(tree, "HeartbeatRoot", refuse)
    result, problem = tree.choose_heartbeats(str(tmp_path), ["n1"], "head")
    assert (type(result), problem) == (Heartbeats, "no free port")
