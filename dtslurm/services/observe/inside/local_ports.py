"""The ports of this machine at which `dtslurm forward` listens, on loopback and for its own user only."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs.roles import PORT_NAME
from dtslurm.model.values import dataclass
from dtslurm.worker.lib import sockets

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket

HOST = "127.0.0.1"
_LARGEST = 65535
_ROOT = 0


@dataclass(frozen=True)
class PortMapping:
    """A port of the job, and the port of this machine that leads to it.

    Attributes:
        remote: its number, or its name if it is a port of a role.
        local: the number here; 0 for a free one, None for the number of the remote port.
    """

    remote: int | str
    local: int | None = None


def parse_port(text: str, *, allows_names: bool) -> PortMapping:
    """Return the mapping that ``[LOCAL:]PORT`` describes.

    Args:
        allows_names: whether PORT may be the name of a port of a role.

    Raises:
        RequestInvalid: it is not of this form.
    """
    left, colon, remote = text.rpartition(":")
    local = _parse_number(left, smallest=0) if colon else None
    number = _parse_number(remote, smallest=1)
    if (local is not None or not colon) and number is not None:
        return PortMapping(number, local)
    if (local is not None or not colon) and PORT_NAME.fullmatch(remote):
        if allows_names:
            return PortMapping(remote, local)
        raise RequestInvalid(
            [f"{text!r}: a port has a name only in a role"], hint="give its number, or the role with --role"
        )
    raise RequestInvalid(
        [f"{text!r} is not a port: write PORT or LOCAL:PORT, with numbers up to {_LARGEST:,}"]
    )


def _parse_number(text: str, *, smallest: int) -> int | None:
    if not re.fullmatch(r"[0-9]{1,5}", text):
        return None
    number = int(text)
    return number if smallest <= number <= _LARGEST else None


class LocalPort:
    """A port of this machine at which this process listens.

    Args:
        number: the port; 0 for a free one.

    Raises:
        RequestInvalid: the port is in use, or may not be used.
    """

    def __init__(self, mapping: PortMapping, number: int) -> None:
        self.mapping = mapping
        try:
            self._listener = socket.create_server((HOST, number))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            other = number + 1 if 1024 <= number < _LARGEST else 8000
            raise RequestInvalid(
                [f"port {number} of this machine {reason}"],
                hint=f"0:{mapping.remote} takes a free port, {other}:{mapping.remote} another one",
            ) from None
        self.number: int = self._listener.getsockname()[1]

    def accept(self, handle: Callable[[LocalPort, socket.socket], None]) -> None:
        """Start a thread that calls ``handle`` with each new connection, each in its own thread."""
        threading.Thread(target=self._accept, args=(handle,), daemon=True, name="dtslurm-accept").start()

    def _accept(self, handle: Callable[[LocalPort, socket.socket], None]) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener was closed
                return
            threading.Thread(
                target=handle, args=(self, connection), daemon=True, name="dtslurm-connection"
            ).start()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):  # wakes the thread in accept
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def comes_from_own_user(connection: socket.socket | TransportSocket) -> bool:
    """Return whether a process of this user, or of root, has the other end of a connection on loopback.

    Only Linux shows the user; on other systems every connection counts as the user's.
    """
    if not sockets.has_tables():
        return True
    try:
        user = sockets.find_user(connection.getpeername(), connection.getsockname())
    except OSError:  # it was closed already
        return False
    return user in {os.getuid(), _ROOT}
