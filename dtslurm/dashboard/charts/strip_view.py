"""The pane with strips over time; draws only the visible strips."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip as Line

from dtslurm.dashboard import movement, theme
from dtslurm.dashboard.charts.strips import Strip, Strips
from dtslurm.dashboard.rows import clip

LABEL = 14


class StripView(ScrollView, can_focus=True):
    """A scrollable view of `Strips`, outliers first."""

    DEFAULT_CSS = "StripView { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [*movement.MOVES, movement.END]

    def __init__(self, id: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self.strips = Strips()
        self.empty = "loading …"

    @property
    def room(self) -> int:
        """The number of cells in a strip."""
        return max(1, self.scrollable_content_region.width - LABEL)

    def show(self, strips: Strips) -> None:
        """Show these strips."""
        self.strips = strips
        self.virtual_size = Size(self.size.width, len(strips.rows))
        self.refresh()

    def render_line(self, y: int) -> Line:
        width = self.scrollable_content_region.width
        index = y + self.scroll_offset.y
        if index >= len(self.strips.rows):
            text = self.empty if not self.strips.rows and y == 0 else ""
            return Line([Segment(clip(text, width), theme.style(self.app, "dim"))]).apply_style(
                self.rich_style
            )
        segments = self._make_segments(self.strips.rows[index])
        return Line(segments).adjust_cell_length(width, Style()).apply_style(self.rich_style)

    def _make_segments(self, strip: Strip) -> list[Segment]:
        mark = "▲ " if strip.stands_out else "  "
        kind = "bad" if strip.stands_out else "dim"
        segments = [Segment(f"{mark}{clip(strip.label, LABEL - 3)} ", theme.style(self.app, kind))]
        pending_text, pending_kind = "", ""
        for text, kind in strip.cells:
            if kind != pending_kind and pending_text:
                segments.append(Segment(pending_text, theme.style(self.app, pending_kind)))
                pending_text = ""
            pending_text, pending_kind = pending_text + text, kind
        return [*segments, Segment(pending_text, theme.style(self.app, pending_kind))]

    def action_line(self, step: int) -> None:
        """Scroll by ``step`` lines."""
        self.scroll_to(y=self.scroll_offset.y + step, animate=False)

    def action_page(self, step: int) -> None:
        """Scroll by ``step`` screens."""
        self.action_line(step * max(1, self.size.height - 1))

    def action_top(self) -> None:
        """Go to the first strip."""
        self.scroll_to(y=0, animate=False)

    def action_bottom(self) -> None:
        """Go to the last strip."""
        self.scroll_to(y=len(self.strips.rows), animate=False)
