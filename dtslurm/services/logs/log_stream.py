"""All log files of a run over one stream, also when the link breaks: nothing is lost, nothing comes twice."""

from __future__ import annotations

import enum
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dtslurm.errors import StoreError, TransportError
from dtslurm.logs import frames
from dtslurm.logs.frames import Frame
from dtslurm.logs.lines import Assembler, LogBlock, LogFile
from dtslurm.logs.shell_tail import MOST_FILES
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.services.logs.log_link import WINDOW, Link, NoPython, PythonLink, ShellLink
from dtslurm.transport.base import Transport
from dtslurm.worker.logtail import frames as wire

_DAY_S = 86_400
_LARGEST_INODE = 1 << 64
_MOST_FILES = 200_000
_LONGEST_NAME = 256
_MOST_UNFINISHED = 1 << 27  # bytes of all lines without their end
_LONGEST_PAUSE_S = 60.0
_SHORT_LIFE_S = 5.0
_MOST_SHORT_LIVES = 5


@dataclass(frozen=True)
class LogRequest:
    """What to follow of a run.

    Attributes:
        run_dir: on the cluster.
        array: whether the run has array tasks; ``task`` is the only one wanted.
        kinds: see `LogFile`.
        ranks: ranges of ranks, None for all; ``nodes``: only ranks on these hosts.
        attempt: the only one; None for the latest and those to come.
        lines: of what is there at the start, only the last lines of each file.
        follow: go on until `LogStream.drain`.
        in_turn: without ``follow``, send a piece of each file in turn rather than one file after the other.
        summary: ranks are only summed up until `LogStream.focus`.
    """

    run_dir: str
    array: bool = False
    task: str | None = None
    kinds: frozenset[str] = frozenset({"batch", "node", "rank"})
    ranks: tuple[tuple[int, int], ...] | None = None
    nodes: frozenset[str] | None = None
    attempt: int | None = None
    lines: int | None = None
    follow: bool = True
    in_turn: bool = True
    summary: bool = False

    def values(self) -> dict[str, object]:
        """Return the request to the far side."""
        return {
            "run": self.run_dir,
            "array": self.array,
            "task": self.task,
            "kinds": sorted(self.kinds),
            "ranks": self.ranks,
            "nodes": None if self.nodes is None else sorted(self.nodes),
            "attempt": self.attempt,
            "lines": self.lines,
            "follow": self.follow,
            "in_turn": self.in_turn,
            "summary": self.summary,
            "credit": WINDOW,
        }


@dataclass(frozen=True)
class Notice:
    """Something to tell the person who reads along."""

    text: str


@dataclass(frozen=True)
class Record:
    """One object of the run's events or metrics."""

    file: LogFile
    values: Mapping[str, Any]


@dataclass(frozen=True)
class OutputSummary:
    """What a rank's output since the last such word amounts to.

    Attributes:
        size: of its log, in bytes.
        last: the last line, cut.
        alarm: the first line that looks like an error, cut; empty if there is none.
    """

    file: LogFile
    size: int
    new_lines: int
    last: str
    alarm: str


@dataclass(frozen=True)
class Rewritten:
    """What an unfinished line shows now: a progress bar."""

    file: LogFile
    text: str


class Mark(enum.Enum):
    """A point in the stream."""

    CAUGHT_UP = "everything that was there at the start has come"
    END = "everything has come"


Item = LogBlock | Notice | Record | OutputSummary | Rewritten | Mark


class LogStream:
    """Follows a run's logs on the machine that ``transport`` reaches. Use it as a context manager.

    The first connection's error is the caller's; after that, lost links are made anew, with growing pauses.

    Attributes:
        utc_offset: of the far side's clock, in seconds east of UTC.
        skipped: whether a file began with lines that were not sent, by ``LogRequest.lines``.
    """

    def __init__(
        self,
        transport: Transport,
        wanted: LogRequest,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        python: str = "",
    ) -> None:
        """With ``python``, that one is tried first on another machine."""
        self._transport, self._wanted, self._python = transport, wanted, python
        self._clock, self._sleep = clock, sleep
        self._link: Link | None = None
        self._files: dict[str, Assembler] = {}
        self._unfinished = 0
        self._first: dict[str, int] = {}
        self._caught_up = False
        self._draining = not wanted.follow
        self._ended = False
        self._focus: bytes = b""
        self.utc_offset = time.localtime().tm_gmtoff
        self.skipped = False
        self._has_python = True
        self._tries = 0
        self._short_lives = 0
        self._next_try = 0.0

    def __enter__(self) -> LogStream:  # noqa: PYI034 (typing.Self is of Python 3.11)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether there is a link now."""
        return self._link is not None

    @property
    def ended(self) -> bool:
        """Whether everything has come."""
        return self._ended

    def read(self, timeout: float) -> list[Item]:
        """Return what came, waiting up to ``timeout`` seconds for it.

        Raises:
            TransportError: there is no link, and there never was one or it cannot last.
            StoreError: the run's folder is not there.
        """
        if self._ended:
            return []
        items: list[Item] = []
        try:
            if self._link is not None or self._connect(timeout):
                items.extend(self._items(timeout))
        except NoPython as error:
            if not self._has_python:
                raise
            self.close()
            self._has_python = False
            items.append(
                Notice(f"{error.message}: a shell looks every second, at {MOST_FILES} log files at most")
            )
        except TransportError as error:
            items += self._lost(error)
        return items

    def drain(self) -> None:
        """Say that the run is over: the rest comes, and then `Mark.END`."""
        if not self._draining:
            self._draining = True
            self._send(wire.frame(wire.DRAIN, 0))

    def focus(self, ranks: Sequence[tuple[int, int]] | None, lines: int | None) -> None:
        """Have these ranks sent in full from their last lines on, and the others only summed up."""
        self._focus = frames.focus(None if ranks is None else [list(item) for item in ranks], lines)
        self._send(self._focus)

    def close(self) -> None:
        """End the far side."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    # ---- The link ----

    def _connect(self, timeout: float) -> bool:
        now = self._clock()
        if now < self._next_try:
            self._sleep(min(timeout, self._next_try - now))
            return False
        if self._has_python:
            self._link = PythonLink(self._transport, self._request(), self._clock, self._python)
        else:
            self._link = ShellLink(self._transport, self._request(), self._clock)
        if self._focus:
            self._send(self._focus)
        return True

    def _request(self) -> dict[str, object]:
        values = self._wanted.values()
        values["follow"] = not self._draining
        values["pack"] = not self._transport.local
        if self._files or self._caught_up:
            values["since"] = self._since()
            values["positions"] = {
                name: [file.inode, file.offset, len(file.checked), zlib.crc32(file.checked)]
                for name, file in self._files.items()
            }
        if self._caught_up:
            values["lines"] = None
        return values

    def _since(self) -> dict[str, int]:
        since = dict(self._first)
        for known in self._files.values():
            if known.file.kind in {"rank", "node"}:
                task = known.file.task or ""
                since[task] = min(since.get(task, known.file.attempt), known.file.attempt)
        return since

    def _send(self, data: bytes) -> None:
        if self._link is not None:
            with suppress(TransportError):  # the next read will tell
                self._link.send(data)

    def _lost(self, error: TransportError) -> list[Item]:
        link, self._link = self._link, None
        lived = 0.0
        if link is not None:
            lived = self._clock() - link.since
            link.close()
        fruitful = link is not None and link.fruitful
        if not error.transient or not (self._files or self._caught_up):
            raise error
        self._short_lives = 0 if fruitful or lived > _SHORT_LIFE_S else self._short_lives + 1
        if self._short_lives >= _MOST_SHORT_LIVES and link is not None and link.greeted:
            raise error
        self._tries = 1 if fruitful else self._tries + 1
        pause = min(_LONGEST_PAUSE_S, 2.0 ** (self._tries - 1)) * random.uniform(0.5, 1.0)  # noqa: S311
        self._next_try = self._clock() + pause
        why = ": ".join([error.message, *error.evidence[-1:]])
        return [Notice(f"link lost ({why}); again in {pause:.0f} s, nothing is lost")]

    # ---- What comes over it ----

    def _items(self, timeout: float) -> Iterator[Item]:
        link = self._link
        if link is not None:
            for frame in link.read(timeout):
                yield from self._item(link, frame)
            grown, link.grown = link.grown, {}
            for known in grown.values():
                if (text := known.rewritten()) is not None:
                    yield Rewritten(known.file, text)

    def _item(self, link: Link, frame: Frame) -> Iterator[Item]:
        if frame.kind == wire.DATA:
            yield from self._data(link, frame)
        elif frame.kind == wire.FILE:
            yield from self._file(link, frame)
        elif frame.kind == wire.SUMMARY:
            yield from _summed(link, frame)
        else:
            yield from self._word(frame)

    def _word(self, frame: Frame) -> Iterator[Item]:
        """Take a frame that is of no file's content."""
        if frame.kind == wire.CAUGHT_UP:
            if not self._caught_up:
                self._caught_up = True
                first = frame.values().get("first")
                numbers = first.items() if isinstance(first, dict) else ()
                self._first = {task: number for task, number in numbers if _is_count(number)}
                yield Mark.CAUGHT_UP
        elif frame.kind == wire.HELLO:
            offset = frame.values().get("utc_offset")
            if isinstance(offset, int) and abs(offset) < _DAY_S:
                self.utc_offset = offset
        elif frame.kind == wire.TROUBLE and frame.stream == 0:
            raise StoreError(str(frame.values().get("message", "")))
        elif frame.kind == wire.TROUBLE:
            yield Notice(str(frame.values().get("message", "")))
        elif frame.kind == wire.END:
            self._ended = True
            for known in self._files.values():
                if rest := known.flush():
                    yield from _told(rest)
            yield Mark.END

    def _file(self, link: Link, frame: Frame) -> Iterator[Item]:
        values = frame.values()
        file = LogFile.of(values)
        name, why = (
            answers.read_path(values, "name", frames.SENDER),
            answers.read_text(values, "why", frames.SENDER),
        )
        offset = answers.read_whole(values, "offset", frames.SENDER)
        inode = answers.read_whole(values, "inode", frames.SENDER, most=_LARGEST_INODE)
        if len(name) > _LONGEST_NAME or (name not in self._files and len(self._files) >= _MOST_FILES):
            raise frames.nonsense(f"more than {_MOST_FILES:,} files, or a longer name than log files have")
        known = self._files.setdefault(name, Assembler(file, name))
        link.streams[frame.stream] = known
        known.inode = inode
        if why == "resumed" and offset == known.offset:
            return
        self.skipped = self.skipped or (why == "new" and offset > 0)
        self._unfinished -= len(known.rest)
        if rest := known.flush():
            yield from _told(rest)
        known.offset, known.checked = offset, b""
        if why in {"truncated", "replaced"}:
            yield Notice(f"{name} was {why}; from its beginning again")

    def _data(self, link: Link, frame: Frame) -> Iterator[Item]:
        known = link.streams.get(frame.stream)
        if known is None or len(frame.payload) < wire.OFFSET.size:
            raise frames.nonsense("bytes of a file that it never named")
        link.owe(len(frame.payload) - wire.OFFSET.size)
        self._unfinished -= len(known.rest)
        block = known.feed(wire.OFFSET.unpack_from(frame.payload)[0], frame.payload[wire.OFFSET.size :])
        self._unfinished += len(known.rest)
        if self._unfinished > _MOST_UNFINISHED:
            raise frames.nonsense(f"more than {_MOST_UNFINISHED >> 20} MiB of lines without an end")
        if known.rest:
            link.grown[frame.stream] = known
        if block is not None:
            yield from _told(block)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= answers.LARGEST_NUMBER


def _told(block: LogBlock) -> Iterator[Item]:
    """Yield a block of output as it is, and records as records."""
    if block.file.kind not in {"events", "metrics"}:
        yield block
        return
    for line in block.data.splitlines():
        with suppress(TransportError):  # a line cut off
            yield Record(block.file, answers.parse_object(line, frames.SENDER))


def _summed(link: Link, frame: Frame) -> Iterator[Item]:
    link.owe(len(frame.payload))
    rows = answers.interpret(answers.parse_json(frame.payload, frames.SENDER), _summaries, frames.SENDER)
    for stream, summary in rows:
        if stream not in link.streams:
            raise frames.nonsense("a summary of a file that it never named")
        yield OutputSummary(link.streams[stream].file, *summary)


def _summaries(rows: Any) -> list[tuple[int, tuple[int, int, str, str]]]:
    return [
        (int(stream), (int(size), int(new_lines), str(last), str(alarm)))
        for stream, size, new_lines, last, alarm in rows
    ]
