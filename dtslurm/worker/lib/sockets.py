"""The kernel's tables of TCP sockets: what listens at a port, and the user of a connection's other end."""

import ipaddress
import os
import struct
from typing import Iterator, List, NamedTuple, Optional, Tuple

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTEN = "0A"

Address = Tuple[str, int]


class TcpSocket(NamedTuple):
    """A TCP socket of this host (more exactly, of the network that this process sees).

    Attributes:
        address: its address, in the form of IPv4 if an IPv6 socket has an address of IPv4.
        peer: the address of the other end.
        uid: the user who created it.
        is_open: whether a process has it; the kernel continues some sockets that were closed.
    """

    address: Address
    peer: Address
    listens: bool
    uid: int
    is_open: bool


def has_tables() -> bool:
    """Return whether this system has the tables; only Linux does."""
    return os.path.exists(_TABLES[0])


def find_listeners(port: int) -> List[TcpSocket]:
    """Return the sockets that listen at a port."""
    return [item for item in _read_tables() if item.listens and item.address[1] == port]


def find_user(connection_end: Address, other_end: Address) -> Optional[int]:
    """Return the user whose process has the first end of a connection on this host, None if there is none."""
    for item in _read_tables():
        if item.address == connection_end and item.peer == other_end and item.is_open:
            return item.uid
    return None


def _read_tables() -> Iterator[TcpSocket]:
    for path in _TABLES:
        try:
            with open(path, encoding="ascii") as table:
                lines = table.read().splitlines()[1:]
        except OSError:  # a kernel without IPv6
            continue
        for line in lines:
            values = line.split()
            yield TcpSocket(
                address=parse_address(values[1]),
                peer=parse_address(values[2]),
                listens=values[3] == _LISTEN,
                uid=int(values[7]),
                is_open=values[9] != "0",
            )


def parse_address(text: str) -> Address:
    """Return the address in a table: hexadecimal words in the byte order of this machine, and the port."""
    words, _, port = text.partition(":")
    packed = b"".join(
        struct.pack("=I", int(words[start : start + 8], 16)) for start in range(0, len(words), 8)
    )
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)
