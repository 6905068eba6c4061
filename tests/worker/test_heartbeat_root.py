"""The supervisor's end of the heartbeat tree, without its thread."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.supervisor.heartbeat_tree import frames, root
from dtslurm.worker.supervisor.heartbeat_tree.placement import HeartbeatTree
from dtslurm.worker.supervisor.heartbeat_tree.root import HeartbeatRoot
from tests.worker.heartbeat_fakes import FakeConnection, FakeSelector, SetClock, line


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def head(tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The supervisor's end without its thread."""
    with monkeypatch.context() as patched:
        patched.setattr(HeartbeatRoot, "_serve", lambda _self: None)
        result = HeartbeatRoot(str(tmp_path), "127.0.0.1", clock)
    yield result
    result.close()
    result._selector.close()
    result._listener.close()


def register(head: Any, node: str, **values: Any) -> FakeConnection:
    """Let a node ask for its parent; return its connection."""
    request = {"node": node, "port": 7, "failed": "", "beat": "", **values}
    connection = FakeConnection(frames.REGISTER + json.dumps(request).encode())
    head._connections.add(connection)
    head._read(connection)
    return connection


def test_address_file_names_the_port_the_key_and_each_host_once(head: Any, tmp_path: Path) -> None:
    target = json.loads((tmp_path / "supervisor.json").read_text())
    assert target["hosts"] == ["127.0.0.1", os.uname().nodename]
    assert target["port"] == head._listener.getsockname()[1]
    assert len(bytes.fromhex(target["key"])) == 32


def test_newest_heartbeat_of_each_node_is_taken_once(head: Any, clock: SetClock) -> None:
    head._read(FakeConnection(frames.BEATS + line("n1") + b"\n" + line("n2") + b"\n\n" + line("n1", at=11.0)))
    clock.now = 1001.0
    head._read(FakeConnection(frames.BEATS + line("n3")))
    assert head.take() == {
        b"n1": (1000.0, line("n1", at=11.0)),
        b"n2": (1000.0, line("n2")),
        b"n3": (1001.0, line("n3")),
    }
    assert head.take() == {}


@pytest.mark.parametrize("farewell", ["e", "f"])
@pytest.mark.parametrize(("at", "is_taken"), [(9.0, False), (10.0, False), (10.5, True)])
def test_heartbeat_from_before_the_farewell_is_ignored(
    head: Any, farewell: str, at: float, is_taken: bool
) -> None:
    head._note(line("n1", farewell))
    head.take()
    head._note(line("n1", at=at) + b"\n" + line("n2", at=1.0))
    assert set(head.take()) == ({b"n1", b"n2"} if is_taken else {b"n2"})


@pytest.mark.parametrize("payload", [b"Rno JSON", b"R{}", b'R{"node": "n1"}', b"Bshort", b"", b"?"])
def test_malformed_message_is_ignored(head: Any, payload: bytes) -> None:
    connection = FakeConnection(payload, frames.BEATS + line("n1"))
    head._read(connection)
    assert set(head.take()) == {b"n1"}
    assert not connection.is_closed


def test_first_nodes_become_children_of_the_supervisor_and_receive_its_orders(
    head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head._placement = HeartbeatTree(1)
    head.give_orders(looks=3)
    first, second = register(head, "n1"), register(head, "n2", port=8)
    assert first.sent == [
        b'P{"parent": ""}',
        b'O{"looks": 3, "stacks": 0, "back": [], "sequence": 0}',
    ]
    assert second.sent == [b'P{"parent": "n1", "host": "10.0.0.9", "port": 7}']
    assert [head.parent_of(name) for name in ("n1", "n2", "n3")] == ["", "n1", ""]
    head._send_orders()
    assert first.sent[2:] == [b'O{"looks": 3, "stacks": 0, "back": [], "sequence": 1}']
    assert len(second.sent) == 1
    again = register(head, "n2", failed="n1")
    assert again.sent[0] == b'P{"parent": ""}'


def test_node_that_registers_sends_its_first_heartbeat(head: Any) -> None:
    register(head, "n1", beat=line("n1").decode())
    assert head.take() == {b"n1": (1000.0, line("n1"))}


def test_leaving_node_is_not_placed(head: Any) -> None:
    connection = register(head, "n1", beat=line("n1", "e").decode(), leaves=True)
    assert connection.sent == []
    assert "n1" not in head._placement.members
    assert head.take() == {b"n1": (1000.0, line("n1", "e"))}


def test_farewell_removes_a_node_from_the_tree(head: Any) -> None:
    head._placement = HeartbeatTree(1)
    register(head, "n1")
    head._note(line("n1", "e"))
    assert register(head, "n2").sent[0] == b'P{"parent": ""}'


def test_child_that_does_not_read_gets_no_further_orders(head: Any) -> None:
    slow, broken = register(head, "n1"), register(head, "n2")
    slow.is_sending, broken.error = True, BrokenPipeError()
    head._send_orders()
    assert (len(slow.sent), slow.flushes, slow.is_closed) == (2, 1, False)
    assert broken.is_closed
    assert head._children == head._connections == {slow}


def test_connection_that_fails_is_closed(head: Any) -> None:
    connection = register(head, "n1")
    connection.error = frames.Untrusted("the signature of a message is wrong")
    head._read(connection)
    assert connection.is_closed
    assert (head._children, head._connections) == (set(), set())


def test_names_of_placed_nodes_are_written_once(head: Any, tmp_path: Path) -> None:
    head._write_members()
    assert not (tmp_path / "members").exists()
    for name in ("n1", "n2", "n1"):
        register(head, name)
    head._write_members()
    register(head, "n3")
    register(head, "n2")
    head._write_members()
    assert (tmp_path / "members").read_text() == "n1\nn2\nn3\n"
    assert root.known_members(str(tmp_path)) == ["n1", "n2", "n3"]
    assert root.known_members(str(tmp_path / "none")) == []


def test_restarted_supervisor_does_not_write_known_names_again(
    head: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "members").write_text("n1\n")
    monkeypatch.setattr(HeartbeatRoot, "_serve", lambda _self: None)
    again = HeartbeatRoot(str(tmp_path), "127.0.0.1")
    register(again, "n1")
    register(again, "n2")
    again._write_members()
    assert (tmp_path / "members").read_text() == "n1\nn2\n"
    again._selector.close()
    again._listener.close()


def serve(head: Any, clock: SetClock, monkeypatch: pytest.MonkeyPatch, until: float) -> FakeSelector:
    """Run the loop of the supervisor's thread, which waits half a second for events that never come."""
    selector = FakeSelector()

    def wait() -> None:
        clock.sleep(0.5)
        head._is_closed = clock.now >= until

    selector.on_select = wait
    head._selector.close()
    head._selector = selector
    monkeypatch.setattr(root, "time", clock)
    head._serve()
    return selector


def test_supervisor_sends_orders_every_one_and_a_half_seconds(
    head: Any, clock: SetClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, stranger = register(head, "n1"), FakeConnection()
    stranger.is_overdue = True
    head._connections.add(stranger)
    serve(head, clock, monkeypatch, 1005.5)
    sequences = [json.loads(payload[1:])["sequence"] for payload in child.sent[1:]]
    assert sequences == [0, 1, 2, 3, 4]
    assert (stranger.is_closed, child.is_closed) == (True, True)
    assert (tmp_path / "members").read_text() == "n1\n"
    assert head._listener.fileno() == -1


def test_connection_without_a_valid_key_is_closed_with_the_next_orders(
    head: Any, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = FakeConnection()
    stranger.is_overdue, head._ordered_at = True, 1000.0
    head._connections.add(stranger)
    closings: list[float] = []
    monkeypatch.setattr(stranger, "close", lambda: closings.append(clock.now))
    serve(head, clock, monkeypatch, 1005.5)
    assert closings == [1001.5]


@pytest.mark.parametrize(("count", "is_accepting"), [(1, True), (2, False), (3, False)])
def test_supervisor_accepts_connections_again_when_there_is_room(
    head: Any, clock: SetClock, monkeypatch: pytest.MonkeyPatch, count: int, is_accepting: bool
) -> None:
    monkeypatch.setattr(root, "MOST_CONNECTIONS", 2)
    head._is_full = True
    head._connections.update(FakeConnection() for _ in range(count))
    selector = serve(head, clock, monkeypatch, 1002.0)
    assert selector.registered == ([head._listener] if is_accepting else [])
    assert head._is_full is not is_accepting
