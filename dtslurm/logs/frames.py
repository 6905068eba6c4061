"""The near side of the frames that the far side of log following sends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dtslurm.remote import answers
from dtslurm.remote.answers import InvalidAnswer
from dtslurm.worker.logtail import frames as wire

SENDER = "the far side of log following"
_LONGEST_BANNER = 1 << 20
_LONGEST_UNPACKED = 1 << 22


class Frame(NamedTuple):
    """One frame: what it is, which stream it is of, and its payload."""

    kind: int
    stream: int
    payload: bytes

    def values(self) -> dict[str, Any]:
        """Return the payload as a JSON object.

        Raises:
            TransportError: it is none.
        """
        return answers.parse_object(self.payload, SENDER)


class Decoder:
    """Turns the bytes of the far side into frames, however they were cut on the way."""

    def __init__(self, *, begun: bool = False, packed: bool = False) -> None:
        """With ``begun``, no greeting comes first; with ``packed``, the frames were packed into one."""
        self._data = bytearray()
        self._begun = begun
        self._packed = packed

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete with these bytes.

        Raises:
            TransportError: these are no frames.
        """
        self._data += data
        if not self._begun and not self._begin():
            return
        yield from self._frames()

    @property
    def begun(self) -> bool:
        """Whether the far side has spoken."""
        return self._begun

    @property
    def has_rest(self) -> bool:
        """Whether there are bytes of a frame that is not complete."""
        return bool(self._data)

    def banner(self) -> list[str]:
        """Return what was printed instead of frames."""
        return bytes(self._data[-2000:]).decode("utf-8", "replace").splitlines()[-10:]

    def _begin(self) -> bool:
        at = self._data.find(wire.MAGIC)
        if at >= 0:
            del self._data[: at + len(wire.MAGIC)]
            self._begun = True
        elif len(self._data) > _LONGEST_BANNER:
            raise nonsense("a megabyte of text before its greeting", self.banner())
        return self._begun

    def _frames(self) -> Iterator[Frame]:
        at = 0
        data, head = self._data, wire.HEAD
        try:
            while len(data) - at >= head.size:
                length, kind, stream = head.unpack_from(data, at)
                if length > wire.LARGEST:
                    raise nonsense(f"a frame of {length} bytes")
                end = at + head.size + length
                if len(data) < end:
                    break
                payload = bytes(data[at + head.size : end])
                at = end
                if kind == wire.PACKED and self._packed:
                    raise nonsense("compressed frames within compressed frames")
                if kind == wire.PACKED:
                    yield from _unpack(payload)
                else:
                    yield Frame(kind, stream, payload)
        finally:
            del data[:at]


def _unpack(payload: bytes) -> Iterator[Frame]:
    decoder = Decoder(begun=True, packed=True)
    yield from decoder.feed(answers.unpack(payload, SENDER, limit=_LONGEST_UNPACKED))
    if decoder.has_rest:
        raise nonsense("compressed frames of which the last is cut off")


def request(values: Mapping[str, object]) -> bytes:
    """Return the frame that tells what to follow (`dtslurm.worker.logtail.files.Request`)."""
    return wire.frame(wire.REQUEST, 0, json.dumps(values, separators=(",", ":")).encode())


def credit(amount: int) -> bytes:
    """Return the frame that allows so many more bytes."""
    return wire.frame(wire.CREDIT, 0, wire.OFFSET.pack(amount))


def focus(ranks: list[list[int]] | None, lines: int | None) -> bytes:
    """Return the frame that chooses the ranks to send in full, from their last lines on; None for all."""
    return wire.frame(wire.FOCUS, 0, json.dumps({"ranks": ranks, "lines": lines}).encode())


def nonsense(what: str, evidence: list[str] | None = None) -> InvalidAnswer:
    """Return the error of a far side that does not keep to the protocol."""
    return answers.invalid(
        SENDER,
        what,
        "\n".join(evidence or []),
        hint="a shell that is not interactive must print nothing; if that is not the cause, report this",
    )
