"""A node's end of the heartbeat tree, without its thread."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.supervisor.heartbeat_tree import beats, frames, relay
from dtslurm.worker.supervisor.heartbeat_tree.relay import Orders, Relay
from tests.worker.heartbeat_fakes import ADDRESS, FakeConnection, FakeParent, FakeSelector, SetClock, line


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def node(tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A node's relay without its thread, which has no link yet."""
    monkeypatch.setattr(relay, "time", clock)
    monkeypatch.setattr(relay, "jitter", lambda: 0.25)
    result = Relay(str(tmp_path), "n1")
    yield result
    result.selector.close()


def give_parent(node: Any, *received: bytes) -> FakeParent:
    """Link a node to a parent that has just sent it orders."""
    parent = FakeParent(*received)
    node._parent, node._ordered_at = parent, 1000.0
    node.orders = Orders(1, 0, [])
    return parent


def orders(sequence: int, looks: int = 1, stacks: int = 0, back: tuple[str, ...] = ()) -> bytes:
    values = {"looks": looks, "stacks": stacks, "back": list(back), "sequence": sequence}
    return frames.ORDERS + json.dumps(values).encode()


BEAT = beats.Beat("beat", 10.0, False, "-", 0, 0, b"{}")
BYE = BEAT._replace(kind="bye")


def test_heartbeat_waits_for_the_next_message_to_the_parent(node: Any) -> None:
    assert node.put(BEAT) is False
    parent = give_parent(node)
    assert node.put(BEAT._replace(time=11.0)) is True
    node.tick()
    node.tick()
    assert parent.sent == [frames.BEATS + line("n1", at=11.0)]


def test_node_sends_its_messages_at_intervals(node: Any, clock: SetClock) -> None:
    parent = give_parent(node)
    node._flushed_at = clock.now
    node.put(BEAT)
    for now, messages in ((1000.5, 0), (1000.75, 1), (1001.25, 1), (1001.5, 2)):
        clock.now = now
        node.tick()
        assert len(parent.sent) == messages
        node.put(BEAT)
    node._is_leaving = True
    node.tick()
    assert len(parent.sent) == 3


def test_farewell_that_a_node_passes_on_is_sent_at_once(node: Any, clock: SetClock) -> None:
    parent = give_parent(node)
    node._flushed_at = clock.now
    node.pass_on([b"", line("n2")])
    node.tick()
    assert parent.sent == []
    node.pass_on([line("n3", "e"), line("n4")])
    node.tick()
    assert parent.sent == [frames.BEATS + b"\n".join([line("n2"), line("n3", "e"), line("n4")])]


def test_parent_that_does_not_read_gets_no_further_heartbeats(node: Any) -> None:
    parent = give_parent(node)
    parent.is_sending = True
    node.put(BEAT)
    node.tick()
    assert (parent.sent, parent.flushes) == ([], 1)
    assert node._has_unsent()


def test_heartbeats_that_could_not_be_sent_are_sent_to_the_next_parent(node: Any) -> None:
    parent = give_parent(node)
    parent.error = BrokenPipeError()
    node.pass_on([line("n1"), line("n2")])
    node.tick()
    assert (parent.is_closed, node.orders, node._parent) == (True, None, None)
    other = give_parent(node)
    node.tick()
    assert other.sent == []  # the interval has not passed
    node._flushed_at = 0.0
    node.tick()
    assert other.sent == [frames.BEATS + line("n1") + b"\n" + line("n2")]


def test_farewells_are_sent_again_over_a_new_link_unless_a_newer_heartbeat_waits(node: Any) -> None:
    give_parent(node)
    node.pass_on([line("n2", "e"), line("n3", "f"), line("n4")])
    node.tick()
    assert not node._has_unsent()
    node.pass_on([line("n3", "r", at=20.0)])
    node._unlink()
    parent = give_parent(node)
    node._flushed_at = 0.0
    node.tick()
    assert parent.sent == [frames.BEATS + line("n2", "e") + b"\n" + line("n3", "r", at=20.0)]


@pytest.mark.parametrize(("age_s", "is_linked"), [(5.0, True), (5.5, False)])
def test_link_without_new_orders_counts_as_broken(
    node: Any, clock: SetClock, age_s: float, is_linked: bool
) -> None:
    parent, child = give_parent(node), FakeConnection()
    node._children.add(child)
    clock.now += age_s
    node.tick()
    assert (parent.is_closed, child.is_closed) == (not is_linked, not is_linked)
    assert (node._parent is parent, node.orders is not None) == (is_linked, is_linked)
    if not is_linked:
        assert node._join_at == clock.now + 0.125
        assert node._sequence == -1
        assert node._children == set()


def test_child_without_a_valid_key_is_dropped(node: Any) -> None:
    give_parent(node)
    child, overdue = FakeConnection(), FakeConnection()
    overdue.is_overdue = True
    node._children.update([child, overdue])
    node.tick()
    assert node._children == {child}
    assert (child.is_closed, overdue.is_closed) == (False, True)


@pytest.mark.parametrize(("age_s", "is_confirmed"), [(0.0, True), (5.5, True), (6.0, False)])
def test_lease_is_confirmed_by_a_recent_look_of_the_supervisor(
    node: Any, clock: SetClock, age_s: float, is_confirmed: bool
) -> None:
    node._looked_at = clock.now
    assert not node.confirms_lease()  # without a link
    node._follow(orders(1))
    clock.now += age_s
    assert node.confirms_lease() is is_confirmed


def test_orders_are_followed_once_and_in_order(node: Any, clock: SetClock) -> None:
    followed = []
    for sequence, looks in ((3, 5), (3, 6), (2, 7), (4, 5), (5, 6), (6, 4)):
        clock.now += 1.0
        is_new = node._follow(orders(sequence, looks, sequence, ("n7",)))
        assert is_new == ((sequence, looks) not in {(3, 6), (2, 7)})
        followed.append((node.orders, node._sequence, node._ordered_at, node._looked_at))
    third, fourth = Orders(5, 3, ["n7"]), Orders(5, 4, ["n7"])
    assert followed == [
        (third, 3, 1001.0, 1001.0),
        (third, 3, 1001.0, 1001.0),
        (third, 3, 1001.0, 1001.0),
        (fourth, 4, 1004.0, 1001.0),  # the supervisor is alive, but has not read the lease again
        (Orders(6, 5, ["n7"]), 5, 1005.0, 1005.0),
        (Orders(4, 6, ["n7"]), 6, 1006.0, 1006.0),
    ]


def test_new_orders_of_the_parent_are_passed_on_to_the_children(node: Any) -> None:
    parent = give_parent(node, orders(2), orders(2), b"?", frames.BEATS + line("n9"))
    child, busy, broken = FakeConnection(), FakeConnection(is_sending=True), FakeConnection()
    broken.error = BrokenPipeError()
    node._children.update([child, busy, broken])
    node._read(parent)
    assert (child.sent, child.flushes) == ([orders(2)], 1)
    assert (busy.sent, busy.flushes) == ([], 1)
    assert broken.is_closed
    assert node._children == {child, busy}
    assert node._pending == {}  # a parent sends no heartbeats


def test_child_gets_the_last_orders_when_it_joins_and_its_heartbeats_are_passed_on(node: Any) -> None:
    parent = give_parent(node)
    node._follow(orders(4, looks=7, stacks=2, back=("n5",)))
    child = FakeConnection(frames.JOIN + b"n2", frames.BEATS + line("n2"), orders(9))
    node._children.add(child)
    node._read(child)
    assert child.sent == [orders(4, looks=7, stacks=2, back=("n5",))]
    assert node._sequence == 4  # children give no orders
    node.tick()
    assert parent.sent == [frames.BEATS + line("n2")]


def test_malformed_heartbeat_of_a_child_ends_only_the_link_to_it(node: Any) -> None:
    child = FakeConnection(frames.BEATS + b"short")
    node._children.add(child)
    node._read(child)
    assert (child.is_closed, node._children, node._pending) == (True, set(), {})


@pytest.mark.parametrize("payload", [b"Ono JSON", b'O{"sequence": 1}', b'O{"sequence": []}', b""])
def test_malformed_orders_and_broken_connections_end_the_link(node: Any, payload: bytes) -> None:
    parent, child = give_parent(node, payload), FakeConnection()
    child.error = ConnectionResetError()
    node._children.add(child)
    node._read(child)
    assert (child.is_closed, parent.is_closed, node._children) == (True, False, set())
    if not payload:
        parent.error = ConnectionResetError()
    node._read(parent)
    assert (parent.is_closed, node._parent) == (True, None)


def test_node_without_orders_has_nothing_to_tell_its_children(node: Any) -> None:
    assert node._pack_orders() == b'O{"sequence": -1}'


def test_attempts_to_join_the_tree_pause_longer_after_each_failure(
    node: Any, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[float] = []
    results = iter([False] * 3 * 8)

    def join() -> bool:
        attempts.append(clock.now)
        return next(results, True)

    monkeypatch.setattr(node, "_join", join)
    assert node._join_at == 1000.25
    node.join_if_due()
    assert attempts == []  # not all nodes at once
    pauses = []
    for _ in range(8):
        clock.now = node._join_at
        node.join_if_due()
        pauses.append(node._join_at - clock.now)
    assert pauses == [0.75 * pause_s for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0)]
    assert len(attempts) == 24  # three parents each time
    clock.now = node._join_at
    node.join_if_due()
    assert (node._join_at, node._failures, len(attempts)) == (clock.now, 0, 25)


def test_node_does_not_join_twice_and_pauses_if_the_supervisor_is_unreachable(
    node: Any, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[float] = []

    def refuse() -> bool:
        attempts.append(clock.now)
        raise ConnectionRefusedError

    monkeypatch.setattr(node, "_join", refuse)
    node._join_at = 0.0
    parent = give_parent(node)
    node.join_if_due()
    assert attempts == []
    node._parent = None
    node.join_if_due()
    assert (len(attempts), node._failures, node._join_at) == (1, 1, clock.now + 0.375)
    assert not parent.is_closed


@pytest.mark.parametrize(
    ("children", "has_orders", "is_accepted"),
    [(0, True, True), (255, True, True), (256, True, False), (0, False, False)],
)
def test_node_accepts_children_while_it_has_a_link_and_room(
    node: Any, children: int, has_orders: bool, is_accepted: bool
) -> None:
    node.orders = Orders(1, 0, []) if has_orders else None
    node._children.update(FakeConnection() for _ in range(children))
    node._key = b"key"
    node._listener = frames.listen("127.0.0.1", 4)
    with socket.create_connection(node._listener.getsockname(), 60.0) as child:
        node._listener.setblocking(True)
        node._listener.settimeout(60.0)
        link, _ = node._listener.accept()
        node._listener.close()
        node._listener = SimpleNamespace(accept=iter_accept(link))
        node._accept()
        assert len(child.recv(100)) == (frames.NONCE if is_accepted else 0)
    assert len(node._children) == children + is_accepted
    link.close()


def iter_accept(link: socket.socket) -> Callable[[], tuple[socket.socket, Any]]:
    links = [link]

    def accept() -> tuple[socket.socket, Any]:
        if not links:
            raise BlockingIOError
        return links.pop(), ADDRESS

    return accept


# ---- A node that joins or leaves the tree ----


@pytest.fixture
def joining(node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A node that reads the supervisor's address, with the connections it opens and the answers it gets."""
    target = {"hosts": ["head", "10.0.0.1"], "port": 77, "key": "aa" * 32}
    (tmp_path / "supervisor.json").write_text(json.dumps(target))
    result = SimpleNamespace(node=node, opened=[], links=[], answers=[], selector=FakeSelector())

    def open_connection(link: Any, key: bytes, *, accepted: bool) -> Any:
        assert (key, accepted) == (bytes.fromhex("aa" * 32), False)
        link.link = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 1))
        return link

    def connect(hosts: list[str], port: int, patience_s: float) -> Any:
        result.links.append((hosts, port, patience_s))
        result.opened.append(FakeParent())
        return result.opened[-1]

    def await_message(_connection: object, kind: bytes) -> Any:
        answer = result.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        assert answer[:1] == kind
        return answer

    node.selector.close()
    node.selector = result.selector
    monkeypatch.setattr(frames, "Connection", open_connection)
    monkeypatch.setattr(frames, "connect", connect)
    monkeypatch.setattr(relay, "await_message", await_message)
    return result


def read_request(connection: FakeParent) -> dict[str, Any]:
    assert connection.sent[0][:1] == frames.REGISTER
    return dict(json.loads(connection.sent[0][1:]))


def test_node_without_another_parent_is_linked_to_the_supervisor(joining: Any, clock: SetClock) -> None:
    node = joining.node
    node.put(BEAT)
    joining.answers = [b'P{"parent": ""}']
    assert node._join()
    [supervisor] = joining.opened
    assert joining.links == [(["head", "10.0.0.1"], 77, 3.0)]
    port = node._listener.getsockname()[1]
    assert read_request(supervisor) == {"node": "n1", "port": port, "failed": "", "beat": line("n1").decode()}
    assert (node._parent, node._ordered_at, supervisor.is_closed) == (supervisor, clock.now, False)
    assert joining.selector.registered == [supervisor, node._listener]
    listener = node._listener
    node._unlink()
    assert joining.selector.registered == [listener]
    joining.answers = [b'P{"parent": ""}']
    assert node._join()
    assert node._listener is listener
    node.close()
    assert (joining.selector.registered, node._listener, listener.fileno()) == ([], None, -1)


def test_node_joins_the_parent_that_the_supervisor_names(joining: Any) -> None:
    node = joining.node
    joining.answers = [b'P{"parent": "n7", "host": "10.0.0.7", "port": 5}', orders(4, looks=9)]
    assert node._join()
    supervisor, parent = joining.opened
    assert joining.links[1] == (["10.0.0.7"], 5, 3.0)
    assert parent.sent == [frames.JOIN + b"n1"]
    assert (supervisor.is_closed, parent.is_closed, node._parent) == (True, False, parent)
    assert node.orders == Orders(9, 0, [])
    node.close()


@pytest.mark.parametrize("answer", [OSError("no answer"), b"Ono JSON", b"O{}"])
def test_node_names_the_parent_that_it_could_not_join(joining: Any, answer: Any) -> None:
    node = joining.node
    joining.answers = [b'P{"parent": "n7", "host": "10.0.0.7", "port": 5}', answer, OSError("no answer")]
    assert not node._join()
    assert joining.opened[1].is_closed
    assert node._parent is None
    with pytest.raises(OSError, match="no answer"):
        node._join()
    assert read_request(joining.opened[2])["failed"] == "n7"
    assert joining.opened[2].is_closed
    node.close()


def test_leaving_node_sends_its_farewell_to_the_supervisor_directly(joining: Any) -> None:
    node = joining.node
    node.pass_on([line("n1", "e"), line("n2", "e")])
    node._is_leaving = True
    assert node._join()
    [supervisor] = joining.opened
    assert read_request(supervisor)["leaves"] is True
    assert supervisor.sent[1] == frames.BEATS + line("n1", "e") + b"\n" + line("n2", "e")
    assert supervisor.is_finished
    assert node._pending == {}
    node.close()


def test_heartbeat_that_arrives_during_the_delivery_of_the_farewell_stays_unsent(
    node: Any, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.pass_on([line("n1", "e"), line("n2", "b")])
    supervisor = FakeParent(is_sending=True)

    def receive_later(seconds: float) -> None:
        clock.now += seconds
        assert clock.now < 1100.0, "the node does not leave"
        node.pass_on([line("n2", "e"), line("n3", "e")])
        supervisor.is_sending = clock.now < 1002.9

    monkeypatch.setattr(clock, "sleep", receive_later)
    assert node._deliver_farewell(supervisor)
    assert node._pending == {b"n2": line("n2", "e"), b"n3": line("n3", "e")}
    assert (supervisor.is_finished, supervisor.flushes > 0) == (True, True)


def test_supervisor_that_does_not_read_the_farewell_is_an_error(node: Any, clock: SetClock) -> None:
    node.put(BYE)
    supervisor = FakeParent(is_sending=True)
    with pytest.raises(OSError, match="the supervisor does not answer"):
        node._deliver_farewell(supervisor)
    assert clock.now == pytest.approx(1003.0, abs=0.03)
    assert not supervisor.is_finished
    assert node._has_unsent()


@pytest.mark.parametrize("is_read", [True, False])
def test_farewell_counts_as_delivered_when_the_parent_has_read_it(
    node: Any, clock: SetClock, is_read: bool
) -> None:
    node.put(BYE)
    parent = give_parent(node)
    node.tick()
    parent.error = None if is_read else OSError("the peer has not confirmed the last messages")
    node._join_at = 5000.0
    assert node._finish(parent) is is_read
    assert (node._parent, parent.is_finished) == (None, is_read)
    if not is_read:
        assert node._join_at == 0.0
        assert node._pending == {b"n1": line("n1", "e")}


def run_until_left(node: Any, clock: SetClock, is_leaving_at: float) -> list[float]:
    """Run a node's loop, in which it is to leave from a certain time on; return when it waited for events."""
    selector, times = FakeSelector(), []

    def wait() -> None:
        times.append(clock.now)
        clock.now += 0.5
        assert clock.now < 1100.0, "the node does not leave"
        node._is_leaving = clock.now >= is_leaving_at

    selector.on_select = wait
    node.selector.close()
    node.selector = selector
    wake, alarm = socket.socketpair()
    node._run(wake)
    assert (wake.fileno(), node._left.is_set()) == (-1, True)
    alarm.close()
    return times


def test_node_without_anything_to_send_leaves_at_once(
    node: Any, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "join_if_due", lambda: None)
    assert run_until_left(node, clock, 1002.0) == [1000.0, 1000.5, 1001.0, 1001.5]
    assert node.leave()


def test_leaving_node_finishes_the_link_to_its_parent(
    node: Any, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "join_if_due", lambda: None)
    parent = give_parent(node)
    node.put(BYE)
    assert len(run_until_left(node, clock, 1002.0)) == 4
    assert parent.sent == [frames.BEATS + line("n1", "e")]
    assert (parent.is_finished, node.leave()) == (True, True)


def test_leaving_node_gives_up_after_three_seconds(
    node: Any, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_times: list[float] = []
    monkeypatch.setattr(node, "join_if_due", lambda: join_times.append(node._join_at))
    node.put(BYE)
    node._join_at = 5000.0
    assert run_until_left(node, clock, 1002.0)[-1] == 1004.5
    assert join_times == [5000.0] * 4 + [0.0] * 6
    assert not node.leave()


def test_unsent_heartbeats_wait_for_the_parent(node: Any) -> None:
    assert not node._has_unsent()
    parent = give_parent(node)
    assert not node._has_unsent()
    parent.is_sending = True
    assert node._has_unsent()
    parent.is_sending = False
    node.put(BEAT)
    assert node._has_unsent()


def test_jitter_is_between_0_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for random_bytes, value in ((b"\0\0", 0.0), (b"\x33\x33", 0.2), (b"\xff\xff", 1.0)):
        monkeypatch.setattr(relay, "os", SimpleNamespace(urandom=lambda _count, data=random_bytes: data))
        assert relay.jitter() == value
