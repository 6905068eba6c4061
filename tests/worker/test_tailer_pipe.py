"""The remote end of the log follower's pipe: greeting, silence, compression and end."""

from __future__ import annotations

import os
import select
import time
import zlib
from pathlib import Path

import pytest

from dtslurm.worker.logtail import frames as wire
from dtslurm.worker.logtail import tailer

RANK = "logs/0/rank-0.log"


class Far:
    """Both ends of a far side's standard streams, as bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *said: bytes) -> None:
        self.said, self.out = list(said), bytearray()
        monkeypatch.setattr(select, "select", lambda *_: ([0], [], []))
        monkeypatch.setattr(os, "read", lambda *_: self.said.pop(0) if self.said else b"")
        monkeypatch.setattr(os, "write", self.write)

    def write(self, _descriptor: int, data: bytes) -> int:
        self.out += data[:7]  # as a pipe that is nearly full
        return len(data[:7])

    def frames(self) -> list[tuple[int, bytes]]:
        data = bytes(self.out).partition(wire.MAGIC)[2] if wire.MAGIC in self.out else bytes(self.out)
        result = []
        while data:
            length, kind, _ = wire.HEAD.unpack_from(data)
            result.append((kind, data[wire.HEAD.size : wire.HEAD.size + length]))
            data = data[wire.HEAD.size + length :]
        return result


@pytest.fixture
def fast_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "nice", lambda _by: 0)


def test_tailer_greets_and_reports_a_missing_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_clock: None
) -> None:
    asked = wire.frame(wire.REQUEST, 0, b'{"run": "%s/none"}' % os.fsencode(tmp_path))
    far = Far(monkeypatch, wire.frame(wire.CREDIT, 0, b"12345678"), asked)
    tailer.main()
    (hello, about), (trouble, message), end = far.frames()
    assert (hello, trouble, end) == (wire.HELLO, wire.TROUBLE, (wire.END, b""))
    assert b'"version": 1' in about
    assert message == b'{"message": "there is no folder %s/none"}' % os.fsencode(tmp_path)


def test_tailer_sends_the_files_of_a_run_and_ends_when_the_client_disconnects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_clock: None
) -> None:
    (tmp_path / "logs/0").mkdir(parents=True)
    (tmp_path / RANK).write_bytes(b"one\n")
    asked = wire.frame(wire.REQUEST, 0, b'{"run": "%s", "credit": 999}' % os.fsencode(tmp_path))
    far = Far(monkeypatch, asked)  # and then the end of input
    tailer.main()
    kinds = [kind for kind, _ in far.frames()]
    assert kinds == [wire.HELLO, wire.FILE, wire.DATA, wire.CAUGHT_UP, wire.PING]


def test_f2_silent_client_is_treated_as_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = wire.Pipe()
    monkeypatch.setattr(select, "select", lambda *_: ([], [], []))
    assert list(pipe.listen(0)) == []
    pipe.heard_at -= wire.SILENCE_S + 1
    with pytest.raises(wire.ClientDisconnected):
        list(pipe.listen(0))


def test_broken_pipe_is_a_disconnected_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_descriptor: int, _data: bytes) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", refused)
    with pytest.raises(wire.ClientDisconnected):
        wire.write_all(b"text")


def test_write_all_waits_for_a_full_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    far = Far(monkeypatch)
    full = [True]

    def write(descriptor: int, data: bytes) -> int:
        if full:
            full.pop()
            raise BlockingIOError
        return far.write(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    wire.write_all(b"0123456789")
    assert far.out == b"0123456789"


@pytest.mark.parametrize(("trip", "packed"), [(0.001, False), (5.0, True)])
def test_data_is_compressed_only_on_a_slow_link(
    monkeypatch: pytest.MonkeyPatch, trip: float, packed: bool
) -> None:
    pipe = wire.Pipe()
    pipe.may_pack = True
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pong = wire.frame(wire.PONG, 0, wire.TIME.pack(now[0] - trip))
    far = Far(monkeypatch, pong + pong)
    assert list(pipe.listen(0)) == []  # a pong is the pipe's own matter
    pipe.send(wire.DATA, 1, b"x" * 2000)
    pipe.flush()
    [(kind, payload)] = far.frames()
    assert (kind == wire.PACKED) == packed
    assert (zlib.decompress(payload) if packed else wire.frame(kind, 1, payload)) == wire.frame(
        wire.DATA, 1, b"x" * 2000
    )


def test_large_frames_are_written_without_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = wire.Pipe()
    written: list[bytes] = []
    monkeypatch.setattr(wire, "write_all", written.append)
    pipe.send(wire.DATA, 1, b"x" * 10)
    assert written == []
    pipe.send(wire.DATA, 1, b"x" * wire.BATCH)
    assert len(written) == 1


def test_tailer_uses_a_small_file_limit_when_the_system_limit_cannot_be_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _which: (20, resource.RLIM_INFINITY))
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _which, pair: limits.append(pair))
    assert tailer.file_limit() == tailer.MOST_FILES
    assert limits == [(tailer.MOST_FILES, resource.RLIM_INFINITY)]

    def refused(_which: int, _pair: tuple[int, int]) -> None:
        raise ValueError

    monkeypatch.setattr(resource, "setrlimit", refused)
    assert tailer.file_limit() == 256
