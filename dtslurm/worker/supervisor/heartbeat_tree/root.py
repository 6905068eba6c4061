"""The supervisor's end of the heartbeat tree: places the nodes, and receives their heartbeats."""

import contextlib
import json
import os
import selectors
import threading
import time
from functools import partial
from typing import Any, Callable, Dict, List, Set, Tuple

from ...lib.json_records import write_atomically
from ...preflight.network import resolve_own_address
from ..files import text_of
from . import frames
from .beats import ADDRESS, FAN_OUT, FAREWELLS
from .placement import HeartbeatTree

ORDER_S = 1.5
MOST_CONNECTIONS = 800  # at once, below the usual limit of 1024 open files; more wait in the backlog
MEMBERS = "members"  # the names of the nodes that have ever been placed, for a supervisor that is restarted
BACKLOG = 4096


class HeartbeatRoot:
    """Accepts the connections of node agents in a thread of its own.

    Args:
        folder: where the agents find the address and the key.
        head: the name under which other nodes reach this one.

    Raises:
        OSError: the port cannot be opened, or the address cannot be written.
    """

    def __init__(self, folder: str, head: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.clock = folder, clock
        self._key = os.urandom(32)
        self._lines: Dict[bytes, Tuple[float, bytes]] = {}
        self._farewells: Dict[bytes, float] = {}  # when each node that has left sent its farewell
        self._lock = threading.Lock()
        self._placement = HeartbeatTree(FAN_OUT)
        self._connections: Set[frames.Connection] = set()
        self._children: Set[frames.Connection] = set()
        self._orders: Dict[str, Any] = {"looks": 0, "stacks": 0, "back": []}
        self._sequence, self._ordered_at = 0, 0.0
        self._known = set(known_members(folder))
        self._new_members: List[str] = []
        self._is_closed = self._is_full = False
        address = head if head.startswith("127.") else resolve_own_address(head)
        self._listener = frames.listen(address, BACKLOG)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        hosts = list(dict.fromkeys(filter(None, (address, head, os.uname().nodename))))
        target = {"hosts": hosts, "port": self._listener.getsockname()[1], "key": self._key.hex()}
        write_atomically(os.path.join(folder, ADDRESS), json.dumps(target), mode=0o600, sync=False)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    # ---- used by the supervisor's main thread ----

    def take(self) -> Dict[bytes, Tuple[float, bytes]]:
        """Return the newest heartbeat of each node that sent one since the last call, and when it arrived."""
        with self._lock:
            lines, self._lines = self._lines, {}
            return lines

    def give_orders(self, **orders: Any) -> None:
        """Change the orders that the nodes receive next; see `relay.Orders`."""
        self._orders = {**self._orders, **orders}

    def parent_of(self, node: str) -> str:
        """Return the node that passes on a node's heartbeats, empty if it sends them itself."""
        return self._placement.parent_of(node) or ""

    def close(self) -> None:
        """Close the port and all connections."""
        self._is_closed = True
        self._thread.join(5.0)

    # ---- the thread ----

    def _serve(self) -> None:
        while not self._is_closed:
            for event, _ in self._selector.select(0.25):
                if event.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(event.fileobj)
            now = time.monotonic()
            if now - self._ordered_at >= ORDER_S:
                self._ordered_at = now
                self._send_orders()
                self._write_members()
                for connection in [connection for connection in self._connections if connection.is_overdue]:
                    self._drop(connection)
            if self._is_full and len(self._connections) < MOST_CONNECTIONS:
                self._is_full = False
                self._selector.register(self._listener, selectors.EVENT_READ)
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._connections) < MOST_CONNECTIONS:
                link, _ = self._listener.accept()
                connection = frames.Connection(link, self._key, accepted=True)
                self._connections.add(connection)
                self._selector.register(connection, selectors.EVENT_READ)
                self._try(connection, connection.flush)
            self._selector.unregister(self._listener)
            self._is_full = True

    def _read(self, connection: Any) -> None:
        payloads: List[bytes] = []
        self._try(connection, lambda: payloads.extend(connection.receive()))
        for payload in payloads:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if payload[:1] == frames.BEATS:
                    self._note(payload[1:])
                elif payload[:1] == frames.REGISTER:
                    self._place(connection, json.loads(payload[1:].decode()))

    def _note(self, lines: bytes) -> None:
        now = self.clock()
        line_by_node = {}
        for line in filter(None, lines.split(b"\n")):
            node, code, sent_at = line.split(b" ", 3)[:3]
            if code in FAREWELLS:
                self._placement.remove(node.decode())
                self._farewells[node] = float(sent_at)
            elif float(sent_at) <= self._farewells.get(node, 0.0):
                continue  # another node has passed on an older heartbeat after the farewell had come directly
            line_by_node[node] = (now, line)
        with self._lock:
            self._lines.update(line_by_node)

    def _place(self, connection: frames.Connection, request: Dict[str, Any]) -> None:
        node = str(request["node"])
        if node not in self._known:
            self._known.add(node)
            self._new_members.append(node)
        if request.get("beat"):
            self._note(str(request["beat"]).encode())
        if request.get("leaves"):
            return
        host = connection.link.getpeername()[0]
        parent = self._placement.place(node, (host, int(request["port"])), str(request.get("failed") or ""))
        if parent is None:
            self._children.add(connection)
            answer: Dict[str, Any] = {"parent": ""}
        else:
            host, port = self._placement.members[parent].address
            answer = {"parent": parent, "host": host, "port": port}
        self._try(connection, lambda: connection.send(frames.PLACE + json.dumps(answer).encode()))
        if parent is None:
            self._try(connection, lambda: connection.send(self._pack_orders()))

    def _pack_orders(self) -> bytes:
        return frames.ORDERS + json.dumps(dict(self._orders, sequence=self._sequence)).encode()

    def _send_orders(self) -> None:
        self._sequence += 1
        payload = self._pack_orders()
        for connection in list(self._children):
            if not connection.is_sending:  # a child that does not read gets no further messages
                self._try(connection, partial(connection.send, payload))
            else:
                self._try(connection, connection.flush)

    def _write_members(self) -> None:
        if not self._new_members:
            return
        names, self._new_members = self._new_members, []
        with contextlib.suppress(OSError), open(os.path.join(self.folder, MEMBERS), "a") as file:
            file.write("".join(name + "\n" for name in names))

    def _try(self, connection: frames.Connection, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError:
            self._drop(connection)

    def _drop(self, connection: frames.Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self._children.discard(connection)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection)
            connection.close()


def known_members(folder: str) -> List[str]:
    """Return the nodes that an earlier supervisor of this attempt has placed."""
    return (text_of(os.path.join(folder, MEMBERS)) or "").split()
