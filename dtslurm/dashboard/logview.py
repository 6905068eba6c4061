"""The log view: follows, searches and filters the output of many ranks; draws only the visible lines."""

from __future__ import annotations

import re
import time
from array import array
from bisect import bisect_left
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from dtslurm.dashboard import movement, theme
from dtslurm.dashboard.store import ANY_LINE, ERRORS, LineStore, compile_pattern
from dtslurm.logs.clean import safe
from dtslurm.logs.exceptions import EXCEPTION_NAME

EXCEPTION = "exception"  # the kind of the last line of a traceback
_EXCEPTION_PATTERN = re.compile(rf"(?:\[[\w .:-]+\]:? *)?{EXCEPTION_NAME}(?:: |:?$)")
_LEVEL_PATTERN = re.compile(
    r"\b(CRITICAL|FATAL|ERROR|WARNING|(?<!NCCL )WARN|INFO|DEBUG|TRACE)\b"
    r"|^([CFEWID])\d{4} |\[(error|warning|debug)\]"
)
_LEVEL_SEARCH_LENGTH = 160  # characters at the start of a line that may contain its level
_LEVEL_KINDS = {
    "CRITICAL": "bad", "FATAL": "bad", "ERROR": "bad", "WARNING": "warn", "WARN": "warn", "INFO": "",
    "DEBUG": "dim", "TRACE": "dim", "C": "bad", "F": "bad", "E": "bad", "W": "warn", "I": "", "D": "dim",
}  # fmt: skip
_TICK_S = 0.1
_FILTER_SLICE_S = 0.01  # filtering time per tick, short enough to keep key presses responsive
_LABEL_WIDTH = 6


class LogView(ScrollView, can_focus=True):
    """A scrollable view of a `LineStore` that another thread fills."""

    DEFAULT_CSS = "LogView { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        *movement.MOVES,
        Binding("end,G", "follow", "newest"),
        Binding("left", "side(-8)", show=False),
        Binding("right", "side(8)", show=False),
        Binding("n", "again(1)", show=False),
        Binding("N", "again(-1)", show=False),
        Binding("e", "error(1)", "next error"),
        Binding("E", "error(-1)", show=False),
    ]

    class Status(Message):
        """The text of the line below the log changed."""

    def __init__(self, store: LineStore, id: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self.store = store
        self.following = True
        self.filter_text = ""
        self._drawn_extent = (-1, -1)
        self._left_column = 0
        self._filter: re.Pattern[bytes] | None = None
        self._matching_numbers: array[int] = array("Q")
        self._filtered = 0
        self._search_pattern: re.Pattern[bytes] | None = None
        self._marked: int | None = None
        self._jump_target: tuple[str, str] | None = None
        self.ended = False
        self.show_rank = True

    def on_mount(self) -> None:
        self.set_interval(_TICK_S, self._tick)

    # ---- Content

    def show_store(self, store: LineStore) -> None:
        """Show another store, from its end."""
        self.store = store
        self._drawn_extent = (-1, -1)
        self._marked = None
        self._jump_target = None
        self.following = True
        self._restart_filter()

    @property
    def count(self) -> int:
        """The number of lines that can be scrolled through."""
        if self._filter is not None:
            return len(self._matching_numbers)
        return self.store.total - self.store.first

    def _line_number(self, row: int) -> int:
        if self._filter is not None:
            return int(self._matching_numbers[row]) if row < len(self._matching_numbers) else -1
        return self.store.first + row

    def _row_of_line(self, number: int) -> int:
        if self._filter is None:
            return number - self.store.first
        return bisect_left(self._matching_numbers, number)

    def _tick(self) -> None:
        if not self.is_on_screen:
            return
        if self._filter is not None:
            self._filter_new_lines(self._filter)
        if self._jump_target is not None and not self.store.loading:
            self._go_to_target(*self._jump_target)
        extent = (self.store.first, self.count)
        bottom = max(0, self.count - self.size.height)
        if extent == self._drawn_extent and not (self.following and self.scroll_offset.y != bottom):
            return
        dropped = (
            extent[0] - self._drawn_extent[0] if self._filter is None and self._drawn_extent[0] >= 0 else 0
        )
        self._drawn_extent = extent
        top = self.scroll_offset.y
        self.virtual_size = Size(self.size.width, self.count)
        if self.following:
            self.scroll_to(y=bottom, animate=False, immediate=True)
        elif dropped:
            self.scroll_to(y=max(0, top - dropped), animate=False, immediate=True)
        self.refresh()
        self.post_message(self.Status())

    def aim(self, source: str, text: str) -> None:
        """After loading, go to the last line of a source that contains a text.

        If no line contains the text, go to the source's last line that looks like an error, else to its last
        line.
        """
        self._jump_target = source, text

    def _go_to_target(self, source: str, text: str) -> None:
        self._jump_target = None
        patterns = [re.compile(re.escape(text.encode()))] if text else []
        for pattern in (*patterns, ERRORS, ANY_LINE):
            number = self.store.find_last(pattern, self.store.total, source)
            if number is not None:
                self.virtual_size = Size(self.size.width, self.count)
                self.call_after_refresh(self._go_to_line, number)  # a pane cannot scroll before its layout
                return

    def _filter_new_lines(self, pattern: re.Pattern[bytes]) -> None:
        """Apply the filter to new lines, for at most `_FILTER_SLICE_S` seconds."""
        if self._matching_numbers and self._matching_numbers[0] < self.store.first:
            del self._matching_numbers[: bisect_left(self._matching_numbers, self.store.first)]
        deadline = time.monotonic() + _FILTER_SLICE_S
        total = self.store.total
        begin = max(self._filtered, self.store.first)
        while begin < total and time.monotonic() < deadline:
            stop = min(total, begin + 1024)
            for numbers in self.store.find_matches(pattern, begin, stop):
                self._matching_numbers.extend(numbers)
            begin = stop
        self._filtered = begin

    def _restart_filter(self) -> None:
        self._matching_numbers = array("Q")
        self._filtered = 0
        self._drawn_extent = (-1, -1)

    # ---- User actions

    def filter(self, text: str) -> None:
        """Show only the lines that match; an empty text shows all lines.

        Raises:
            re.error: the text is not a regular expression.
        """
        self._filter = compile_pattern(text) if text else None
        self.filter_text = text
        self.following = True
        self._restart_filter()
        self.refresh()
        self.post_message(self.Status())

    def search(self, text: str) -> None:
        """Highlight all matches and go to the nearest one: upwards when following new lines, else downwards.

        Raises:
            re.error: the text is not a regular expression.
        """
        self._search_pattern = compile_pattern(text) if text else None
        self._marked = None
        self.refresh()
        if self._search_pattern is not None:
            self._start_search(self._search_pattern, -1 if self.following else 1)

    def action_again(self, direction: int) -> None:
        """Go to the next (1) or previous (-1) match."""
        if self._search_pattern is not None:
            self._start_search(self._search_pattern, direction)

    def action_error(self, direction: int) -> None:
        """Go to the next (1) or previous (-1) line that looks like an error."""
        self._start_search(ERRORS, direction, ("e", "E"))

    def _start_search(
        self, pattern: re.Pattern[bytes], direction: int, keys: tuple[str, str] = ("n", "N")
    ) -> None:
        if self._marked is not None:
            begin = self._marked
        elif direction > 0:
            begin = self._line_number(self.scroll_offset.y) - 1 if self.count else self.store.first - 1
        else:
            begin = self.store.total
        self.run_worker(
            lambda: self._search_and_go(pattern, begin, direction, keys),
            thread=True,
            exclusive=True,
            group="seek",
        )

    def _search_and_go(
        self, pattern: re.Pattern[bytes], begin: int, direction: int, keys: tuple[str, str]
    ) -> None:
        number = self._find_nearest(pattern, begin, direction)
        if number is not None:
            self.app.call_from_thread(self._go_to_line, number)
            return
        failure = "no line that looks like an error" if pattern is ERRORS else "no match"
        text = f"{failure} {'below' if direction > 0 else 'above'}"
        if self._find_nearest(pattern, begin, -direction) is not None:
            text += f"; {keys[1]} goes up" if direction > 0 else f"; {keys[0]} goes down"
        elif begin == self._marked:
            text = f"{text} or {'above' if direction > 0 else 'below'}: this is the only one"
        else:
            text = f"{failure} in these lines"
        self.app.call_from_thread(self.notify, text, timeout=4)

    def _find_nearest(self, pattern: re.Pattern[bytes], begin: int, direction: int) -> int | None:
        """Return the nearest matching line below (1) or above (-1) a line; None if there is none."""
        if direction < 0:
            return self.store.find_last(pattern, begin)
        return next((numbers[0] for numbers in self.store.find_matches(pattern, begin + 1) if numbers), None)

    def _go_to_line(self, number: int) -> None:
        if self._filter is not None and number not in self._matching_numbers:
            self.filter("")
        self._marked = number
        self.following = False
        row = self._row_of_line(number)
        self.virtual_size = Size(self.size.width, self.count)
        self.scroll_to(y=max(0, row - self.size.height // 2), animate=False, immediate=True)
        self.refresh()
        self.post_message(self.Status())

    def action_line(self, step: int) -> None:
        """Scroll by a line."""
        self._scroll_to_row(self.scroll_offset.y + step)

    def action_page(self, step: int) -> None:
        """Scroll by a screen."""
        self._scroll_to_row(self.scroll_offset.y + step * max(1, self.size.height - 1))

    def action_top(self) -> None:
        """Go to the oldest line."""
        self._scroll_to_row(0)

    def action_follow(self) -> None:
        """Go to the newest line and follow new lines."""
        self.following = True
        self._marked = None
        self._drawn_extent = (-1, -1)
        self._tick()

    def action_side(self, step: int) -> None:
        """Scroll the lines horizontally."""
        self._left_column = max(0, self._left_column + step)
        self.refresh()

    def _scroll_to_row(self, y: int) -> None:
        bottom = max(0, self.count - self.size.height)
        self.following = y >= bottom
        self.scroll_to(y=max(0, min(bottom, y)), animate=False, immediate=True)
        self.refresh()
        self.post_message(self.Status())

    def on_mouse_scroll_up(self) -> None:
        self.following = False
        self.post_message(self.Status())

    def visible_text(self) -> str:
        """Return the visible lines as text."""
        top = self.scroll_offset.y
        rows = range(top, min(self.count, top + self.size.height))
        lines = self.store.lines([self._line_number(row) for row in rows])
        return "\n".join(f"{source}: {safe(text)}" for source, text in lines)

    @property
    def source(self) -> str:
        """The source of the marked line, else of the last visible line; empty if there is no line."""
        last_row = min(self.count, self.scroll_offset.y + self.size.height) - 1
        number = (
            self._marked if self._marked is not None else self._line_number(last_row) if last_row >= 0 else -1
        )
        return self.store.lines([number])[0][0]

    def status(self) -> str:
        """Return the text of the line below the log."""
        if self.ended:
            parts = ["at the end" if self.following else "End goes to the end"]
        else:
            parts = ["following" if self.following else "paused, End follows"]
        if self.store.loading:
            parts = ["loading"]
        stored = self.store.total - self.store.first
        parts.append(
            f"{self.count:,} of {stored:,} lines match {self.filter_text!r}"
            if self.filter_text
            else f"{stored:,} lines"
        )
        if self.store.first:
            parts.append(f"{self.store.first:,} older ones dropped")
        return " · ".join(parts)

    # ---- Drawing

    @property
    def _empty_text(self) -> str:
        if self._filter is not None and self.store.total > self.store.first:
            return f"no line matches {self.filter_text!r}"
        if self.store.loading:
            return "loading …"
        return "nothing was written" if self.ended else "nothing written yet"

    def render_line(self, y: int) -> Strip:
        return self._draw_row(y).apply_style(self.rich_style)

    def _draw_row(self, y: int) -> Strip:
        width = self.size.width
        row = y + self.scroll_offset.y
        if row >= self.count:
            text = "" if y or self.count else self._empty_text
            return Strip([Segment(set_cell_size(text, width), theme.style(self.app, "dim"))], width)
        number = self._line_number(row)
        source, raw = self.store.lines([number])[0]
        text = safe(raw.expandtabs(8))
        background = theme.ground(self.app, "panel") if number == self._marked else Style()
        label = f"{source[:_LABEL_WIDTH]:>{_LABEL_WIDTH}} " if self.show_rank else ""
        hue = theme.hue(self.app, source)
        segments = [Segment(label, hue + background)]
        room = width - len(label)
        body = text[self._left_column :] if self._left_column else text
        body = body[: room + 1] if cell_len(body) > room else body
        segments += self._highlight_matches(body, background)
        return Strip(segments).adjust_cell_length(width, background)

    def _highlight_matches(self, text: str, ground: Style) -> list[Segment]:
        kind = classify_line(text)
        base_style = theme.exception(self.app) if kind == EXCEPTION else theme.style(self.app, kind) + ground
        pattern = self._search_pattern or self._filter
        if pattern is None:
            return [Segment(text, base_style)]
        data = text.encode("utf-8", "replace")
        segments, position = [], 0
        for match in pattern.finditer(data):
            begin, end = _align_to_characters(data, max(position, match.start()), match.end())
            if begin >= end:
                continue
            segments.append(Segment(data[position:begin].decode(), base_style))
            segments.append(Segment(data[begin:end].decode(), base_style + Style(reverse=True)))
            position = end
        segments.append(Segment(data[position:].decode(), base_style))
        return segments


def classify_line(text: str) -> str:
    """Return the kind of a log line: by its level, else by whether it looks like an error.

    The last line of a Python traceback has the kind `EXCEPTION`.
    """
    if _EXCEPTION_PATTERN.match(text):
        return EXCEPTION
    match = _LEVEL_PATTERN.search(text, 0, _LEVEL_SEARCH_LENGTH)
    if match is not None:
        return _LEVEL_KINDS[match[match.lastindex or 0].upper()]
    return "bad" if ERRORS.search(text.encode("utf-8", "replace")) else ""


def _align_to_characters(data: bytes, begin: int, end: int) -> tuple[int, int]:
    """Extend a byte range of UTF-8 text to whole characters."""
    if begin >= end:
        return begin, begin
    while begin and data[begin] & 0xC0 == 0x80:
        begin -= 1
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end += 1
    return begin, end
