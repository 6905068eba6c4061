"""Frames between a log reader and the remote tailer: their meaning, and the tailer's end of the pipe.

A frame is ``length u32 | type u8 | stream u32 | payload``, big-endian; a stream is one log file. The frames
begin after ``MAGIC``, so that output of a login shell before it is ignored.
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
LARGEST = 1 << 24  # maximum payload size in bytes

# To the reader.
HELLO = 1  # JSON: version, host, python, pid, utc_offset (seconds east of UTC)
FILE = 2  # JSON: the file of a stream, and the offset from which its data follows (`GrowingFile.describe`)
DATA = 3  # u64 offset, then the bytes at that offset
SUMMARY = 4  # JSON: for summarized streams [stream, size, new lines, last line, first line with an alarm]
CAUGHT_UP = 5  # JSON: first (attempt by task); all data that existed at the start has been sent
PING = 6  # the reader answers with PONG
END = 7  # all requested data has been sent; no frame follows
TROUBLE = 8  # JSON: message; about one stream, or about all if the stream is 0
PACKED = 9  # zlib: frames
# From the reader.
REQUEST = 32  # JSON (`Request`)
CREDIT = 33  # u64: number of additional bytes that may be sent
FOCUS = 34  # JSON: ranks, lines: the ranks to send in full from now on, starting with this many last lines
DRAIN = 35  # the run has ended: send the rest of every file and exit
PONG = 36

BATCH = 262144  # bytes per write
SILENCE_S = 120.0  # a reader that sends nothing for this time is considered gone
FAR_S = 0.02  # round-trip time in seconds from which compressed data arrives sooner


class ClientDisconnected(Exception):
    """The reader has closed the connection, or does not answer."""


def frame(kind: int, stream: int, payload: bytes = b"") -> bytes:
    """Return an encoded frame."""
    return HEAD.pack(len(payload), kind, stream) + payload


class Pipe:
    """The tailer's end of the pipe: reads frames from standard input, writes frames to standard output."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.input = bytearray()
        self.may_pack = False
        self.packs = False
        self.heard_at = time.monotonic()
        self.trips = 0
        self.shortest = 1e9

    def send(self, kind: int, stream: int, payload: bytes = b"") -> None:
        """Queue a frame; the queue is written at the next flush, or when it is large."""
        self.out += HEAD.pack(len(payload), kind, stream)
        self.out += payload
        if len(self.out) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Write the queued frames."""
        if self.out:
            frames = bytes(self.out)
            self.out = bytearray()
            if self.packs and len(frames) > 500:
                frames = frame(PACKED, 0, zlib.compress(frames, 1))
            write_all(frames)

    def ping(self) -> None:
        """Send a PING, which the reader must answer."""
        self.send(PING, 0, TIME.pack(time.monotonic()))
        self.flush()

    def listen(self, wait: float) -> Iterator[Tuple[int, bytes]]:
        """Wait up to ``wait`` seconds for frames of the reader, and yield them.

        Raises:
            ClientDisconnected: the reader closed its end, or was silent for too long.
        """
        if not self.complete():
            if not select.select([0], [], [], max(0.0, wait))[0]:
                if time.monotonic() - self.heard_at > SILENCE_S:
                    raise ClientDisconnected
                return
            chunk = os.read(0, BATCH)
            if not chunk:
                raise ClientDisconnected
            self.heard_at = time.monotonic()
            self.input += chunk
        while self.complete():
            length, kind, _ = HEAD.unpack_from(self.input)
            payload = bytes(self.input[HEAD.size : HEAD.size + length])
            del self.input[: HEAD.size + length]
            if kind == PONG:
                self.trips += 1
                self.shortest = min(self.shortest, self.heard_at - TIME.unpack(payload)[0])
                self.packs = self.may_pack and self.trips > 1 and self.shortest > FAR_S
            else:
                yield kind, payload

    def complete(self) -> bool:
        """Return whether the input has a complete frame."""
        size = len(self.input)
        return size >= HEAD.size and size >= HEAD.size + HEAD.unpack_from(self.input)[0]


def write_all(data: bytes) -> None:
    """Write all data to standard output.

    Raises:
        ClientDisconnected: the reader has closed the pipe.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(1, view) :]
        except BlockingIOError:
            select.select([], [1], [], 1.0)
        except OSError:
            raise ClientDisconnected from None
