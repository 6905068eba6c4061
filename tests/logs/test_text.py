"""Frames, lines, safe text and times, as pure functions."""

from __future__ import annotations

import zlib
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.errors import TransportError
from dtslurm.logs.clean import is_plain, safe
from dtslurm.logs.frames import Decoder, Frame
from dtslurm.logs.lines import Assembler, LogBlock, LogFile
from dtslurm.logs.stamps import point_in_time, written_at
from dtslurm.worker.logtail import frames as wire

RANK = LogFile("rank", 3)


def encoded(frames: list[Frame]) -> bytes:
    return b"".join(wire.frame(*item) for item in frames)


@given(
    st.binary(max_size=50).filter(lambda noise: wire.MAGIC not in noise + wire.MAGIC[:-1]),
    st.lists(st.builds(Frame, st.integers(1, 8), st.integers(0, 9), st.binary(max_size=40)), max_size=5),
    st.booleans(),
    st.integers(1, 20),
)
def test_decoder_reads_frames_after_noise_from_packed_and_split_input(
    noise: bytes, frames: list[Frame], packed: bool, size: int
) -> None:
    body = encoded(frames)
    if packed:
        body = wire.frame(wire.PACKED, 0, zlib.compress(body))
    data = noise + wire.MAGIC + body
    decoder = Decoder()
    result = [item for at in range(0, len(data), size) for item in decoder.feed(data[at : at + size])]
    assert result == frames


@pytest.mark.parametrize(
    "data",
    [
        wire.HEAD.pack(wire.LARGEST + 1, wire.DATA, 0),
        wire.frame(wire.PACKED, 0, b"not zlib"),
        wire.frame(wire.PACKED, 0, zlib.compress(bytes(1 << 24))),
    ],
)
def test_decoder_rejects_malformed_frames(data: bytes) -> None:
    with pytest.raises(TransportError):
        list(Decoder(is_greeted=True).feed(data))


@given(st.binary(max_size=300), st.integers(1, 40))
def test_assembler_returns_whole_lines_for_any_chunk_size(data: bytes, size: int) -> None:
    known = Assembler(RANK, "log")
    blocks = [known.feed(at, data[at : at + size]) for at in range(0, len(data), size)]
    text = b"".join(block.data for block in blocks if block)
    assert text + bytes(known.rest) == data
    assert text == data[: data.rfind(b"\n") + 1]
    assert known.checked == data[-256:]
    assert known.offset == len(data)


def test_assembler_rejects_bytes_at_an_unexpected_offset() -> None:
    with pytest.raises(TransportError, match="instead of byte"):
        Assembler(RANK, "log").feed(5, b"x")


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"\n", [""]),
        (b"windows\r\n", ["windows"]),
        (b"1%\r2%\r\n", ["2%"]),
        (b"\xff\n", ["\ufffd"]),
        ("form\x0cfeed\u2028line\n".encode(), ["form\x0cfeed\u2028line"]),
    ],
)
def test_log_block_splits_its_bytes_into_text_lines(data: bytes, texts: list[str]) -> None:
    block = LogBlock(RANK, data)
    assert block.texts() == texts
    assert [line.text for line in block.lines()] == texts


HOSTILE = [
    "\x1b]52;c;Zm9v\x07", "\x1b]0;title\x1b\\", "\x1b[2J", "\x1b[10;10H", "\x1bP1$r\x1b\\",
    "\x1b_x\x1b\\", "\x07", "\x08", "\x9b31m", "\x1b[?1049h", "\x1bc", "\x1b(0", "\x90x\x9c", "\x7f", "\x00", "\x1b]8;;http://x\x07",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_c1_safe_removes_hostile_escape_sequences(text: str) -> None:
    shown = safe(f"before{text}after")
    assert shown.startswith("before")
    assert shown.endswith("after")
    assert shown.isprintable()
    assert safe(f"\x1b[31mred{text}", colours=True).startswith("\x1b[31mred")


@given(st.text())
def test_c1_safe_removes_control_characters_from_any_text(text: str) -> None:
    assert not any((ord(char) < 32 and char != "\t") or 127 <= ord(char) < 160 for char in safe(text))
    data = text.encode("utf-8", "replace")
    decoded = data.decode("utf-8", "replace")
    if is_plain(data, decoded):
        assert all(safe(line) == line for line in decoded.split("\n"))


NOW = datetime(2026, 11, 21, 17, 0, tzinfo=timezone.utc).timestamp()


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("2026-11-21 16:59:50,250 INFO step", 9.75),
        ("[2026-11-21T16:59:50Z] x", 10),
        ("2026-11-21T17:59:50+01:00 x", 10),
        ("[rank0]:[W1121 16:59:50.500000000 ProcessGroupNCCL.cpp:1] x", 9.5),
        ("I1121 16:59:50.000000 123 file.cc:1] x", 10),
        ("no time at all", None),
        ("step 2026-99-99 10:10:10", None),
        ("x" * 200 + "2026-11-21 16:59:50", None),
    ],
)
def test_written_at_parses_common_timestamp_formats(text: str, ago: float | None) -> None:
    time = written_at(text, NOW, 0)
    assert (None if time is None else NOW - time) == ago


def test_f66_written_at_uses_the_cluster_time_zone_and_the_previous_year() -> None:
    assert written_at("2026-11-21 17:59:50", NOW, 3600) == NOW - 10
    january = datetime(2027, 1, 1, 0, 5, tzinfo=timezone.utc).timestamp()
    time = written_at("I1231 23:59:00.000000 x", january, 0)
    assert time is not None
    assert 0 < january - time < 86400


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("10m", 600),
        ("1.5h", 5400),
        ("16:59", 60),
        ("16:59:30", 30),
        ("2026-11-21 16:00", 3600),
        ("2026-11-21T17:00:00Z", 0),
    ],
)
def test_point_in_time_parses_ages_and_times(text: str, ago: float) -> None:
    assert NOW - point_in_time(text, NOW, 0) == ago


@pytest.mark.parametrize("text", ["", "soon", "25:00", "10x", "2026-13-01"])
def test_point_in_time_rejects_text_that_is_not_a_time(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (whichever message)
        point_in_time(text, NOW, 0)
