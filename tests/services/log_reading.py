"""Helpers for the tests of log following: a run directory, a reader, and writers."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from dtslurm.logs.lines import LogBlock
from dtslurm.services.logs.log_stream import Item, LogRequest, LogStream, Mark, Notice, Record
from dtslurm.transport.local import LocalTransport
from tests.waiting import wait_until

DEADLINE_S = 60.0


class Run:
    """A run's folder as a job fills it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "logs").mkdir(parents=True)

    def log(self, rank: int, attempt: int = 0) -> Path:
        path = self.path / "logs" / str(attempt) / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, rank: int, data: bytes, attempt: int = 0) -> Path:
        path = self.log(rank, attempt)
        with path.open("ab") as file:
            file.write(data)
        return path


class Reader:
    """Reads a stream and keeps what came."""

    def __init__(self, stream: LogStream) -> None:
        self.stream = stream
        self.items: list[Item] = []

    def read(self) -> list[Item]:
        came = self.stream.read(0.05)
        self.items += came
        return came

    def wait_until(self, happened: Callable[[], object]) -> None:
        def is_reached() -> bool:
            while not happened():
                came = self.stream.read(0.1)
                self.items += came
                if not came:
                    return False
            return True

        try:
            wait_until(is_reached, limit=300)
        except AssertionError as error:
            raise AssertionError(f"{error}; came: {self.items[-5:]}") from None

    def until_mark(self, mark: Mark) -> None:
        self.wait_until(lambda: mark in self.items)

    def text(self, rank: int, attempt: int = 0) -> bytes:
        return b"".join(
            item.data
            for item in self.items
            if isinstance(item, LogBlock) and (item.file.rank, item.file.attempt) == (rank, attempt)
        )

    def notices(self) -> list[str]:
        return [item.text for item in self.items if isinstance(item, Notice)]

    def drained(self) -> Reader:
        self.stream.drain()
        self.until_mark(Mark.END)
        return self


def line(rank: int, number: int, length: int) -> bytes:
    body = b"%d %d %s" % (rank, number, b"." * length)
    return b"%s %08x\n" % (body, zlib.crc32(body))


class Writers:
    """Ranks that write lines in any pieces, each to a log that is now and then renamed and begun anew."""

    RANKS, LINES = 8, 1500

    def __init__(self, run: Run, seed: int) -> None:
        self.run = run
        self.seen = [0] * self.RANKS  # bytes that the reader has of each
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.write, args=[rank, seed]) for rank in range(self.RANKS)]

    def write(self, rank: int, seed: int) -> None:
        dice = random.Random(seed * 100 + rank)
        data = b"".join(line(rank, number, dice.choice([0, 10, 100, 3000])) for number in range(self.LINES))
        done = began = 0
        while done < len(data) and not self.stop.is_set():
            size = dice.choice([1, 50, 5000, 100_000])
            rotate = dice.random() < 0.05 and self.seen[rank] > began  # what nobody saw at all, nobody misses
            end = data.find(b"\n", done + size) + 1 if rotate else done + size
            self.run.write(rank, data[done : end or len(data)])
            done = end or len(data)
            if rotate:
                path = self.run.log(rank)
                path.rename(path.with_name(f"rank-{rank}.log.{done}"))
                began = done
            time.sleep(dice.choice([0, 0.001, 0.01]))

    def note(self, items: list[Item]) -> None:
        for item in items:
            if isinstance(item, LogBlock):
                self.seen[item.file.number] += len(item.data)

    def busy(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def __enter__(self) -> Writers:  # noqa: PYI034 (typing.Self is of Python 3.11)
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def check(self, reader: Reader) -> None:
        """Every line came whole, once, in order."""
        for rank in range(self.RANKS):
            bodies = [text.rpartition(b" ") for text in reader.text(rank).splitlines()]
            torn = [body for body, _, crc in bodies if f"{zlib.crc32(body):08x}".encode() != crc]
            assert not torn, torn[:3]
            assert [int(body.split()[1]) for body, _, _ in bodies] == list(range(self.LINES))


@contextmanager
def follow_logs(run: Run, **wanted: Any) -> Iterator[Reader]:
    """Follow a run's logs on this machine."""
    with LogStream(LocalTransport(), LogRequest(str(run.path), **wanted)) as stream:
        yield Reader(stream)


def log_follower_process() -> psutil.Process:
    """Return the only log follower process of this process."""
    children = psutil.Process().children(recursive=True)
    (log_follower,) = [child for child in children if "dtslurm-worker" in _command_line(child)]
    return log_follower


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # the process has just ended
        return ""


def record_values(reader: Reader) -> list[Any]:
    """Return the received events and metrics."""
    return [item.values for item in reader.items if isinstance(item, Record)]
