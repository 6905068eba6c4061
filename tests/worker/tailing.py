"""A reader of logs for the far side in this process: it keeps what it is sent, and makes time pass."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.logtail import files as tailer_files
from dtslurm.worker.logtail import frames as wire
from dtslurm.worker.logtail import tailer

Frames = list[tuple[int, bytes]]


class RecordingPipe(wire.Pipe):
    """Keeps the frames instead of sending them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, int, bytes]] = []

    def send(self, kind: int, stream: int, payload: bytes = b"") -> None:
        self.sent.append((kind, stream, payload))

    def flush(self) -> None:
        pass

    def payloads(self, kind: int) -> list[bytes]:
        return [payload for item, _, payload in self.sent if item == kind]

    def told(self, kind: int) -> list[Any]:
        return [json.loads(payload) for payload in self.payloads(kind)]

    def files(self, *wanted: str) -> list[tuple[Any, ...]]:
        """What was said of which file follows, in order: the name and why, or the values wanted."""
        return [tuple(item[key] for key in wanted or ("name", "why")) for item in self.told(wire.FILE)]

    def texts(self) -> dict[str, bytes]:
        """The bytes that came of each file, those of one name together; each piece stands where it says."""
        names: dict[int, str] = {}
        ends: dict[int, int] = {}
        result: dict[str, bytes] = {}
        for kind, stream, payload in self.sent:
            if kind == wire.FILE:
                document = json.loads(payload)
                names[stream], ends[stream] = document["name"], document["offset"]
                result.setdefault(document["name"], b"")
            elif kind == wire.DATA:
                data = payload[wire.OFFSET.size :]
                assert wire.OFFSET.unpack_from(payload)[0] == ends[stream]
                ends[stream] += len(data)
                result[names[stream]] += data
        return result


class Reader(RecordingPipe):
    """Answers by a script: what each step yields is what the reader says next; after the last one, DRAIN."""

    def __init__(self, script: Iterator[Frames], passes: Callable[[float], None]) -> None:
        super().__init__()
        self.script, self.passes = script, passes

    def listen(self, wait: float) -> Iterator[tuple[int, bytes]]:
        self.passes(max(wait, 0.001))
        yield from next(self.script, [(wire.DRAIN, b"")])


def credit(count: int) -> Frames:
    return [(wire.CREDIT, wire.OFFSET.pack(count))]


def nothing(times: int = 20) -> Iterator[Frames]:
    """The reader is silent for so many looks of the far side."""
    for _ in range(times):
        yield []


class Run:
    """A run's folder, and a far side that sends its logs; its clock goes on as it waits for the reader."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, localtime=time.localtime)
        monkeypatch.setattr(tailer, "time", clock)
        self.side: tailer.Tailer

    def write(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def add(self, name: str, data: bytes) -> None:
        with (self.folder / name).open("ab") as file:
            file.write(data)

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def follow(self, script: Iterable[Frames] = (), **request: Any) -> Reader:
        reader = Reader(iter(script), self.passes)
        values = {"run": str(self.folder), "credit": 1 << 24, **request}
        self.side = tailer.Tailer(reader, tailer_files.Request(values))
        try:
            self.side.run()
        finally:
            for log in self.side.finder.logs.values():
                self.side.close(log)
        assert reader.sent[-1] == (wire.END, 0, b"")
        return reader
