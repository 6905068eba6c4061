"""Live output of many ranks: follow, search, filter; draws only the lines on the screen."""

from __future__ import annotations

import re
import time
from array import array
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from dtslurm.dashboard import keys, theme
from dtslurm.dashboard.store import ANY_LINE, ERRORS, LineStore, compiled
from dtslurm.logs.clean import safe
from dtslurm.logs.exceptions import EXCEPTION_NAME

EXCEPTION = "exception"  # the kind of the line that ends a traceback
_EXCEPTION = re.compile(rf"(?:\[[\w .:-]+\]:? *)?{EXCEPTION_NAME}(?:: |:?$)")
_LEVEL = re.compile(
    r"\b(CRITICAL|FATAL|ERROR|WARNING|(?<!NCCL )WARN|INFO|DEBUG|TRACE)\b"
    r"|^([CFEWID])\d{4} |\[(error|warning|debug)\]"
)
_LEVEL_ROOM = 160  # characters at the start of a line in which its level stands
_LEVELS = {
    "CRITICAL": "bad", "FATAL": "bad", "ERROR": "bad", "WARNING": "warn", "WARN": "warn", "INFO": "",
    "DEBUG": "dim", "TRACE": "dim", "C": "bad", "F": "bad", "E": "bad", "W": "warn", "I": "", "D": "dim",
}  # fmt: skip
_TICK_S = 0.1
_SLICE_S = 0.01  # of a tick that filtering may take, so that keys are answered
_LABEL = 6


class LogView(ScrollView, can_focus=True):
    """Shows a `LineStore` that another thread fills."""

    DEFAULT_CSS = "LogView { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys.MOVES,
        Binding("end,G", "follow", "newest"),
        Binding("left", "side(-8)", show=False),
        Binding("right", "side(8)", show=False),
        Binding("n", "again(1)", show=False),
        Binding("N", "again(-1)", show=False),
        Binding("e", "error(1)", "next error"),
        Binding("E", "error(-1)", show=False),
    ]

    class Status(Message):
        """What the line below the log says has changed."""

    def __init__(self, store: LineStore, id: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self.store = store
        self.following = True
        self.words = ""
        self._seen = (-1, -1)
        self._side = 0
        self._filter: re.Pattern[bytes] | None = None
        self._kept: array[int] = array("Q")
        self._filtered = 0
        self._search: re.Pattern[bytes] | None = None
        self._marked: int | None = None
        self._aim: tuple[str, str] | None = None
        self.ended = False
        self.show_rank = True

    def on_mount(self) -> None:
        self.set_interval(_TICK_S, self._tick)

    # ---- What there is

    def use(self, store: LineStore) -> None:
        """Show another store from its end."""
        self.store = store
        self._seen = (-1, -1)
        self._marked = None
        self._aim = None
        self.following = True
        self._refilter()

    @property
    def count(self) -> int:
        """How many lines there are to scroll through."""
        if self._filter is not None:
            return len(self._kept)
        return self.store.total - self.store.first

    def _number(self, place: int) -> int:
        if self._filter is not None:
            return int(self._kept[place]) if place < len(self._kept) else -1
        return self.store.first + place

    def _place(self, number: int) -> int:
        if self._filter is None:
            return number - self.store.first
        from bisect import bisect_left

        return bisect_left(self._kept, number)

    def _tick(self) -> None:
        if not self.is_on_screen:
            return
        if self._filter is not None:
            self._sift(self._filter)
        if self._aim is not None and not self.store.loading:
            self._shoot(*self._aim)
        now = (self.store.first, self.count)
        bottom = max(0, self.count - self.size.height)
        if now == self._seen and not (self.following and self.scroll_offset.y != bottom):
            return
        gone = now[0] - self._seen[0] if self._filter is None and self._seen[0] >= 0 else 0
        self._seen = now
        top = self.scroll_offset.y
        self.virtual_size = Size(self.size.width, self.count)
        if self.following:
            self.scroll_to(y=bottom, animate=False, immediate=True)
        elif gone:
            self.scroll_to(y=max(0, top - gone), animate=False, immediate=True)
        self.refresh()
        self.post_message(self.Status())

    def aim(self, source: str, text: str) -> None:
        """Once everything has been loaded, go to the last line of a source that has a text.

        Where no line has it, go to its last line that looks like an error, else to its last line.
        """
        self._aim = source, text

    def _shoot(self, source: str, text: str) -> None:
        self._aim = None
        patterns = [re.compile(re.escape(text.encode()))] if text else []
        for pattern in (*patterns, ERRORS, ANY_LINE):
            number = self.store.backwards(pattern, self.store.total, source)
            if number is not None:
                self.virtual_size = Size(self.size.width, self.count)
                self.call_after_refresh(self._go_to, number)  # a pane scrolls once it has been laid out
                return

    def _sift(self, pattern: re.Pattern[bytes]) -> None:
        """Look through lines that are not yet filtered, for no longer than a slice."""
        if self._kept and self._kept[0] < self.store.first:
            from bisect import bisect_left

            del self._kept[: bisect_left(self._kept, self.store.first)]
        end = time.monotonic() + _SLICE_S
        total = self.store.total
        begin = max(self._filtered, self.store.first)
        while begin < total and time.monotonic() < end:
            stop = min(total, begin + 1024)
            for found in self.store.matches(pattern, begin, stop):
                self._kept.extend(found)
            begin = stop
        self._filtered = begin

    def _refilter(self) -> None:
        self._kept = array("Q")
        self._filtered = 0
        self._seen = (-1, -1)

    # ---- What the user does

    def filter(self, text: str) -> None:
        """Show only lines that match; all of them for an empty text.

        Raises:
            re.error: it is not a regular expression.
        """
        self._filter = compiled(text) if text else None
        self.words = text
        self.following = True
        self._refilter()
        self.refresh()
        self.post_message(self.Status())

    def search(self, text: str) -> None:
        """Go to a line that matches, from the newest back if new ones are followed, and mark all that do.

        Raises:
            re.error: it is not a regular expression.
        """
        self._search = compiled(text) if text else None
        self._marked = None
        self.refresh()
        if self._search is not None:
            self._seek(self._search, -1 if self.following else 1)

    def action_again(self, way: int) -> None:
        """Go to the next (1) or previous (-1) match."""
        if self._search is not None:
            self._seek(self._search, way)

    def action_error(self, way: int) -> None:
        """Go to the next (1) or previous (-1) line that looks like an error."""
        self._seek(ERRORS, way, ("e", "E"))

    def _seek(self, pattern: re.Pattern[bytes], way: int, keys: tuple[str, str] = ("n", "N")) -> None:
        if self._marked is not None:
            begin = self._marked
        elif way > 0:
            begin = self._number(self.scroll_offset.y) - 1 if self.count else self.store.first - 1
        else:
            begin = self.store.total
        self.run_worker(
            lambda: self._look(pattern, begin, way, keys), thread=True, exclusive=True, group="seek"
        )

    def _look(self, pattern: re.Pattern[bytes], begin: int, way: int, keys: tuple[str, str]) -> None:
        found = self._nearest(pattern, begin, way)
        if found is not None:
            self.app.call_from_thread(self._go_to, found)
            return
        what = "no line that looks like an error" if pattern is ERRORS else "no match"
        text = f"{what} {'below' if way > 0 else 'above'}"
        if self._nearest(pattern, begin, -way) is not None:
            text += f"; {keys[1]} goes up" if way > 0 else f"; {keys[0]} goes down"
        elif begin == self._marked:
            text = f"{text} or {'above' if way > 0 else 'below'}: this is the only one"
        else:
            text = f"{what} in these lines"
        self.app.call_from_thread(self.notify, text, timeout=4)

    def _nearest(self, pattern: re.Pattern[bytes], begin: int, way: int) -> int | None:
        """Return the next line that matches below (1) or above (-1) a line."""
        if way < 0:
            return self.store.backwards(pattern, begin)
        return next((numbers[0] for numbers in self.store.matches(pattern, begin + 1) if numbers), None)

    def _go_to(self, number: int) -> None:
        if self._filter is not None and number not in self._kept:
            self.filter("")
        self._marked = number
        self.following = False
        place = self._place(number)
        self.virtual_size = Size(self.size.width, self.count)
        self.scroll_to(y=max(0, place - self.size.height // 2), animate=False, immediate=True)
        self.refresh()
        self.post_message(self.Status())

    def action_line(self, step: int) -> None:
        """Scroll by a line."""
        self._scrolled(self.scroll_offset.y + step)

    def action_page(self, step: int) -> None:
        """Scroll by a screen."""
        self._scrolled(self.scroll_offset.y + step * max(1, self.size.height - 1))

    def action_top(self) -> None:
        """Go to the oldest line."""
        self._scrolled(0)

    def action_follow(self) -> None:
        """Go to the newest line and stay there."""
        self.following = True
        self._marked = None
        self._seen = (-1, -1)
        self._tick()

    def action_side(self, step: int) -> None:
        """Show what stands further right or left in the lines."""
        self._side = max(0, self._side + step)
        self.refresh()

    def _scrolled(self, y: int) -> None:
        bottom = max(0, self.count - self.size.height)
        self.following = y >= bottom
        self.scroll_to(y=max(0, min(bottom, y)), animate=False, immediate=True)
        self.refresh()
        self.post_message(self.Status())

    def on_mouse_scroll_up(self) -> None:
        self.following = False
        self.post_message(self.Status())

    def visible_text(self) -> str:
        """Return the lines on the screen as text."""
        top = self.scroll_offset.y
        places = range(top, min(self.count, top + self.size.height))
        lines = self.store.lines([self._number(place) for place in places])
        return "\n".join(f"{source}: {safe(text)}" for source, text in lines)

    @property
    def source(self) -> str:
        """Whose line is marked, or else the last one on the screen; empty where there is none."""
        last = min(self.count, self.scroll_offset.y + self.size.height) - 1
        number = self._marked if self._marked is not None else self._number(last) if last >= 0 else -1
        return self.store.lines([number])[0][0]

    def status(self) -> str:
        """Return the words below the log."""
        if self.ended:
            parts = ["at the end" if self.following else "End goes to the end"]
        else:
            parts = ["following" if self.following else "paused, End follows"]
        if self.store.loading:
            parts = ["loading"]
        kept = self.store.total - self.store.first
        parts.append(
            f"{self.count:,} of {kept:,} lines match {self.words!r}" if self.words else f"{kept:,} lines"
        )
        if self.store.first:
            parts.append(f"{self.store.first:,} older ones dropped")
        return " · ".join(parts)

    # ---- What is drawn

    @property
    def _empty(self) -> str:
        if self._filter is not None and self.store.total > self.store.first:
            return f"no line matches {self.words!r}"
        if self.store.loading:
            return "loading …"
        return "nothing was written" if self.ended else "nothing written yet"

    def render_line(self, y: int) -> Strip:
        return self._line(y).apply_style(self.rich_style)

    def _line(self, y: int) -> Strip:
        width = self.size.width
        place = y + self.scroll_offset.y
        if place >= self.count:
            text = "" if y or self.count else self._empty
            return Strip([Segment(set_cell_size(text, width), theme.style(self.app, "dim"))], width)
        number = self._number(place)
        source, raw = self.store.lines([number])[0]
        text = safe(raw.expandtabs(8))
        ground = theme.ground(self.app, "panel") if number == self._marked else Style()
        label = f"{source[:_LABEL]:>{_LABEL}} " if self.show_rank else ""
        hue = theme.hue(self.app, source)
        segments = [Segment(label, hue + ground)]
        room = width - len(label)
        body = text[self._side :] if self._side else text
        body = body[: room + 1] if cell_len(body) > room else body
        segments += self._marked_pieces(body, ground)
        return Strip(segments).adjust_cell_length(width, ground)

    def _marked_pieces(self, text: str, ground: Style) -> list[Segment]:
        kind = line_kind(text)
        base = theme.exception(self.app) if kind == EXCEPTION else theme.style(self.app, kind) + ground
        pattern = self._search or self._filter
        if pattern is None:
            return [Segment(text, base)]
        data = text.encode("utf-8", "replace")
        pieces, place = [], 0
        for found in pattern.finditer(data):
            begin, end = _whole(data, max(place, found.start()), found.end())
            if begin >= end:
                continue
            pieces.append(Segment(data[place:begin].decode(), base))
            pieces.append(Segment(data[begin:end].decode(), base + Style(reverse=True)))
            place = end
        pieces.append(Segment(data[place:].decode(), base))
        return pieces


def line_kind(text: str) -> str:
    """Return the kind of a log line: by its level, else whether it looks like an error.

    The line that ends a Python traceback is of kind `EXCEPTION`.
    """
    if _EXCEPTION.match(text):
        return EXCEPTION
    level = _LEVEL.search(text, 0, _LEVEL_ROOM)
    if level is not None:
        return _LEVELS[level[level.lastindex or 0].upper()]
    return "bad" if ERRORS.search(text.encode("utf-8", "replace")) else ""


def _whole(data: bytes, begin: int, end: int) -> tuple[int, int]:
    """Return a piece of UTF-8 with the rest of the characters that it begins and ends in."""
    if begin >= end:
        return begin, begin
    while begin and data[begin] & 0xC0 == 0x80:
        begin -= 1
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end += 1
    return begin, end
