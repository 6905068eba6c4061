"""A node's end of the heartbeat tree: sends its own heartbeats, and passes on those of other nodes.

A node asks the supervisor for its parent in the tree, which is another node or the supervisor itself. In the
other direction, the supervisor's orders pass down the tree every second or two. A node that receives no new
orders for a few seconds drops its children and requests another parent.
"""

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional, Set

from ...lib.json_records import read_object
from . import frames
from .beats import ADDRESS, FAN_OUT, FAREWELLS, Beat, pack_beat

FLUSH_S = 0.7  # no divisor of the interval between heartbeats, so that their delays vary
LINK_S = 5.0  # without new orders: then the link counts as broken
LOOKS_S = 6.0  # without a new look of the supervisor: then the node reads the lease itself
CONNECT_S, REPLY_S = 3.0, 5.0
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # between attempts to join the tree
TRIES = 3  # parents that a node tries before it pauses
FAREWELL_S = 3.0
MOST_CHILDREN = 2 * FAN_OUT  # connections at once, those included that have not proved their key yet


class Orders(NamedTuple):
    """The latest orders of the supervisor to all nodes.

    Attributes:
        looks: how often the supervisor has read the heartbeats; it reads the lease each time before.
        stacks: number of the requested snapshot of the ranks' stacks.
        back: nodes whose first agent writes heartbeats again, so that a restarted one is not needed.
    """

    looks: int
    stacks: int
    back: List[str]


class Relay:
    """The connections of one node's agent.

    Attributes:
        orders: the last orders; None while the node has no link to the supervisor.
    """

    def __init__(self, folder: str, node: str) -> None:
        self.folder, self.node = folder, node
        self.orders: Optional[Orders] = None
        self._sequence = -1
        self._ordered_at = self._looked_at = self._flushed_at = 0.0
        self._pending: Dict[bytes, bytes] = {}  # the newest line of each node
        # The farewells of this node and of those below it, which are sent again over a new link: the nodes
        # themselves have left, and the old link may have broken before they were read.
        self._farewells: Dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self._parent: Optional[frames.Connection] = None
        self._children: Set[frames.Connection] = set()
        self._key = b""
        self._listener: Optional[socket.socket] = None
        self._is_listening = False
        self._failed = ""
        self._failures, self._join_at = 0, time.monotonic() + jitter()  # not all nodes at once
        self._is_leaving = False
        self._is_delivered = False
        self._left = threading.Event()
        self._alarm: Optional[socket.socket] = None  # wakes up the thread
        self.selector = selectors.DefaultSelector()

    # ---- used by the agent's main thread ----

    def start(self) -> None:
        """Run in a thread of its own."""
        wake, self._alarm = socket.socketpair()
        self.selector.register(wake, selectors.EVENT_READ)
        threading.Thread(target=self._run, args=(wake,), daemon=True).start()

    def put(self, beat: Beat) -> bool:
        """Send a heartbeat; return whether this node has a link to the supervisor."""
        self._take_over([pack_beat(self.node, beat)])
        return self.orders is not None

    def pass_on(self, lines: List[bytes]) -> None:
        """Send the heartbeats of other nodes with this node's own."""
        if self._take_over([line for line in lines if line]):
            self._flushed_at = 0.0  # Slurm may end this node's agent soon

    def _take_over(self, lines: List[bytes]) -> bool:
        """Add lines to those to send; return whether one is a farewell."""
        farewells = {line.split(b" ", 1)[0]: line for line in lines if line.split(b" ", 2)[1] in FAREWELLS}
        with self._lock:
            self._pending.update((line.split(b" ", 1)[0], line) for line in lines)
            self._farewells.update(farewells)
        return bool(farewells)

    def confirms_lease(self) -> bool:
        """Return whether the supervisor has just confirmed that this attempt holds the lease."""
        return self.orders is not None and time.monotonic() - self._looked_at < LOOKS_S

    def leave(self) -> bool:
        """Send the pending heartbeats and close all connections; return whether the farewell has arrived."""
        self._is_leaving = True
        if self._alarm is not None:
            with contextlib.suppress(OSError):
                self._alarm.send(b".")
        self._left.wait(2 * FAREWELL_S)
        return self._is_delivered

    # ---- the thread ----

    def _run(self, wake: socket.socket) -> None:
        end = None
        while end is None or (not self._is_delivered and time.monotonic() < end):
            self.join_if_due()
            events = self.selector.select(0.2)
            self.handle([event for event, _ in events if event.fileobj is not wake])
            self.tick()
            if self._is_leaving and end is None:
                end = time.monotonic() + FAREWELL_S
                self._join_at = 0.0
                self._flushed_at = 0.0
            if end is not None and not self._has_unsent():
                self._is_delivered = self._parent is None or self._finish(self._parent)
        self.close()
        wake.close()
        self._left.set()

    def _finish(self, parent: frames.Connection) -> bool:
        """End the link of a node that leaves; return whether the parent has read everything.

        If it has not, this node sends the farewells to the supervisor itself.
        """
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(parent)
        try:
            parent.finish(FAREWELL_S)
        except OSError:
            self._unlink()
            self._join_at = 0.0
            return False
        self._parent = None
        return True

    def _has_unsent(self) -> bool:
        return bool(self._pending) or (self._parent is not None and self._parent.is_sending)

    def handle(self, events: List[selectors.SelectorKey]) -> None:
        """Read from the sockets that a selector has reported as readable."""
        for event in events:
            if event.fileobj is self._listener:
                self._accept()
            else:
                self._read(event.fileobj)

    def tick(self) -> None:
        """Send the pending heartbeats if it is time, and find out whether the link is broken."""
        now = time.monotonic()
        parent = self._parent
        if parent is None:
            return
        if now - self._ordered_at > LINK_S:
            self._unlink()
            return
        for child in [child for child in self._children if child.is_overdue]:
            self._drop_child(child)
        if now - self._flushed_at >= FLUSH_S or self._is_leaving:
            self._flushed_at = now
            try:
                if parent.is_sending:
                    parent.flush()
                else:
                    self._send_pending(parent)
            except OSError:
                self._unlink()

    def _send_pending(self, parent: frames.Connection) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        if pending:
            try:
                parent.send(frames.BEATS + b"\n".join(pending.values()))
            except OSError:
                with self._lock:
                    self._pending = {**pending, **self._pending}
                raise

    def close(self) -> None:
        """Close all connections."""
        self._unlink()
        if self._alarm is not None:
            self._alarm.close()
        if self._listener is not None:
            if self._is_listening:
                self.selector.unregister(self._listener)
            self._listener.close()
            self._listener, self._is_listening = None, False

    # ---- the way to the supervisor ----

    def join_if_due(self) -> None:
        """Join the tree, unless this node is in it or must wait before the next try. It takes seconds."""
        if self._parent is not None or time.monotonic() < self._join_at:
            return
        is_joined = False
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            for _ in range(TRIES):
                is_joined = is_joined or self._join()
        pause_s = PAUSES_S[min(self._failures, len(PAUSES_S) - 1)]
        self._failures = 0 if is_joined else self._failures + 1
        self._join_at = time.monotonic() + (0.0 if is_joined else pause_s * (0.5 + jitter()))

    def _join(self) -> bool:
        """Ask the supervisor for a parent, and connect to it; return whether that succeeded.

        Raises:
            OSError: the supervisor cannot be reached.
        """
        target = read_object(os.path.join(self.folder, ADDRESS))
        self._key = bytes.fromhex(target["key"])
        root = frames.Connection(
            frames.connect(target["hosts"], target["port"], CONNECT_S), self._key, accepted=False
        )
        try:
            address = root.link.getsockname()[0]
            if self._listener is None:
                self._listener = frames.listen(address, MOST_CHILDREN)
            line = self._pending.get(self.node.encode(), b"").decode()
            port = self._listener.getsockname()[1]
            request = {"node": self.node, "port": port, "failed": self._failed, "beat": line}
            request.update({"leaves": True} if self._is_leaving else {})
            root.send(frames.REGISTER + json.dumps(request).encode())
            if self._is_leaving:
                return self._deliver_farewell(root)
            answer = json.loads(await_message(root, frames.PLACE)[1:].decode())
            self._failed = str(answer["parent"])
            if not self._failed:
                self._link(root)
                return True
        except Exception:
            root.close()
            raise
        root.close()
        return self._join_parent(str(answer["host"]), int(answer["port"]))

    def _deliver_farewell(self, root: frames.Connection) -> bool:
        """Send the pending heartbeats of a node that leaves; wait until the supervisor has received them.

        Raises:
            OSError: it has not received all of them.
        """
        with self._lock:
            pending = dict(self._pending)
        root.send(frames.BEATS + b"\n".join(pending.values()))
        end = time.monotonic() + CONNECT_S
        while root.is_sending:
            if time.monotonic() >= end:
                raise OSError("the supervisor does not answer")
            time.sleep(0.02)
            root.receive()
            root.flush()
        root.finish(FAREWELL_S)
        with self._lock:
            self._pending = {node: line for node, line in self._pending.items() if line != pending.get(node)}
        return True

    def _join_parent(self, host: str, port: int) -> bool:
        parent: Optional[frames.Connection] = None
        try:
            parent = frames.Connection(frames.connect([host], port, CONNECT_S), self._key, accepted=False)
            parent.send(frames.JOIN + self.node.encode())
            self._follow(await_message(parent, frames.ORDERS))
        except (OSError, ValueError, KeyError):
            if parent is not None:
                parent.close()
            return False
        self._link(parent)
        return True

    def _link(self, parent: frames.Connection) -> None:
        self._parent = parent
        self._ordered_at = time.monotonic()
        self.selector.register(parent, selectors.EVENT_READ)
        if self._listener is not None and not self._is_listening:
            self._is_listening = True
            self.selector.register(self._listener, selectors.EVENT_READ)
        self._read(parent)  # messages that arrived together with the answer

    def _unlink(self) -> None:
        """Drop the parent and all children, which then request other parents."""
        self.orders, self._sequence = None, -1
        with self._lock:
            self._pending = {**self._farewells, **self._pending}
        for child in list(self._children):
            self._drop_child(child)
        parent, self._parent = self._parent, None
        if parent is not None:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(parent)
            parent.close()
        self._join_at = time.monotonic() + jitter() / 2

    # ---- messages ----

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while self._listener is not None:
                link, _ = self._listener.accept()
                if self.orders is None or len(self._children) >= MOST_CHILDREN:
                    link.close()
                    continue
                child = frames.Connection(link, self._key, accepted=True)
                self._children.add(child)
                self.selector.register(child, selectors.EVENT_READ)
                child.flush()

    def _drop_child(self, child: frames.Connection) -> None:
        self._children.discard(child)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(child)
        child.close()

    def _read(self, connection: Any) -> None:
        try:
            payloads = connection.receive()
            for payload in payloads:
                self._act(connection, payload)
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            if connection is self._parent:
                self._unlink()
            else:
                self._drop_child(connection)

    def _act(self, connection: frames.Connection, payload: bytes) -> None:
        kind = payload[:1]
        if connection is self._parent:
            if kind == frames.ORDERS and self._follow(payload):
                for child in list(self._children):
                    self._forward(child, payload)
        elif kind == frames.JOIN:
            self._forward(connection, self._pack_orders())
        elif kind == frames.BEATS:
            self.pass_on(payload[1:].split(b"\n"))

    def _forward(self, child: frames.Connection, payload: bytes) -> None:
        try:
            child.flush()
            if not child.is_sending:
                child.send(payload)
        except OSError:
            self._drop_child(child)

    def _pack_orders(self) -> bytes:
        orders = self.orders._asdict() if self.orders else {}
        return frames.ORDERS + json.dumps(dict(orders, sequence=self._sequence)).encode()

    def _follow(self, payload: bytes) -> bool:
        """Take over orders; return whether they are new.

        Raises:
            ValueError, KeyError: the message is malformed.
        """
        values = json.loads(payload[1:].decode())
        sequence, now = int(values["sequence"]), time.monotonic()
        if sequence <= self._sequence:
            return False
        orders = Orders(int(values["looks"]), int(values["stacks"]), list(values["back"]))
        if self.orders is None or orders.looks != self.orders.looks:
            self._looked_at = now
        self._sequence, self._ordered_at, self.orders = sequence, now, orders
        return True


def jitter() -> float:
    """Return a random number between 0 and 1: the nodes of a job do not all act at the same moment."""
    return int.from_bytes(os.urandom(2), "big") / 0xFFFF


def await_message(connection: frames.Connection, kind: bytes) -> bytes:
    """Return the next message of a kind.

    Raises:
        OSError: the peer closed the connection, or sent no message in time.
    """
    end = time.monotonic() + REPLY_S
    with contextlib.closing(selectors.DefaultSelector()) as selector:
        selector.register(connection, selectors.EVENT_READ)
        while time.monotonic() < end:
            selector.select(0.2)
            connection.flush()
            payloads = connection.receive()
            for number, payload in enumerate(payloads):
                if payload[:1] == kind:
                    connection.put_back(payloads[number + 1 :])
                    return payload
    raise OSError("no answer within {:.0f} s".format(REPLY_S))
