"""A table of any length with columns, a cursor and a fixed header; draws only the visible rows."""

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

from dtslurm.dashboard import movement, theme
from dtslurm.dashboard.words import StyledText
from dtslurm.model.values import dataclass


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        width: width in characters; the minimum if ``share`` is set.
        share: weight by which the spare width of the line is divided among the columns.
        rank: priority of removal: the column with the highest rank is removed first if the line is too short.
        right: whether the text is right-aligned.
    """

    key: str
    title: str
    width: int
    share: int = 0
    rank: int = 0
    right: bool = False


def fit_columns(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """Return the columns that fit into a line, with their widths."""
    visible_columns = list(columns)
    while len(visible_columns) > 1 and sum(column.width + 1 for column in visible_columns) - 1 > width:
        visible_columns.remove(max(visible_columns, key=lambda column: column.rank))
    spare_width = width - (sum(column.width + 1 for column in visible_columns) - 1)
    shares = sum(column.share for column in visible_columns)
    widths = []
    for column in visible_columns:
        extra = spare_width * column.share // shares if shares and spare_width > 0 else 0
        widths.append((column, min(width, column.width + extra)))
    return widths


class Rows(movement.Cursor, ScrollView, can_focus=True):
    """A table whose rows are identified by keys: the cursor stays on its row when other rows change."""

    DEFAULT_CSS = "Rows { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        *movement.MOVES,
        movement.END,
        Binding("enter", "choose", "open"),
    ]

    cursor = reactive(0)

    class Chosen(Message):
        """The user opened a row with Enter or a second click."""

        def __init__(self, rows: Rows, key: str) -> None:
            super().__init__()
            self.rows, self.key = rows, key

    class Moved(Message):
        """The cursor moved to another row, or the data of its row changed."""

        def __init__(self, rows: Rows, key: str | None) -> None:
            super().__init__()
            self.rows, self.key = rows, key

    class Titled(Message):
        """The user clicked the header of a column."""

        def __init__(self, rows: Rows, column: str) -> None:
            super().__init__()
            self.rows, self.column = rows, column

    def __init__(
        self,
        columns: Sequence[Column],
        cells: Callable[[int], dict[str, StyledText]],
        *,
        empty: str = "",
        id: str | None = None,  # noqa: A002 (Textual's name)
    ) -> None:
        super().__init__(id=id)
        self.columns = tuple(columns)
        self.sorted_by: str | None = None
        self.empty = empty
        self._make_cells = cells
        self._keys: list[str] = []
        self._previous_key: str | None = None

    @property
    def key(self) -> str | None:
        """The key of the row under the cursor."""
        return self._keys[self.cursor] if 0 <= self.cursor < len(self._keys) else None

    def show(self, keys: Sequence[str]) -> None:
        """Show the rows with these keys."""
        previous_key = self._previous_key
        self._keys = list(keys)
        self.virtual_size = Size(self.size.width, len(self._keys) + 1)
        if previous_key is not None and previous_key in self._keys:
            self.cursor = self._keys.index(previous_key)
        else:
            self.cursor = max(0, min(self.cursor, len(self._keys) - 1))
        self._report_move()
        self.refresh()

    def on_resize(self) -> None:
        self.virtual_size = Size(self.size.width, len(self._keys) + 1)

    def watch_cursor(self, old_index: int, new_index: int) -> None:
        if old_index != new_index:
            self._report_move()
            self._scroll_to_cursor()
            self.refresh()

    def _report_move(self) -> None:
        self._previous_key = self.key
        self.post_message(self.Moved(self, self.key))

    def _scroll_to_cursor(self) -> None:
        row_count = max(1, self.size.height - 1)
        top = self.scroll_offset.y
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + row_count:
            self.scroll_to(y=self.cursor - row_count + 1, animate=False)

    @property
    def room(self) -> int:
        """The width of a line without the scroll bar."""
        return self.scrollable_content_region.width

    @property
    def position_count(self) -> int:
        """The number of rows."""
        return len(self._keys)

    def action_line(self, step: int) -> None:
        """Move the cursor by ``step`` rows."""
        self.move(step)

    def action_page(self, step: int) -> None:
        """Move the cursor by ``step`` screens."""
        self.action_line(step * max(1, self.size.height - 2))

    def action_choose(self) -> None:
        """Open the row under the cursor."""
        if self.key is not None:
            self.post_message(self.Chosen(self, self.key))

    def on_click(self, event: events.Click) -> None:
        if event.y == 0:
            left_edge = 0
            for column, width in fit_columns(self.columns, self.room):
                if left_edge <= event.x <= left_edge + width:
                    self.post_message(self.Titled(self, column.key))
                    return
                left_edge += width + 1
            return
        index = event.y - 1 + self.scroll_offset.y
        if index < len(self._keys):
            is_double_click = index == self.cursor and event.chain > 1
            self.cursor = index
            if is_double_click:
                self.action_choose()

    def render_line(self, y: int) -> Strip:
        return self._draw_row(y).apply_style(self.rich_style)

    def _draw_row(self, y: int) -> Strip:
        width = self.room
        if y == 0:
            return self._draw_header(width)
        index = y - 1 + self.scroll_offset.y
        if index >= len(self._keys):
            text = self.empty if not self._keys and y == 1 else ""
            return Strip([Segment(set_cell_size(text, width), theme.style(self.app, "dim"))], width)
        is_selected = index == self.cursor
        background_name = "primary" if self.has_focus else "panel"
        background = theme.ground(self.app, background_name) if is_selected else Style()
        cells = self._make_cells(index)
        segments = []
        for number, (column, column_width) in enumerate(fit_columns(self.columns, width)):
            text, kind = cells.get(column.key, ("", ""))
            style = theme.style(self.app, kind)
            if is_selected and self.has_focus:
                style = Style(color=theme.choose_text_colour(background), bold=True)
            if number:
                segments.append(Segment(" ", background))
            segments.append(Segment(clip(text, column_width, align_right=column.right), style + background))
        return Strip(segments).adjust_cell_length(width, background)

    def _draw_header(self, width: int) -> Strip:
        style = Style(bold=True) + theme.ground(self.app, "surface")
        parts = []
        for column, column_width in fit_columns(self.columns, width):
            mark = "▼" if self.sorted_by == column.key else ""
            parts.append(clip(column.title + mark, column_width, align_right=column.right))
        return Strip([Segment(" ".join(parts), style)]).adjust_cell_length(width, style)


def clip(text: str, width: int, *, align_right: bool = False) -> str:
    """Return the text padded or cut to exactly ``width`` cells; a cut text ends in an ellipsis."""
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, max(0, width - 1)) + "…" if width > 0 else ""
    return " " * (width - length) + text if align_right else text + " " * (width - length)
