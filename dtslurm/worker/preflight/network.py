"""What this node knows of the first one: its address, and its clock."""

import contextlib
import socket
import time
from typing import List, Optional

from .findings import BAD, OK, UNKNOWN, WARN, Finding, finding

SOME_S, MUCH_S = 2.0, 60.0  # munge refuses credentials of clocks that differ by 5 minutes
PATIENCE_S = 10.0


def dns(head: str, needed: bool) -> List[Finding]:
    """See that the first node's name has an address: ranks meet there."""
    try:
        found = socket.getaddrinfo(head, None, 0, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        text = "the name {} has no address here: {}".format(head, error)
        return [finding("dns", BAD if needed else WARN, text)]
    return [finding("dns", OK, "{} is {}".format(head, found[0][4][0]))]


def clock(head: str, port: int) -> List[Finding]:
    """Compare this clock with the first node's, which tells its time to who connects."""
    try:
        with contextlib.closing(socket.create_connection((head, port), PATIENCE_S)) as link:
            link.settimeout(PATIENCE_S)
            link.sendall(b"?")
            before = time.time()
            told = float(link.recv(64))
            after = time.time()
    except (OSError, ValueError, UnicodeError) as error:
        return [finding("clock", UNKNOWN, "the first node cannot be asked: {}".format(error))]
    return [judged((before + after) / 2 - told, after - before)]


def judged(off: float, took: Optional[float] = 0.0) -> Finding:
    """Judge by how many seconds this clock is ahead of the first node's; the answer took ``took``."""
    sure = max(0.0, abs(off) - (took or 0.0) / 2)
    text = "{:.1f} s {} the first node's".format(abs(off), "ahead of" if off > 0 else "behind")
    return finding("clock", BAD if sure > MUCH_S else WARN if sure > SOME_S else OK, text)
