"""The heartbeat tree: its shape, the format of heartbeats, and signed messages."""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from dtslurm.worker.supervisor.heartbeat_tree import beats, frames, relay
from dtslurm.worker.supervisor.heartbeat_tree.placement import HeartbeatTree
from tests.worker.heartbeat_fakes import ADDRESS, SetClock


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


# ---- The placement of the nodes ----


def place(placement: HeartbeatTree, names: str, failed: str = "") -> list[str | None]:
    return [placement.place(name, ADDRESS, failed) for name in names]


def test_node_that_leaves_makes_room_below_its_parent() -> None:
    placement = HeartbeatTree(2)
    assert place(placement, "abcdef") == [None, None, "a", "a", "b", "b"]
    placement.remove("d")
    placement.remove("f")
    assert place(placement, "ghi") == ["a", "b", "c"]
    placement.remove("a")
    assert place(placement, "jk") == [None, "j"]
    assert [placement.members[name].depth for name in "bgijk"] == [1, 2, 3, 1, 2]


def test_children_of_a_node_that_is_placed_anew_no_longer_count_as_its_children() -> None:
    placement = HeartbeatTree(2)
    place(placement, "abcd")
    assert place(placement, "aefgh") == [None, "b", "b", "a", "a"]
    placement.remove("c")  # a child of the former connection of a
    assert place(placement, "i") == ["d"]
    assert placement.members["h"].parent_number == placement.members["a"].number == 5


def test_node_with_room_for_several_children_is_filled_again_when_a_child_leaves() -> None:
    placement = HeartbeatTree(3)
    assert place(placement, "abcdefgh") == [None] * 3 + ["a"] * 3 + ["b"] * 2
    placement.remove("e")
    assert place(placement, "ij") == ["a", "b"]


def test_unreachable_node_stays_without_children_after_its_children_have_left() -> None:
    placement = HeartbeatTree(2)
    place(placement, "abcd")
    assert place(placement, "c", failed="a") == ["b"]
    placement.remove("d")
    assert place(placement, "ef") == ["b", "c"]


def test_supervisor_takes_more_children_than_usual_if_all_nodes_are_unreachable() -> None:
    placement = HeartbeatTree(1)
    place(placement, "ab")
    assert place(placement, "b", failed="a") == [None]
    assert place(placement, "c", failed="b") == [None]
    assert place(placement, "de") == ["c", "d"]


def test_parent_of_an_unknown_node_is_the_supervisor() -> None:
    placement = HeartbeatTree(1)
    placement.remove("a")
    place(placement, "ab")
    assert [placement.parent_of(name) for name in "abc"] == [None, "a", None]


# ---- The format of heartbeats ----


@pytest.mark.parametrize(
    ("beat", "line"),
    [
        (beats.Beat("beat", 12.5, False, "cts", 7, 2, b'{"0": {}}'), b'n1 b 12.5 cts 7 2 {"0": {}}'),
        (beats.Beat("beat", 12.5, True, "-", 0, 0, b"{}"), b"n1 r 12.5 - 0 0 {}"),
        (beats.Beat("bye", 1e9, False, "t", 0, 1, b"{}"), b"n1 e 1000000000.0 t 0 1 {}"),
        (beats.Beat("bye", 1e9, True, "s", 0, 1, b"{}"), b"n1 f 1000000000.0 s 0 1 {}"),
    ],
)
def test_heartbeat_is_one_line(beat: beats.Beat, line: bytes) -> None:
    assert beats.pack_beat("n1", beat) == line
    assert beats.unpack_beat(line) == beat


@pytest.mark.parametrize(
    ("values", "beat"),
    [
        ({"ranks": {}}, beats.Beat("beat", 5.0, False, "c", 0, 0, b"{}")),
        (
            {"ranks": {"0": {"output": 3}, "1": {}, "2": {"output": 4}}, "activity": "t", "restarted": True},
            beats.Beat("beat", 5.0, True, "t", 7, 3, b'{"0": {"output": 3}, "1": {}, "2": {"output": 4}}'),
        ),
    ],
)
def test_heartbeat_file_has_the_content_of_a_heartbeat(values: dict[str, Any], beat: beats.Beat) -> None:
    assert beats.beat_of({"kind": "beat", "time": 5, **values}) == beat


# ---- Signed messages ----


@pytest.fixture
def link() -> Iterator[tuple[frames.Connection, frames.Connection]]:
    """Both ends of a connection."""
    near, far = socket.socketpair()
    ends = (frames.Connection(near, b"key", accepted=False), frames.Connection(far, b"key", accepted=True))
    yield ends
    for end in ends:
        end.close()


def exchange_nonces(*ends: frames.Connection) -> None:
    for end in ends:
        end.flush()
    for end in ends:
        assert end.receive() == []


def test_connection_is_sending_until_its_messages_are_signed_and_sent(link: Any) -> None:
    near, far = link
    assert near.is_sending  # its nonce
    near.flush()
    assert not near.is_sending
    near.send(b"one")
    assert near.is_sending  # cannot be signed before the nonce of the peer has arrived
    far.flush()
    near.receive()
    assert not near.is_sending
    assert far.receive() == [b"one"]


@pytest.mark.parametrize(
    ("age_s", "is_trusted", "is_overdue"),
    [(0.0, False, False), (5.0, False, False), (5.1, False, True), (5.1, True, False)],
)
def test_peer_must_prove_its_key_within_five_seconds(
    link: Any, monkeypatch: pytest.MonkeyPatch, age_s: float, is_trusted: bool, is_overdue: bool
) -> None:
    near, _ = link
    near.opened, near.trusted = 1000.0, is_trusted
    monkeypatch.setattr(frames, "time", SetClock(1000.0 + age_s))
    assert near.is_overdue is is_overdue


def test_message_is_returned_when_its_last_byte_has_arrived(link: Any) -> None:
    near, far = link
    exchange_nonces(near, far)
    for payload in (b"one", b"", b"three"):
        near._sign(payload)
    wire, near._outgoing = bytes(near._outgoing), bytearray()
    lengths = [36 + len(payload) for payload in (b"one", b"", b"three")]
    result = []
    for byte in wire:
        near.link.send(bytes([byte]))
        result.append(far.receive())
    assert [number + 1 for number, payloads in enumerate(result) if payloads] == [
        lengths[0],
        sum(lengths[:2]),
        sum(lengths),
    ]
    assert [payload for payloads in result for payload in payloads] == [b"one", b"", b"three"]


def test_messages_that_are_put_back_are_returned_before_new_messages(link: Any) -> None:
    near, far = link
    exchange_nonces(near, far)
    far.put_back([b"two", b"three"])
    near.send(b"four")
    assert far.receive() == [b"two", b"three", b"four"]
    assert far.receive() == []


@pytest.mark.parametrize(
    ("length", "is_trusted", "is_refused"),
    [
        (frames.MOST_UNKNOWN, False, False),
        (frames.MOST_UNKNOWN + 1, False, True),
        (frames.MOST_UNKNOWN + 1, True, False),
        (frames.MOST, True, False),
        (frames.MOST + 1, True, True),
    ],
)
def test_message_length_is_limited(link: Any, length: int, is_trusted: bool, is_refused: bool) -> None:
    near, far = link
    exchange_nonces(near, far)
    far.trusted = is_trusted
    near.link.send(struct.pack(">I32s", length, b"x" * 32))
    if is_refused:
        with pytest.raises(frames.Untrusted, match=f"a message of {length} bytes"):
            far.receive()
    else:
        assert far.receive() == []
        assert (frames.MOST_UNKNOWN, frames.MOST) == (65_536, 67_108_864)


def test_closed_connection_returns_its_last_messages_before_the_error(link: Any) -> None:
    near, far = link
    exchange_nonces(near, far)
    near.send(b"one")
    near.send(b"two")
    near.link.shutdown(socket.SHUT_WR)
    assert far.receive() == [b"one", b"two"]
    with pytest.raises(ConnectionResetError, match="the peer has closed the connection"):
        far.receive()
    assert near.receive() == [frames.READ_ALL + b"2"]


def test_peer_that_closes_without_a_message_gets_no_messages(link: Any) -> None:
    near, far = link
    near.close()
    with pytest.raises(ConnectionResetError):
        far.receive()


@pytest.mark.parametrize(
    ("answers", "is_confirmed"),
    [
        ([frames.READ_ALL + b"2"], True),
        ([b"orders", frames.READ_ALL + b"2"], True),
        ([frames.READ_ALL + b"1"], False),
        ([b"orders"], False),
        ([], False),
    ],
)
def test_connection_is_finished_when_the_peer_has_confirmed_all_messages(
    link: Any, answers: list[bytes], is_confirmed: bool
) -> None:
    near, far = link
    exchange_nonces(near, far)
    near.send(b"one")
    near._sign(b"two")  # not sent yet
    for payload in answers:
        far.send(payload)
    far.link.shutdown(socket.SHUT_WR)
    if is_confirmed:
        near.finish(60.0)
    else:
        with pytest.raises(OSError, match="the peer has not confirmed the last messages"):
            near.finish(60.0)
    assert near.fileno() == -1
    assert far.receive() == [b"one", b"two"]


def test_port_is_opened_on_all_addresses_if_the_address_is_not_on_this_node() -> None:
    for address, bound in (("127.0.0.1", "127.0.0.1"), ("203.0.113.1", "0.0.0.0")):
        with frames.listen(address, 1) as listener:
            assert listener.getsockname()[0] == bound
            assert listener.getsockname()[1] > 0
            assert not listener.getblocking()


def test_hosts_are_tried_in_order_until_a_host_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def connect(target: tuple[str, int], patience_s: float) -> Any:
        tried.append((*target, patience_s))
        if target[0] == "invalid":
            raise UnicodeError("label too long")
        if target[0] == "down":
            raise ConnectionRefusedError("refused")
        return "a socket"

    monkeypatch.setattr(socket, "create_connection", connect)
    accepted: Any = frames.connect(["invalid", "down", "up", "more"], 9, 2.0)
    assert accepted == "a socket"
    assert tried == [("invalid", 9, 2.0), ("down", 9, 2.0), ("up", 9, 2.0)]
    for hosts, error in (
        (["down"], "refused"),
        (["down", "invalid"], "label too long"),
        ([], "no host is known"),
    ):
        with pytest.raises(OSError, match=error):
            frames.connect(hosts, 9, 2.0)


def test_message_of_the_wanted_kind_is_awaited(link: Any) -> None:
    near, far = link
    exchange_nonces(near, far)
    for payload in (b"A1", b"B1", b"B2", b"C1"):
        far.send(payload)
    assert relay.await_message(near, b"B") == b"B1"
    assert near.receive() == [b"B2", b"C1"]


def test_missing_answer_of_the_supervisor_is_an_error(
    link: Any, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "time", clock)
    near, far = link
    exchange_nonces(near, far)
    waits: list[float] = []

    class Selector:
        def register(self, *_: object) -> None:
            pass

        def select(self, seconds: float) -> None:
            waits.append(clock.now)
            clock.sleep(2.0)

        def close(self) -> None:
            pass

    monkeypatch.setattr(selectors, "DefaultSelector", Selector)
    with pytest.raises(OSError, match="no answer within 5 s"):
        relay.await_message(near, b"B")
    assert waits == [1000.0, 1002.0, 1004.0]
