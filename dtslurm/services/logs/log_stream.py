"""Stream all log files of a run over one connection; after a lost link, resume without loss or repeats."""

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
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.services.logs.log_link import WINDOW, Link
from dtslurm.transport.base import Transport
from dtslurm.worker.logtail import frames as wire

_DAY_S = 86_400
_LARGEST_INODE = 1 << 64
_MOST_FILES = 200_000
_LONGEST_NAME = 256
_MOST_UNFINISHED = 1 << 27  # bytes of all unfinished lines together
_LONGEST_PAUSE_S = 60.0
_SHORT_LIFE_S = 5.0
_MOST_SHORT_LIVES = 5


@dataclass(frozen=True)
class LogRequest:
    """Which log files of a run to read or follow.

    Attributes:
        run_dir: the run directory on the cluster.
        array: whether the run has array tasks.
        task: the only array task to read; None for all.
        kinds: kinds of log files, see `LogFile`.
        roles: roles to read, if ``role`` is one of the kinds.
        ranks: ranges of ranks; None for all.
        nodes: read only ranks on these hosts; None for all.
        attempt: the only attempt to read; None for the latest and later ones.
        lines: of the existing content, read only this number of last lines of each file; None for all lines.
        follow: continue until `LogStream.drain`.
        in_turn: without ``follow``, send a piece of each file in turn instead of one file after the other.
        summary: send only summaries of the ranks' output until `LogStream.focus`.
    """

    run_dir: str
    array: bool = False
    task: str | None = None
    kinds: frozenset[str] = frozenset({"batch", "node", "rank"})
    roles: frozenset[str] | None = None
    ranks: tuple[tuple[int, int], ...] | None = None
    nodes: frozenset[str] | None = None
    attempt: int | None = None
    lines: int | None = None
    follow: bool = True
    in_turn: bool = True
    summary: bool = False

    def values(self) -> dict[str, object]:
        """Return the request to the worker program as a JSON object."""
        return {
            "run": self.run_dir,
            "array": self.array,
            "task": self.task,
            "kinds": sorted(self.kinds),
            "roles": None if self.roles is None else sorted(self.roles),
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
    """A message of the log follower to the user."""

    text: str


@dataclass(frozen=True)
class Record:
    """One JSON object from the run's events or metrics file."""

    file: LogFile
    values: Mapping[str, Any]


@dataclass(frozen=True)
class OutputSummary:
    """A summary of a rank's output since the previous summary.

    Attributes:
        size: size of the rank's log in bytes.
        last: the last line, truncated.
        alarm: the first line that looks like an error, truncated; empty if there is none.
    """

    file: LogFile
    size: int
    new_lines: int
    last: str
    alarm: str


@dataclass(frozen=True)
class Rewritten:
    """The current text of an unfinished line, such as a progress bar."""

    file: LogFile
    text: str


class Mark(enum.Enum):
    """A point in the stream."""

    CAUGHT_UP = "all output that existed at the start has arrived"
    END = "all output has arrived"


Item = LogBlock | Notice | Record | OutputSummary | Rewritten | Mark


class LogStream:
    """A stream of a run's logs from the host that ``transport`` reaches. Use it as a context manager.

    An error of the first connection is raised. Later, a lost link is reopened after increasing pauses.

    Attributes:
        utc_offset: the host's offset from UTC, in seconds east.
        skipped: whether ``LogRequest.lines`` left out the beginning of a file.
    """

    def __init__(
        self,
        transport: Transport,
        log_request: LogRequest,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        python: str = "",
    ) -> None:
        """Create the stream; ``python`` is the interpreter that is tried first on a remote host."""
        self._transport, self._log_request, self._python = transport, log_request, python
        self._clock, self._sleep = clock, sleep
        self._link: Link | None = None
        self._files: dict[str, Assembler] = {}
        self._unfinished = 0
        self._first: dict[str, int] = {}
        self._caught_up = False
        self._draining = not log_request.follow
        self._ended = False
        self._focus: bytes = b""
        self.utc_offset = time.localtime().tm_gmtoff
        self.skipped = False
        self._tries = 0
        self._short_lives = 0
        self._next_try_at = 0.0

    def __enter__(self) -> LogStream:  # noqa: PYI034 (typing.Self is of Python 3.11)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether the link is open."""
        return self._link is not None

    @property
    def ended(self) -> bool:
        """Whether all output was received."""
        return self._ended

    def read(self, timeout: float) -> list[Item]:
        """Return the received items, after waiting up to ``timeout`` seconds for data.

        Raises:
            CommandNotFound: the host has no Python that can run the worker program.
            TransportError: the first connection failed, or the link breaks again and again.
            StoreError: the run directory does not exist.
        """
        if self._ended:
            return []
        items: list[Item] = []
        try:
            if self._link is not None or self._connect(timeout):
                items.extend(self._read_items(timeout))
        except TransportError as error:
            items += self._handle_loss(error)
        return items

    def drain(self) -> None:
        """Stop following because the run has ended: the remaining output is sent, then `Mark.END`."""
        if not self._draining:
            self._draining = True
            self._send(wire.frame(wire.DRAIN, 0))

    def focus(self, ranks: Sequence[tuple[int, int]] | None, lines: int | None) -> None:
        """Request the full output of these ranks from their last lines on, and summaries of the others."""
        self._focus = frames.focus(None if ranks is None else [list(item) for item in ranks], lines)
        self._send(self._focus)

    def close(self) -> None:
        """Close the link, which ends the remote program."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    # ---- The link ----

    def _connect(self, timeout: float) -> bool:
        now = self._clock()
        if now < self._next_try_at:
            self._sleep(min(timeout, self._next_try_at - now))
            return False
        self._link = Link(self._transport, self._make_request(), self._clock, self._python)
        if self._focus:
            self._send(self._focus)
        return True

    def _make_request(self) -> dict[str, object]:
        values = self._log_request.values()
        values["follow"] = not self._draining
        values["pack"] = not self._transport.local
        if self._files or self._caught_up:
            values["since"] = self._first_attempts_by_task()
            values["positions"] = {
                name: [file.inode, file.offset, len(file.checked), zlib.crc32(file.checked)]
                for name, file in self._files.items()
            }
        if self._caught_up:
            values["lines"] = None
        return values

    def _first_attempts_by_task(self) -> dict[str, int]:
        first_attempts = dict(self._first)
        for assembler in self._files.values():
            if assembler.file.kind in {"rank", "node", "role"}:
                task = assembler.file.task or ""
                first_attempts[task] = min(
                    first_attempts.get(task, assembler.file.attempt), assembler.file.attempt
                )
        return first_attempts

    def _send(self, data: bytes) -> None:
        if self._link is not None:
            with suppress(TransportError):  # the next read raises the error
                self._link.send(data)

    def _handle_loss(self, error: TransportError) -> list[Item]:
        link, self._link = self._link, None
        lifetime_s = 0.0
        if link is not None:
            lifetime_s = self._clock() - link.since
            link.close()
        fruitful = link is not None and link.fruitful
        if not error.transient or not (self._files or self._caught_up):
            raise error
        self._short_lives = 0 if fruitful or lifetime_s > _SHORT_LIFE_S else self._short_lives + 1
        if self._short_lives >= _MOST_SHORT_LIVES and link is not None and link.greeted:
            raise error
        self._tries = 1 if fruitful else self._tries + 1
        pause = min(_LONGEST_PAUSE_S, 2.0 ** (self._tries - 1)) * random.uniform(0.5, 1.0)  # noqa: S311
        self._next_try_at = self._clock() + pause
        cause = ": ".join([error.message, *error.evidence[-1:]])
        return [Notice(f"connection lost ({cause}); reconnecting in {pause:.0f} s, no output is lost")]

    # ---- Received frames ----

    def _read_items(self, timeout: float) -> Iterator[Item]:
        link = self._link
        if link is not None:
            for frame in link.read(timeout):
                yield from self._handle_frame(link, frame)
            grown_by_stream, link.grown = link.grown, {}
            for assembler in grown_by_stream.values():
                if (text := assembler.rewritten()) is not None:
                    yield Rewritten(assembler.file, text)

    def _handle_frame(self, link: Link, frame: Frame) -> Iterator[Item]:
        if frame.kind == wire.DATA:
            yield from self._handle_data(link, frame)
        elif frame.kind == wire.FILE:
            yield from self._handle_file(link, frame)
        elif frame.kind == wire.SUMMARY:
            yield from _handle_summary(link, frame)
        else:
            yield from self._handle_control(frame)

    def _handle_control(self, frame: Frame) -> Iterator[Item]:
        """Handle a frame that does not carry file content."""
        if frame.kind == wire.CAUGHT_UP:
            if not self._caught_up:
                self._caught_up = True
                attempts_by_task = frame.values().get("first")
                pairs = attempts_by_task.items() if isinstance(attempts_by_task, dict) else ()
                self._first = {task: number for task, number in pairs if _is_attempt_number(number)}
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
            for assembler in self._files.values():
                if partial_line := assembler.flush():
                    yield from _split_records(partial_line)
            yield Mark.END

    def _handle_file(self, link: Link, frame: Frame) -> Iterator[Item]:
        values = frame.values()
        file = LogFile.of(values)
        name, reason = (
            answers.read_path(values, "name", frames.SENDER),
            answers.read_text(values, "why", frames.SENDER),
        )
        offset = answers.read_whole(values, "offset", frames.SENDER)
        inode = answers.read_whole(values, "inode", frames.SENDER, maximum=_LARGEST_INODE)
        if len(name) > _LONGEST_NAME or (name not in self._files and len(self._files) >= _MOST_FILES):
            raise frames.protocol_error(
                f"more than {_MOST_FILES:,} files, or a name that is too long for a log file"
            )
        assembler = self._files.setdefault(name, Assembler(file, name))
        link.streams[frame.stream] = assembler
        assembler.inode = inode
        if reason == "resumed" and offset == assembler.offset:
            return
        self.skipped = self.skipped or (reason == "new" and offset > 0)
        self._unfinished -= len(assembler.rest)
        if partial_line := assembler.flush():
            yield from _split_records(partial_line)
        assembler.offset, assembler.checked = offset, b""
        if reason in {"truncated", "replaced"}:
            yield Notice(f"{name} was {reason}; its output is shown again from the beginning")

    def _handle_data(self, link: Link, frame: Frame) -> Iterator[Item]:
        assembler = link.streams.get(frame.stream)
        if assembler is None or len(frame.payload) < wire.OFFSET.size:
            raise frames.protocol_error("data for a file that it did not announce")
        link.owe(len(frame.payload) - wire.OFFSET.size)
        self._unfinished -= len(assembler.rest)
        block = assembler.feed(wire.OFFSET.unpack_from(frame.payload)[0], frame.payload[wire.OFFSET.size :])
        self._unfinished += len(assembler.rest)
        if self._unfinished > _MOST_UNFINISHED:
            raise frames.protocol_error(f"more than {_MOST_UNFINISHED >> 20} MiB of lines without a line end")
        if assembler.rest:
            link.grown[frame.stream] = assembler
        if block is not None:
            yield from _split_records(block)


def _is_attempt_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= answers.LARGEST_NUMBER


def _split_records(block: LogBlock) -> Iterator[Item]:
    """Yield a block of output unchanged; yield the lines of an events or metrics file as records."""
    if block.file.kind not in {"events", "metrics"}:
        yield block
        return
    for line in block.data.splitlines():
        with suppress(TransportError):  # a truncated line
            yield Record(block.file, answers.parse_object(line, frames.SENDER))


def _handle_summary(link: Link, frame: Frame) -> Iterator[Item]:
    link.owe(len(frame.payload))
    rows = answers.interpret(
        answers.parse_json(frame.payload, frames.SENDER), _parse_summaries, frames.SENDER
    )
    for stream, summary in rows:
        if stream not in link.streams:
            raise frames.protocol_error("a summary of a file that it did not announce")
        yield OutputSummary(link.streams[stream].file, *summary)


def _parse_summaries(rows: Any) -> list[tuple[int, tuple[int, int, str, str]]]:
    return [
        (int(stream), (int(size), int(new_lines), str(last), str(alarm)))
        for stream, size, new_lines, last, alarm in rows
    ]
