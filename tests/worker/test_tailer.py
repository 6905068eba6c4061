"""The log tailer's programs: Python version, imports, and the start of the last lines."""

from __future__ import annotations

import ast
import errno
import json
import os
import select
import subprocess
import sys
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dtslurm import assets
from dtslurm.logs.lines import LONGEST_LINE
from dtslurm.worker.lib.rank_files import PlainLog
from dtslurm.worker.logtail import files, frames, summary, tailer
from tests.worker.tailing import RecordingPipe

PROGRAMS = [
    "logtail/tailer.py", "logtail/files.py", "logtail/frames.py", "logtail/summary.py", "lib/rank_files.py"
]  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_log_tail_programs_parse_as_python_3_6(name: str) -> None:
    ast.parse(assets.worker(name).read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("name", PROGRAMS)
def test_log_tail_programs_import_only_the_standard_library(name: str) -> None:
    tree = ast.parse(assets.worker(name).read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [item.name for item in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        assert all(item.partition(".")[0] in sys.stdlib_module_names for item in names), names


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"a", b"a\n", b"a\nb", b"a\nb\n", b"\n\n\n", b"x" * 70_000 + b"\nb\nc"]
)
@pytest.mark.parametrize("lines", [0, 1, 2, 3, 9])
def test_start_of_last_lines_matches_tail(tmp_path: Path, text: bytes, lines: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(text)
    stdout = subprocess.run(["tail", "-n", str(lines), str(path)], capture_output=True, check=True).stdout
    with closing(PlainLog(str(path))) as log:
        start = files.start_of_last(log, len(text), lines)
    assert text[start:] == stdout


@pytest.mark.parametrize("lines", [1, 2, 5])
def test_start_of_last_lines_counts_pieces_of_a_very_long_line(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"first\n")
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write("é".encode() * 40_000)
    size = path.stat().st_size
    with closing(PlainLog(str(path))) as log:
        start = files.start_of_last(log, size, lines)
        assert log.read(size, start).decode()  # no character is cut in two
    assert size - lines * LONGEST_LINE <= start < size - (lines - 1) * LONGEST_LINE


@pytest.mark.parametrize(("states", "is_followed"), [(40_000, True), (4_000_000, False)])
def test_progress_bar_counts_as_a_single_line_up_to_the_size_limit(
    tmp_path: Path, states: int, is_followed: bool
) -> None:
    path = tmp_path / "log"
    text = b"before\n" + b"\r".join(b"%7d" % number for number in range(states))
    path.write_bytes(text)
    with closing(PlainLog(str(path))) as log:
        start = files.start_of_last(log, len(text), 2)
    assert (start == 0) is is_followed
    assert len(text) - start <= files.LONGEST_TAIL + files.BLOCK


def test_pipe_assembles_frames_from_any_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = frames.Pipe()
    data = frames.frame(frames.CREDIT, 0, b"12345678") + frames.frame(frames.DRAIN, 0)
    pieces = [data[at : at + 3] for at in range(0, len(data), 3)]
    monkeypatch.setattr(select, "select", lambda *_: ([0], [], []))
    monkeypatch.setattr(os, "read", lambda *_: pieces.pop(0))
    result = []
    while pieces:
        result += list(pipe.listen(0))
    assert result == [(frames.CREDIT, b"12345678"), (frames.DRAIN, b"")]


def test_f70_network_file_system_is_recognized(tmp_path: Path) -> None:
    assert not files.on_network(str(tmp_path))
    assert files.on_network("/proc/self")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_f71_log_is_reopened_after_a_stale_handle_and_read_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    logs = tmp_path / "logs" / "0"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_bytes(b"one\n")
    pipe = RecordingPipe()
    side = tailer.Tailer(pipe, files.Request({"run": str(tmp_path), "credit": 1 << 20}))
    side.admit(side.finder.scan(0.0))
    (log,) = side.finder.logs.values()
    assert side.visit(log)

    (logs / "rank-0.log").write_bytes(b"one\ntwo\n")
    right, lost = os.pread, [True, True]

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        if lost:
            lost.pop()
            raise OSError(number, os.strerror(number))
        return right(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    for _ in range(4):
        side.visit(log)
    data = b"".join(payload[8:] for payload in pipe.payloads(frames.DATA))
    assert data == b"one\ntwo\n"
    # That the file server lost a handle is nobody's concern.
    assert len(pipe.payloads(frames.TROUBLE)) == (number == errno.EIO)
    side.close(log)


# ---- Summaries and packed frames ----


class FakeLog:
    """A rank's log whose size is known."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def test_summary_has_the_last_line_and_the_first_alarm_of_each_rank() -> None:
    result = summary.Summary([b"ERROR", b"Killed"])
    log = files.GrowingFile(3, "/log", "rank-3.log", "rank", 3, 0)
    file: Any = FakeLog(100)
    for data in (b"one\ntwo", b"x Killed\ny ERROR\nbar 1\rbar 2\r\n", b"z ERROR\n" + b"-" * 300):
        result.take(log, file, data)
    offset = 7 + 30 + 308
    assert log.offset == offset
    [payload] = result.payloads()
    assert json.loads(payload) == [[3, offset, 5, "-" * 200, "x Killed"]]
    assert list(result.payloads()) == []


@pytest.mark.parametrize(("unread", "offset"), [(1 << 22, 14), ((1 << 22) + 1, 10 + (1 << 22) + 1 - 65536)])
def test_summary_skips_output_that_is_far_behind(unread: int, offset: int) -> None:
    log = files.GrowingFile(3, "/log", "rank-3.log", "rank", 3, 0)
    log.offset = 10
    file: Any = FakeLog(10 + unread)
    summary.Summary([]).take(log, file, b"text")
    assert log.offset == offset


def test_summaries_of_many_ranks_are_sent_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "TOGETHER", 2)
    result = summary.Summary([])
    result.rows = {number: [number] for number in range(5)}
    assert [json.loads(payload) for payload in result.payloads()] == [[[0], [1]], [[2], [3]], [[4]]]


@pytest.mark.parametrize(
    ("data", "alarm"),
    [(b"a\nb ERROR c\nd", "b ERROR c"), (b"ERROR", "ERROR"), (b"x" * 300 + b"ERROR", "x" * 200),
     (b"a\nb", "")],
)  # fmt: skip
def test_alarm_is_the_line_with_the_word(data: bytes, alarm: str) -> None:
    assert summary.alarm(data, [b"never", b"ERROR"]) == alarm


@pytest.mark.parametrize(
    ("payload", "packs", "is_packed"), [(491, True, False), (492, True, True), (492, False, False)]
)
def test_only_large_batches_of_frames_are_packed(
    monkeypatch: pytest.MonkeyPatch, payload: int, packs: bool, is_packed: bool
) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(frames, "write_all", written.append)
    pipe = frames.Pipe()
    pipe.packs = packs
    pipe.send(frames.DATA, 7, b"x" * payload)
    assert written == []
    pipe.flush()
    pipe.flush()
    [data] = written
    plain = frames.frame(frames.DATA, 7, b"x" * payload)
    size, kind, stream = frames.HEAD.unpack_from(data)
    if is_packed:
        assert (size, kind, stream) == (len(data) - frames.HEAD.size, frames.PACKED, 0)
        data = zlib.decompress(data[frames.HEAD.size :])
    assert data == plain


def test_frames_are_written_when_the_batch_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(frames, "write_all", lambda data: written.append(len(data)))
    monkeypatch.setattr(frames, "BATCH", 30)
    pipe = frames.Pipe()
    for size in (5, 6, 21, 20):  # each with a head of nine bytes
        pipe.send(frames.DATA, 1, b"x" * size)
    assert written == [29 + 30]


@pytest.mark.parametrize(
    ("may_pack", "trips", "packs"),
    [(True, [0.5], False), (True, [0.5, 0.5], True), (True, [0.5, 0.02], False), (True, [0.5, 0.03], True),
     (False, [0.5, 0.5], False)],
)  # fmt: skip
def test_slow_connections_are_detected_by_their_answers(
    may_pack: bool, trips: list[float], packs: bool
) -> None:
    pipe = frames.Pipe()
    pipe.may_pack, pipe.heard_at = may_pack, 100.0
    for trip in trips:
        pipe.input += frames.frame(frames.PONG, 0, frames.TIME.pack(100.0 - trip))
    pipe.input += frames.frame(frames.CREDIT, 0, b"abc")
    pipe.input += frames.frame(frames.DRAIN, 0, b"abc")[:-1]
    assert list(pipe.listen(0.0)) == [(frames.CREDIT, b"abc")]
    assert (pipe.packs, pipe.trips, len(pipe.input)) == (packs, len(trips), frames.HEAD.size + 2)
