"""Runs on a node of a running job, and connects the client of ``dtslurm forward`` to ports of the node.

Standard input and output carry the frames of `connections`. The program ends with its input, if the client
answers no more, and when the process of the job that the client chose has ended.
"""

import base64
import contextlib
import ipaddress
import json
import os
import select
import socket
import sys
import threading
import time
import zlib
from typing import Any, Dict, List, Optional

from ..lib import sockets
from ..probe.execute import GONE, find_process, is_here
from ..stacks import stacks
from . import connections
from .connections import Connections, FrameDecoder, ProtocolError

TICK_S = 2.0  # between looks at the process of the job
PING_S = 10.0
SILENCE_S = 120.0  # a client that sends nothing for this time is considered gone
TEST_S = 30.0  # for the client to test whether it reaches this node
CONNECT_S = 20.0
_ROOT = 0


def main() -> int:
    """Relay for the process in the last argument until it ends, or the client does; return the exit code."""
    request = json.loads(zlib.decompress(base64.b64decode(sys.argv[-1])).decode())
    target = request["process"]
    pid = (
        find_process(target, request["run_dir"])
        if is_here(target["node"], by_node=request["by_node"])
        else None
    )
    if pid is None:
        sys.stderr.write("dtslurm: {} no longer runs\n".format(target["label"]))
        return GONE
    return PortRelay(pid).run()


class PortRelay:
    """The node's end of the relay."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._started_at = stacks.started_at(pid)
        self._writing = threading.Lock()
        self._connections = Connections(self._send, lambda number, reason: None)
        self._address = find_own_address(os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or "127.0.0.1")

    def run(self) -> int:
        """Relay until the process of the job ends, or the client does; return the exit code."""
        with self._writing:
            _write_all(connections.MAGIC)
        self._send(connections.HELLO, 0, json.dumps(self._begin_test()).encode())
        decoder = FrameDecoder(is_greeted=True)
        looked_at = heard_at = pinged_at = time.monotonic()
        while True:
            readable = select.select([0], [], [], TICK_S)[0]
            now = time.monotonic()
            if readable:
                data = os.read(0, connections.LARGEST)
                if not data:
                    return 0
                heard_at = now
                try:
                    for kind, number, payload in decoder.feed(data):
                        self._receive(kind, number, payload)
                except ProtocolError as error:
                    sys.stderr.write("dtslurm: the client sent {}\n".format(error))
                    return 1
            if now - heard_at > SILENCE_S:
                return 0
            if now - pinged_at > PING_S:
                self._send(connections.PING, 0, b"")
                pinged_at = now
            if now - looked_at > TICK_S:
                if stacks.started_at(self._pid) != self._started_at:
                    return GONE
                looked_at = now

    def _receive(self, kind: int, number: int, payload: bytes) -> None:
        if kind == connections.PONG:
            return
        if kind == connections.ASK:
            answer = self._describe_port(connections.PORT.unpack(payload)[0])
            self._send(connections.ANSWER, number, json.dumps(answer).encode())
        elif kind == connections.OPEN:
            port = connections.PORT.unpack(payload)[0]
            self._connections.add(number, lambda: connect(port))
        else:
            self._connections.receive(kind, number, payload)

    def _describe_port(self, port: int) -> Dict[str, Any]:
        listeners = sockets.find_listeners(port)
        return describe_port(listeners, os.getuid(), self._address)

    def _begin_test(self) -> Dict[str, Any]:
        """Listen for one connection for a while, and send a nonce on it.

        A client that reads the nonce knows that it reaches this very node from its login node.
        """
        nonce = base64.b64encode(os.urandom(12)).decode()
        if self._address is None:
            return {"address": "", "port": 0, "nonce": nonce}
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((self._address, 0))
            listener.listen(1)
        except OSError:
            listener.close()
            return {"address": "", "port": 0, "nonce": nonce}
        port = listener.getsockname()[1]
        threading.Thread(target=_send_nonce, args=(listener, nonce.encode()), daemon=True).start()
        return {"address": self._address, "port": port, "nonce": nonce}

    def _send(self, kind: int, number: int, payload: bytes) -> None:
        with self._writing:
            _write_all(connections.encode(kind, number, payload))


def describe_port(listeners: List[sockets.TcpSocket], uid: int, own_address: Optional[str]) -> Dict[str, Any]:
    """Return whether a client may connect to a port of this node, and at which address.

    Returns:
        ``problem``: ``nothing`` or ``other user`` if no process of the user listens there, else empty.
        ``address``: where the login node may reach the service, empty if it listens on loopback only.
    """
    trusted = [item for item in listeners if item.uid in (uid, _ROOT)]
    if not trusted:
        return {"address": "", "problem": "other user" if listeners else "nothing"}
    for listener in trusted:
        address = ipaddress.ip_address(listener.address[0])
        if own_address is not None and (address.is_unspecified or str(address) == own_address):
            return {"address": own_address, "problem": ""}
    return {"address": "", "problem": ""}


def connect(port: int) -> socket.socket:
    """Return a connection to the service of this user at a port of this node.

    Raises:
        OSError: there is none.
    """
    trusted = [item for item in sockets.find_listeners(port) if item.uid in (os.getuid(), _ROOT)]
    if not trusted:
        raise OSError("nothing listens there now")
    address = ipaddress.ip_address(trusted[0].address[0])
    host = str(address)
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    connection = socket.create_connection((host, port), timeout=CONNECT_S)
    connection.settimeout(None)
    return connection


def find_own_address(client: str) -> Optional[str]:
    """Return the address of this node on the way to another host, None if there is no way."""
    family = socket.AF_INET6 if ":" in client else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((client, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return None


def _send_nonce(listener: socket.socket, nonce: bytes) -> None:
    listener.settimeout(TEST_S)
    with contextlib.suppress(OSError), listener:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(nonce)


def _write_all(data: bytes) -> None:
    """Write to standard output; end the process if the client has closed it."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(1, view) :]
    except OSError:
        os._exit(0)
