"""The rank grid: a cell for each of up to ten thousand ranks, with outliers highlighted."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from dtslurm.dashboard import ascii_fallback, movement, theme
from dtslurm.dashboard.rows import clip
from dtslurm.dashboard.words import RANK_KINDS, StyledText, format_percent, sort_failures_first
from dtslurm.model.runs.telemetry import RankCell
from dtslurm.presentation.quantities import duration

MODES = ("state", "gpu", "memory", "silence")
_CARD_WIDTH = 26
_LABEL_WIDTH = 7


def format_dot(cell: RankCell, mode: str) -> StyledText:
    """Return the shortest text for a rank in a mode of `MODES`, with its kind."""
    kind = RANK_KINDS.get(cell.state, "")
    if cell.deviation:
        kind = "bad" if cell.state in {"failed", "lost"} else "warn"
    if cell.state != "running" or mode == "state":
        return (
            "▲" if cell.deviation and cell.state == "running" else ascii_fallback.RANKS.get(cell.state, "?")
        ), kind
    if mode == "gpu":
        return _format_number(cell.gpu), kind if cell.deviation else _rate_utilization(cell.gpu)
    if mode == "memory":
        return _format_number(None if cell.memory is None else cell.memory * 100), kind
    return _format_number(cell.silent), kind


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{min(999, value):.0f}"


def _rate_utilization(use: float | None) -> str:
    return "dim" if use is None else "good" if use >= 60 else "warn" if use >= 20 else "bad"


def format_card(cell: RankCell) -> StyledText:
    """Return a fixed-width text with the most important measurements of a rank, and its kind."""
    mark, kind = format_dot(cell, "state")
    status = "" if cell.silent is None else duration(cell.silent)
    if cell.state in {"failed", "terminated"}:
        status = f"sig {cell.signal}" if cell.signal else f"exit {cell.exit_code}"
    if cell.failed_first:
        return f"{cell.rank:>5} {mark} first  {status:>9}", kind
    gpu, memory = format_percent(cell.gpu), format_percent(cell.memory, of_one=True)
    return f"{cell.rank:>5} {mark} {gpu:>4} {memory:>4} {status:>6}", kind


class RankGrid(movement.Cursor, ScrollView, can_focus=True):
    """A scrollable grid of ranks that draws only the visible ones."""

    DEFAULT_CSS = "RankGrid { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        *movement.MOVES,
        movement.END,
        Binding("left,h", "rank(-1)", show=False),
        Binding("right,l", "rank(1)", show=False),
        Binding("m", "mode", "metric"),
        Binding("o", "next_outlier", "next outlier"),
        Binding("enter", "choose", "log"),
    ]
    cursor = reactive(0)
    mode = reactive("state")

    class Moved(Message):
        """The cursor moved to another rank, or the data of its rank changed."""

    class Chosen(Message):
        """The user opened the log of a rank."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

    def __init__(self, id: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self.cells: tuple[RankCell, ...] = ()
        self.empty = "loading …"
        self._cells_by_rank: tuple[RankCell, ...] = ()
        self._first_failed_rank: int | None = None
        self._group_size = 8
        self._had_cards = False

    @property
    def cards(self) -> bool:
        """Whether the grid has room for a card per rank."""
        cards_per_line = self.size.width // _CARD_WIDTH
        return cards_per_line > 0 and len(self._cells_by_rank) <= cards_per_line * max(0, self.size.height)

    @property
    def across(self) -> int:
        """The number of ranks in a line."""
        if self.cards:
            return max(1, self.size.width // _CARD_WIDTH)
        capacity = max(1, (self.size.width - _LABEL_WIDTH) // self._cell_width)
        for group_size in (self._group_size, 10, 8, 4):
            if group_size and capacity >= group_size:
                return capacity // group_size * group_size
        return capacity

    @property
    def _cell_width(self) -> int:
        return 2 if self.mode == "state" else 4

    @property
    def chosen(self) -> RankCell | None:
        """The rank under the cursor."""
        return self.cells[self.cursor] if self.cursor < len(self.cells) else None

    def show(self, cells: tuple[RankCell, ...], ranks_per_node: int) -> None:
        """Show these ranks in groups of ``ranks_per_node``.

        The cursor moves to the first failed rank when there is a new one.
        """
        self._cells_by_rank, self._group_size = cells, ranks_per_node if 1 < ranks_per_node <= 64 else 8
        first_failed_rank = next((cell.rank for cell in cells if cell.failed_first), None)
        is_new_failure = first_failed_rank != self._first_failed_rank
        self._first_failed_rank = first_failed_rank
        self._update_layout(first_failed_rank if is_new_failure else None)
        self.post_message(self.Moved())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the change of the metric while cards show all metrics."""
        return False if action == "mode" and self.cards else super().check_action(action, parameters)

    def _order_cells(self, target_rank: int | None) -> None:
        """Sort the first failure first if ranks are shown as cards, and keep the cursor on its rank."""
        selected = self.chosen
        rank = target_rank if target_rank is not None or selected is None else selected.rank
        self.cells = sort_failures_first(self._cells_by_rank) if self.cards else self._cells_by_rank
        positions = (index for index, cell in enumerate(self.cells) if cell.rank == rank)
        self.cursor = next(positions, max(0, min(self.cursor, len(self.cells) - 1)))

    def _update_layout(self, target_rank: int | None = None) -> None:
        self._order_cells(target_rank)
        if self.cards != self._had_cards:
            self._had_cards = self.cards
            self.refresh_bindings()
        lines = -(-len(self._cells_by_rank) // self.across)
        self.virtual_size = Size(self.size.width, lines)
        self.refresh()

    def on_resize(self) -> None:
        self._update_layout()

    def watch_mode(self) -> None:
        self._update_layout()
        self._scroll_to_cursor()

    def watch_cursor(self) -> None:
        self._scroll_to_cursor()
        self.post_message(self.Moved())
        self.refresh()

    def _scroll_to_cursor(self) -> None:
        line, top = self.cursor // self.across, self.scroll_offset.y
        if line < top:
            self.scroll_to(y=line, animate=False)
        elif line >= top + self.size.height:
            self.scroll_to(y=line - self.size.height + 1, animate=False)

    @property
    def position_count(self) -> int:
        """The number of ranks."""
        return len(self.cells)

    def action_rank(self, step: int) -> None:
        """Move the cursor by ``step`` ranks."""
        self.move(step)

    def action_line(self, step: int) -> None:
        """Move the cursor by ``step`` lines."""
        self.action_rank(step * self.across)

    def action_page(self, step: int) -> None:
        """Move the cursor by ``step`` screens."""
        self.action_line(step * max(1, self.size.height - 1))

    def action_mode(self) -> None:
        """Show the next metric."""
        self.mode = MODES[(MODES.index(self.mode) + 1) % len(MODES)]
        self.post_message(self.Moved())

    def action_next_outlier(self) -> None:
        """Move the cursor to the next outlier rank."""
        count = len(self.cells)
        for step in range(1, count + 1):
            if self.cells[(self.cursor + step) % count].deviation:
                self.cursor = (self.cursor + step) % count
                return

    def action_choose(self) -> None:
        """Open the log of the rank under the cursor."""
        if self.chosen is not None:
            self.post_message(self.Chosen(self.chosen.rank))

    def on_click(self, event: events.Click) -> None:
        line = event.y + self.scroll_offset.y
        column = event.x // _CARD_WIDTH if self.cards else (event.x - _LABEL_WIDTH) // self._cell_width
        index = line * self.across + column
        if 0 <= column < self.across and index < len(self.cells):
            is_double_click = index == self.cursor and event.chain > 1
            self.cursor = index
            if is_double_click:
                self.action_choose()

    def render_line(self, y: int) -> Strip:
        return self._draw_row(y).apply_style(self.rich_style)

    def _draw_row(self, y: int) -> Strip:
        width = self.size.width
        begin = (y + self.scroll_offset.y) * self.across
        visible_cells = self.cells[begin : begin + self.across]
        if not visible_cells:
            text = self.empty if not self.cells and y == 0 else ""
            return Strip([Segment(clip(text, width), theme.style(self.app, "dim"))], width)
        segments = []
        cards = self.cards
        if not cards:
            segments.append(Segment(f"{begin:>{_LABEL_WIDTH - 1}} ", theme.style(self.app, "dim")))
        for offset, cell in enumerate(visible_cells):
            if cards:
                text, kind = format_card(cell)
                room = _CARD_WIDTH
            else:
                text, kind = format_dot(cell, self.mode)
                room = self._cell_width
                text = text if self.mode == "state" else f"{text:>3}"
            style = theme.style(self.app, kind)
            is_selected = begin + offset == self.cursor
            text = clip(text, room - 1)
            if not is_selected and segments and segments[-1].style == style:
                segments[-1] = Segment(f"{segments[-1].text}{text} ", style)
            elif is_selected:
                segments += [Segment(text, style + Style(reverse=True)), Segment(" ", Style())]
            else:
                segments.append(Segment(f"{text} ", style))
        return Strip(segments).adjust_cell_length(width, Style())
