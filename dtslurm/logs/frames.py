"""Decode the frames that the remote log follower sends, and encode requests to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dtslurm.remote import answers
from dtslurm.remote.answers import InvalidAnswer
from dtslurm.worker.logtail import frames as wire

SENDER = "the remote log follower"
_LONGEST_BANNER = 1 << 20
_LONGEST_UNPACKED = 1 << 22


class Frame(NamedTuple):
    """One frame: its kind, its stream and its payload."""

    kind: int
    stream: int
    payload: bytes

    def values(self) -> dict[str, Any]:
        """Return the payload as a JSON object.

        Raises:
            TransportError: the payload is not a JSON object.
        """
        return answers.parse_object(self.payload, SENDER)


class Decoder:
    """A decoder of the remote log follower's bytes into frames; the bytes may be split at any point."""

    def __init__(self, *, is_greeted: bool = False, is_compressed: bool = False) -> None:
        """Expect a greeting unless ``is_greeted``; ``is_compressed`` is for content of a compressed frame."""
        self._data = bytearray()
        self._is_greeted = is_greeted
        self._is_compressed = is_compressed

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add bytes and yield the frames that are complete.

        Raises:
            TransportError: the bytes are not valid frames.
        """
        self._data += data
        if not self._is_greeted and not self._find_greeting():
            return
        yield from self._decode_frames()

    @property
    def begun(self) -> bool:
        """Whether the greeting of the remote log follower has arrived."""
        return self._is_greeted

    @property
    def has_rest(self) -> bool:
        """Whether bytes of an incomplete frame are buffered."""
        return bool(self._data)

    def banner(self) -> list[str]:
        """Return the last lines of text that was printed instead of frames."""
        return bytes(self._data[-2000:]).decode("utf-8", "replace").splitlines()[-10:]

    def _find_greeting(self) -> bool:
        position = self._data.find(wire.MAGIC)
        if position >= 0:
            del self._data[: position + len(wire.MAGIC)]
            self._is_greeted = True
        elif len(self._data) > _LONGEST_BANNER:
            raise protocol_error("a megabyte of text before its greeting", self.banner())
        return self._is_greeted

    def _decode_frames(self) -> Iterator[Frame]:
        position = 0
        buffer, header = self._data, wire.HEAD
        try:
            while len(buffer) - position >= header.size:
                length, kind, stream = header.unpack_from(buffer, position)
                if length > wire.LARGEST:
                    raise protocol_error(f"a frame of {length} bytes")
                end = position + header.size + length
                if len(buffer) < end:
                    break
                payload = bytes(buffer[position + header.size : end])
                position = end
                if kind == wire.PACKED and self._is_compressed:
                    raise protocol_error("compressed frames within compressed frames")
                if kind == wire.PACKED:
                    yield from _unpack(payload)
                else:
                    yield Frame(kind, stream, payload)
        finally:
            del buffer[:position]


def _unpack(payload: bytes) -> Iterator[Frame]:
    decoder = Decoder(is_greeted=True, is_compressed=True)
    yield from decoder.feed(answers.unpack(payload, SENDER, limit=_LONGEST_UNPACKED))
    if decoder.has_rest:
        raise protocol_error("compressed frames with a truncated last frame")


def request(values: Mapping[str, object]) -> bytes:
    """Return the frame that requests the files to follow (`dtslurm.worker.logtail.files.Request`)."""
    return wire.frame(wire.REQUEST, 0, json.dumps(values, separators=(",", ":")).encode())


def credit(byte_count: int) -> bytes:
    """Return the frame that permits the log follower to send ``byte_count`` more bytes."""
    return wire.frame(wire.CREDIT, 0, wire.OFFSET.pack(byte_count))


def focus(ranks: list[list[int]] | None, lines: int | None) -> bytes:
    """Return the frame that selects the ranks to send in full, starting with their last ``lines`` lines.

    ``ranks`` are ranges of ranks, None for all ranks.
    """
    return wire.frame(wire.FOCUS, 0, json.dumps({"ranks": ranks, "lines": lines}).encode())


def protocol_error(message: str, evidence: list[str] | None = None) -> InvalidAnswer:
    """Return the error for a remote log follower that violates the protocol."""
    return answers.invalid(
        SENDER,
        message,
        "\n".join(evidence or []),
        hint="check that your non-interactive shell prints nothing on the login node; if it prints "
        "nothing, report this",
    )
