"""Heartbeats over TCP: real connections on this machine between nodes' relays and the supervisor."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.worker.sampler_values import PLAIN_NODES, output_position
from dtslurm.worker.supervisor import lease, node
from dtslurm.worker.supervisor.heartbeat_tree import beats, frames, relay, root, tree
from dtslurm.worker.supervisor.heartbeat_tree.placement import HeartbeatTree
from dtslurm.worker.supervisor.heartbeat_tree.relay import Relay
from dtslurm.worker.supervisor.heartbeat_tree.tree import TreeHeartbeats
from dtslurm.worker.supervisor.heartbeats import Heartbeats
from tests.waiting import wait_until

# ---- The tree ----


def test_heartbeat_tree_fills_each_level_before_the_next() -> None:
    placement = HeartbeatTree(3)
    parents = [placement.place(f"n{number}", ("10.0.0.1", number)) for number in range(15)]
    assert parents == [None] * 3 + ["n0"] * 3 + ["n1"] * 3 + ["n2"] * 3 + ["n3"] * 3
    assert [placement.members[f"n{number}"].depth for number in (0, 3, 12)] == [1, 2, 3]


def test_heartbeat_tree_gives_an_unreachable_parent_no_children_until_it_returns() -> None:
    placement = HeartbeatTree(1)
    for name in ("a", "b", "c"):
        placement.place(name, ("", 0))
    assert placement.place("c", ("", 0), failed="b") is None  # a is full: the supervisor takes one more
    placement = HeartbeatTree(2)
    for name in ("a", "b", "c"):
        placement.place(name, ("", 0))
    assert [placement.place(name, ("", 0), failed="a") for name in ("c", "d")] == ["b", "b"]
    assert placement.place("a", ("", 0)) is None
    assert placement.place("e", ("", 0)) == "a"


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["place", "failed", "remove"]))))
def test_heartbeat_tree_limits_children_and_has_no_cycles(steps: list[tuple[int, str]]) -> None:
    placement = HeartbeatTree(2)
    for number, action in steps:
        name = f"n{number}"
        if action == "remove":
            placement.remove(name)
        else:
            placement.place(name, ("", 0), placement.parent_of(name) or "" if action == "failed" else "")
    children: dict[tuple[str, int], int] = {}
    for name, member in placement.members.items():
        above, number = member.parent, member.parent_number
        if above is not None and above in placement.members and placement.members[above].number == number:
            children[above, number] = children.get((above, number), 0) + 1
            assert placement.members[above].number < member.number  # so no chain leads back
            assert member.depth == placement.members[above].depth + 1
        assert above != name
    assert max(children.values(), default=0) <= 2


# ---- Messages ----


@pytest.fixture
def ends() -> Iterator[Callable[[bytes, bytes], tuple[frames.Connection, frames.Connection]]]:
    made: list[frames.Connection] = []

    def connect(key: bytes, other_key: bytes) -> tuple[frames.Connection, frames.Connection]:
        near, far = socket.socketpair()
        made.extend(
            [frames.Connection(near, key, accepted=False), frames.Connection(far, other_key, accepted=True)]
        )
        return made[-2], made[-1]

    yield connect
    for connection in made:
        connection.close()


def received(connection: frames.Connection, other: frames.Connection) -> list[bytes]:
    """Let both ends exchange their nonces; return what the first one gets."""
    payloads: list[bytes] = []
    for _ in range(4):
        other.flush()
        connection.flush()
        payloads += connection.receive()
        other.put_back(other.receive())
    return payloads


def test_signed_connection_delivers_messages_in_both_directions(ends: Any) -> None:
    near, far = ends(b"key", b"key")
    near.send(b"one")
    near.send(b"x" * 100_000)
    assert received(far, near) == [b"one", b"x" * 100_000]
    assert far.trusted
    far.send(b"answer")
    assert received(near, far) == [b"answer"]


def test_signed_connection_refuses_a_peer_with_another_key(ends: Any) -> None:
    near, far = ends(b"key", b"another key")
    near.send(b"one")
    with pytest.raises(frames.Untrusted, match="signature"):
        received(far, near)
    assert not far.trusted


def test_signed_connection_refuses_replayed_and_reflected_messages(ends: Any) -> None:
    near, far = ends(b"key", b"key")
    near.send(b"one")
    assert received(far, near) == [b"one"]
    signature = near._signature(b"two", 1, accepted=False)
    frame = struct.pack(">I32s", 3, signature) + b"two"
    far.link.send(frame)  # reflected
    with pytest.raises(frames.Untrusted):
        near.receive()
    near.link.send(frame)
    assert far.receive() == [b"two"]
    near.link.send(frame)
    with pytest.raises(frames.Untrusted):
        far.receive()


def test_signed_connection_refuses_a_long_message_of_an_untrusted_peer(ends: Any) -> None:
    near, far = ends(b"key", b"key")
    near.flush()
    far.receive()
    near.link.send(struct.pack(">I32s", 1 << 20, b"x" * 32))
    with pytest.raises(frames.Untrusted, match="1048576 bytes"):
        far.receive()


# ---- Nodes and the supervisor ----


def beat(kind: str, ranks: dict[str, Any], **values: Any) -> beats.Beat:
    return beats.beat_of({"kind": kind, "time": time.time(), "ranks": ranks, **values})


class Job:
    """An attempt's nodes, each with its relay, and the supervisor's heartbeats."""

    started: ClassVar[list[Relay]] = []

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.beats = TreeHeartbeats(str(folder), "127.0.0.1", silent_s=2.0)
        self.relays: dict[str, Relay] = {}
        self.silenced: set[str] = set()
        self.restarted: set[str] = set()
        self.activity = "-"

    def start(self, *names: str) -> None:
        for name in names:
            self.relays[name] = self.run(Relay(self.beats.folder, name))

    def run(self, one: Relay | None) -> Relay:
        assert one is not None
        one.start()
        self.started.append(one)
        return one

    def pulse(self) -> None:
        """Let every node send a heartbeat, and the supervisor look."""
        for name, item in self.relays.items():
            if name not in self.silenced:
                ranks = {name[1:]: {"cpu": 1.0, "output": 7}}
                item.put(beat("beat", ranks, restarted=name in self.restarted, activity=self.activity))
        time.sleep(0.05)
        self.beats.look()

    def pulse_until(self, condition: Callable[[], object], limit: float = 30) -> None:
        def is_reached() -> object:
            self.pulse()
            return condition()

        wait_until(is_reached, limit=limit)

    def linked(self) -> list[str]:
        return sorted(name for name, item in self.relays.items() if item.orders is not None)

    def freeze(self, name: str) -> None:
        """Let a node keep its connections and do nothing, as when its network is cut off."""
        self.silenced.add(name)
        frozen = self.relays[name]
        frozen.tick = frozen.join_if_due = lambda: None  # type: ignore[method-assign]
        frozen.handle = lambda events: time.sleep(0.05)  # type: ignore[method-assign]
        frozen._has_unsent = lambda: False  # type: ignore[method-assign]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(root, "FAN_OUT", 2)
    monkeypatch.setattr(root, "ORDER_S", 0.2)
    monkeypatch.setattr(relay, "FLUSH_S", 0.1)
    monkeypatch.setattr(relay, "LINK_S", 1.0)
    monkeypatch.setattr(relay, "PAUSES_S", (0.1, 0.2))
    monkeypatch.setattr(relay, "CONNECT_S", 1.0)
    made = Job(tmp_path)
    yield made
    for item in Job.started:
        item._is_leaving = True
    for item in Job.started:
        assert item._left.wait(20)
    Job.started.clear()
    made.beats.close()


NAMES = tuple(f"n{number}" for number in range(9))


def depths(job: Job) -> list[int]:
    return sorted(member.depth for member in job.beats.root._placement.members.values())


def test_tree_heartbeats_arrive_without_a_file_for_each_node(job: Job) -> None:
    job.start(*NAMES)
    job.pulse_until(lambda: set(job.beats.last_seen) == set(NAMES) and job.linked() == list(NAMES))
    assert depths(job)[-1] >= 3
    assert sorted(path.name for path in Path(job.beats.folder).iterdir()) == ["members", "supervisor.json"]
    assert (Path(job.beats.folder) / "supervisor.json").stat().st_mode & 0o777 == 0o600
    assert job.beats.ranks()[3] == {"cpu": 1.0, "output": 7, "node": "n3"}
    summary = job.beats.activity()
    assert summary is not None
    assert summary.outputs == dict.fromkeys(NAMES, 7)
    assert summary[1:] == (False, False, False, 9)
    job.activity = "ts"
    job.pulse_until(lambda: (one := job.beats.activity()) and one[1:] == (False, True, True, 9))
    assert set(job.beats.clocks) == set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dies", "freezes"])
def test_only_a_lost_node_is_silent_although_it_relayed_heartbeats_of_other_nodes(job: Job, way: str) -> None:
    job.start(*NAMES)
    job.pulse_until(lambda: set(job.beats.last_seen) == set(NAMES))
    parents = {name: job.beats.root.parent_of(name) for name in NAMES}
    lost = next(name for name in NAMES if name in parents.values() and not parents[name])
    if way == "dies":
        job.silenced.add(lost)
        job.relays[lost].leave()
    else:
        job.freeze(lost)
    suspects: set[str] = set()

    def is_noticed() -> bool:
        suspects.update(job.beats.silent(2.0))
        return lost in suspects

    job.pulse_until(is_noticed)
    others = set(NAMES) - {lost}
    job.pulse_until(lambda: job.beats.silent(1.0) == [lost] and set(job.linked()) - {lost} == others)
    assert suspects == {lost}


def test_farewells_of_all_nodes_reach_the_supervisor_through_the_tree(job: Job) -> None:
    job.start(*NAMES)
    job.pulse_until(lambda: job.linked() == list(NAMES))
    for name in reversed(NAMES):
        job.silenced.add(name)
        job.relays[name].put(beat("bye", {}))
        assert job.relays[name].leave()
    job.pulse_until(lambda: job.beats.still_there() == [])
    assert job.beats.ranks() == {}


def test_farewell_arrives_from_a_node_that_has_not_joined_yet(job: Job) -> None:
    job.start("n0")
    job.relays["n0"]._join_at = time.monotonic() + 1000
    time.sleep(0.3)
    job.relays["n0"].put(beat("bye", {}))
    job.silenced.add("n0")
    assert job.relays["n0"].leave()
    job.pulse_until(lambda: job.beats.last.get("n0", {}).get("kind") == "bye")


def test_node_that_leaves_without_a_link_delivers_the_farewells_it_passes_on(job: Job) -> None:
    job.start("n0")
    job.relays["n0"]._join_at = time.monotonic() + 1000
    job.silenced.add("n0")
    job.relays["n0"].put(beat("bye", {}))
    job.relays["n0"].pass_on([beats.pack_beat("n1", beat("bye", {}))])
    assert job.relays["n0"].leave()
    job.pulse_until(lambda: {"n0", "n1"} <= set(job.beats.last))
    assert [job.beats.last[name]["kind"] for name in ("n0", "n1")] == ["bye", "bye"]


def test_farewell_to_a_parent_that_has_closed_the_link_reaches_the_supervisor(job: Job) -> None:
    names = ("n0", "n1", "n2")
    job.start(*names)
    job.pulse_until(lambda: set(job.beats.last_seen) == set(names) and job.linked() == list(names))
    child = next(name for name in names if job.beats.root.parent_of(name))
    leaving = job.relays[child]
    leaving.handle = lambda events: None  # type: ignore[method-assign]  # it has not noticed yet
    for connection in list(job.relays[job.beats.root.parent_of(child)]._children):
        connection.close()
    job.silenced.add(child)
    leaving.put(beat("bye", {}))
    assert leaving.leave()
    job.pulse_until(lambda: job.beats.last.get(child, {}).get("kind") == "bye")


def test_older_heartbeat_that_arrives_after_the_farewell_is_ignored(job: Job) -> None:
    job.start("n0")
    older = beats.pack_beat("n0", beat("beat", {}, restarted=False))
    job.pulse_until(lambda: job.linked() == ["n0"])
    job.silenced.add("n0")
    farewell = beats.pack_beat("n0", beat("bye", {}))
    job.beats.root._note(farewell + b"\n" + older)
    job.beats.root._note(older)
    job.pulse_until(lambda: job.beats.last.get("n0", {}).get("kind") == "bye")
    job.pulse()
    assert job.beats.still_there() == []


def test_farewell_that_a_broken_link_may_have_lost_is_sent_again(job: Job) -> None:
    job.start("n0")
    job.pulse_until(lambda: job.linked() == ["n0"])
    job.silenced.add("n0")
    leaving = job.relays["n0"]
    leaving.put(beat("bye", {}))
    job.pulse_until(lambda: not leaving._pending)
    job.beats.root.take()
    job.beats.last.clear()  # as if the supervisor had not read it
    job.beats._codes.clear()
    assert leaving._parent is not None
    leaving._parent.link.shutdown(socket.SHUT_RDWR)
    job.pulse_until(lambda: job.beats.last.get("n0", {}).get("kind") == "bye")


def test_farewell_that_is_read_late_counts_as_delivered(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.start("n0")
    job.pulse_until(lambda: job.linked() == ["n0"])
    read = job.beats.root._read

    def read_late(connection: frames.Connection) -> None:
        time.sleep(0.8)
        read(connection)

    monkeypatch.setattr(job.beats.root, "_read", read_late)
    job.silenced.add("n0")
    job.relays["n0"].put(beat("bye", {}))
    assert job.relays["n0"].leave()


@pytest.mark.slow
def test_farewell_that_nobody_has_read_does_not_count_as_delivered(job: Job) -> None:
    busy = frames.listen("127.0.0.1", 8)
    busy.setblocking(True)
    target = json.loads((Path(job.beats.folder) / beats.ADDRESS).read_text())
    target["port"] = busy.getsockname()[1]
    elsewhere = job.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / beats.ADDRESS).write_text(json.dumps(target))

    def answer_late() -> None:
        with contextlib.suppress(OSError):  # the test closes the socket
            while True:
                link, _ = busy.accept()
                with link, contextlib.suppress(OSError):
                    # The node no longer waits for an answer, but still for the end of the connection.
                    time.sleep(2 * relay.CONNECT_S)
                    link.sendall(b"x" * frames.NONCE)
                    while link.recv(frames.READ):
                        pass

    threading.Thread(target=answer_late, daemon=True).start()
    late = job.run(Relay(str(elsewhere), "n0"))
    late._join_at = time.monotonic() + 1000
    late.put(beat("bye", {}))
    assert not late.leave()
    busy.close()


@pytest.mark.slow
def test_nodes_rejoin_a_restarted_supervisor(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "RESUMED_S", 1.0)
    job.start(*NAMES)
    job.pulse_until(lambda: set(job.beats.last_seen) == set(NAMES))
    wait_until(lambda: len((Path(job.beats.folder) / "members").read_text().split()) == len(NAMES))
    job.beats.close()
    job.silenced.add("n4")
    job.relays["n4"].leave()  # lost while there is no supervisor
    wait_until(lambda: job.linked() == [])
    job.beats = TreeHeartbeats(str(job.folder), "127.0.0.1", silent_s=2.0)
    job.pulse_until(lambda: len(job.linked()) == len(NAMES) - 1)
    assert set(job.beats.silent(2.0)) <= {"n4"}
    job.pulse_until(lambda: job.beats.silent(2.0) == ["n4"])


def test_node_with_a_wrong_key_does_not_join_the_tree(job: Job) -> None:
    target = json.loads((Path(job.beats.folder) / beats.ADDRESS).read_text())
    forged = job.folder / "forged"
    forged.mkdir()
    (forged / beats.ADDRESS).write_text(json.dumps(dict(target, key="00" * 32)))
    job.relays["n1"] = job.run(Relay(str(forged), "n1"))
    job.start("n0")
    job.pulse_until(lambda: job.linked() == ["n0"])
    for _ in range(20):
        job.pulse()
    assert set(job.beats.last_seen) == {"n0"}
    assert job.linked() == ["n0"]


def test_connection_that_sends_no_signature_is_closed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "TRUST_S", 0.3)
    target = json.loads((Path(job.beats.folder) / beats.ADDRESS).read_text())
    with socket.create_connection(("127.0.0.1", target["port"]), 5) as stranger:
        assert len(stranger.recv(100)) == frames.NONCE
        assert stranger.recv(100) == b""


def test_nodes_join_the_tree_when_the_supervisor_limits_its_connections(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root, "MOST_CONNECTIONS", 3)
    job.start(*NAMES)
    job.pulse_until(lambda: set(job.beats.last_seen) == set(NAMES) and job.linked() == list(NAMES))


def test_heartbeat_file_of_a_node_without_a_connection_is_read(job: Job) -> None:
    job.start("n0")
    job.pulse_until(lambda: "n0" in job.beats.last_seen)
    record = {"kind": "beat", "node": "n1", "time": time.time(), "ranks": {"1": {"cpu": 2.0}}}
    (Path(job.beats.folder) / "n1.json").write_text(json.dumps(record))
    job.beats._files_at -= tree.FILES_S
    job.pulse()
    assert job.beats.ranks()[1]["cpu"] == 2.0
    job.beats.last_seen["n1"] -= 60.0  # its next file comes within a minute
    assert job.beats.silent(2.0) == []
    job.beats.last_seen["n1"] -= 60.0
    assert job.beats.silent(2.0) == ["n1"]


def test_node_without_a_network_is_not_silent_while_it_writes_a_heartbeat_file(job: Job) -> None:
    job.start("n0", "n1")
    job.pulse_until(lambda: {"n0", "n1"} <= set(job.beats.last_seen))
    job.freeze("n1")
    record = {"kind": "beat", "node": "n1", "time": time.time() + 1.0, "ranks": {}}
    (Path(job.beats.folder) / "n1.json").write_text(json.dumps(record))
    job.pulse_until(lambda: job.beats.by_file == {"n1"})
    assert job.beats.silent(2.0) == []


def test_restarted_agent_receives_the_order_that_the_first_agent_is_back(job: Job) -> None:
    job.start("n0")
    job.pulse_until(lambda: "n0" in job.beats.last_seen)
    first = job.relays.pop("n0")
    job.restarted.add("n0")
    job.start("n0")
    job.pulse_until(lambda: job.beats.last["n0"].get("restarted"))
    second = job.relays.pop("n0")
    job.relays["n0"] = first
    job.restarted.clear()
    job.pulse_until(lambda: not job.beats.last["n0"].get("restarted"))
    wait_until(lambda: second.orders is not None and second.orders.back == ["n0"])


def test_small_jobs_use_heartbeat_files_instead_of_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [f"n{number}" for number in range(PLAIN_NODES + 1)]
    small, _ = tree.choose_heartbeats(str(tmp_path), nodes[1:], "127.0.0.1")
    assert type(small) is Heartbeats
    large, problem = tree.choose_heartbeats(str(tmp_path), nodes, "127.0.0.1")
    large.close()
    assert (type(large), problem) == (TreeHeartbeats, "")
    monkeypatch.setenv("DTSLURM_PLAIN_NODES", "1")
    lowered, _ = tree.choose_heartbeats(str(tmp_path), nodes[:2], "127.0.0.1")
    lowered.close()
    assert lowered.arrive_by_tcp
    monkeypatch.setattr(socket.socket, "bind", lambda *_: (_ for _ in ()).throw(OSError("no port")))
    plain, problem = tree.choose_heartbeats(str(tmp_path), nodes, "127.0.0.1")
    assert (type(plain), problem) == (Heartbeats, "no port")


# ---- The agent ----


@pytest.fixture
def agent(job: Job, monkeypatch: pytest.MonkeyPatch) -> node.NodeAgent:
    (job.folder / "ranks").mkdir()
    (job.folder / "ranks/0").symlink_to(job.folder)
    for name, value in {
        "DTSLURM_RUN_DIR": str(job.folder), "DTSLURM_ATTEMPT": "0", "SLURMD_NODENAME": "n0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    lease.take(str(job.folder), 0)
    return node.NodeAgent()


def test_agent_in_a_tree_writes_no_heartbeat_file_and_reads_the_lease_once(
    job: Job, agent: node.NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.run(agent.relay)
    job.pulse_until(lambda: agent.relay is not None and agent.relay.confirms_lease())
    readings: list[int] = []
    holds = lease.holds

    def count_and_read(run_dir: str, attempt: int) -> bool:
        readings.append(attempt)
        return holds(run_dir, attempt)

    monkeypatch.setattr(lease, "holds", count_and_read)
    assert agent._holds_lease()
    assert len(readings) == 1  # the first time, and then once a minute
    for _ in range(5):
        agent.beat()
        assert agent._holds_lease()
        agent.tell()
    job.pulse_until(lambda: "n0" in job.beats.last_seen)
    assert len(readings) == 1
    assert not Path(agent.path).exists()
    lease.take(str(job.folder), 1)
    job.beats.close()
    wait_until(lambda: not agent._holds_lease())


@pytest.mark.slow
def test_agent_without_a_supervisor_writes_a_heartbeat_file_less_often(
    job: Job, agent: node.NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.beats.close()  # the port is closed, its address is still there
    now = [time.monotonic()]

    class Clock:
        time = staticmethod(lambda: 1000.0 + now[0])
        monotonic = staticmethod(lambda: now[0])

    monkeypatch.setattr(node, "time", Clock)
    written = []
    for _ in range(150):
        now[0] += 3.0
        agent.beat()
        text = Path(agent.path).read_text() if Path(agent.path).exists() else ""
        written += [text] if text and text not in written else []
    assert len(written) == 8  # in 450 s
    assert json.loads(written[0])["kind"] == "beat"
    agent.relay = job.run(Relay(job.beats.folder, "n0"))
    agent._write("bye", {})
    assert json.loads(Path(agent.path).read_text())["kind"] == "bye"


def test_stack_request_reaches_an_agent_with_its_orders(job: Job, agent: node.NodeAgent) -> None:
    job.run(agent.relay)
    job.pulse_until(lambda: agent.relay is not None and agent.relay.orders)
    job.beats.ask_stacks()  # the supervisor waits for the answers and does not look meanwhile
    wait_until(lambda: agent.relay is not None and agent.relay.orders and agent.relay.orders.stacks == 1)
    (Path(job.beats.folder).parent / "stacks/wanted").unlink()
    agent.tell()
    assert job.beats.reported_stacks() == ({}, True)


def test_agent_reports_recent_cpu_transfer_and_stopped_activity_of_its_ranks(
    agent: node.NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=lambda: now[0]))
    agent._usage.clear()

    def look(cpu: float, moved: int = 0, state: str = "S") -> str:
        now[0] += 3.0
        ranks = {
            "0": {"cpu": 0.0, "moved": 0, "state": "S"},
            "1": {"cpu": cpu, "moved": moved, "state": state},
        }
        return agent._find_activity(ranks)

    assert [look(0.0) for _ in range(4)] == ["c"] * 4  # nothing is known yet
    assert look(0.0) == ""
    assert look(1.3) == "c"  # in 12 s
    assert [look(1.3) for _ in range(4)] == ["c"] * 3 + [""]
    assert look(1.3, moved=1_300_000) == "t"
    assert look(3.0, moved=1_300_000, state="T") == "sct"


def test_output_position_reports_the_bytes_that_a_rank_has_written(tmp_path: Path) -> None:
    import subprocess

    log = tmp_path / "rank-0.log"
    log.write_text("12345")
    with log.open("a") as output:
        script = "echo hello; sleep 100"
        process = subprocess.Popen(["sh", "-c", script], stdout=output)
    try:
        wait_until(lambda: output_position(process.pid) == 11)
    finally:
        process.kill()
        process.wait()
    assert output_position(process.pid) is None
