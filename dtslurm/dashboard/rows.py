"""A list of any length with columns, a cursor and a head that stays: only what is seen is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from dtslurm.dashboard import keys, theme
from dtslurm.dashboard.cursor import Cursor
from dtslurm.dashboard.words import Piece
from dtslurm.model.values import dataclass


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        width: in characters; with ``share`` the least, the rest of the line is divided by the shares.
        rank: the columns of the highest rank give way first where the line is short.
    """

    key: str
    title: str
    width: int
    share: int = 0
    rank: int = 0
    right: bool = False


def fit(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """Return the columns that have room in a line, with their widths."""
    kept = list(columns)
    while len(kept) > 1 and sum(column.width + 1 for column in kept) - 1 > width:
        kept.remove(max(kept, key=lambda column: column.rank))
    rest = width - (sum(column.width + 1 for column in kept) - 1)
    shares = sum(column.share for column in kept)
    widths = []
    for column in kept:
        extra = rest * column.share // shares if shares and rest > 0 else 0
        widths.append((column, min(width, column.width + extra)))
    return widths


class Rows(Cursor, ScrollView, can_focus=True):
    """Rows of cells, told by keys: the cursor stays on its row when others come and go."""

    DEFAULT_CSS = "Rows { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys.MOVES,
        keys.END,
        Binding("enter", "choose", "open"),
    ]

    cursor = reactive(0)

    class Chosen(Message):
        """A row was opened by Enter or a second click."""

        def __init__(self, rows: Rows, key: str) -> None:
            super().__init__()
            self.rows, self.key = rows, key

    class Moved(Message):
        """The cursor is on another row, or its row changed."""

        def __init__(self, rows: Rows, key: str | None) -> None:
            super().__init__()
            self.rows, self.key = rows, key

    class Titled(Message):
        """The head of a column was clicked."""

        def __init__(self, rows: Rows, column: str) -> None:
            super().__init__()
            self.rows, self.column = rows, column

    def __init__(
        self,
        columns: Sequence[Column],
        cells: Callable[[int], dict[str, Piece]],
        *,
        empty: str = "",
        id: str | None = None,  # noqa: A002 (Textual's name)
    ) -> None:
        super().__init__(id=id)
        self.columns = tuple(columns)
        self.sorted_by: str | None = None
        self.empty = empty
        self._cells = cells
        self._keys: list[str] = []
        self._last: str | None = None

    @property
    def key(self) -> str | None:
        """The key of the row under the cursor."""
        return self._keys[self.cursor] if 0 <= self.cursor < len(self._keys) else None

    def show(self, keys: Sequence[str]) -> None:
        """Show these rows."""
        before = self._last
        self._keys = list(keys)
        self.virtual_size = Size(self.size.width, len(self._keys) + 1)
        if before is not None and before in self._keys:
            self.cursor = self._keys.index(before)
        else:
            self.cursor = max(0, min(self.cursor, len(self._keys) - 1))
        self._told()
        self.refresh()

    def on_resize(self) -> None:
        self.virtual_size = Size(self.size.width, len(self._keys) + 1)

    def watch_cursor(self, before: int, now: int) -> None:
        if before != now:
            self._told()
            self._reveal()
            self.refresh()

    def _told(self) -> None:
        self._last = self.key
        self.post_message(self.Moved(self, self.key))

    def _reveal(self) -> None:
        room = max(1, self.size.height - 1)
        top = self.scroll_offset.y
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + room:
            self.scroll_to(y=self.cursor - room + 1, animate=False)

    @property
    def room(self) -> int:
        """How wide a line is beside the scroll bar."""
        return self.scrollable_content_region.width

    @property
    def places(self) -> int:
        """How many rows there are."""
        return len(self._keys)

    def action_line(self, step: int) -> None:
        """Move the cursor."""
        self.move(step)

    def action_page(self, step: int) -> None:
        """Move the cursor by a screen."""
        self.action_line(step * max(1, self.size.height - 2))

    def action_choose(self) -> None:
        """Open the row."""
        if self.key is not None:
            self.post_message(self.Chosen(self, self.key))

    def on_click(self, event: events.Click) -> None:
        if event.y == 0:
            place = 0
            for column, width in fit(self.columns, self.room):
                if place <= event.x <= place + width:
                    self.post_message(self.Titled(self, column.key))
                    return
                place += width + 1
            return
        at = event.y - 1 + self.scroll_offset.y
        if at < len(self._keys):
            again = at == self.cursor and event.chain > 1
            self.cursor = at
            if again:
                self.action_choose()

    def render_line(self, y: int) -> Strip:
        return self._line(y).apply_style(self.rich_style)

    def _line(self, y: int) -> Strip:
        width = self.room
        if y == 0:
            return self._head(width)
        at = y - 1 + self.scroll_offset.y
        if at >= len(self._keys):
            text = self.empty if not self._keys and y == 1 else ""
            return Strip([Segment(set_cell_size(text, width), theme.style(self.app, "dim"))], width)
        chosen = at == self.cursor
        name = "primary" if self.has_focus else "panel"
        ground = theme.ground(self.app, name) if chosen else Style()
        cells = self._cells(at)
        segments = []
        for number, (column, room) in enumerate(fit(self.columns, width)):
            text, kind = cells.get(column.key, ("", ""))
            style = theme.style(self.app, kind)
            if chosen and self.has_focus:
                style = Style(color=theme.on(ground), bold=True)
            if number:
                segments.append(Segment(" ", ground))
            segments.append(Segment(clipped(text, room, right=column.right), style + ground))
        return Strip(segments).adjust_cell_length(width, ground)

    def _head(self, width: int) -> Strip:
        style = Style(bold=True) + theme.ground(self.app, "surface")
        parts = []
        for column, room in fit(self.columns, width):
            mark = "▼" if self.sorted_by == column.key else ""
            parts.append(clipped(column.title + mark, room, right=column.right))
        return Strip([Segment(" ".join(parts), style)]).adjust_cell_length(width, style)


def clipped(text: str, width: int, *, right: bool = False) -> str:
    """Return the text in exactly so many cells, with an ellipsis where it is cut."""
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, max(0, width - 1)) + "…" if width > 0 else ""
    return " " * (width - length) + text if right else text + " " * (width - length)
