"""The rank grid: a cell for each rank, ten thousand if need be; those that stand out are seen at once."""

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

from dtslurm.dashboard import ascii_fallback, keys, theme
from dtslurm.dashboard.cursor import Cursor
from dtslurm.dashboard.rows import clipped
from dtslurm.dashboard.words import RANK_KINDS, Piece, failures_first, percent
from dtslurm.model.units import duration
from dtslurm.views.run_page import RankCell

MODES = ("state", "gpu", "memory", "silence")
_CARD = 26
_LABEL = 7


def dot(cell: RankCell, mode: str) -> Piece:
    """Return a rank in a few characters."""
    kind = RANK_KINDS.get(cell.state, "")
    if cell.odd:
        kind = "bad" if cell.state in {"failed", "lost"} else "warn"
    if cell.state != "running" or mode == "state":
        return (
            "▲" if cell.odd and cell.state == "running" else ascii_fallback.RANKS.get(cell.state, "?")
        ), kind
    if mode == "gpu":
        return _number(cell.gpu), kind if cell.odd else _heat(cell.gpu)
    if mode == "memory":
        return _number(None if cell.memory is None else cell.memory * 100), kind
    return _number(cell.silent), kind


def _number(value: float | None) -> str:
    return "-" if value is None else f"{min(999, value):.0f}"


def _heat(use: float | None) -> str:
    return "dim" if use is None else "good" if use >= 60 else "warn" if use >= 20 else "bad"


def card(cell: RankCell) -> Piece:
    """Return all that matters of a rank in one small card."""
    mark, kind = dot(cell, "state")
    silent = "" if cell.silent is None else duration(cell.silent)
    if cell.state in {"failed", "terminated"}:
        silent = f"sig {cell.signal}" if cell.signal else f"exit {cell.exit_code}"
    if cell.failed_first:
        return f"{cell.rank:>5} {mark} first  {silent:>9}", kind
    text = f"{cell.rank:>5} {mark} {percent(cell.gpu):>4} {percent(cell.memory, of_one=True):>4} {silent:>6}"
    return text, kind


class RankGrid(Cursor, ScrollView, can_focus=True):
    """Draws the ranks that are on the screen, and no others."""

    DEFAULT_CSS = "RankGrid { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys.MOVES,
        keys.END,
        Binding("left,h", "rank(-1)", show=False),
        Binding("right,l", "rank(1)", show=False),
        Binding("m", "mode", "metric"),
        Binding("o", "odd", "next odd"),
        Binding("enter", "choose", "its log"),
    ]
    cursor = reactive(0)
    mode = reactive("state")

    class Moved(Message):
        """The cursor is on another rank, or its rank changed."""

    class Chosen(Message):
        """The rank's log is wanted."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

    def __init__(self, id: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self.cells: tuple[RankCell, ...] = ()
        self.empty = "loading …"
        self._by_rank: tuple[RankCell, ...] = ()
        self._first_failed: int | None = None
        self._together = 8
        self._had_cards = False

    @property
    def cards(self) -> bool:
        """Whether there is room to say more of every rank than a dot."""
        across = self.size.width // _CARD
        return across > 0 and len(self._by_rank) <= across * max(0, self.size.height)

    @property
    def across(self) -> int:
        """How many ranks stand in a line."""
        if self.cards:
            return max(1, self.size.width // _CARD)
        room = max(1, (self.size.width - _LABEL) // self._width)
        for together in (self._together, 10, 8, 4):
            if together and room >= together:
                return room // together * together
        return room

    @property
    def _width(self) -> int:
        return 2 if self.mode == "state" else 4

    @property
    def chosen(self) -> RankCell | None:
        """The rank under the cursor."""
        return self.cells[self.cursor] if self.cursor < len(self.cells) else None

    def show(self, cells: tuple[RankCell, ...], together: int) -> None:
        """Show these ranks, in groups of ``together`` (those of a node).

        The rank that failed first is chosen when it appears.
        """
        self._by_rank, self._together = cells, together if 1 < together <= 64 else 8
        failed = next((cell.rank for cell in cells if cell.failed_first), None)
        appeared = failed != self._first_failed
        self._first_failed = failed
        self._resized(failed if appeared else None)
        self.post_message(self.Moved())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer another metric where not all of them are shown."""
        return False if action == "mode" and self.cards else super().check_action(action, parameters)

    def _arrange(self, wanted: int | None) -> None:
        """Put the first failure first where every rank has a card, and keep the chosen rank chosen."""
        chosen = self.chosen
        rank = wanted if wanted is not None or chosen is None else chosen.rank
        self.cells = failures_first(self._by_rank) if self.cards else self._by_rank
        places = (at for at, cell in enumerate(self.cells) if cell.rank == rank)
        self.cursor = next(places, max(0, min(self.cursor, len(self.cells) - 1)))

    def _resized(self, wanted: int | None = None) -> None:
        self._arrange(wanted)
        if self.cards != self._had_cards:
            self._had_cards = self.cards
            self.refresh_bindings()
        lines = -(-len(self._by_rank) // self.across)
        self.virtual_size = Size(self.size.width, lines)
        self.refresh()

    def on_resize(self) -> None:
        self._resized()

    def watch_mode(self) -> None:
        self._resized()
        self._reveal()

    def watch_cursor(self) -> None:
        self._reveal()
        self.post_message(self.Moved())
        self.refresh()

    def _reveal(self) -> None:
        line, top = self.cursor // self.across, self.scroll_offset.y
        if line < top:
            self.scroll_to(y=line, animate=False)
        elif line >= top + self.size.height:
            self.scroll_to(y=line - self.size.height + 1, animate=False)

    @property
    def places(self) -> int:
        """How many ranks there are."""
        return len(self.cells)

    def action_rank(self, step: int) -> None:
        """Move the cursor by ranks."""
        self.move(step)

    def action_line(self, step: int) -> None:
        """Move the cursor by lines."""
        self.action_rank(step * self.across)

    def action_page(self, step: int) -> None:
        """Move the cursor by a screen."""
        self.action_line(step * max(1, self.size.height - 1))

    def action_mode(self) -> None:
        """Show another metric."""
        self.mode = MODES[(MODES.index(self.mode) + 1) % len(MODES)]
        self.post_message(self.Moved())

    def action_odd(self) -> None:
        """Go to the next rank that stands out."""
        count = len(self.cells)
        for step in range(1, count + 1):
            if self.cells[(self.cursor + step) % count].odd:
                self.cursor = (self.cursor + step) % count
                return

    def action_choose(self) -> None:
        """Ask for the rank's log."""
        if self.chosen is not None:
            self.post_message(self.Chosen(self.chosen.rank))

    def on_click(self, event: events.Click) -> None:
        line = event.y + self.scroll_offset.y
        column = event.x // _CARD if self.cards else (event.x - _LABEL) // self._width
        at = line * self.across + column
        if 0 <= column < self.across and at < len(self.cells):
            again = at == self.cursor and event.chain > 1
            self.cursor = at
            if again:
                self.action_choose()

    def render_line(self, y: int) -> Strip:
        return self._line(y).apply_style(self.rich_style)

    def _line(self, y: int) -> Strip:
        width = self.size.width
        begin = (y + self.scroll_offset.y) * self.across
        shown = self.cells[begin : begin + self.across]
        if not shown:
            text = self.empty if not self.cells and y == 0 else ""
            return Strip([Segment(clipped(text, width), theme.style(self.app, "dim"))], width)
        segments = []
        cards = self.cards
        if not cards:
            segments.append(Segment(f"{begin:>{_LABEL - 1}} ", theme.style(self.app, "dim")))
        for number, cell in enumerate(shown):
            if cards:
                text, kind = card(cell)
                room = _CARD
            else:
                text, kind = dot(cell, self.mode)
                room = self._width
                text = text if self.mode == "state" else f"{text:>3}"
            style = theme.style(self.app, kind)
            here = begin + number == self.cursor
            text = clipped(text, room - 1)
            if not here and segments and segments[-1].style == style:
                segments[-1] = Segment(f"{segments[-1].text}{text} ", style)
            elif here:
                segments += [Segment(text, style + Style(reverse=True)), Segment(" ", Style())]
            else:
                segments.append(Segment(f"{text} ", style))
        return Strip(segments).adjust_cell_length(width, Style())
