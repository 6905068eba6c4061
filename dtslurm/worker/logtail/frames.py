"""Frames between those who follow logs and the far side: what they mean, and the far side's end of the pipe.

A frame is ``length u32 | type u8 | stream u32 | payload``, big-endian; a stream is one log file. The frames
begin after ``MAGIC``, so that what a login shell printed before does not matter.
"""

import os
import select
import struct
import time
import zlib
from typing import Iterator, Tuple

VERSION = 1
MAGIC = b"\0dtslurm tailer\0"
HEAD = struct.Struct(">IBI")
OFFSET = struct.Struct(">Q")
TIME = struct.Struct(">d")
LARGEST = 1 << 24  # no frame has a longer payload

# To the reader.
HELLO = 1  # JSON: version, host, python, pid, utc_offset (seconds east of UTC)
FILE = 2  # JSON: which file a stream is, and from which offset on its bytes follow (`Log.describe`)
DATA = 3  # u64 offset, then the bytes that stand there
SUMMARY = 4  # JSON: of streams that are only summed up, [stream, size, new lines, last line, line of alarm]
CAUGHT_UP = 5  # JSON: first (attempt by task); everything that was there at the start has been sent
PING = 6  # to be sent back as PONG
END = 7  # everything asked for has been sent; nothing follows
TROUBLE = 8  # JSON: message; of one stream, or of all if the stream is 0
PACKED = 9  # zlib: frames
# From the reader.
REQUEST = 32  # JSON (`Request`)
CREDIT = 33  # u64: so many more bytes may be sent
FOCUS = 34  # JSON: ranks, lines: which ranks are wanted in full now, and from how many last lines on
DRAIN = 35  # the run is over: send the rest of everything and end
PONG = 36

BATCH = 262144  # bytes to a write
SILENCE_S = 120.0  # without a word from the reader it is taken for gone
FAR_S = 0.02  # from this round trip on, compressed data arrives sooner


class ClientDisconnected(Exception):
    """The reader is no more."""


def frame(kind: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return HEAD.pack(len(payload), kind, stream) + payload


class Pipe:
    """Frames in by standard input, out by standard output."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.input = bytearray()
        self.may_pack = False
        self.packs = False
        self.heard = time.monotonic()
        self.trips = 0
        self.shortest = 1e9

    def send(self, kind: int, stream: int, payload: bytes = b"") -> None:
        """Queue a frame; it leaves with the next flush, or when there are many."""
        self.out += HEAD.pack(len(payload), kind, stream)
        self.out += payload
        if len(self.out) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Write what is queued."""
        if self.out:
            data = bytes(self.out)
            self.out = bytearray()
            if self.packs and len(data) > 500:
                data = frame(PACKED, 0, zlib.compress(data, 1))
            write_all(data)

    def ping(self) -> None:
        """Ask for a sign of life."""
        self.send(PING, 0, TIME.pack(time.monotonic()))
        self.flush()

    def listen(self, wait: float) -> Iterator[Tuple[int, bytes]]:
        """Wait for frames of the reader at most so long (seconds), and yield them.

        Raises:
            Gone: the reader closed its end, or was silent for too long.
        """
        if not self.complete():
            if not select.select([0], [], [], max(0.0, wait))[0]:
                if time.monotonic() - self.heard > SILENCE_S:
                    raise ClientDisconnected
                return
            data = os.read(0, BATCH)
            if not data:
                raise ClientDisconnected
            self.heard = time.monotonic()
            self.input += data
        while self.complete():
            length, kind, _ = HEAD.unpack_from(self.input)
            payload = bytes(self.input[HEAD.size : HEAD.size + length])
            del self.input[: HEAD.size + length]
            if kind == PONG:
                self.trips += 1
                self.shortest = min(self.shortest, self.heard - TIME.unpack(payload)[0])
                self.packs = self.may_pack and self.trips > 1 and self.shortest > FAR_S
            else:
                yield kind, payload

    def complete(self) -> bool:
        """Return whether a whole frame of the reader is here."""
        size = len(self.input)
        return size >= HEAD.size and size >= HEAD.size + HEAD.unpack_from(self.input)[0]


def write_all(data: bytes) -> None:
    """Write to standard output to the end.

    Raises:
        Gone: nobody reads it any more.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(1, view) :]
        except BlockingIOError:
            select.select([], [1], [], 1.0)
        except OSError:
            raise ClientDisconnected from None
