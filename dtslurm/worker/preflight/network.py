"""Checks of the connection to the first node: its address, and its clock."""

import contextlib
import hmac
import os
import socket
import time
from typing import List, Optional

from .findings import BAD, OK, UNKNOWN, WARN, Finding, finding

SOME_S, MUCH_S = 2.0, 60.0  # munge refuses credentials of clocks that differ by 5 minutes
PATIENCE_S, AGAIN_S = 3.0, 0.5  # a datagram can be lost, so the request is repeated
KEY = "DTSLURM_CLOCK_KEY"
SIGNATURE, NONCE, MOST = 32, 16, 128  # bytes; MOST of any message


def dns(head: str, is_required: bool) -> List[Finding]:
    """Check that the first node's name has an address: the ranks' rendezvous uses it."""
    try:
        addresses = socket.getaddrinfo(head, None, 0, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        text = "the name {} has no address here: {}".format(head, error)
        return [finding("dns", BAD if is_required else WARN, text)]
    return [finding("dns", OK, "{} is {}".format(head, addresses[0][4][0]))]


def resolve_own_address(head: str) -> str:
    """Return the IPv4 address of the host name ``head``, or an empty string for a loopback address."""
    try:
        address = socket.gethostbyname(head)
    except (OSError, UnicodeError):
        return ""
    return "" if address.startswith("127.") else address


def sign(data: bytes, key: str) -> bytes:
    """Return data with its HMAC-SHA256 signature in front."""
    return hmac.new(key.encode(), data, "sha256").digest() + data


def verify(message: bytes, key: str) -> Optional[bytes]:
    """Return the data of a signed message, or None if the signature does not match the key."""
    data = message[SIGNATURE:]
    return data if hmac.compare_digest(sign(data, key), message) else None


def build_answer(question: bytes, key: str, now: float) -> Optional[bytes]:
    """Return the first node's response with its time, or None if the question's signature is invalid."""
    nonce = verify(question, key)
    return None if not nonce else sign(nonce + repr(now).encode(), key)


def clock(head: str, port: int, key: str) -> List[Finding]:
    """Compare this node's clock with the first node's, by a signed UDP request."""
    nonce = os.urandom(NONCE)
    end = time.monotonic() + PATIENCE_S
    try:
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
            address = (socket.gethostbyname(head), port)
            sock.settimeout(AGAIN_S)
            while time.monotonic() < end:
                sock.sendto(sign(nonce, key), address)
                sent_at = time.time()
                remote_time = _receive_time(sock, nonce, key)
                received_at = time.time()
                if remote_time is not None:
                    return [judged((sent_at + received_at) / 2 - remote_time, received_at - sent_at)]
    except (OSError, UnicodeError) as error:
        return [finding("clock", UNKNOWN, "the first node cannot be reached: {}".format(error))]
    return [finding("clock", UNKNOWN, "the first node did not respond within {:.0f} s".format(PATIENCE_S))]


def _receive_time(link: socket.socket, nonce: bytes, key: str) -> Optional[float]:
    """Return the first node's time, or None if no valid response with this nonce arrived."""
    try:
        data = verify(link.recv(MOST), key)
    except socket.timeout:
        return None
    return float(data[NONCE:]) if data and data[:NONCE] == nonce and len(data) > NONCE else None


def judged(off: float, took: Optional[float] = 0.0) -> Finding:
    """Judge the seconds by which this clock is ahead of the first node's; the round trip took ``took``."""
    least_offset = max(0.0, abs(off) - (took or 0.0) / 2)
    text = "{:.1f} s {} the first node's".format(abs(off), "ahead of" if off > 0 else "behind")
    return finding("clock", BAD if least_offset > MUCH_S else WARN if least_offset > SOME_S else OK, text)
